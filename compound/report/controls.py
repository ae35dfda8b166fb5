"""Rows of a sweep's table for its controls: a constant answer, and one direct call of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict

from compound.engine import NO_USAGE
from compound.evaluation.evaluate import Evaluation, joint_bounds
from compound.report.pooling import Pooled, pooled


class ControlRun(TypedDict):
    """A control of one file and seed; its status is ``finished``, ``skipped`` or ``failed``.

    ``name`` is ``constant`` or ``direct call``; ``choice`` is the answer that is given, or the model.
    """

    file: str
    name: str
    seed: int
    status: str
    reason: str
    choice: str
    evaluation: Evaluation | None
    seconds: float


class ControlResult(TypedDict):
    """A control of one file and seed with its results, as JSON types."""

    file: str
    name: str
    seed: int
    status: str
    reason: str
    choice: str
    test: float | None
    failed: int
    calls: int
    prompt_tokens: int
    completion_tokens: int
    cost: float
    unpriced: int
    seconds: float


class MeanSpending(TypedDict, total=False):
    """Mean spending of the runs of a row, over seeds."""

    system_runs: float | None
    test_runs: float | None
    calls: float | None
    prompt_tokens: float | None
    completion_tokens: float | None
    cost: float | None
    unpriced: float | None
    seconds: float | None


Trained = dict[str, float | None]  # cost of weight training, by name


class Row(MeanSpending):
    """A row of the table: the runs of a method on one file, the unoptimized systems, or a control."""

    file: str
    method: str
    seeds: list[int]
    test: Pooled | None
    gain: Pooled | None
    control: str | None
    accepted: NotRequired[int]
    decisions: NotRequired[int]
    training: NotRequired[Trained | None]


def control_result(run: ControlRun) -> ControlResult:
    """Return a control with its results."""
    evaluation = run["evaluation"]
    usage = evaluation.usage if evaluation else NO_USAGE
    return {
        "file": run["file"],
        "name": run["name"],
        "seed": run["seed"],
        "status": run["status"],
        "reason": run["reason"],
        "choice": run["choice"],
        "test": evaluation.mean if evaluation else None,
        "failed": evaluation.failed if evaluation else 0,
        "calls": usage.calls,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cost": usage.cost,
        "unpriced": usage.unpriced,
        "seconds": run["seconds"],
    }


def control_row(file: str, name: str, runs: Sequence[ControlRun]) -> Row | None:
    """Return the row of a control, over the seeds for which it was evaluated; None if there are none."""
    done = [run for run in runs if (run["file"], run["name"]) == (file, name) and run["evaluation"]]
    evaluations = [run["evaluation"] for run in done if run["evaluation"]]
    if not done:
        return None
    results = [control_result(run) for run in done]
    bounds = joint_bounds(*(each.range for each in evaluations))

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    return {
        "file": file,
        "method": f"{name}: {', '.join(dict.fromkeys(run['choice'] for run in done))}",
        "control": name,
        "seeds": sorted(run["seed"] for run in done),
        "test": pooled([each.by_example() for each in evaluations], bounds),
        "gain": None,
        "calls": mean([result["calls"] for result in results]),
        "prompt_tokens": mean([result["prompt_tokens"] for result in results]),
        "completion_tokens": mean([result["completion_tokens"] for result in results]),
        "cost": mean([result["cost"] for result in results]),
        "unpriced": mean([result["unpriced"] for result in results]),
        "seconds": mean([result["seconds"] for result in results]),
    }


def missing_controls(results: Sequence[ControlResult]) -> list[str]:
    """Return notes on controls that are not in the tables."""
    seeds: dict[tuple[str, str, str], list[str]] = {}
    for each in results:
        if each["status"] != "finished":
            key = each["file"], each["name"], f"{each['status']}: {each['reason']}"
            seeds.setdefault(key, []).append(str(each["seed"]))
    return [
        f"{file}, control {name!r}, seed{'s' if len(found) > 1 else ''} {', '.join(found)}: {reason}"
        for (file, name, reason), found in seeds.items()
    ]
