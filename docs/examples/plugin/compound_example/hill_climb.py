"""Hill climbing: an optimizer of numbers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from pydantic import Field

import compound as cp


class HillClimbSettings(cp.ext.Settings):
    """Settings of `hill_climb`."""

    step: float = Field(default=0.1, gt=0, le=1)
    """Step size, as a share of the range of each parameter."""


class HillClimbState(cp.ext.State):
    """Parameters that have been tried, and the changes that improved the score."""

    tried: list[str] = []
    gains: dict[str, float] = {}
    values: dict[str, float] = {}


@cp.ext.optimizer(settings=HillClimbSettings, tunes=cp.Float)
class HillClimb:
    """Move each number by one step, in the direction that improves the score."""

    def __init__(self, settings: HillClimbSettings) -> None:
        self.settings = settings

    async def propose(self, task: cp.ext.Task) -> AsyncIterator[cp.ext.Progress | cp.ext.Proposal]:
        """Try both directions for each parameter; propose all steps that improve the score."""
        state = HillClimbState() if task.resume is None else HillClimbState.from_json(task.resume)
        examples = task.train[: task.minibatch]
        for key in task.keys[len(state.tried) :]:
            candidates = self._neighbors(task.system, key)
            if task.scorer.runs_left < len(examples) * (1 + len(candidates)):
                break
            before, *after = await task.scorer.score([{}, *candidates], examples)
            best = max(range(len(after)), key=lambda number: after[number].mean)
            if after[best].mean > before.mean:
                state.values[key] = candidates[best][key]
                state.gains[key] = after[best].mean - before.mean
            state.tried.append(key)
            yield cp.ext.Progress(
                state.to_json(), note=key, step=len(state.tried), of=len(task.keys)
            )
        yield cp.ext.Proposal(state.values, tried=2 * len(state.tried))

    def plan(self, job: cp.ext.PlannedJob) -> cp.ext.JobPlan:
        """Declare that the optimizer requests nothing from models."""
        return cp.ext.JobPlan()

    def _neighbors(self, system: cp.System, key: str) -> list[Mapping[str, float]]:
        space, value = system.parameters[key], system.configuration[key]
        assert isinstance(space, cp.Float)
        assert isinstance(value, float)
        step = self.settings.step * (space.high - space.low)
        moved = (max(space.low, value - step), min(space.high, value + step))
        return [{key: neighbor} for neighbor in moved if neighbor != value]
