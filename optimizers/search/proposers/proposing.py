"""Requests for proposals to a model, and the count of their outcomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from compound.core.engine import Request
from compound.core.errors import CallError
from compound.optimization.method import Task

T = TypeVar("T")


async def ask_for_proposal(
    task: Task,
    request: Request,
    lm: str | None,
    read: Callable[[str], T | None],
    is_known: Callable[[T], bool] = lambda proposal: False,
) -> T | None:
    """Ask a model for a proposal, and count the outcome as proposed, duplicate, unusable or failed.

    Args:
        task: the job.
        request: the request.
        lm: the model; ``None`` for the system's own.
        read: parses the proposal from a reply; returns ``None`` if the reply is unusable.
        is_known: returns whether the job had a proposal before.

    Returns:
        The proposal, even if it is known; ``None`` if there is none, or if it is a text that
        contains the answer of a held-out example.
    """
    try:
        reply = await task.scorer.generate(request, lm)
    except CallError:  # the scorer counts failed requests; the job continues without this proposal
        return None
    proposal = read(reply.text)
    if isinstance(proposal, str) and task.scorer.leaks(proposal, request, lm):
        proposal = None
    if proposal is None:
        task.scorer.record_outcome("unusable", lm)
    else:
        task.scorer.record_outcome("duplicate" if is_known(proposal) else "proposed", lm)
    return proposal
