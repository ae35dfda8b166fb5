"""Agents of someone else, as functions and programs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

import openai
from pydantic import BaseModel

SYSTEM = "You are a geographer of {place}. Answer with one word."


def _ask(client: openai.OpenAI, place: str, question: str, **settings: Any) -> str:
    messages: Any = [
        {"role": "system", "content": SYSTEM.format(place=place)},
        {"role": "user", "content": question},
    ]
    answer = client.chat.completions.create(model="agents-own", messages=messages, **settings)
    return answer.choices[0].message.content or ""


def with_address(question: str, base_url: str, api_key: str) -> str:
    """Ask twice: with a known prompt, then about the answer."""
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        first = _ask(client, "Peru", question, temperature=0)
        return _ask(client, "Chile", f"Check: {first}", temperature=0)


async def with_async_client(question: str, base_url: str, api_key: str) -> str:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        time.sleep(0.01)  # noqa: ASYNC251 - code that blocks its event loop must not block the gateway
        messages: Any = [{"role": "user", "content": question}]
        made = [
            client.chat.completions.create(model="m", messages=messages, seed=i) for i in range(3)
        ]
        answers = await asyncio.gather(*made)
        return "|".join(answer.choices[0].message.content or "" for answer in answers)


def from_environment(question: str) -> dict[str, str]:
    """Use the environment only, as most programs do."""
    print("a line that is no result")
    with openai.OpenAI(max_retries=0) as client:
        return {"answer": _ask(client, "Peru", question), "process": str(os.getpid())}


def later(day: str, cost: str) -> dict[str, object]:
    """Return values of classes that JSON does not have."""
    return {
        "day": date.fromisoformat(day) + timedelta(days=1),
        "cost": 2 * Decimal(cost),
        "days": {date.fromisoformat(day)},
    }


class Place(BaseModel):
    name: str


def typed(place: Place, day: date | None, count: int = 3) -> str:
    """Name the classes of the arguments."""
    return f"{type(place).__name__} {place.name}, {type(day).__name__} {day}, {count}"


def environment_of(question: str) -> str:
    return " ".join(sorted(os.environ))


def repeating(question: str) -> str:
    return "x" * int(question)


def failing(question: str) -> str:
    raise ValueError(f"the key is {os.environ['OPENAI_API_KEY']}")


def ending(question: str) -> str:
    print("the last words", file=sys.stderr, flush=True)
    os._exit(3)


def waiting(question: str) -> str:
    """Start a child process, report its id, and wait for a minute."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with open(question, "w", encoding="ascii") as file:
        file.write(str(child.pid))
    time.sleep(60)
    return ""


def process_of(question: str) -> str:
    return str(os.getpid())


def insisting(question: str, base_url: str, api_key: str) -> str:
    """Ask forever, ignoring errors; return the last one."""
    problem = ""
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        for number in range(40):
            try:
                _ask(client, "Peru", f"{question} {number}")
            except openai.APIStatusError as error:
                problem = f"{error.status_code} {error.message}"
                with open(question, "a", encoding="utf-8") as file:
                    file.write(problem + "\n")
    return problem
