"""Ask a model until its answer can be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from compound.core.engine import AnswerFormat, Completion, Message, Request
from compound.core.errors import ParseError
from compound.graph.component import CallContext

T = TypeVar("T")
Revise = Callable[[Request, Completion | None, ParseError], Request | None]

MAX_ERROR_CHARACTERS = 500  # of the error that a re-ask shows


def correction(problem: str, answer: AnswerFormat | None) -> str:
    """Return the message of a re-ask."""
    only = "the corrected JSON" if answer is not None and answer.schema else "the corrected answer"
    return f"The answer is invalid: {problem[:MAX_ERROR_CHARACTERS]}\nReply with {only} only."


def corrected(request: Request, completion: Completion | None, error: ParseError) -> Request:
    """Return a request that shows the model its answer and the error."""
    said = [Message("assistant", completion.text)] if completion and completion.text else []
    asked = Message("user", correction(error.message, request.format))
    return replace(request, messages=(*request.messages, *said, asked))


async def ask(
    call: CallContext,
    lm: str,
    request: Request,
    read: Callable[[Completion], T],
    reasks: int,
    revise: Revise = corrected,
) -> T:
    """Send a request, and return its answer as read; ask again while it cannot be read.

    Args:
        call: the running call, whose seed is that of the first request; each further one adds 1.
        lm: the name of the model.
        request: the first request.
        read: reads an answer, or raises `ParseError`.
        reasks: maximum number of further requests.
        revise: returns the next request; ``None`` to ask no further.

    Raises:
        ParseError: the last answer cannot be read.
    """
    attempt = 0
    while True:
        completion = None
        try:
            completion = await call.generate(
                lm, replace(request, seed=(call.seed + attempt) % 2**64)
            )
            return read(completion)
        except ParseError as error:
            revised = revise(request, completion, error) if attempt < reasks else None
            if revised is None:
                raise
        request, attempt = revised, attempt + 1


@contextmanager
def noting_truncation(completion: Completion, max_tokens: int) -> Iterator[None]:
    """Add to a `ParseError` of the block that the text was truncated, if it was."""
    try:
        yield
    except ParseError as error:
        if completion.finish_reason != "length":
            raise
        message = f"{error.message} (the text was truncated at max_tokens={max_tokens})"
        raise ParseError(message, outputs=error.outputs) from None
