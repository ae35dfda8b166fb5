"""Explain errors to the user of the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from compound.errors import (
    FRESH,
    BudgetExhausted,
    CompoundError,
    SeveralErrors,
    SpecError,
    TooManyFailures,
)

FRESH_HERE = "pass --new for a fresh run, or choose another --run"


def explain_system(error: OSError) -> bool:
    """Print what the operating system refused, and what to do; False where it named no place."""
    from compound.security.untrusted import advice, reason

    place = error.filename or _unnamed(error)
    if place is None:
        return False
    print(f"error: {reason(error, place)}", file=sys.stderr)
    if hint := advice(error):
        print(f"hint: {hint}", file=sys.stderr)
    return True


def _unnamed(error: OSError) -> str | None:
    """Return what an error without a file name is about, as far as it can be known."""
    try:
        os.getcwd()
    except OSError:
        return "the current folder"
    lost = isinstance(error, ConnectionError | TimeoutError)  # of a component, or of a model's server
    return None if lost or error.errno is None else "a file or the output"


def explain_unforeseen(error: Exception) -> None:
    """Print an error that nothing else explains, with the line of the user's code that it comes from."""
    from compound.registry.user_code import place_of_error

    place = place_of_error(error)
    defect = "this is a defect of compound; run again with --debug for the traceback"
    print(f"error: {type(error).__name__}: {error}{place}", file=sys.stderr)
    print(f"hint: {'--debug shows the traceback' if place else defect}", file=sys.stderr)


@contextmanager
def explained_imports() -> Iterator[None]:
    """Name the extra that installs an optional library."""
    try:
        yield
    except ImportError as error:
        from compound.extras import raise_missing_extra

        raise_missing_extra(error, "this command")
        raise


def explain(error: CompoundError) -> int:
    """Print an error, with what to do about it, and return the exit code."""
    from compound.runs.recorder import Interrupted

    if isinstance(error, SpecError):
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    if isinstance(error, SeveralErrors):
        return max(map(explain, error.errors))
    if isinstance(error, Interrupted):  # which the user asked for
        print(str(error), file=sys.stderr)
        return 130
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint.replace(FRESH, FRESH_HERE)}", file=sys.stderr)
    return 1 if isinstance(error, BudgetExhausted | TooManyFailures) else 2
