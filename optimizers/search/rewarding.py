"""Local rewards of a run: collect preference pairs, fit reward models, and persist both across jobs.

The buffer of pairs is part of the run's memory, so a resumed run has the same buffer. With a frozen
backbone, a reward model is a function of the buffer and is refitted when needed; the adapter of a
trained backbone is stored under the digest of its content.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self, cast

from pydantic import Field

from compound.core.example import Example
from compound.core.formatting import plural
from compound.core.storage.state import State
from compound.core.threads import compute
from compound.engines.local.devices import Placement
from compound.evaluation.feedback import read_feedback
from compound.execution.rng import generator
from compound.execution.trace import Trace
from compound.graph.configuration import components_of
from compound.optimization.method import Memory, Proposal, Task
from compound.optimizers.search.memory_part import MemoryPart
from compound.rewards.alignment import Evidence
from compound.rewards.buffer import PairBuffer, draws_from_feedback, row_digest
from compound.rewards.features import Embedder, Template
from compound.rewards.fit import FittedRewards, component_pairs, fit_rewards
from compound.rewards.heads import MIN_INPUTS
from compound.rewards.model import LocalReward, ScoreCalls, make_backbone
from compound.rewards.pairs import Collection, Draw, collect, expected_cost
from compound.rewards.settings import BackboneLoRASettings, RewardLearning

if TYPE_CHECKING:
    from compound.rewards.backbone import Backbone

Traced = list[tuple[Example, Trace]]

ENOUGH = 2 * MIN_INPUTS  # inputs with pairs: to fit a reward and to evaluate it on held-out pairs
# Fitted rewards of this process, by the digest of their data: most jobs change only one component's
# data.
KNOWN: dict[str, LocalReward] = {}


@functools.lru_cache(maxsize=2)
def shared_backbone(name: str, max_length: int, placement: Placement | None = None) -> Embedder:
    """Return a backbone that all jobs of the process share, with its cached features."""
    return make_backbone(name, max_length, placement)


@dataclass(frozen=True)
class Guidance:
    """Scoring of one component's calls in one job."""

    scores: ScoreCalls
    facts: Mapping[str, object] = field(default_factory=dict)
    unusable: str = ""  # why there are no scores; `""` if there are
    # why the scores must not replace the global reward in training; `""` if they may
    untrusted: str = ""
    # the ids of the examples whose calls have scores; `None` for all examples
    examples: frozenset[str] | None = None


class RewardAdapter(State):
    """A trained adapter of the backbone."""

    name: str = Field(pattern="^[0-9a-f]+$")  # part of a folder name, so no path separators
    data: str  # the digest of the pairs that it was trained on


class RewardMemory(MemoryPart):
    """Memory of local rewards, besides the pairs."""

    NAME = "rewards"
    iteration: int = 0  # the last iteration that pairs were collected in; 0 before the first
    # the number of inputs that pairs were collected from; the next ones follow in a fixed order
    inputs: int = 0
    # the number of draws copied from the feedback folder; `None` before that
    feedback: int | None = None
    adapter: RewardAdapter | None = None
    adapters: dict[str, RewardAdapter] = Field(default_factory=dict)


