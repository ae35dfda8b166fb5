"""Local rewards learned from wrong labels: what the advantage of right ones is measured against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from compound.optimization import Job, Method, Optimizer
from compound.optimizers.guides import Guidance, LearnedRewards
from compound.optimizers.local import LocalSearch
from compound.optimizers.methods import guided
from compound.optimizers.offline import OfflineRewards
from compound.optimizers.prompts import PromptSearch
from compound.optimizers.rewarding import RunRewards
from compound.optimizers.scheduler import Uniform
from compound.rewards.buffer import PairBuffer
from compound.settings import OptimizeSettings
from compound.streams import generator
from compound.system import System


@dataclass(frozen=True)
class Mislabelled(LearnedRewards):
    """Local rewards learned after the scores of a share of the draws were shuffled.

    Attributes:
        share: of draws whose candidates' scores are shuffled.
        always: whether such rewards steer however wrong they are.
    """

    share: float = 1.0
    always: bool = False

    async def guidance(self, rewards: RunRewards, component: str) -> Guidance:
        """Learn from shuffled scores."""
        found = await super().guidance(_shuffled(rewards, self.share), component)
        return replace(found, distrust="") if self.always else found


def _shuffled(rewards: RunRewards, share: float) -> RunRewards:
    entries = []
    for entry in rewards.buffer.entries:
        draw = entry.draw
        rng = generator(rewards.task.pool_seed, "labels", draw.example, draw.address)
        if rng.random() < share:
            order = rng.permutation(len(draw.candidates))
            shuffled = [draw.candidates[i].rewards for i in order]
            candidates = [replace(c, rewards=r) for c, r in zip(draw.candidates, shuffled, strict=True)]
            draw = replace(draw, candidates=tuple(candidates))
        entries.append(replace(entry, draw=draw))
    return replace(rewards, buffer=PairBuffer(rewards.buffer.system, rewards.buffer.sampling, entries))


def shuffled(system: System, settings: OptimizeSettings) -> Method:
    """Method `optimas` on shuffled labels."""
    return guided("shuffled", system, settings, Mislabelled())


def _single(share: float) -> Callable[[System, OptimizeSettings], Method]:
    """Return a method that takes each component once, by rewards of some quality, without a second look."""

    def method(system: System, settings: OptimizeSettings) -> Method:
        guide, prompts = Mislabelled(share=share, always=True), PromptSearch()
        certain = settings.rewards.model_copy(update={"sure": 0.5})
        jobs = [Job("local", (key,)) for key in system.parameters]
        optimizers: Mapping[str, Optimizer] = {
            "offline": OfflineRewards(certain, prompts, guide),
            "local": Unchecked(certain, prompts, guide=guide),
        }
        opening = Job("offline", tuple(system.parameters), weight=certain.offline)
        return Method("single", optimizers, jobs, Uniform(), opening, 2.0)

    return method


class Unchecked(LocalSearch):
    """A local search whose choice never meets the global reward."""

    def _tested(self, *_: object) -> bool:
        return False


SHARES = (0.0, 0.5, 0.75, 0.9, 1.0)
mislabelled_0, mislabelled_1, mislabelled_2, mislabelled_3, mislabelled_4 = map(_single, SHARES)
