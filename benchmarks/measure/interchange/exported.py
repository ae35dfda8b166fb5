"""Answer questions by the exported requests of a system with one prompt, without this package."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any

import compound as cp

Answer = Callable[[str], object]


def runners(system: cp.System, url: str) -> dict[str, Answer]:
    """Return a function for each target that answers a question by its exported form."""
    return {"messages": _messages(system, url), "openai": _openai(system, url)}


def in_dspy(program: Any, url: str, **inputs: object) -> Any:  # noqa: ANN401 - of DSPy, which has no types
    """Run a program in DSPy itself."""
    import dspy

    lm = dspy.LM("openai/local", api_base=url, api_key="none", cache=False)
    with dspy.context(lm=lm):
        return program(**inputs)


def ask(url: str, body: dict[str, Any]) -> str:
    """Return the text of a chat completion."""
    asked = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(asked) as answer:  # nosec B310  # a server on loopback
        text: str = json.load(answer)["choices"][0]["message"]["content"]
        return text


def _messages(system: cp.System, url: str) -> Answer:
    prompt = json.loads(cp.interchange.export(system, "messages"))["prompts"][0]
    return lambda question: ask(
        url, {"model": "local", "messages": _filled(prompt["messages"], question)}
    )


def _openai(system: cp.System, url: str) -> Answer:
    body = next(iter(json.loads(cp.interchange.export(system, "openai")).values()))
    return lambda question: ask(url, {**body, "messages": _filled(body["messages"], question)})


def _filled(messages: list[dict[str, str]], question: str) -> list[dict[str, str]]:
    return [
        {**message, "content": message["content"].format(question=question)} for message in messages
    ]
