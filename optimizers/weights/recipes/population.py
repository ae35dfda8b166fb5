"""A population of prompts, spread over the rollouts of each example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from compound.execution.graph_run import ComponentSettings
from compound.execution.rng import generator
from compound.graph.configuration import component_of

Prompts = Mapping[str, str]  # texts by key


@dataclass
class Population:
    """Prompts that rollouts of one step use in turn, so that an advantage compares runs with all of them.

    Attributes:
        prompts: the versions of the prompts, with the same keys.
        step: the index of the step, from which the order of the prompts of each example is drawn.
        rewards: by version, the sum and the number of the rewards so far.
    """

    prompts: Sequence[Prompts]
    step: int
    rewards: list[tuple[float, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.rewards = [(0.0, 0)] * len(self.prompts)

    def index(self, example: str, number: int) -> int:
        """Return the version of the prompts of an example's rollout.

        The numbers of rollouts with each version differ by at most one. The order is drawn for each example.

        >>> versions = Population([{}, {}, {}], step=1)
        >>> sorted(versions.index("e1", number) for number in range(6))
        [0, 0, 1, 1, 2, 2]
        """
        order = generator(self.step, "prompts", example).permutation(len(self.prompts))
        return int(order[number % len(order)])

    def settings(self, own: ComponentSettings, example: str, number: int) -> ComponentSettings:
        """Return the settings of components in a rollout: ``own``, and the texts of its version."""
        found = {component: dict(values) for component, values in own.items()}
        for key, text in self.prompts[self.index(example, number)].items():
            component = component_of(key)
            found.setdefault(component, {})[key.removeprefix(f"{component}.")] = text
        return found

    def record(self, example: str, number: int, reward: float) -> None:
        """Add the reward of a rollout."""
        version = self.index(example, number)
        total, count = self.rewards[version]
        self.rewards[version] = (total + reward, count + 1)
