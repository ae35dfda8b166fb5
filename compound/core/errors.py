"""Exceptions of the package, and helpers for their messages.

A message states the requirement, the actual value, its location, and the fix. Errors that refine a
builtin also inherit from it, so that ``except ValueError`` keeps working.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compound.core.engine import Usage

DISTRIBUTION = "compound-systems"
"""The name of the installed package, for `importlib.metadata`."""

FRESH = "pass new=True, or another run_dir"  # the command line replaces this by its own options


class CompoundError(Exception):
    """Base class of all errors raised deliberately by this package.

    ``hint`` states how to fix the problem; the command line prints it on a separate line.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class DeclarationError(CompoundError, ValueError):
    """A component, a space or a system is declared incorrectly."""


class WiringError(DeclarationError):
    """The ends of an edge have incompatible types, or an edge is missing, duplicated or part of a cycle."""


class GraphBuildError(DeclarationError, TypeError):
    """A function that builds a graph uses a value that exists only when the graph runs."""


class ConfigurationError(CompoundError, ValueError):
    """A configuration has an unknown key, or a value outside its space."""


class PlacedProblem(str):
    """A problem with its lines of the file, by number; it begins at ``column``, from 0, of the last one."""

    lines: Sequence[tuple[int, str]] = ()
    column = 0


class SpecError(CompoundError, ValueError):
    """A YAML file is invalid. ``problems`` lists every error as ``file:line:column: …``.

    Those at a place of the file are `PlacedProblem`, of which the command line shows an excerpt.

    ``readable`` holds the data, the metric, the inputs and the outputs of a file with other errors.
    """

    readable: tuple[object, object, Mapping[str, object], Collection[str]] | None = None

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class ExportError(CompoundError, ValueError):
    """A part of a system has no counterpart in the form that it is exported to, or cannot be written."""


class DataError(CompoundError, ValueError):
    """A data file is missing, or one of its rows is invalid."""


class InvalidRow(DataError):
    """A row of data is invalid; ``key`` is equal for rows with the same problem.

    Their number is ``rows``; ``of`` is the number of rows in which it was looked for, 0 if unknown.
    """

    def __init__(
        self, place: str, problem: str, *, hint: str = "", key: str = "", rows: int = 1, of: int = 0
    ) -> None:
        count = f"{rows} of {of} rows" if of else f"{rows - 1} more row{'s' * (rows > 2)}"
        hints = [hint] if rows == 1 else [hint, f"{count} like this"]
        super().__init__(
            f"{place}: {problem}" if place else problem, hint="; ".join(filter(None, hints))
        )
        self.place, self.problem, self.fix, self.key = place, problem, hint, key or problem
        self.rows, self.of = rows, of


class MissingOutput(DataError, KeyError):
    """A metric reads an output that the system does not produce."""


class SeveralErrors(DataError):
    """Several errors were found at once; ``errors`` lists them."""

    def __init__(self, errors: Iterable[CompoundError]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(map(str, self.errors)))


def merge_rows(errors: Iterable[CompoundError]) -> list[CompoundError]:
    """Return the errors, equal ones once, with one for the rows with the same problem: that of the first."""
    groups: dict[str, dict[str, CompoundError]] = {}
    for error in errors:
        for each in error.errors if isinstance(error, SeveralErrors) else (error,):
            alike = groups.setdefault(each.key if isinstance(each, InvalidRow) else str(each), {})
            alike.setdefault(str(each), each)
    return [_merged(list(alike.values())) for alike in groups.values()]


def _merged(alike: list[CompoundError]) -> CompoundError:
    first, rows = alike[0], [error for error in alike if isinstance(error, InvalidRow)]
    if not isinstance(first, InvalidRow) or len(alike) == 1:
        return first
    count, of = sum(row.rows for row in rows), sum(row.of for row in rows)
    return InvalidRow(first.place, first.problem, hint=first.fix, key=first.key, rows=count, of=of)


