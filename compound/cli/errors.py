"""Error messages, hints and exit codes of the command line."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.cells import cell_len

from compound.core.errors import (
    FRESH,
    BudgetExhausted,
    CompoundError,
    PlacedProblem,
    SeveralErrors,
    SpecError,
    TooManyFailures,
)
from compound.core.formatting import cut, width_of
from compound.core.security.sanitize import encodable, sanitize_for_terminal

FRESH_OPTION = "pass --new to start a new run, or choose another --run"


def explain_os_error(error: OSError) -> bool:
    """Print an operating system error with advice; return False if its location is unknown."""
    from compound.core.security.untrusted import error_hint, error_text

    place = error.filename or _unnamed(error)
    if place is None:
        return False
    print(f"error: {error_text(error, place)}", file=sys.stderr)
    if hint := error_hint(error):
        print(f"hint: {hint}", file=sys.stderr)
    return True


def _unnamed(error: OSError) -> str | None:
    """Return the likely subject of an error that has no file name, or None."""
    try:
        os.getcwd()
    except OSError:
        return "the current folder"
    lost = isinstance(error, ConnectionError | TimeoutError)  # from a component or a model server
    return None if lost or error.errno is None else "a file or the output"


def explain_unforeseen(error: Exception) -> None:
    """Print an error that nothing else explains, with the line of the user's code that it comes from."""
    from compound.graph.registry.user_code import place_of_error

    place = place_of_error(error)
    defect = "this is a bug in compound; run again with --debug for the traceback"
    print(f"error: {type(error).__name__}: {error}{place}", file=sys.stderr)
    print(f"hint: {'--debug shows the traceback' if place else defect}", file=sys.stderr)


@contextmanager
def explain_imports() -> Iterator[None]:
    """Turn a failed import of an optional library into an error that names its extra."""
    try:
        yield
    except ImportError as error:
        from compound.core.errors import raise_missing_extra

        raise_missing_extra(error, "this command")
        raise


def excerpt(problem: PlacedProblem, width: int, encoding: str = "utf-8") -> str:
    """Return the line of a problem, cut to a width, with carets under the place.

    >>> problem = PlacedProblem("a.yaml:2:6: seed: must be an integer")
    >>> problem.lines, problem.column = [(2, "seed: one")], 6
    >>> print(excerpt(problem, 80))
      2 | seed: one
        |       ^^^
    """
    gutter = len(str(problem.lines[-1][0])) + 2
    room = max(8, width - gutter - 3)
    *above, (number, line) = problem.lines
    # as the stream writes them, so that what follows stands in the same column on all terminals
    before, after = (
        encodable(sanitize_for_terminal(part), encoding).replace("\t", "    ")
        for part in (line[: problem.column], line[problem.column :])
    )
    if cell_len(before) > 2 * room // 3:
        before = cut(before[::-1], 2 * room // 3)[::-1]
    left = room - cell_len(before)
    marked = re.match(r"""[^\s,\[\]{}:#"']+|"[^"]*"|'[^']*'|""", after)
    carets = "^" * max(1, min(cell_len(marked[0] if marked else ""), left))
    rows = [*((n, cut(sanitize_for_terminal(text), room)) for n, text in above)]
    rows.append((number, before + cut(after, left)))
    shown = [f"{n:>{gutter}} | {text}".rstrip() for n, text in rows]
    return "\n".join([*shown, f"{'':>{gutter}} | {'':{cell_len(before)}}{carets}"])


def explain(error: CompoundError) -> int:
    """Print an error with its hint, and return the exit code."""
    from compound.optimization.runs.recorder import Interrupted

    if isinstance(error, SpecError):
        for problem in error.problems:
            print(problem, file=sys.stderr)
            if isinstance(problem, PlacedProblem) and problem.lines:
                width = min(100, width_of(sys.stderr))
                print(excerpt(problem, width, sys.stderr.encoding), file=sys.stderr)
        return 2
    if isinstance(error, SeveralErrors):
        return max(map(explain, error.errors))
    if isinstance(error, Interrupted):  # requested by the user, so not an error
        print(str(error), file=sys.stderr)
        return 130
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint.replace(FRESH, FRESH_OPTION)}", file=sys.stderr)
    return 1 if isinstance(error, BudgetExhausted | TooManyFailures) else 2
