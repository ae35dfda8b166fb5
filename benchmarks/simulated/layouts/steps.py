"""Time of a training step in a layout: a division of GPUs between sampling and training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.simulated.layouts.costs import Costs
from benchmarks.simulated.layouts.sampling import Load, sampling_time

ADAPTERS = (
    1.0  # seconds to load the adapters of a step on a replica, and to probe them; an assumption
)


@dataclass(frozen=True)
class Layout:
    """A division of GPUs.

    Attributes:
        sampling: GPUs that sample.
        training: GPUs that train; 0 if those that sample also train, in turns.
        overlaps: whether the next step is sampled while this one is trained (``max_staleness: 1``).
    """

    sampling: int
    training: int = 0
    overlaps: bool = False

    @property
    def gpus(self) -> int:
        """The number of all GPUs."""
        return self.sampling + self.training

    def __str__(self) -> str:
        if not self.training:
            return f"{self.sampling} in turns"
        kind = "overlapping" if self.overlaps else "one after the other"
        return f"{self.sampling} + {self.training} {kind}"


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        sampling: until all runs have ended.
        training: of the update.
        between: until the new weights sample, without the other two.
        step: of a whole step, in a long run.
        driver: in which the driver is busy.
    """

    sampling: float
    training: float
    between: float
    step: float
    driver: float

    @property
    def bottleneck(self) -> str:
        """The part that takes the longest."""
        parts = {"sampling": self.sampling, "training": self.training, "switching": self.between}
        return max(parts, key=lambda name: parts[name])


def step_time(costs: Costs, load: Load, layout: Layout, seed: int) -> StepTime:
    """Simulate one step.

    Raises:
        ValueError: the GPUs that sample hold no replica.
    """
    replicas = layout.sampling // costs.group
    if not replicas:
        raise ValueError(f"{layout.sampling} GPUs hold no replica, which takes {costs.group}")
    sampling = sampling_time(costs, load, replicas, seed)
    runs = load.examples * load.group
    tokens = runs * load.calls * (load.prompt + load.answer)
    training = costs.training(tokens, layout.training or layout.sampling)
    between = ADAPTERS + (0.0 if layout.training else costs.switch())
    in_order = sampling + training + between
    step = max(sampling + ADAPTERS, training) if layout.overlaps else in_order
    return StepTime(sampling, training, between, step, (load.calls + 1) * runs * load.driver)


def layouts(gpus: int, group: int) -> Iterator[Layout]:
    """Yield layouts of a number of GPUs, in steps of a replica or of a sixteenth of the GPUs."""
    yield Layout(gpus)
    step = max(group, gpus // 16)
    for sampling in range(step, gpus, step):
        yield Layout(sampling, gpus - sampling, overlaps=True)
        yield Layout(sampling, gpus - sampling)