def raise_all(errors: Iterable[CompoundError]) -> None:
    """Raise the errors, if there are any, with rows merged."""
    found = merge_rows(errors)
    if found:
        raise found[0] if len(found) == 1 else SeveralErrors(found)


def install_command(extra: str) -> str:
    """Return a command that installs the libraries of an extra.

    In a clone it installs the clone, which it names unless that is the current folder. Elsewhere,
    e.g. for a wheel, it installs the libraries themselves, since the package is on no index.
    """
    from importlib import metadata

    clone = Path(__file__).parents[2]
    if (clone / "pyproject.toml").is_file():
        folder = "." if clone == Path.cwd() else str(clone)
        return f'pip install -e "{folder}[{extra}]"'
    stated = (line.partition(";") for line in metadata.requires(DISTRIBUTION) or ())
    libraries = [
        name.strip()
        for name, _, marker in stated
        if re.search(rf"""extra == ["']{extra}["']""", marker)
    ]
    return " ".join(["pip install", *(f'"{name}"' for name in libraries)])


class MissingExtra(CompoundError, ImportError):
    """A feature requires libraries of an extra that are not installed."""

    def __init__(self, feature: str, library: str, extra: str, *others: str) -> None:
        self.feature, self.libraries, self.extra = feature, (library, *others), extra
        named = f"{library}, which is" if not others else f"{', '.join(self.libraries)}, which are"
        super().__init__(f"{feature} needs {named} not installed", hint=install_command(extra))


class SandboxUnavailable(CompoundError):
    """Generated code cannot be run in isolation on this machine, and is not run at all."""


class ModelNotFound(CompoundError):
    """The weights of a model are not on this machine."""


class RunDirectoryError(CompoundError):
    """A run directory is invalid, damaged, in use, or belongs to another configuration."""


class BudgetExhausted(CompoundError):
    """The worst case of the next step exceeds the remaining budget."""


class AdapterNotServed(CompoundError):
    """A server does not sample with the adapter that it was sent and has acknowledged."""


class TooManyFailures(CompoundError):
    """The share of failed runs exceeds the limit."""


