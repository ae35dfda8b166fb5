"""Every error a user can meet, and the functions that make their messages useful.

A message states what is required, what was found, where, and how to fix it. Errors that refine a builtin
inherit it as well, so that ``except ValueError`` keeps working.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compound.engine import Usage


FRESH = "pass new=True, or another run_dir"  # the command line says it in its own words


class CompoundError(Exception):
    """Base of every error this package raises on purpose.

    ``hint`` states how to fix it; the command line prints it on a line of its own.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class DeclarationError(CompoundError, ValueError):
    """A component, a space or a system is declared wrongly."""


class WiringError(DeclarationError):
    """Two ends of an edge do not fit, or an edge is missing, doubled or part of a cycle."""


class ConfigurationError(CompoundError, ValueError):
    """A configuration names what the system does not have, or holds a value outside its space."""


class SpecError(CompoundError, ValueError):
    """A YAML file is wrong. ``problems`` holds every mistake found, one ``file:line:column: …`` each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class DataError(CompoundError, ValueError):
    """A data file is missing, or one of its rows is unusable."""


class MissingOutput(DataError, KeyError):
    """A metric reads an output that the system does not have."""


class SeveralErrors(DataError):
    """Several mistakes were found at once; ``errors`` holds each."""

    def __init__(self, errors: Iterable[CompoundError]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(map(str, self.errors)))


class MissingExtra(CompoundError, ImportError):
    """A feature needs a library that is not installed."""

    def __init__(self, feature: str, library: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs {library}, which is not installed",
            hint=f'pip install "compound-ai[{extra}]"',
        )


class ModelNotFound(CompoundError):
    """A model's weights are not on this machine."""


class RunDirectoryError(CompoundError):
    """A run directory is foreign, broken, in use, or belongs to another configuration."""


class BudgetExhausted(CompoundError):
    """The next step's worst case does not fit into what is left of the budget."""


class AdapterNotServed(CompoundError):
    """A server samples with something other than the adapter that it was given and has acknowledged."""


class TooManyFailures(CompoundError):
    """More runs failed than the stated share allows."""


class RunFailed(CompoundError):
    """A run of a system failed. ``trace`` holds what each component did, and where it failed."""

    def __init__(self, message: str, *, trace: object, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.trace = trace


class QuotaExhausted(CompoundError):
    """The account at a provider has no credit left. It ends the run, which can be continued later."""


class CallError(CompoundError):
    """One call failed. The executor records it; it ends a trace, never a run.

    Args:
        message: what happened, and where.
        hint: how to fix it.
        outputs: what was produced before the failure (the fields that did parse).
        kind: the kind of the recorded failure; that of the class by default.
        charged: what an engine's failed request is charged: `NO_USAGE` for one that was refused before it was
            processed; ``None`` where nobody knows, which charges its worst case.
    """

    kind = "error"

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        outputs: dict[str, object] | None = None,
        kind: str = "",
        charged: Usage | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.outputs = outputs or {}
        self.charged = charged
        if kind:
            self.kind = kind


class ParseError(CallError):
    """A model's text does not hold the fields its component declares."""

    kind = "parse"


class OutputTypeError(CallError):
    """A component returned something other than what its ports declare."""

    kind = "type"


class TransientError(CallError):
    """A failure that may pass: a dropped connection, an overloaded server, a timeout.

    ``retry_after`` is the wait that the server asks for, in seconds.
    """

    kind = "transient"

    def __init__(
        self, message: str, *, retry_after: float | None = None, charged: Usage | None = None, hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint, charged=charged)
        self.retry_after = retry_after


class RateLimited(TransientError):
    """A server refused a request because of its rate limit. It is sent again after a wait, free of charge."""

    kind = "rate_limit"


def nearest(name: str, possible: Iterable[str]) -> str:
    """Return ``"did you mean 'x'?"`` for the closest name, or ``"possible: …"``.

    >>> nearest("bugdet", ["budget", "seed"])
    "did you mean 'budget'?"
    >>> nearest("zzz", ["budget", "seed"])
    'possible: budget, seed'
    """
    names = sorted(possible)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return "possible: " + (", ".join(names) if names else "none")


def first_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first single error of a group."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
