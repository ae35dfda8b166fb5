"""Errors of runs as HTTP answers."""

from __future__ import annotations

from compound.errors import RateLimited
from compound.execution.trace import Failure
from compound.web.problems import Problem

RETRY_SECONDS = 1


def of_failure(failure: Failure, run: str) -> Problem:
    """Return the problem of a failed run."""
    status = 429 if failure.kind == RateLimited.kind else 502
    headers = {"Retry-After": str(RETRY_SECONDS)} if status == 429 else {}
    return Problem(status, failure.kind, failure.message, run, headers=headers)


def overloaded(limit: int) -> Problem:
    """Return the problem of a server with too many runs."""
    return Problem(
        429, "overloaded", f"{limit} runs are executing or waiting; try again later",
        headers={"Retry-After": str(RETRY_SECONDS)},
    )  # fmt: skip
