"""Local rewards learned from wrong labels, as a control for the advantage of right ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from typing_extensions import override

from compound.execution.rng import generator
from compound.graph.system import System
from compound.optimization.method import Job, Method, Optimizer
from compound.optimization.registration import MethodFactory, method
from compound.optimizers.optimas.guides import Guidance, LearnedRewards
from compound.optimizers.optimas.local import LocalSearch
from compound.optimizers.optimas.methods import OptimasSettings, guided
from compound.optimizers.optimas.offline import OfflineRewards
from compound.optimizers.optimas.rewarding import RunRewards
from compound.optimizers.scheduling.scheduler import Uniform
from compound.optimizers.search.prompts import PromptSearch
from compound.rewards.buffer import PairBuffer
from compound.rewards.settings import RewardLearning
from compound.settings.optimize import OptimizeSettings


@dataclass(frozen=True)
class Mislabelled(LearnedRewards):
    """Local rewards learned with shuffled scores in a share of the draws.

    Attributes:
        share: share of the draws whose candidates' scores are shuffled.
        always: whether the rewards are used regardless of their accuracy.
    """

    share: float = 1.0
    always: bool = False

    async def guidance(self, rewards: RunRewards, component: str) -> Guidance:
        """Learn rewards from shuffled scores."""
        found = await super().guidance(_shuffled(rewards, self.share), component)
        return replace(found, untrusted_reason="") if self.always else found


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


def _learning(settings: OptimasSettings) -> RewardLearning:
    return RewardLearning(settings.pairs, settings.backbone, settings.reward)


@method(settings=OptimasSettings)
def shuffled(system: System, optimize: OptimizeSettings, settings: OptimasSettings) -> Method:
    """Method `optimas` on shuffled labels."""
    offline, fresh = settings.offline, settings.pairs.fresh
    return guided("shuffled", system, settings, _learning(settings), Mislabelled(), offline, fresh)


def _single(share: float) -> MethodFactory:
    """Return a method that optimizes each component once by rewards of a given quality, without a check."""

    def single(system: System, optimize: OptimizeSettings, settings: OptimasSettings) -> Method:
        guide, prompts = Mislabelled(share=share, always=True), PromptSearch()
        certain = replace(_learning(settings), reward=settings.reward.model_copy(update={"check_below": 0.5}))
        fresh = settings.pairs.fresh
        jobs = [Job("local", (key,)) for key in system.parameters]
        optimizers: Mapping[str, Optimizer] = {
            "offline": OfflineRewards(certain, prompts, guide),
            "local": Unchecked(certain, settings.search, prompts, guide=guide, fresh=fresh),
        }
        opening = Job("offline", tuple(system.parameters), weight=settings.offline)
        return Method("single", optimizers, jobs, Uniform(), opening, 2.0)

    return MethodFactory(single, OptimasSettings)


class Unchecked(LocalSearch):
    """Local search whose choice is not tested against the global reward."""

    @override  # so that a renamed hook is an error of mypy, and not a test that takes place unnoticed
    def _is_worth_testing(self, *_: object) -> bool:
        return False


SHARES = (0.0, 0.5, 0.75, 0.9, 1.0)
mislabelled_0, mislabelled_1, mislabelled_2, mislabelled_3, mislabelled_4 = map(_single, SHARES)
