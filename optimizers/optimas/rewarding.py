"""The local rewards of a run: pairs are collected, rewards learned, and all of it remembered from job to job.

The buffer is the run's memory, so a resumed run has the same one. With fixed features a reward model is a
function of the buffer and is fitted again when needed; a trained backbone's adapter is stored by its content.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from pydantic import Field

from compound.concurrency.threads import compute
from compound.errors import BudgetExhausted, TooManyFailures
from compound.example import Example
from compound.execution.rng import generator
from compound.execution.trace import Trace
from compound.graph.configuration import canonical, components_of, digest
from compound.optimization.method import Memory, Task
from compound.optimizers.search.racing import INCUMBENT, Race
from compound.optimizers.search.remembered import Remembered
from compound.rewards.buffer import PairBuffer
from compound.rewards.features import Embeds
from compound.rewards.fit import Learned, learn, texts_of
from compound.rewards.heads import LEAST_INPUTS
from compound.rewards.model import LocalReward, make_backbone
from compound.rewards.pairs import Collected, Draw, collect, compared, expected_cost
from compound.rewards.settings import BackboneLoRASettings, RewardLearning
from compound.storage.state import State

if TYPE_CHECKING:
    from compound.rewards.backbone import Backbone

Traced = list[tuple[Example, Trace]]

ENOUGH = 2 * LEAST_INPUTS  # inputs with pairs, to learn a reward from and to judge it
KNOWN: dict[str, LocalReward] = {}  # fits of this process by what they were made from: most jobs change one


@functools.lru_cache(maxsize=2)
def shared_backbone(name: str, max_length: int) -> Embeds:
    """Return a backbone, loaded once in a process: its cached features serve every job."""
    return make_backbone(name, max_length)


class Adapter(State):
    """A trained adapter of the backbone.

    Attributes:
        name: names it by its content.
        data: the digest of the pairs that it was trained on.
    """

    name: str = Field(pattern="^[0-9a-f]+$")  # it names a folder
    data: str


class RewardMemory(Remembered):
    """What a run remembers of its local rewards, besides the pairs.

    Attributes:
        iteration: the last iteration that pairs were collected in; 0 before the first.
        inputs: how many inputs pairs were collected from; the next ones follow in a fixed order.
        adapter: the adapter that was used last.
        adapters: the last adapter of each configuration, by the configuration's digest.
        tried: the candidates that were scored locally, by what the scores belong to (`_place`).
    """

    NAME = "rewards"
    iteration: int = 0
    inputs: int = 0
    adapter: Adapter | None = None
    adapters: dict[str, Adapter] = Field(default_factory=dict)
    tried: dict[str, list[dict[str, object]]] = Field(default_factory=dict)


@dataclass
class RunRewards:
    """A run's buffer and reward model."""

    learning: RewardLearning
    task: Task
    memory: Memory
    buffer: PairBuffer

    @staticmethod
    def open(task: Task, learning: RewardLearning) -> RunRewards:
        """Return what the run remembers.

        Raises:
            DataError: the buffer is damaged, or another system's.
        """
        memory = task.context.memory
        buffer = PairBuffer.read(memory.records(), task.system, learning.pairs.sampling)
        return RunRewards(learning, task, memory, buffer)

    @property
    def components(self) -> list[str]:
        """All components of the system that have parameters."""
        return components_of(self.task.system.parameters)

    @property
    def iteration(self) -> int:
        """The last iteration that pairs were collected in; 0 before the offline phase."""
        return RewardMemory.of(self.memory).iteration

    def fresh(self, examples: Sequence[Example], count: int) -> list[Example]:
        """Return the next ``count`` examples of a fixed, cyclic order."""
        return self._in_order(examples, RewardMemory.of(self.memory).inputs, count)

    def latest(self, examples: Sequence[Example], count: int) -> list[Example]:
        """Return the examples last collected from, and those before, up to ``count``."""
        return self._in_order(examples, max(0, RewardMemory.of(self.memory).inputs - count), count)

    def _in_order(self, examples: Sequence[Example], start: int, count: int) -> list[Example]:
        order = generator(self.task.pool_seed, "fresh").permutation(len(examples))
        return [examples[order[(start + i) % len(order)]] for i in range(min(count, len(order)))]

    async def collect(
        self,
        components: Sequence[str],
        traced: Traced,
        proposals: Mapping[str, Sequence[Mapping[str, object]]],
        iteration: int,
    ) -> Collected:
        """Collect pairs of some components, and remember them."""
        context = self.task.context
        found = await collect(
            context.executor, self.task.system, traced, components, context.metric,
            sampling=self.buffer.sampling, rules=context.rules, round_=iteration, proposals=proposals,
        )  # fmt: skip
        self._remember(found.draws, iteration, len({example.id for example, _ in traced}))
        return found

    async def remember_race(
        self,
        component: str,
        candidates: Sequence[Mapping[str, object]],
        race: Race,
        examples: Sequence[Example],
        iteration: int,
    ) -> None:
        """Make pairs of what a race ran anyway: traces of runs that did not fail are in the cache.

        Args:
            component: whose settings raced.
            candidates: their values by key.
            race: how far each candidate came, and which of its runs failed.
            examples: in the order of the race.
            iteration: of the pairs.
        """
        if not race.standings or not self.task.scorer.free_repeats:
            return
        count = max(standing.n for standing in race.standings)
        runs: list[list[tuple[Mapping[str, object], Trace]]] = [[] for _ in range(count)]
        raced = [(str(s.candidate), candidates[s.candidate], s.n) for s in race.standings]
        for name, values, n in [(INCUMBENT, {}, count), *raced]:
            settings = {key.split(".", maxsplit=1)[1]: value for key, value in values.items()}
            failed = race.failed.get(name, ())
            places = [i for i in range(n) if examples[i].id not in failed]
            if not places:
                continue
            try:
                traces = await self.task.scorer.traces(values, [examples[i] for i in places])
            except (TooManyFailures, BudgetExhausted):  # what is not in the cache is worth no further runs
                continue
            for place, trace in zip(places, traces, strict=True):
                runs[place].append((settings, trace))
        draws = [draw for row in runs if row for draw in compared(component, row, self.buffer.sampling)]
        self._remember(draws, iteration)

    def _remember(self, draws: Sequence[Draw], iteration: int, inputs: int = 0) -> None:
        """Keep draws of one iteration, which were made from some further inputs."""
        kept = RewardMemory.of(self.memory)
        kept.iteration = iteration
        kept.inputs += inputs
        kept.store(self.memory)
        for record in self.buffer.add(draws, iteration):
            self.memory.append(record)

    async def learn(self, components: Sequence[str] = ()) -> Learned:
        """Return the reward model of the buffer, for all components it knows unless some are named.

        Reading texts and training do not block the run.
        """
        return await compute(self._learn, components or self._known())

    def _learn(self, components: Sequence[str]) -> Learned:
        reads, reward = self.learning.backbone, self.learning.reward
        backbone = shared_backbone(reads.model, reads.max_length)
        backbone.keep_in(self.memory.folder / f"features-{reads.max_length}.bin")
        if reward.lora is not None:
            self._train(cast("Backbone", backbone), components, reward.lora)
        learned = learn(
            self.buffer, self.task.system, components, backbone, reads.model,
            weighting=reward.weighting, trained=reward.lora is not None,
            seed=self.task.pool_seed, known=KNOWN,
        )  # fmt: skip
        learned.model.save(self.memory.folder / "rewards")
        return learned

    def _train(self, backbone: Backbone, components: Sequence[str], lora: BackboneLoRASettings) -> None:
        """Train on from the adapter of this configuration, or else from the last one.

        So an adapter trained under a configuration that was rejected is left with it. One that was trained on
        this very buffer is taken as it is.
        """
        from compound.rewards.backbone_training import Training, train

        kept = RewardMemory.of(self.memory)
        here = self.task.system.configuration.digest
        known = kept.adapters.get(here, kept.adapter)
        if known and backbone.adapter != known.name:
            backbone.load_adapter(self.memory.folder / _folder(known.name), known.name)
        elif not known:
            backbone.drop_adapter()
        if not known or known.data != self.buffer.digest:
            texts = [texts_of(self.buffer, self.task.system, name, held_out=True) for name in components]
            texts = [part for part in texts if part.enough()]
            if not texts:
                return
            sizes = Training(lora.rank, lora.alpha, lora.lr, lora.epochs, lora.batch, lora.patience)
            train(backbone, texts, sizes, seed=self.task.pool_seed)
            backbone.save_adapter(self.memory.folder / _folder(backbone.adapter))
            known = Adapter(name=backbone.adapter, data=self.buffer.digest)
        kept.adapter = kept.adapters[here] = known
        kept.store(self.memory)

    def cost_of_learning(self, component: str) -> float:
        """Return about how many system runs a component's pairs of `ENOUGH` inputs take.

        Goes by the share of its inputs that gave pairs so far: where outputs rarely lead to different scores,
        it takes many. Before the first draws, returns what it takes to know more.
        """
        drawn = {draw.example for draw in self.draws(component)}
        useful = {pair.example for pair, _ in self.buffer.pairs(component)}
        share = (len(useful) + 1) / (len(drawn) + 2)
        inputs = max(0, ENOUGH - len(useful)) / share if drawn else LEAST_INPUTS
        return inputs * expected_cost(self.task.system, component, self.buffer.sampling)

    def draws(self, component: str) -> list[Draw]:
        """Return the remembered draws of a component."""
        return [entry.draw for entry in self.buffer.of(component)]

    def is_trusted(self, learned: Learned, component: str) -> bool:
        """Return whether a component's reward may steer."""
        reward = learned.model.rewards_of.get(component)
        return reward is not None and reward.accuracy.mean >= self.learning.reward.min_accuracy

    def is_constant(self, component: str) -> bool:
        """Return whether a component always wrote the same: in all draws of a call, as it is configured now.

        More draws would give no pairs; another configuration may let it read other things.
        """
        here = self.task.system.configuration.digest
        draws = [draw for draw in self.draws(component) if draw.configuration == here]
        return bool(draws) and all(len(draw.candidates) == 1 for draw in draws)

    def is_settled(self, learned: Learned, component: str) -> bool:
        """Return whether more pairs would not help: it is surely good, or always writes the same."""
        if component in learned.missing:
            return self.is_constant(component)
        found = learned.model.rewards_of[component].accuracy
        return found.low is not None and found.low >= self.learning.reward.check_below

    def untried(self, task: Task, candidates: Iterable[dict[str, object]]) -> list[dict[str, object]]:
        """Return the candidates that no earlier job scored locally under this very configuration."""
        tried = RewardMemory.of(self.memory).tried.get(_place(task), ())
        known = {canonical(values) for values in tried}
        return [values for values in candidates if canonical(values) not in known]

    def note_tried(self, task: Task, candidates: Iterable[dict[str, object]]) -> None:
        """Remember what was scored locally."""
        kept = RewardMemory.of(self.memory)
        tried = kept.tried.setdefault(_place(task), [])
        tried += [values for values in candidates if values]
        kept.store(self.memory)

    def distrust(self, learned: Learned, component: str) -> str:
        """Return why a component's reward may not steer."""
        if component in learned.missing:
            return learned.missing[component]
        accuracy = learned.model.rewards_of[component].accuracy
        return f"the local reward orders {accuracy.mean:.0%} of held-out pairs right"

    def facts(self, learned: Learned | None) -> dict[str, object]:
        """Return the numbers of a job's record: accuracies and gaps of every component."""
        known = dict.fromkeys(entry.draw.component for entry in self.buffer.entries)
        rewards_of = learned.model.rewards_of if learned else {}
        return {
            "iteration": self.iteration,
            "accuracy": {name: reward.accuracy.to_json() for name, reward in rewards_of.items()},
            "gaps": {name: self.buffer.gap(name) for name in known},
            "pairs": {name: len(self.buffer.pairs(name)) for name in known},
            "missing": dict(learned.missing) if learned else {},
        }

    def _known(self) -> list[str]:
        """Return every component the buffer knows, and those of the task."""
        known = dict.fromkeys(entry.draw.component for entry in self.buffer.entries)
        return list(dict.fromkeys([*tunable(self.task), *known]))


def _folder(adapter: str) -> str:
    return f"adapter-{adapter[:16]}"


def _place(task: Task) -> str:
    """Return what a job's local scores belong to: its keys, and the whole configuration as it is now."""
    return digest([list(task.keys), task.system.configuration.to_json()])


def tunable(task: Task) -> list[str]:
    """Return the components that the task's keys belong to, in the order of the keys."""
    return components_of(task.keys)
