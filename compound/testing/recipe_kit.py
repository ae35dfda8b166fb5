"""Conformance kit for training recipes; a job runs their steps on scripted agents, without a model."""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from compound.components.llm import LLM
from compound.core.engine import Completion, Request, TokenRecord
from compound.core.errors import BudgetExhausted, TooManyFailures, TransientError
from compound.core.example import Example, Metric, Score, Values
from compound.core.formatting import short_repr
from compound.evaluation.evaluate import EvaluationRules
from compound.evaluation.metrics.custom import custom
from compound.execution.budget import Meter
from compound.execution.cache import MemoryCache
from compound.execution.executor import Executor
from compound.graph.component import Input, Source
from compound.graph.configuration import canonical_json
from compound.graph.space import LoRA, Text
from compound.graph.system import System
from compound.optimization.method import JobContext, Method, Problem, Task
from compound.optimization.scorer import JobScorer
from compound.optimization.settings.optimize import OptimizeSettings
from compound.optimizers.scheduling import Uniform
from compound.optimizers.weights.learner.losses import ImitationObjective, PolicyObjective
from compound.optimizers.weights.learner.samples import Sample, SamplingSettings
from compound.optimizers.weights.learner.updates import CriticSettings
from compound.optimizers.weights.recipes.recipe import (
    CreditedSamples,
    Recipe,
    RecipeContext,
    TrainingSettings,
    credited_by,
)
from compound.optimizers.weights.recipes.rollouts import (
    Rollout,
    RolloutFork,
    Sampler,
    rollout_rules,
)
from compound.testing.checks import (
    json_problem,
    temporary_folder,
    through_json,
    without_global_generators,
)
from compound.testing.doubles import PlainMemory, ScriptedLM

if TYPE_CHECKING:
    from compound.optimizers.weights.distributed.processes import Learner

__all__ = ["DigitAnswer", "DigitLM", "RecipeJob", "RecipeKit", "WatchedSampler"]

LM = "lm"
EXAMPLES = tuple(Example(f"e{i}", {"x": f"word{i}"}) for i in range(3))


@dataclass(frozen=True)
class DigitAnswer:
    """An answer of `DigitLM`."""

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
        self.answers: list[DigitAnswer] = []
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
        self.answers.append(DigitAnswer(component, record, request.temperature))
        return replace(done, tokens=record)


@dataclass
class ConstantCritic:
    """Substitute for the trainer, with a constant value head."""

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

    async def forks(self, wanted: Sequence[RolloutFork]) -> list[Rollout]:
        """Run forks, and record their rollouts."""
        rollouts = await super().forks(wanted)
        self.rollouts += rollouts
        return rollouts


