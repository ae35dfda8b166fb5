"""Results of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from compound import notebook
from compound.errors import RunDirectoryError
from compound.evaluation.evaluate import Evaluation, gain_interval
from compound.evaluation.statistics import Interval
from compound.formatting import format_repr
from compound.graph.configuration import Configuration
from compound.loop.loop import final_configuration
from compound.runs.candidate_record import Candidate, describe_costs, front, read_candidates
from compound.runs.directory import (
    baselines,
    inconsistency_errors,
    load_checkpoint,
    read_records,
)
from compound.runs.recorder import MEMORY_FOLDER
from compound.security.untrusted import UntrustedFolder

ResultVerdict = Literal["supported", "promising", "feasible", "unchanged"]


@dataclass(frozen=True, repr=False)
class Result:
    """Result of a run.

    Attributes:
        best: the best configuration.
        before, after: evaluations on the validation split, before the search and for ``best``.
        test_before, test_after: the same on the test split; ``None`` if there is none or the budget ended.
        verdict: whether a test supports ``best`` (``supported``), it only scored higher (``promising``), it
            meets the limits, which the initial one exceeds (``feasible``), or it is the initial configuration
            (``unchanged``).
        supported: the last configuration that a test supported, at first the initial one.
        promising: the one with the highest score of those that only scored higher; ``None`` without one.
        accepted: number of proposals that became the best configuration.
        spent: system runs, calls, tokens, cost and seconds, including the test split.
        path: the run directory.
        baselines: results of the baselines, by method.
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
    baselines: Mapping[str, Result] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def report(self) -> str:
        """The report as Markdown."""
        return UntrustedFolder(self.path).read("report.md").decode(errors="replace")

    @property
    def candidates(self) -> list[Candidate]:
        """Every configuration that the run evaluated, the initial one first."""
        return read_candidates(self.path)

    @property
    def front(self) -> list[Candidate]:
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
            "baselines": {name: result.to_json() for name, result in self.baselines.items()},
        }


def read_result(path: str | Path) -> Result:
    """Read the result of a run from its directory.

    Raises:
        RunDirectoryError: it is not a run directory, has no result yet, or one of its files is damaged.
    """
    return _read_result(UntrustedFolder(path))


def _verdict(accepted: Sequence[Mapping[str, Any]], *, is_supported: bool) -> ResultVerdict:
    """Return the verdict of the best configuration, given the decisions that accepted one."""
    if not accepted:
        return "unchanged"
    if not is_supported:
        return "promising"
    return "feasible" if accepted[-1].get("verdict") == "feasible" else "supported"


def _read_result(folder: UntrustedFolder) -> Result:
    stored = load_checkpoint(folder)
    if stored is None or stored.state.before is None or stored.state.search is None:
        raise RunDirectoryError(
            f"{folder} has no result yet", hint="resume it with the command that started it"
        )
    state, search = stored.state, stored.state.search
    with inconsistency_errors(folder):
        events = [e for e in read_records(folder, "events.jsonl") if "spent" in e]
        notes = (e.get("told", [e.get("note", "")]) for e in events if e["event"] in ("outlook", "note"))
        decisions = [e for e in events if e["event"] == "decision" and e.get("accepted")]
        best = final_configuration(state, folder.path / MEMORY_FOLDER)
        supported = search.supported or search.best  # earlier versions kept only what a test supported
        return Result(
            best=best,
            verdict=_verdict(decisions, is_supported=supported == search.best),
            supported=Configuration(supported).located(folder.path / MEMORY_FOLDER),
            promising=None
            if search.promising is None
            else Configuration(search.promising).located(folder.path / MEMORY_FOLDER),
            before=stored.state.before,
            after=search.incumbent,
            test_before=state.test_before.evaluation if state.test_before else None,
            test_after=state.test_after.evaluation if state.test_after else None,
            accepted=len(decisions),
            spent=events[-1]["spent"],
            path=folder.path,
            baselines={b.path.name: _read_result(b) for b in baselines(folder) if load_checkpoint(b)},
            notes=list(dict.fromkeys(chain.from_iterable(notes))),
        )
