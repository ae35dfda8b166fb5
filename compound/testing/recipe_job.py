"""Run training steps of a recipe on a chain of scripted agents, without a model and without torch."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from compound.components.llm import LLM
from compound.engine import Completion, Request, TokenRecord
from compound.errors import TransientError
from compound.evaluation.evaluate import EvaluationRules
from compound.evaluation.metrics.custom import custom
from compound.example import Example, Metric, Score, Values
from compound.execution.budget import Meter
from compound.execution.cache import MemoryCache
from compound.execution.executor import Executor
from compound.graph.component import Input, Source
from compound.graph.space import LoRA, Text
from compound.graph.system import System
from compound.optimization.method import JobContext, Method, Task
from compound.optimization.problem import Problem
from compound.optimization.scorer import JobScorer
from compound.optimizers.scheduling.scheduler import Uniform
from compound.optimizers.weights.learner.samples import Sample
from compound.optimizers.weights.recipes.recipe import CreditedSamples, Recipe, RecipeContext, credited_by
from compound.optimizers.weights.recipes.rollouts import Fork, Rollout, Sampler, rollout_rules
from compound.settings.optimize import OptimizeSettings
from compound.testing.checks import temporary_folder
from compound.testing.doubles import PlainMemory, ScriptedLM

if TYPE_CHECKING:
    from compound.optimizers.weights.distributed.learner import Learner

__all__ = ["Answer", "DigitLM", "RecipeJob", "WatchedSampler"]

LM = "lm"
EXAMPLES = tuple(Example(f"e{i}", {"x": f"word{i}"}) for i in range(3))


@dataclass(frozen=True)
class Answer:
    """An answer of `DigitLM`.

    Attributes:
        component: the component that sent the request.
        tokens: the sampled tokens.
        temperature: the sampling temperature.
    """

    component: str
    tokens: TokenRecord
    temperature: float


class DigitLM(ScriptedLM):
    """Engine that answers with a digit drawn from the request's random stream, recorded as one token.

    A component is identified by the first letter of its prompt.

    Attributes:
        request_counts: the number of requests by component.
        answers: the answers so far.
        adapters: the digests of the adapters used for sampling, ``""`` for none.
        losses: the number of upcoming requests to lose, by component.
        lost_request: the number of a single request to lose, from 1 on; 0 for none.
    """

    def __init__(self) -> None:
        super().__init__(lambda text, rng: str(rng.integers(10)))
        self.request_counts: Counter[str] = Counter()
        self.answers: list[Answer] = []
        self.adapters: set[str] = set()
        self.losses: Counter[str] = Counter()
        self.lost_request = 0

    async def generate(self, request: Request) -> Completion:
        """Answer with a digit.

        Raises:
            TransientError: the request is one to lose.
        """
        self.request_counts[component := request.messages[-1].text[0]] += 1
        self.adapters.add(request.adapter.sha256 if request.adapter else "")
        if self.losses[component] or self.request_counts.total() == self.lost_request:
            self.losses[component] -= bool(self.losses[component])
            raise TransientError("the server lost the request")
        done = await super().generate(request)
        prompt = tuple(request.messages[-1].text.encode())
        record = TokenRecord(prompt, (int(done.text),), (-1.0,), "stop")
        self.answers.append(Answer(component, record, request.temperature))
        return replace(done, tokens=record)


@dataclass
class ConstantCritic:
    """Substitute for the trainer, with a constant value head.

    Attributes:
        value: the value that the head predicts.
        asked: the samples that it received.
    """

    value: float = 0.0
    asked: list[Sample] = field(default_factory=list)

    def values(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return samples with a value before each token."""
        self.asked += samples
        return [replace(sample, values=(self.value,) * sample.length) for sample in samples]

    def divergences(
        self, samples: Sequence[Sample], taught: Sequence[Sample] | None = None
    ) -> list[tuple[float, ...]]:
        """Return log-ratios to another model: for each token the number of its sample, from 1 on."""
        return [(number + 1.0,) * sample.length for number, sample in enumerate(samples)]


@dataclass
class WatchedSampler(Sampler):
    """Sampler that records its rollouts, including lost ones."""

    rollouts: list[Rollout] = field(default_factory=list)

    async def attempts(
        self,
        wanted: Sequence[tuple[Example, int]],
        system: System | None = None,
        teacher: str = "",
        *,
        shared: Collection[str] = (),
    ) -> list[Rollout]:
        """Run the given rollouts, pairs of an example and a number, and record them."""
        rollouts = await super().attempts(wanted, system, teacher, shared=shared)
        self.rollouts += rollouts
        return rollouts

    async def forks(self, wanted: Sequence[Fork]) -> list[Rollout]:
        """Run forks, and record their rollouts."""
        rollouts = await super().forks(wanted)
        self.rollouts += rollouts
        return rollouts


