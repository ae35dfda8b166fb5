"""Asking a model for a proposal, and counting what came of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from compound.engine import Request
from compound.errors import CallError
from compound.optimization.method import Task

T = TypeVar("T")


async def ask(
    task: Task,
    request: Request,
    lm: str | None,
    read: Callable[[str], T | None],
    is_known: Callable[[T], bool] = lambda proposal: False,
) -> T | None:
    """Ask a model for a proposal; count it as proposed, unusable, duplicate or failed.

    Args:
        task: the job.
        request: what to ask.
        lm: the model; the system's own when ``None``.
        read: returns the proposal in a reply, or ``None`` when the reply cannot be used.
        is_known: whether a proposal is one that the job had before.

    Returns:
        The proposal, even if it is known; ``None`` when there is none.
    """
    try:
        reply = await task.scorer.generate(request, lm)
    except CallError:  # counted by the scorer, unless it was not sent; the job continues without it
        return None
    found = read(reply.text)
    if found is None:
        task.scorer.judge("unusable", lm)
    else:
        task.scorer.judge("duplicate" if is_known(found) else "proposed", lm)
    return found
