"""Print the calls of traces: inputs, messages, raw answers, outputs and usage."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import cast

from compound.api.result import Result
from compound.errors import DeclarationError, suggest_name
from compound.execution.trace import Trace, as_text, from_json
from compound.formatting import short_repr
from compound.narrowing import report_wrong_arguments
from compound.report.facts.traces import RecordedTrace
from compound.runs.directory import CONFIG, inconsistency_errors, read_json, read_records
from compound.security.sanitize import sanitize_for_terminal

TRACES = "traces.jsonl"
SPLITS = ("valid", "test")
LIMIT = 3


@report_wrong_arguments
def inspect_calls(
    source: Trace | Iterable[Trace] | Result | str | Path,
    *,
    component: str = "",
    example: str = "",
    split: str = "",
    failed: bool = False,
    limit: int = LIMIT,
) -> None:
    """Print the calls of a trace, of several traces, or of the recorded system runs of a run directory.

    Args:
        source: a trace, traces, the result of an optimization, or the path of a run directory.
        component: only calls of this component; default: all.
        example: only system runs on the example with this id; default: all.
        split: only system runs on this split of a run directory, ``valid`` or ``test``.
        failed: only failed system runs.
        limit: maximum number of system runs; the last ones are printed.

    Raises:
        DeclarationError: the split or the component is unknown, ``source`` has no traces, or ``limit`` is
            below 1.
        RunDirectoryError: the path is not a run directory, or one of its files is damaged.

    Example:
        >>> from compound import Function, Input, System, run
        >>> def double(x: int) -> int:
        ...     return 2 * x
        >>> system = System("demo", outputs={"y": Function("double", double)(x=Input("x", int))})
        >>> inspect_calls(run(system, {"x": 4}))
        == double (0.00 s)
        x <- 4
        output -> 8
    """
    if limit < 1:
        raise DeclarationError(f"limit >= 1 must hold, got {limit}")
    if isinstance(source, Result):
        source = source.path
    if isinstance(source, str | Path):
        found = select_recorded(
            source, example=example, component=component, split=split, failed=failed, limit=limit
        )
        texts = [format_recorded(recorded) for recorded in found]
    else:
        traces = _traces(source)
        chosen = [t for t in traces if example in ("", t.example) and (not failed or t.failure is not None)]
        _check_component(component, chosen)
        texts = [as_text(_only(trace, component)) for trace in chosen[-limit:]]
    print(sanitize_for_terminal("\n\n".join(texts) or "no system run matches"))


def _traces(source: object) -> list[Trace]:
    """Return the given traces as a list."""
    found: list[object] = list(source) if isinstance(source, Iterable) else [source]
    traces = [trace for trace in found if isinstance(trace, Trace)]
    if len(traces) < len(found):
        other = next(item for item in found if not isinstance(item, Trace))
        raise DeclarationError(
            f"inspect_calls prints traces, but got {type(other).__name__} {short_repr(other)}",
            hint="pass the trace that cp.run returns, the result of cp.optimize, or a run directory",
        )
    return traces


def select_recorded(
    run: str | Path, *, example: str, component: str, split: str, failed: bool, limit: int
) -> list[RecordedTrace]:
    """Return the last recorded traces of a run directory that match, as JSON types.

    The arguments and errors are those of `inspect_calls`.
    """
    if split not in ("", *SPLITS):
        raise DeclarationError(
            f"no traces of the split {split!r} are recorded; possible: {', '.join(SPLITS)}"
        )
    read_json(run, CONFIG)  # rejects other folders
    found: deque[RecordedTrace] = deque(maxlen=limit)
    seen: dict[str, None] = {}
    with inconsistency_errors(run):
        for row in read_records(Path(run), TRACES):
            recorded = cast("RecordedTrace", row)  # checksums guarantee what the run wrote
            seen.update(dict.fromkeys(call["component"] for call in recorded["calls"]))
            matches = example in ("", recorded["example"]) and split in ("", recorded["split"])
            if matches and (not failed or recorded["failure"] is not None):
                calls = [c for c in recorded["calls"] if component in ("", c["component"])]
                found.append({**recorded, "calls": calls})
    if component and seen and component not in seen:
        raise _unknown(component, seen)
    return list(found)


def format_recorded(recorded: RecordedTrace) -> str:
    """Format a recorded trace as text, with its example, score and configuration."""
    trace = from_json(recorded)
    score = "no score" if trace.score is None else f"score {trace.score:g}"
    again = ", rerun" if recorded.get("again") else ""
    head = (
        f"# example {trace.example}, {recorded['split']}{again}, sample {trace.sample}, "
        f"configuration {trace.configuration[:8]}: {score}"
    )
    lines = [head, *([f"feedback: {trace.feedback}"] if trace.feedback else [])]
    lines += [f"gold: {short_repr(recorded['gold'])}"] if recorded.get("gold") else []
    return "\n".join(["\n".join(lines), *([as_text(trace)] if trace.calls else [])])


def _only(trace: Trace, component: str) -> Trace:
    return replace(trace, calls=trace.calls_of(component)) if component else trace


def _check_component(component: str, traces: Iterable[Trace]) -> None:
    seen = dict.fromkeys(call.component for trace in traces for call in trace.calls)
    if component and seen and component not in seen:
        raise _unknown(component, seen)


def _unknown(component: str, seen: Iterable[str]) -> DeclarationError:
    return DeclarationError(
        f"no component {component!r} in the traces", hint=suggest_name(component, list(seen))
    )
