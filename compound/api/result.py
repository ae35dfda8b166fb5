"""Result of an optimization run, read from its directory, and the recorded calls of the run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from compound.core import notebook
from compound.core.errors import DeclarationError, RunDirectoryError, suggest_name
from compound.core.formatting import format_repr, short_repr
from compound.core.narrowing import report_wrong_arguments
from compound.core.security.sanitize import sanitize_for_terminal
from compound.core.security.untrusted import UntrustedFolder
from compound.core.storage.records import Damaged
from compound.evaluation.evaluate import Evaluation, gain_interval
from compound.evaluation.statistics import Interval
from compound.execution.trace import Trace, as_text, from_json
from compound.graph.configuration import Configuration
from compound.optimization.loop.loop import final_configuration
from compound.optimization.runs.candidate_record import (
    CandidateRecord,
    describe_costs,
    front,
    read_candidates,
)
from compound.optimization.runs.directory import (
    CONFIG,
    inconsistency_errors,
    load_checkpoint,
    read_json,
    read_records,
)
from compound.optimization.runs.recorder import MEMORY_FOLDER
from compound.report.record import RecordedTrace, recorded_trace

ResultVerdict = Literal["supported", "promising", "feasible", "unchanged"]


@dataclass(frozen=True, repr=False)
class Result:
    """Result of a run.

    Attributes:
        best: the best configuration.
        before, after: evaluations on the validation split, before the search and for ``best``.
        test_before, test_after: the same on the test split; ``None`` if there is none or the budget
            ended.
        verdict: whether a test supports ``best`` (``supported``), it only scored higher
            (``promising``), it meets the limits, which the initial one exceeds (``feasible``), or
            it is the initial configuration (``unchanged``).
        supported: the last configuration that a test supported, at first the initial one.
        promising: the one with the highest score of those that only scored higher; ``None`` without
            one.
        accepted: number of proposals that became the best configuration.
        spent: system runs, calls, tokens, cost and seconds, including the test split.
        path: the run directory.
        notes: facts stated at the start, such as the proposers in use.
    """

    best: Configuration
    before: Evaluation
    after: Evaluation
    test_before: Evaluation | None
    test_after: Evaluation | None
    verdict: ResultVerdict
    supported: Configuration
    promising: Configuration | None
    accepted: int
    spent: Mapping[str, Any]
    path: Path
    notes: Sequence[str] = ()

    @property
    def report(self) -> str:
        """The report as Markdown."""
        return UntrustedFolder(self.path).read("report.md").decode(errors="replace")

    @property
    def candidates(self) -> list[CandidateRecord]:
        """Every configuration that the run evaluated, the initial one first."""
        return read_candidates(self.path)

    @property
    def front(self) -> list[CandidateRecord]:
        """The candidates that no other one beats in both gain and dollars per run, the cheapest first.

        Tokens count instead of dollars if a price is unknown, or if no call costs anything.
        """
        return front(self.candidates)

    @property
    def cost_notes(self) -> list[str]:
        """Sentences on limits of the objective, and on tokens and dollars per run that changed much."""
        return describe_costs(self.candidates)

    @property
    def test_gain(self) -> Interval | None:
        """Mean gain on the test split with its 95 % confidence interval, paired by example."""
        before, after = self.test_before, self.test_after
        return None if before is None or after is None else gain_interval(before, after)

    def __repr__(self) -> str:
        def mean(of: Evaluation | None) -> str:
            return "" if of is None else f"{of.mean:.4g}"

        return format_repr(
            "Result",
            before=mean(self.before),
            after=mean(self.after),
            test_before=mean(self.test_before),
            test_after=mean(self.test_after),
            verdict=self.verdict,
            system_runs=f"{self.spent.get('system_runs', 0.0):g}",
            costs=repr(" ".join(self.cost_notes)) if self.cost_notes else "",
            path=repr(str(self.path)),
        )

    def _repr_html_(self) -> str:
        """Return the scores, the spending and the best configuration, for notebooks."""
        pairs = [("valid", self.before, self.after), ("test", self.test_before, self.test_after)]
        rows = [
            (split, before.interval, after.interval, gain_interval(before, after))
            for split, before, after in pairs
            if before is not None and after is not None
        ]
        scores = notebook.table(["split", "before", "after", "gain"], rows)
        facts = [
            ("verdict", self.verdict),
            ("system runs", f"{self.spent.get('system_runs', 0.0):g}"),
            ("calls", self.spent.get("calls", 0)),
            ("costs", " ".join(self.cost_notes)),
            ("run", self.path),
        ]
        return notebook.block("Result", scores, self.best._repr_html_(), facts=facts)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON."""
        spent = self.spent
        return {
            "before": self.before.summary(),
            "after": self.after.summary(),
            "test_before": self.test_before.summary() if self.test_before else None,
            "test_after": self.test_after.summary() if self.test_after else None,
            "test_gain": self.test_gain.to_json() if self.test_gain else None,
            "system_runs": spent.get("system_runs", 0.0),
            "test_runs": spent.get("test_runs", 0.0),
            "calls": spent.get("calls", 0),
            "tokens": spent.get("prompt_tokens", 0) + spent.get("completion_tokens", 0),
            "metric_calls": spent.get("metric_calls", 0),
            "cost": spent.get("cost", 0.0),
            "unpriced_calls": spent.get("unpriced", 0),
            "seconds": spent.get("seconds", 0.0),
            "verdict": self.verdict,
            "accepted": self.accepted,
            "cost_notes": self.cost_notes,
            "configuration": self.best.to_json(),
            "run": str(self.path),
            "notes": list(self.notes),
        }