class RecipeJob:
    """Training steps of a recipe, on a chain of agents with known answers and rewards.

    Each agent reads the answer of the previous one, and answers with a digit. The reward of a run is a tenth
    of the last agent's digit. The state of the recipe persists between calls of `collect`.

    Args:
        agents: the names of the agents, one letter each, in order.
        trained: the agents whose weights are trained; all of them by default.
        value: the prediction of the value head before each token.

    Attributes:
        system: the chain.
        lm: the engine.
        critic: the substitute for the trainer.
        state: the state that the recipe persists across steps.

    Example:
        >>> from compound.optimizers.weights.recipes.mmgrpo import MMGRPO, MMGRPOSettings
        >>> job = RecipeJob("ab")
        >>> credited = job.collect(MMGRPO(MMGRPOSettings(rollouts={"runs": 4})))
        >>> len(credited.samples), dict(job.lm.request_counts)
        (24, {'a': 12, 'b': 12})
    """

    def __init__(
        self, agents: Sequence[str] = "abc", trained: Sequence[str] | None = None, *, value: float = 0.0
    ) -> None:
        last: Source = Input("x")
        for name in agents:
            last = LLM(name, prompt=Text(name), weights=LoRA(), retries=0)(x=last)
        self.system = System("chain", outputs={"y": last}, lm=LM)
        self.trained = tuple(agents if trained is None else trained)
        self.lm = DigitLM()
        self.critic = ConstantCritic(value)
        self.state: dict[str, object] = {}
        self._files = temporary_folder(self)

    def with_adapter(self, component: str, name: str) -> System:
        """Return the system with an adapter of the given name and digest for one of its components."""
        values = {f"{component}.weights": {"path": name, "sha256": name}}
        return self.system.bind({**self.system.configuration, **values})

    def collect(
        self,
        recipe: Recipe,
        *,
        step: int = 0,
        examples: Sequence[Example] = EXAMPLES,
        present: System | None = None,
        metric: Metric | None = None,
        meter: Meter | None = None,
        folder: Path = Path(),
        spare: Sequence[Example] = (),
    ) -> CreditedSamples:
        """Collect the samples of a step like the training loop does.

        Args:
            recipe: the recipe to test.
            step: the number of the step, which seeds its random streams.
            examples: the examples of the step.
            present: the system with its current weights; the initial chain by default.
            metric: the global reward; a tenth of the last digit by default.
            meter: counts the system runs.
            folder: the folder for code and files that the settings name.
            spare: further examples, which may replace those without a gradient.

        Raises:
            TooManyFailures: too many rollouts of the step were lost.
        """
        context = self.context(recipe, step, examples, present, metric, meter, folder, spare=spare)
        credited = asyncio.run(credited_by(recipe, context, examples))
        context.sampler.check_failures()
        return credited

    def context(
        self,
        recipe: Recipe,
        step: int = 0,
        examples: Sequence[Example] = EXAMPLES,
        present: System | None = None,
        metric: Metric | None = None,
        meter: Meter | None = None,
        folder: Path = Path(),
        *,
        spare: Sequence[Example] = (),
    ) -> RecipeContext:
        """Return the context of a step; the arguments are those of `collect`."""
        rules = rollout_rules(EvaluationRules(), self.system, self.trained, recipe.sampling)
        executor = Executor({LM: self.lm}, cache=MemoryCache(), meter=meter, folder=self._files)
        metric = metric or custom(_digit, "digit", bounds=(0, 1))
        sampler = WatchedSampler(executor, present or self.system, metric, rules, step)
        problem = Problem(
            self.system, examples, (), (), metric, OptimizeSettings(), Method("none", {}, [], Uniform()),
            {LM: self.lm}, folder,
        )  # fmt: skip
        task = Task(
            system=self.system,
            keys=tuple(f"{name}.weights" for name in self.trained),
            train=examples,
            scorer=JobScorer(problem, executor, self.system, float("inf"), executor.meter.system_runs),
            seed=1,
            pool_seed=2,
            minibatch=4,
            candidates=8,
            context=JobContext(executor, metric, problem.rules, PlainMemory(self._files), folder),
        )
        return RecipeContext(
            sampler,
            self.trained,
            step,
            cast("Learner", self.critic),
            task,
            self.state,
            folder,
            spare,
        )


def _digit(outputs: Values, example: Example) -> Score:
    """Score the last agent's digit."""
    return Score(int(str(outputs["y"])) / 10)