class RecipeJob:
    """Training steps of a recipe, on a chain of agents with known answers and rewards.

    Each agent reads the answer of the previous one, and answers with a digit. The reward of a run
    is a tenth of the last agent's digit. The state of the recipe persists between calls of
    `collect`.

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
        self,
        agents: Sequence[str] = "abc",
        trained: Sequence[str] | None = None,
        *,
        value: float = 0.0,
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

    def collect(
        self,
        recipe: Recipe,
        *,
        examples: Sequence[Example] = EXAMPLES,
        **settings: Any,  # noqa: ANN401
    ) -> CreditedSamples:
        """Collect the samples of a step like the training loop does; ``settings`` are those of `context`.

        Raises:
            TooManyFailures: too many rollouts of the step were lost.
        """
        context = self.context(recipe, examples=examples, **settings)
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
    ) -> RecipeContext:
        """Return the context of a step.

        Args:
            recipe: the recipe to test.
            step: the number of the step, which seeds its random streams.
            examples: the examples of the step.
            present: the system with its current weights; the initial chain by default.
            metric: the global reward; a tenth of the last digit by default.
            meter: counts the system runs.
            folder: the folder for code and files that the settings name.
        """
        rules = rollout_rules(EvaluationRules(), self.system, self.trained, recipe.sampling)
        executor = Executor({LM: self.lm}, cache=MemoryCache(), meter=meter, folder=self._files)
        metric = metric or custom(_digit, "digit", bounds=(0, 1))
        sampler = WatchedSampler(executor, present or self.system, metric, rules, step)
        problem = Problem(
            self.system,
            examples,
            (),
            (),
            metric,
            OptimizeSettings(),
            Method("none", {}, [], Uniform()),
            {LM: self.lm},
            folder,
        )
        task = Task(
            system=self.system,
            keys=tuple(f"{name}.weights" for name in self.trained),
            train=examples,
            scorer=JobScorer(
                problem, executor, self.system, float("inf"), executor.meter.system_runs
            ),
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
        )


def _digit(outputs: Values, example: Example) -> Score:
    return Score(int(str(outputs["y"])) / 10)


ROUNDING = 1e-6  # tolerance for sums of fractional system runs
WORD = re.compile(rb"word\d+")  # inputs of the job's examples


class RecipeKit:
    """Checks of a training recipe; subclass it as ``Test…``, and override `make`.

    Steps run on a chain of agents without a model; see `compound.testing.RecipeJob`. Configure the
    recipe with at least two runs of each example, so that rewards can be compared.

    The training loop starts a step if the job's share of the budget covers its ``cost``, and stops
    the step if it exceeds the share: a cost that is too low ends the job without that step.

    Attributes:
        agents: the names of the agents of the chain, one letter each.
        trained: the agents to train.

    Example:
        >>> from compound.optimizers.weights.recipes.mmgrpo import MMGRPO, MMGRPOSettings
        >>> from compound.testing import RecipeKit, run_kit
        >>> class TestMMGRPO(RecipeKit):
        ...     def make(self):
        ...         return MMGRPO(MMGRPOSettings(rollouts={"runs": 4}))
        >>> run_kit(TestMMGRPO)
        {}
    """

    agents: Sequence[str] = ("a", "b", "c")
    trained: Sequence[str] = ("a", "c")

    def make(self) -> Recipe:
        """Return a new recipe. Override this; all returned recipes must be equivalent."""
        raise NotImplementedError("override make() to return the recipe to test")

    def job(self, agents: Sequence[str] | None = None) -> RecipeJob:
        """Return a job of the kit."""
        return RecipeJob(self.agents if agents is None else agents, self.trained)

    def test_settings_agree(self) -> None:
        """``sampling``, ``loss`` and ``critic`` are settings that are consistent with each other."""
        recipe = self.make()
        for what, value, kind in (
            ("settings", recipe.settings, TrainingSettings),
            ("sampling", recipe.sampling, SamplingSettings),
            ("loss", recipe.loss, (PolicyObjective, ImitationObjective)),
            ("critic", recipe.critic, (CriticSettings, type(None))),
        ):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            names = " or ".join(k.__name__ for k in kinds)
            assert isinstance(value, kinds), f"{what} must be {names}, but is {short_repr(value)}"
        imitates = isinstance(recipe.loss, ImitationObjective)
        assert recipe.likelihood == imitates, (
            f"likelihood is {recipe.likelihood}, but the loss is {recipe.loss.name}"
        )
        assert not (imitates and recipe.critic), (
            "a recipe with an imitation loss does not use a critic; set critic to None"
        )
        stale = recipe.sampling.max_staleness
        corrected = isinstance(recipe.loss, ImitationObjective) or recipe.loss.settings.correction
        assert not stale or corrected, (
            f"samples may be {stale} steps old, but the loss {recipe.loss.name} has no off-policy "
            "correction; set max_staleness to 0 or choose a loss with a correction"
        )

    def test_costs_are_consistent(self) -> None:
        """Costs are finite and positive, and do not decrease with the number of examples."""
        recipe = self.make()
        for what, costs in (
            ("cost", [recipe.cost(n, len(self.trained)) for n in (1, 2, 8)]),
            ("evaluation_cost", [recipe.evaluation_cost(n) for n in (1, 2, 8)]),
        ):
            assert all(math.isfinite(cost) and cost > 0 for cost in costs), (
                f"{what} must be a positive number, but is {costs} for 1, 2 and 8 examples"
            )
            assert costs == sorted(costs), (
                f"{what} must not decrease with the number of examples, but is {costs} for 1, 2 and 8"
            )

    def test_samples_belong_to_the_step(self) -> None:
        """Samples belong to trained components and to the examples of the step."""
        job = self.job()
        credited = self._collected(job)
        words = {example.id: {str(example.inputs["x"]).encode()} for example in EXAMPLES}
        for sample in credited.samples:
            assert sample.component in self.trained, (
                f"a sample belongs to {sample.component!r}, which is not trained; create samples only from "
                "calls of context.trained"
            )
            assert sample.example in words, (
                f"a sample belongs to the example {sample.example!r}, which is not in the step"
            )
            read = set(WORD.findall(bytes(sample.tokens.prompt)))
            assert read <= words[sample.example], (
                f"a sample of the example {sample.example!r} has a prompt with "
                f"{sorted(read - words[sample.example])}, which "
                "belongs to another example"
            )
        trained = {sample.component for sample in credited.samples}
        assert trained == set(self.trained), (
            f"the trained components are {', '.join(self.trained)}, but only {', '.join(sorted(trained))} "
            "has samples"
        )

    def test_samples_are_what_was_sampled(self) -> None:
        """Tokens and temperatures are those that the model recorded."""
        job, recipe = self.job(), self.make()
        credited = self._collected(job, recipe)
        temperature = recipe.sampling.temperature
        answers = {
            (answer.component, answer.tokens, answer.temperature) for answer in job.lm.answers
        }
        for sample in credited.samples:
            assert (sample.component, sample.tokens, temperature) in answers, (
                f"a sample of {sample.component!r} has {sample.tokens!r}, which is not an answer to it at "
                f"the temperature {temperature:g}; pass on the token record of a call unchanged"
            )

    def test_advantages_are_finite(self) -> None:
        """Each token has a finite advantage and, with a critic, a value and a return."""
        job, recipe = self.job(), self.make()
        credited = self._collected(job, recipe)
        for sample in credited.samples:
            _check_numbers(sample, "advantages", sample.length)
            for name in ("values", "returns"):
                _check_numbers(sample, name, sample.length if recipe.critic else 0)
            for name in ("reward", "weight"):
                value = getattr(sample, name)
                assert math.isfinite(value), f"a sample has the {name} {value}; it must be finite"
        for score in credited.scores:
            assert math.isfinite(score), f"a score of the step is {score}; it must be finite"

    def test_equal_seeds_give_equal_samples(self) -> None:
        """Two new jobs give equal steps, and another step gives different samples."""
        one, other = (self._collected(self.job()) for _ in range(2))
        for what in ("samples", "scores", "facts"):
            first, second = _plain(one, what), _plain(other, what)
            assert first == second, (
                f"two equal steps have different {what}; use only generator(context.seed, ...) and the "
                "sampler for randomness"
            )
        later = self._collected(self.job(), step=1)
        assert _plain(one, "samples") != _plain(later, "samples"), (
            "steps 0 and 1 have equal samples; create rollouts with context.sampler, which seeds by step"
        )

    def test_system_runs_stay_within_the_cost(self) -> None:
        """A step takes at most ``cost`` system runs, with every agent trained and called once."""
        recipe, meter = self.make(), Meter()
        cost = recipe.cost(len(EXAMPLES), len(self.trained))
        job = self.job(self.trained)
        try:
            with meter.cap_runs(cost):
                job.collect(recipe, meter=meter)
        except BudgetExhausted as error:
            raise AssertionError(
                f"a step of {len(EXAMPLES)} examples takes more than its cost of {cost:g} system runs; "
                "return the maximum from cost, because the training loop stops a step that exceeds it"
            ) from error
        assert meter.system_runs <= cost + ROUNDING, (
            f"a step took {meter.system_runs:g} system runs, but its cost is {cost:g}"
        )

    def test_an_evaluation_stays_within_its_cost(self) -> None:
        """An evaluation gives finite scores, and takes at most ``evaluation_cost`` system runs."""
        recipe, meter = self.make(), Meter()
        cost = recipe.evaluation_cost(len(EXAMPLES))
        context = self.job().context(recipe, meter=meter)
        scores = asyncio.run(recipe.evaluate(context, {}, EXAMPLES))
        assert scores, "an evaluation returned no scores, although all its examples succeeded"
        assert all(math.isfinite(score) for score in scores), (
            f"the scores of an evaluation are {scores}"
        )
        assert meter.system_runs <= cost + ROUNDING, (
            f"an evaluation of {len(EXAMPLES)} examples took {meter.system_runs:g} system runs, but "
            f"evaluation_cost is {cost:g}"
        )

    def test_what_is_kept_restores(self) -> None:
        """Facts and states are JSON; after an interruption, the restored state leads to the same step."""
        job, recipe = self.job(), self.make()
        facts = dict(self._collected(job, recipe).facts)
        for what, stored in (("facts of a step", facts), ("state of a recipe", job.state)):
            problem = json_problem(stored)
            assert not problem, (
                f"the {what} must be JSON, but {problem}; keep states with context.keep and a State"
            )
        restored = self.job()
        state = through_json(job.state)
        assert isinstance(state, dict)
        restored.state.update(state)
        whole, later = job.collect(recipe, step=1), restored.collect(self.make(), step=1)
        for what in ("samples", "scores", "facts"):
            assert _plain(whole, what) == _plain(later, what), (
                f"after an interruption the next step has different {what}; store what later steps depend on "
                "with context.keep, and nothing in the recipe"
            )
        assert canonical_json(job.state) == canonical_json(restored.state), (
            f"after an interruption the recipe stores {short_repr(restored.state)} instead of "
            f"{short_repr(job.state)}"
        )

    def test_lost_rollouts_teach_nothing(self) -> None:
        """A rollout that a server lost is independent of the weights, and gives no sample and no score."""
        recipe, job = self.make(), self.job()
        whole = self._collected(self.job(), recipe)
        job.lm.losses[self.trained[-1]] = 1
        context = job.context(recipe)
        found = asyncio.run(recipe.collect(context, EXAMPLES))
        sampler = context.sampler
        assert isinstance(sampler, WatchedSampler)
        if (
            not sampler.rollouts
        ):  # the recipe samples without `attempts` or `forks`: compare the counts
            assert len(found.samples) < len(whole.samples), (
                "one answer was lost, but the step has as many samples as without the loss"
            )
            return
        lost = {
            (rollout.example.id, rollout.number) for rollout in sampler.rollouts if rollout.lost
        }
        assert lost, "no rollout of the step was lost; create rollouts with context.sampler"
        taught = [sample for sample in found.samples if (sample.example, sample.rollout) in lost]
        assert not taught, (
            f"{len(taught)} samples are from a rollout that a server lost; skip such rollouts, for example "
            "with compound.optimizers.weights.recipes.recipe.learnable"
        )
        assert len(found.scores) <= len(sampler.rollouts) - len(lost), (
            f"{len(lost)} of {len(sampler.rollouts)} rollouts were lost, but the step has "
            f"{len(found.scores)} scores; skip lost rollouts"
        )

    def test_a_lost_step_ends(self) -> None:
        """If every request is lost, the step raises an error and stores no state."""
        job = self.job()
        job.lm.losses.update(dict.fromkeys(self.agents, 10**6))
        try:
            credited = job.collect(self.make())
        except TooManyFailures:
            assert not job.state, (
                f"every request was lost, but the recipe stores {short_repr(job.state)}; store state only at "
                "the end of a step"
            )
            return
        raise AssertionError(
            f"every request was lost, but the step has {len(credited.samples)} samples and no error; create "
            "rollouts with context.sampler, which raises TooManyFailures"
        )

    def test_global_generators_are_not_used(self) -> None:
        """The recipe neither uses nor seeds the global random generators."""
        recipe, job = self.make(), self.job()
        with without_global_generators("the recipe"):
            job.collect(recipe)

    def _collected(
        self, job: RecipeJob, recipe: Recipe | None = None, step: int = 0
    ) -> CreditedSamples:
        credited = job.collect(recipe or self.make(), step=step)
        assert credited.samples, (
            "the step has no samples to test; return a recipe from make() that learns from rewards between "
            "0.0 and 0.9"
        )
        return credited


def _check_numbers(sample: Sample, name: str, count: int) -> None:
    """Check that a sample has ``count`` finite numbers."""
    numbers = getattr(sample, name)
    assert len(numbers) == count, (
        f"a sample of {count} tokens has {len(numbers)} {name}"
        if count
        else (f"a sample has {name}, but the recipe has no critic")
    )
    wrong = [number for number in numbers if not math.isfinite(number)]
    assert not wrong, f"{name} of a sample contain {wrong[0]}; they must be finite"


def _plain(credited: CreditedSamples, what: str) -> object:
    value = getattr(credited, what)
    return canonical_json(dict(value)) if what == "facts" else list(value)
