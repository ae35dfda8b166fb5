"""Requests to engines in this process, made concurrently or one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compound.core.engine import Completion, Message, Request
from compound.engines.local.engine import TransformersEngine


def engine(folder: Path, **settings: Any) -> TransformersEngine:
    return TransformersEngine(str(folder), dtype="float32", **{"max_wait_ms": 200.0, **settings})


def ask(text: str = "the king", **settings: Any) -> Request:
    return Request((Message("user", text),), **{"max_tokens": 8, "want_tokens": True, **settings})


def outcomes(
    lm: TransformersEngine, requests: Sequence[Request]
) -> list[Completion | BaseException]:
    """Make requests concurrently; return each one's completion or error, and close the engine."""

    async def work() -> list[Completion | BaseException]:
        calls = (lm.generate(request) for request in requests)
        done = await asyncio.gather(*calls, return_exceptions=True)
        await lm.aclose()
        return done

    return asyncio.run(work())


def run(lm: TransformersEngine, *requests: Request) -> list[Completion]:
    """Make requests concurrently, close the engine, and raise the first error."""
    answers = []
    for answer in outcomes(lm, requests):
        if isinstance(answer, BaseException):
            raise answer
        answers.append(answer)
    return answers


def one_by_one(lm: TransformersEngine, requests: Sequence[Request]) -> list[Completion]:
    async def work() -> list[Completion]:
        answers = [await lm.generate(request) for request in requests]
        await lm.aclose()
        return answers

    return asyncio.run(work())
