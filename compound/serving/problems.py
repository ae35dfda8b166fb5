"""Errors of runs as HTTP answers."""

from __future__ import annotations

from compound.errors import RateLimited
from compound.execution.trace import Call, Failure
from compound.graph.component import Operation
from compound.graph.system import System
from compound.web.problems import INTERNAL, Problem

RETRY_SECONDS = 1
PRIVATE = "internal"  # kind of failures whose text is in the log only
STATUS_OF_KIND = {RateLimited.kind: 429, PRIVATE: 500}
"""Statuses by kind of failure; all others are 502."""


def public_failure(call: Call | None, failure: Failure, system: System) -> Failure:
    """Return a failure as clients may see it: texts of models as they are, without those of the user's code.

    The text of an exception, or of a value that has another type than declared, may hold anything that a
    function works with.

    Args:
        call: the failed call; ``None`` if the run failed without one.
        failure: its failure.
        system: the system that ran.
    """
    component = system.components.get(call.component) if call is not None else None
    if isinstance(component, Operation) and "lm" in component.settings:
        return failure
    return Failure(failure.kind if failure.kind == RateLimited.kind else PRIVATE, INTERNAL)


def of_failure(failure: Failure, run: str) -> Problem:
    """Return the problem of a failed run; the failure is one that clients may see."""
    status = STATUS_OF_KIND.get(failure.kind, 502)
    headers = {"Retry-After": str(RETRY_SECONDS)} if status == 429 else {}
    return Problem(status, failure.kind, failure.message, run, headers=headers)


def overloaded(limit: int) -> Problem:
    """Return the problem of a server with too many runs."""
    return Problem(
        429, "overloaded", f"{limit} runs are executing or waiting; try again later",
        headers={"Retry-After": str(RETRY_SECONDS)},
    )  # fmt: skip