@dataclass
class RunRewards:
    """Buffer of pairs and reward models of a run; a subclass may score calls in another way."""

    # whether rewards are fitted to pairs, so that pairs of a changed configuration are collected
    learns: ClassVar[bool] = True
    learning: RewardLearning
    task: Task
    memory: Memory
    buffer: PairBuffer

    @classmethod
    def load(cls, task: Task, learning: RewardLearning) -> Self:
        """Load the rewards of a run from its memory.

        Raises:
            DataError: the buffer is damaged, or belongs to another system.
        """
        memory = task.context.memory
        sampling, place = learning.pairs.sampling, f"{memory.folder.parent}: "
        buffer = PairBuffer.read(memory.records(), task.system, sampling, place)
        rewards = cls(learning, task, memory, buffer)
        rewards.add_feedback()
        return rewards

    def add_feedback(self) -> None:
        """Copy the pairs of the feedback folder into the run, once."""
        folder, stored = self.learning.pairs.feedback, RewardMemory.of(self.memory)
        if folder is None or stored.feedback is not None:
            return
        log = read_feedback(self.task.context.folder / folder)
        draws = draws_from_feedback(log, self.task.system)
        stored.feedback = len(draws)
        stored.store(self.memory)
        self.add(draws, stored.iteration)

    @property
    def iteration(self) -> int:
        """The last iteration that pairs were collected in; 0 before the offline phase."""
        return RewardMemory.of(self.memory).iteration

    def fresh(self, examples: Sequence[Example], count: int) -> list[Example]:
        """Return the next ``count`` examples of a fixed, cyclic order."""
        start = RewardMemory.of(self.memory).inputs
        order = generator(self.task.pool_seed, "fresh").permutation(len(examples))
        return [examples[order[(start + i) % len(order)]] for i in range(min(count, len(order)))]

    async def collect(
        self,
        components: Sequence[str],
        traced: Traced,
        proposals: Mapping[str, Sequence[Mapping[str, object]]],
        iteration: int,
    ) -> Collection:
        """Collect pairs of some components, and add them to the buffer and the memory."""
        context = self.task.context
        collected = await collect(
            context.executor,
            self.task.system,
            traced,
            components,
            context.metric,
            sampling=self.buffer.sampling,
            rules=context.rules,
            round_index=iteration,
            proposals=proposals,
        )
        self.add(collected.draws, iteration, len({example.id for example, _ in traced}))
        return collected

    def add(self, draws: Sequence[Draw], iteration: int, inputs: int = 0) -> None:
        """Add the draws of an iteration to the buffer and the memory."""
        stored = RewardMemory.of(self.memory)
        stored.iteration = iteration
        stored.inputs += inputs
        stored.store(self.memory)
        named = {draw.example for draw in draws}
        rows = {
            example.id: row_digest(example) for example in self.task.train if example.id in named
        }
        for draw, record in zip(draws, self.buffer.add(draws, iteration), strict=True):
            row = rows.get(draw.example)
            self.memory.append(record if row is None else {**record, "row": row})

    async def learn(self, components: Sequence[str] = (), *, tested: bool = False) -> FittedRewards:
        """Fit the reward models to the buffer, in the computing thread, so that the run is not blocked."""
        job = components_of(self.task.keys)
        known = components or list(dict.fromkeys([*job, *self.buffer.components]))
        return await compute(self._learn, known, tested)

    def _backbone(self) -> Embedder:
        settings = self.learning.backbone
        backbone = shared_backbone(settings.model, settings.max_length, settings.placement)
        backbone.store_in(self.memory.folder / f"features-{settings.max_length}.bin")
        return backbone

    def frozen_backbone(self) -> Embedder:
        """Return the backbone without an adapter, which another job of the process may have trained."""
        backbone = self._backbone()
        backbone.remove_adapter()
        return backbone

    def _learn(self, components: Sequence[str], tested: bool) -> FittedRewards:
        settings, reward, backbone = self.learning.backbone, self.learning.reward, self._backbone()
        if reward.lora is not None:
            self._train(cast("Backbone", backbone), components, reward.lora)
        learned = fit_rewards(
            self.buffer,
            self.task.system,
            components,
            backbone,
            settings.model,
            trained=reward.lora is not None,
            tested=tested,
            seed=self.task.pool_seed,
            known=KNOWN,
        )
        learned.model.save(self.memory.folder / "rewards")
        return learned

    def _train(
        self, backbone: Backbone, components: Sequence[str], lora: BackboneLoRASettings
    ) -> None:
        """Train the backbone, from the adapter of this configuration or the last one."""
        from compound.rewards.fit import train

        stored = RewardMemory.of(self.memory)
        configuration = self.task.system.configuration.digest
        known = stored.adapters.get(configuration, stored.adapter)
        if known and backbone.adapter != known.name:
            backbone.load_adapter(self.memory.folder / _folder(known.name), known.name)
        elif not known:
            backbone.remove_adapter()
        if not known or known.data != self.buffer.digest:
            templates = [Template.of(self.task.system.components[name]) for name in components]
            texts = [component_pairs(self.buffer, each, held_out=True) for each in templates]
            texts = [part for part in texts if part.is_sufficient()]
            if not texts:
                return
            train(backbone, texts, lora, seed=self.task.pool_seed)
            backbone.save_adapter(self.memory.folder / _folder(backbone.adapter))
            known = RewardAdapter(name=backbone.adapter, data=self.buffer.digest)
        stored.adapter = stored.adapters[configuration] = known
        stored.store(self.memory)

    def cost_of_learning(self, component: str) -> float:
        """Return the expected cost of pairs from `ENOUGH` inputs of a component, in system runs.

        It uses the share of inputs that gave pairs so far; before the first draws, it is that of a wave.
        """
        drawn = {entry.draw.example for entry in self.buffer.of(component)}
        useful = {pair.example for pair, _ in self.buffer.pairs(component)}
        share = (len(useful) + 1) / (len(drawn) + 2)
        inputs = max(0, ENOUGH - len(useful)) / share if drawn else MIN_INPUTS
        return inputs * expected_cost(self.task.system, component, self.buffer.sampling)

    def is_constant(self, component: str) -> bool:
        """Return whether all draws under the current configuration gave one output per call."""
        configuration = self.task.system.configuration.digest
        found = [entry.draw for entry in self.buffer.of(component)]
        draws = [draw for draw in found if draw.configuration == configuration]
        return bool(draws) and all(len(draw.candidates) == 1 for draw in draws)

    def is_settled(self, learned: FittedRewards, component: str) -> bool:
        """Return whether a reward needs no more pairs: it is accurate, or the component is constant."""
        if component in learned.missing:
            return self.is_constant(component)
        accuracy = learned.model.rewards_of[component].accuracy
        return accuracy.low is not None and accuracy.low >= self.learning.reward.sufficient_accuracy

    def untrusted_reason(self, learned: FittedRewards, component: str) -> str:
        """Return why a component's reward must not replace the global reward; ``""`` if it may.

        Besides its accuracy, the exact lower limit of the share of inputs that it orders right counts.
        """
        reward, settings = learned.model.rewards_of.get(component), self.learning.reward
        if reward is None:
            return learned.missing.get(component, "no pairs")
        if reward.accuracy.mean < settings.min_accuracy:
            return f"the local reward orders only {reward.accuracy.mean:.0%} of held-out pairs correctly"
        evidence = reward.evidence or Evidence()
        if reward.evidence is not None and evidence.lower_limit(settings.trust_level) > 0.5:
            return ""
        return (
            f"the local reward is not significantly better than chance: it orders {evidence.right} of "
            f"{plural(evidence.right + evidence.wrong, 'held-out input')} right"
        )

    # -- scoring of calls --------------------------------------------------------------------------------

    async def needing_pairs(self, components: Sequence[str]) -> list[str]:
        """Return the components of which the offline phase should collect more pairs."""
        learned = await self.learn(components)
        return [name for name in components if not self.is_settled(learned, name)]

    async def finish_offline(self, components: Sequence[str]) -> Proposal:
        """Process the pairs of the offline phase; return a proposal that only reports them."""
        learned = await self.learn(components)
        accuracies = [
            f"{name} {r.accuracy.mean:.2f}" for name, r in learned.model.rewards_of.items()
        ]
        missing = [f"{name}: {reason}" for name, reason in learned.missing.items()]
        ranking = [f"ranking accuracy {', '.join(accuracies)}"] if accuracies else []
        return Proposal({}, note="; ".join([*ranking, *missing]), facts=self.facts(learned))

    async def guidance(self, component: str) -> Guidance:
        """Return the scoring of a component's calls, by the pairs collected so far."""
        learned = await self.learn(tested=True)
        known = component in learned.model.rewards_of
        missing = "" if known else learned.missing.get(component, "no pairs")
        untrusted = self.untrusted_reason(learned, component)
        return Guidance(learned.model.rewards, self.facts(learned), missing, untrusted)

    @property
    def base(self) -> Mapping[str, object]:
        """The configuration of the other components, under which the scores apply."""
        return self.task.system.configuration.to_json()

    def facts(self, learned: FittedRewards | None) -> dict[str, object]:
        """Return the numbers for a job's record: accuracies, gaps and pair counts by component."""
        known, rewards_of = self.buffer.components, learned.model.rewards_of if learned else {}
        return {
            "iteration": self.iteration,
            "accuracy": {name: reward.accuracy.to_json() for name, reward in rewards_of.items()},
            "gaps": {name: gap for name in known if (gap := self.buffer.gap(name)) is not None},
            "pairs": {name: len(self.buffer.weighted_pairs(name)) for name in known},
            "missing": dict(learned.missing) if learned else {},
        }


def _folder(adapter: str) -> str:
    return f"adapter-{adapter[:16]}"