class RunFailed(CompoundError):
    """A system run failed. ``trace`` records all calls, including the failed one."""

    def __init__(self, message: str, *, trace: object, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.trace = trace


class QuotaExhausted(CompoundError):
    """A provider account has no credit left. The run stops and can be resumed later."""


class CallError(CompoundError):
    """A call failed. The executor records it; it ends the trace but not the run.

    Args:
        message: the failure and its location.
        hint: how to fix it.
        outputs: outputs produced before the failure (the fields that were parsed).
        kind: kind of the recorded failure; default: that of the class.
        charged: usage charged for the failed request: `NO_USAGE` if it was rejected before
            processing; ``None`` if unknown, in which case its worst case is charged.
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
    """The text of a model lacks fields that its component declares."""

    kind = "parse"


class OutputTypeError(CallError):
    """A component returned outputs that do not match its ports."""

    kind = "type"


class TransientError(CallError):
    """A transient failure: a dropped connection, an overloaded server, a timeout.

    ``retry_after`` is the wait requested by the server, in seconds.
    """

    kind = "transient"

    def __init__(
        self,
        message: str,
        *,
        retry_after: float | None = None,
        charged: Usage | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint, charged=charged)
        self.retry_after = retry_after


class RateLimited(TransientError):
    """A server rejected a request because of its rate limit. It is retried after a wait, uncharged."""

    kind = "rate_limit"


def suggest_name(name: str, possible: Iterable[str]) -> str:
    """Return ``"did you mean 'x'?"`` for the closest name, or ``"possible: …"``.

    >>> suggest_name("bugdet", ["budget", "seed"])
    "did you mean 'budget'?"
    >>> suggest_name("zzz", ["budget", "seed"])
    'possible: budget, seed'
    """
    names = sorted(possible)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return "possible: " + (", ".join(names) if names else "none")


def first_leaf(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first leaf exception of a group."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


LIBRARIES: Mapping[str, tuple[str, str]] = {
    "inspect_ai": ("inspect-ai", "inspect"),
    "torch": ("torch", "local"),
    "transformers": ("transformers", "local"),
    "gguf": ("gguf", "local"),
    "safetensors": ("safetensors", "local"),
    "accelerate": ("accelerate", "local"),
    "llguidance": ("llguidance", "local"),
    "psutil": ("psutil", "local"),
    "bitsandbytes": ("bitsandbytes", "quantized"),
    "huggingface_hub": ("transformers", "local"),  # a dependency of transformers
    "litellm": ("litellm", "remote"),
    "httpx": ("httpx", "remote"),
    "optuna": ("optuna", "search"),
    "gepa": ("gepa", "search"),
    "bm25s": ("bm25s", "retrieval"),
    "regex": ("regex", "retrieval"),
    "snowballstemmer": ("snowballstemmer", "retrieval"),
    "sentence_transformers": ("sentence-transformers", "dense"),
    "rouge_score": ("rouge-score", "rouge"),
    "matplotlib": ("matplotlib", "report"),
    "pyarrow": ("pyarrow", "hub"),
    "s3fs": ("s3fs", "stores"),
    "sklearn": ("scikit-learn", "rewards"),
    "peft": ("peft", "train"),
    "opentelemetry": ("opentelemetry-sdk", "otel"),
    "mlflow": ("mlflow-skinny", "mlflow"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "fastapi": ("fastapi", "serve"),
    "starlette": ("fastapi", "serve"),  # a dependency of fastapi
    "uvicorn": ("uvicorn", "serve"),
    "prometheus_client": ("prometheus-client", "serve"),
    "ray": ("ray", "ray"),
    "mcp": ("mcp", "mcp"),
    "pyseccomp": ("pyseccomp", "sandbox"),
    "dspy": ("dspy", "dspy"),
}
"""Maps a module to the library's name on PyPI and the extra that installs it."""


def raise_missing_extra(error: BaseException, feature: str = "this") -> None:
    """Raise `MissingExtra` for the failed import of an optional library; return for any other error.

    >>> raise_missing_extra(ModuleNotFoundError("No module named 'torch'", name="torch"))
    Traceback (most recent call last):
    compound.core.errors.MissingExtra: this needs torch, which is not installed; pip install ...
    """
    if (
        isinstance(error, ModuleNotFoundError)
        and not isinstance(error, MissingExtra)
        and error.name
    ):
        known = LIBRARIES.get(error.name.partition(".")[0])
        if known is not None:
            raise MissingExtra(feature, *known) from error


def check_installed(module: str, feature: str) -> None:
    """Check that an optional library is installed, without importing it."""
    if sys.modules.get(module, module) is None or find_spec(module) is None:
        raise MissingExtra(feature, *LIBRARIES[module])


@contextmanager
def explain_missing(feature: str) -> Iterator[None]:
    """Raise `MissingExtra` for a failed import of an optional library in a block or a decorated function."""
    try:
        yield
    except ImportError as error:
        raise_missing_extra(error, feature)
        raise


def libraries_of(part: object) -> Sequence[str]:
    """Return the modules of optional libraries that an engine, a metric or another part ``requires``."""
    found: Sequence[str] = getattr(part, "requires", ())
    return found


def missing_libraries(needed: Iterable[tuple[str, Sequence[str]]]) -> list[MissingExtra]:
    """Return an error for each extra of which a library is not installed, naming its libraries."""
    found: dict[str, MissingExtra] = {}
    for feature, modules in needed:
        for module in modules:
            try:
                check_installed(module, feature)
            except MissingExtra as error:
                known = found.get(error.extra)
                if known is None:
                    found[error.extra] = error
                elif not set(error.libraries) & set(known.libraries):
                    first, *others = (*known.libraries, *error.libraries)
                    found[error.extra] = MissingExtra(known.feature, first, error.extra, *others)
    return list(found.values())