def read_result(path: str | Path) -> Result:
    """Read the result of a run from its directory.

    Raises:
        RunDirectoryError: it is not a run directory, has no result yet, or one of its files is
            damaged.
    """
    folder = UntrustedFolder(path)
    stored = load_checkpoint(folder)
    if stored is None or stored.state.before is None or stored.state.search is None:
        raise RunDirectoryError(
            f"{folder} has no result yet", hint="resume it with the command that started it"
        )
    state, search = stored.state, stored.state.search
    with inconsistency_errors(folder):
        events = [e for e in read_records(folder, "events.jsonl") if "spent" in e]
        notes = (
            e.get("told", [e.get("note", "")]) for e in events if e["event"] in ("outlook", "note")
        )
        decisions = [e for e in events if e["event"] == "decision" and e.get("accepted")]
        best = final_configuration(state, folder.path / MEMORY_FOLDER)
        supported = (
            search.supported or search.best
        )  # earlier versions kept only what a test supported
        return Result(
            best=best,
            verdict=_verdict(decisions, is_supported=supported == search.best),
            supported=Configuration(supported).located(folder.path / MEMORY_FOLDER),
            promising=None
            if search.promising is None
            else Configuration(search.promising).located(folder.path / MEMORY_FOLDER),
            before=stored.state.before.shared(stored.state.search.incumbent),
            after=search.incumbent,
            test_before=state.test_before.evaluation if state.test_before else None,
            test_after=state.test_after.evaluation if state.test_after else None,
            accepted=len(decisions),
            spent=events[-1]["spent"],
            path=folder.path,
            notes=list(dict.fromkeys(chain.from_iterable(notes))),
        )


def _verdict(accepted: Sequence[Mapping[str, Any]], *, is_supported: bool) -> ResultVerdict:
    """Return the verdict of the best configuration, given the decisions that accepted one."""
    if not accepted:
        return "unchanged"
    if not is_supported:
        return "promising"
    return "feasible" if accepted[-1].get("verdict") == "feasible" else "supported"


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
        DeclarationError: the split or the component is unknown, ``source`` has no traces, or
            ``limit`` is below 1.
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
        chosen = [
            trace
            for trace in _traces(source)
            if example in ("", trace.example) and (not failed or trace.failure is not None)
        ]
        _check_component(component, [call.component for each in chosen for call in each.calls])
        texts = [
            as_text(replace(trace, calls=trace.calls_of(component)) if component else trace)
            for trace in chosen[-limit:]
        ]
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
    for number, row in enumerate(read_records(Path(run), TRACES), 1):
        try:
            recorded = recorded_trace(row)
        except Damaged as error:
            raise RunDirectoryError(f"{Path(run) / TRACES}:{number}: {error}") from None
        seen.update(dict.fromkeys(call["component"] for call in recorded["calls"]))
        matches = example in ("", recorded["example"]) and split in ("", recorded["split"])
        if matches and (not failed or recorded["failure"] is not None):
            calls = [c for c in recorded["calls"] if component in ("", c["component"])]
            found.append({**recorded, "calls": calls})
    _check_component(component, seen)
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


def _check_component(component: str, seen: Iterable[str]) -> None:
    """Reject the name of a component that made no call, if there are calls."""
    known = list(dict.fromkeys(seen))
    if component and known and component not in known:
        raise DeclarationError(
            f"no component {component!r} in the traces", hint=suggest_name(component, known)
        )
