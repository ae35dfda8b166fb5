"""Write an optimizer with settings of its own, and compare it with random search at the same budget.

`CompassSearch` moves one number at a time by a step, and halves the step when no move improves the
score. The task is to fit a line through points: the slope is 137, and the intercept is -282.

Run: python docs/examples/custom_optimizer.py [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from pydantic import Field

import compound as cp


class CompassSettings(cp.ext.Settings):
    """Settings of `CompassSearch`."""

    step: int = Field(default=100, ge=1)
    """The first step."""
    examples: int = Field(default=4, ge=1)
    """How many train examples each candidate is scored on."""


class CompassState(cp.ext.State):
    """The step and the best numbers so far: enough to resume an interrupted run."""

    step: int
    best: dict[str, int]
    tried: int = 0


@cp.ext.optimizer(settings=CompassSettings, tunes=cp.Int)
class CompassSearch:
    """Search whole numbers by moves along one axis."""

    def __init__(self, settings: CompassSettings) -> None:
        self.settings = settings

    async def propose(self, task: cp.ext.Task) -> AsyncIterator[cp.ext.Progress | cp.ext.Proposal]:
        """Move to the best neighbor, or halve the step, until the step is 0 or the budget is used."""
        if task.resume is None:
            state = CompassState(
                step=self.settings.step,
                best={key: int(str(task.system.configuration[key])) for key in task.keys},
            )
        else:
            state = CompassState.from_json(task.resume)
        examples = task.train[: self.settings.examples]
        while state.step >= 1:
            candidates = [state.best, *neighbors(task, state)]
            if task.scorer.runs_left < len(candidates) * len(examples):
                break
            scored = await task.scorer.score(candidates, examples)
            best = max(range(len(scored)), key=lambda number: scored[number].mean)
            step = state.step // 2 if best == 0 else state.step
            state = CompassState(
                step=step, best=candidates[best], tried=state.tried + len(candidates) - 1
            )
            yield cp.ext.Progress(state.to_json(), note=f"step {step}: {scored[best].mean:.3f}")
        yield cp.ext.Proposal(state.best, tried=state.tried)

    def plan(self, job: cp.ext.PlannedJob) -> cp.ext.JobPlan:
        """Declare that the optimizer sends no requests to models."""
        return cp.ext.JobPlan()


def neighbors(task: cp.ext.Task, state: CompassState) -> list[dict[str, int]]:
    """Return the candidates one step away from the best numbers."""
    moved = [
        (key, state.best[key] + move) for key in task.keys for move in (-state.step, state.step)
    ]
    return [
        {**state.best, key: value}
        for key, value in moved
        if not task.system.parameters[key].problem(value)
    ]


def line(x: int, slope: int, intercept: int) -> int:
    """Return the point of a line."""
    return slope * x + intercept


def squared_error(outputs: Mapping[str, object], example: cp.Example) -> float:
    """Score 0 for the gold point, and less the farther away: scores are maximized."""
    return -float((int(str(outputs["y"])) - int(str(example.gold["y"]))) ** 2)


def main(folder: Path) -> cp.Result:
    """Compare the optimizer with random search, and print a table."""
    slope, intercept = cp.Int(-500, 500, value=0), cp.Int(-500, 500, value=0)
    fitted = cp.Function("line", line, slope=slope, intercept=intercept)(x=cp.Input("x", int))
    rows = [
        {"id": f"{x}", "x": x, "y": line(x, 137, -282)}
        for x in (-4, 4, -3, 3, -2, 2, -1, 1, *range(5, 25))
    ]

    def optimize(method: str, run: str) -> cp.Result:
        return cp.optimize(
            cp.System("line", outputs={"y": fitted}),
            data={"train": rows[:8], "valid": rows[8:18], "test": rows[18:]},
            metric=cp.metrics.custom(squared_error),
            method=method,
            CompassSearch=CompassSettings(step=128),
            budget=cp.Budget(system_runs=2000),
            run_dir=folder / run,
            progress=False,
        )

    result = optimize(f"{__name__}:CompassSearch", "custom_optimizer")
    others = {"random": optimize("random", "random")}
    print(f"{'method':16} {'test score':>12} {'system runs':>12}   slope, intercept (137, -282)")
    for name, found in {"compass search": result, **others}.items():
        assert found.test_after is not None
        values = f"{found.best['line.slope']}, {found.best['line.intercept']}"
        print(
            f"{name:16} {found.test_after.mean:12,.0f} {found.spent['system_runs']:12.0f}   {values}"
        )
    return result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
