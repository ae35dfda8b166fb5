"""Weights as something an optimizer proposes: sample, credit, update, checkpoint, step after step.

The recipe says how rollouts are made and what they earn; all else is here. Each step samples with the
adapters of the step before, by reference, so that the executor's cache and the engines know which weights
they had. After a crash a job goes on from its last step: calls that were made are in the cache, weights and
optimizers in files.

Where samples may be `stale` updates old, the next step's are drawn while a step is trained, with the weights
that it began with.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from compound.artifacts import discard, is_reference, put, verified
from compound.components.engines import loading
from compound.components.engines.prefilled import Prefilled
from compound.computing import compute
from compound.configuration import components_of
from compound.contracts import Example
from compound.errors import BudgetExhausted, DeclarationError, first_of
from compound.optimization import ROLLOUTS, Progress, Proposal, Task
from compound.optimizers.policy.adapters import Adapters, partition
from compound.optimizers.policy.bases import base_format, base_model, spaces
from compound.optimizers.policy.drawn import Drawn
from compound.optimizers.policy.recipe import Recipe, Work
from compound.optimizers.policy.rollouts import Sampler, rolling, warm
from compound.optimizers.policy.samples import Sample
from compound.optimizers.policy.trainer import OPTIMIZERS, Trainer
from compound.plan import values_of
from compound.settings import WeightSettings
from compound.streams import generator, stream

RECORD = "training"  # the kind of a memory record
LETTERS = 300  # of an answer that a record shows
WINDOW = 0.2  # of the steps, at either end, that a proposal's rewards are the mean of
START: Mapping[str, Any] = {"step": 0, "saved": None, "ahead": None, "kept": {}, "curve": [], "dearest": 0.0}


@dataclass(frozen=True)
class WeightTraining:
    """Trains the weights that a job names.

    Attributes:
        recipe: makes rollouts and gives credit.
        settings: how many, how fast.
    """

    recipe: Recipe
    settings: WeightSettings

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Train, checkpointing after every step; propose the weights of the last one."""
        job = Job(task, self.recipe, self.settings)
        try:
            state: dict[str, Any] = {**START, **(task.resume or {})}
            await compute(job.open, state)
            while state["ahead"] or job.affords(state["step"], state["dearest"]):
                try:
                    state = await job.step(state)
                except BudgetExhausted:
                    break
                job.forget(state)
                yield Progress(state, told(state["curve"], self.settings.steps))
            yield job.proposal(state)
        finally:
            await compute(job.close)


@dataclass
class Job:
    """One training under way."""

    task: Task
    recipe: Recipe
    settings: WeightSettings
    trained: tuple[str, ...] = field(init=False)
    trainer: Trainer = field(init=False)

    def __post_init__(self) -> None:
        self.trained = tuple(components_of(self.task.keys))
        self._groups = partition(self.trained, self.settings.adapters)
        self._adapter_of = {c: name for name, some in self._groups.items() for c in some}
        self._batch = min(self.settings.examples, len(self.task.train))

    @property
    def folder(self) -> Path:
        """Where adapters and checkpoints are."""
        return self.task.bench.memory.folder

    @property
    def cost(self) -> float:
        """System runs of a step, about."""
        return self.recipe.cost(self._batch, len(self.trained), self.settings)

    def open(self, state: Mapping[str, Any]) -> None:
        """Load the base, and go on from where the job was."""
        system = self.task.system
        engine_of = self.task.bench.executor.engine
        model = base_model(system, self.trained, engine_of)
        dtype = base_format(system, self.trained, engine_of)
        adapters = Adapters(model, spaces(system, self._groups), seed=self.task.seed, dtype=dtype)
        self.trainer = Trainer(
            adapters, self._adapter_of, self.settings,
            seed=self.task.seed, steps=self.settings.steps, longest=self._longest(),
            critic=self.recipe.critic,
        )  # fmt: skip
        if state["saved"] is not None:
            self.trainer.restore(state["saved"], self.folder)
            return
        for name, some in self._groups.items():
            reference = system.configuration[f"{some[0]}.weights"]
            if any(system.configuration[f"{c}.weights"] != reference for c in some):
                raise DeclarationError(
                    f"the adapter {name!r} is shared by components that start from different ones",
                    hint="let them start from the same, or train them apart: optimize.weights.adapters: each",
                )
            adapters.begin(name, reference, self.folder)
            self.trainer.versions[name] = [adapters.version(name)]

    def _longest(self) -> int:
        """Return the most tokens that an answer may have.

        Raises:
            DeclarationError: a wire says how many, and the loss divides by it.
        """
        system = self.task.system
        wired = [n.component.name for n in system.all_nodes() if "max_tokens" in n.wires]
        if self.settings.loss == "dr_grpo" and not set(wired).isdisjoint(self.trained):
            raise DeclarationError(
                f"the loss dr_grpo divides by max_tokens, which is wired in {', '.join(wired)}",
                hint="set it in the component, or take another loss",
            )
        return max(int(values_of(system.components[c], system)["max_tokens"]) for c in self.trained)

    def close(self) -> None:
        """Free the model."""
        if hasattr(self, "trainer"):
            del self.trainer
            loading.release()

    def values(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the weights of a state, as values of the configuration."""
        if state["saved"] is None:
            return {}
        adapters = state["saved"]["adapters"]
        return {f"{c}.weights": adapters[name] for c, name in self._adapter_of.items()}

    def affords(self, number: int, dearest: float) -> bool:
        """Return whether a step is to be taken, and the job's share of the budget holds one.

        Args:
            number: of the step.
            dearest: what a step has taken at most so far: with loops it may be more than was expected.
        """
        needed = self.cost if dearest <= self.cost else dearest + 1.0  # the last of its runs is held whole
        return number < self.settings.steps and self.task.scorer.left >= needed

    async def step(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Sample with the weights of a state, give credit, update; return the next state."""
        number, kept = state["step"], dict(state["kept"])
        drawn, ahead = await self._drawn(state, kept), None
        dearest = max(state["dearest"], drawn.facts["runs"])
        try:
            async with asyncio.TaskGroup() as group:
                training = group.create_task(self._train(drawn, number))
                if self.settings.stale and self.affords(number + 1, dearest):
                    await asyncio.sleep(0)  # so that values are those of the trained value head
                    ahead = await self._ahead(state, number + 1, kept)
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None
        saved = training.result()
        credited = drawn.credited
        made = credited.facts.get("samples", len(credited.samples))  # of all groups
        brief = {"reward": credited.reward, "samples": len(credited.samples), "made": made}
        if not credited.samples:
            brief["why"] = why_nothing(self.recipe, drawn)
        curve = [*state["curve"], brief]
        found = {"step": number + 1, "saved": saved, "ahead": ahead, "kept": kept, "curve": curve}
        return {**found, "dearest": dearest}

    async def _drawn(self, state: Mapping[str, Any], kept: dict[str, Any]) -> Drawn:
        """Return the samples of a state's step: those that were drawn ahead, or new ones."""
        if state["ahead"]:
            return Drawn.read(verified(state["ahead"], self.folder))
        return await self._draw(state, state["step"], kept)

    async def _ahead(
        self, state: Mapping[str, Any], number: int, kept: dict[str, Any]
    ) -> dict[str, str] | None:
        """Draw the samples of a later step with the weights of a state, and store them."""
        try:
            drawn = await self._draw(state, number, kept)
        except BudgetExhausted:
            return None
        return put(drawn.write, self.folder, "ahead")

    async def _draw(self, state: Mapping[str, Any], number: int, kept: dict[str, Any]) -> Drawn:
        """Sample with the weights of a state, and give credit, within the job's share of the budget."""
        meter, begun = self.task.bench.executor.meter, time.perf_counter()
        work, before, runs = self._work(state, number, kept), self._prefilled(), meter.system_runs
        with meter.capped(self.task.scorer.left):
            credited = await self.recipe.collect(work, self.examples(number))
        work.sampler.refuse_broken()
        read, seconds = self._prefilled() - before, time.perf_counter() - begun
        facts = {
            "prompt_tokens": read.tokens, "prompt_tokens_cached": read.cached, **work.sampler.facts,
            "runs": meter.system_runs - runs, "sample_seconds": seconds,
        }  # fmt: skip
        return Drawn(credited, facts)

    async def _train(self, drawn: Drawn, number: int) -> dict[str, Any]:
        """Update, store, and record; return what is to be restored from."""
        samples, likelihood = drawn.credited.samples, self.recipe.likelihood
        facts = await compute(self.trainer.step, samples, number, likelihood=likelihood)
        saved = await compute(self.trainer.save, self.folder)
        self.task.bench.memory.append(self._record(number, drawn, facts))
        return saved

    def _prefilled(self) -> Prefilled:
        """Return what the engine says it read so far."""
        system = self.task.system
        lm = values_of(system.components[self.trained[0]], system)["lm"]
        return getattr(self.task.bench.executor.engine(lm), "prefill", Prefilled())

    def _work(self, state: Mapping[str, Any], number: int, kept: dict[str, Any]) -> Work:
        """Return what the recipe works with."""
        task, settings = self.task, self.settings
        rules = rolling(
            task.bench.rules, warm(task.system, self.trained, settings.temperature), settings.failure
        )
        system = task.system.bind({**task.system.configuration, **self.values(state)})
        sampler = Sampler(task.bench.executor, system, task.bench.metric, rules, self._index(number))
        seed = stream(task.seed, "step", number)
        return Work(sampler, self.trained, settings, seed, self.trainer, task, kept, task.bench.folder)

    def _index(self, number: int) -> int:
        """Return a number for the step that no step of another job has."""
        return self.task.seed % 100_000 * 1_000 + number

    def examples(self, number: int) -> list[Example]:
        """Return a step's examples: each epoch goes through all of them in an order of its own."""
        train, first = self.task.train, number * self._batch
        found = []
        for place in range(first, first + self._batch):
            epoch, at = divmod(place, len(train))
            found.append(train[generator(self.task.seed, "epoch", epoch).permutation(len(train))[at]])
        return list({example.id: example for example in found}.values())  # an epoch's end may meet its next

    def _record(self, number: int, drawn: Drawn, trained: Mapping[str, Any]) -> dict[str, Any]:
        credited = drawn.credited
        scores = {"reward": credited.reward, "rollouts": len(credited.scores)}
        job = {"seed": self.task.seed, "recipe": type(self.recipe).__name__, "keys": list(self.task.keys)}
        found = {**job, **scores, **credited.facts, **trained, **drawn.facts}
        answers = examples_of(credited.samples, self.trainer.adapters.tokenizer)
        return {"kind": RECORD, "step": number, **found, "answers": answers, "memory": peak()}

    def forget(self, state: Mapping[str, Any]) -> None:
        """Delete optimizer states and adapters that neither this state nor the one before needs.

        The one before is still in the checkpoint until this one's is written. Of other jobs, which are over,
        only the optimizer states are deleted.
        """
        saved = state["saved"]
        needed = [saved["optimizers"], state["ahead"], *saved["adapters"].values()]
        present = {reference["path"] for reference in needed if reference} | self._given(state)
        kept = state["kept"].get("folders", [])
        over = [path.name for path in self.folder.glob(f"{OPTIMIZERS}-*")]
        for name in {*state["kept"].get("folders_before", []), *over}.difference(present, kept):
            discard(name, self.folder)
        state["kept"].update(folders_before=kept, folders=sorted(present))

    def _given(self, state: Mapping[str, Any]) -> set[str]:
        """Return the names of folders that the job began with, or that its recipe keeps: others need them."""
        held = [self.task.system.configuration, *state["kept"].values()]
        values = [value for some in held if isinstance(some, Mapping) for value in some.values()]
        return {Path(value["path"]).name for value in values if is_reference(value)}

    def _done(self, state: Mapping[str, Any]) -> str:
        """Return how many steps were made, and why not more."""
        if state["step"] == self.settings.steps:
            return f"{state['step']} steps"
        return f"{state['step']} of {self.settings.steps} steps, which is all that the budget holds"

    def proposal(self, state: Mapping[str, Any]) -> Proposal:
        """Return the weights of the last step, and what rollouts earned at either end.

        That is no comparison of the system before and after: examples differ, and the temperature is that of
        rollouts. Schedulers take it for want of a better one; reports and people are told what it is.
        """
        curve = [point["reward"] for point in state["curve"] if point["reward"] is not None]
        facts = {"steps": state["step"], "samples": sum(point["samples"] for point in state["curve"])}
        if not curve or not facts["samples"]:
            whys = Counter(point["why"] for point in state["curve"] if "why" in point)
            why = whys.most_common(1)[0][0] if whys else "the budget does not hold a step"
            return Proposal({}, note=f"nothing to learn from: {why}", facts=facts)
        few = max(1, round(WINDOW * len(curve)))
        before, after = fmean(curve[:few]), fmean(curve[-few:])
        if self.recipe.local:  # no score of the system
            note = f"{self._done(state)}: mean local reward of answers {before:.3f} -> {after:.3f}"
            return Proposal(self.values(state), tried=state["step"], note=note, facts=facts)
        note = f"{self._done(state)}: mean reward of rollouts {before:.3f} -> {after:.3f}"
        return Proposal(self.values(state), before, after, state["step"], note, {**facts, ROLLOUTS: True})


def told(curve: Sequence[Mapping[str, Any]], steps: int) -> str:
    """Return a step's line for people.

    >>> told([{"reward": 0.25, "samples": 24, "made": 32}], 25)
    'step 1 of 25: mean reward 0.250, 24 of 32 samples teach something'
    """
    last = curve[-1]
    reward = "no rollouts" if last["reward"] is None else f"mean reward {last['reward']:.3f}"
    samples, made = last["samples"], last.get("made", last["samples"])
    several = f"{samples} samples" if samples == made else f"{samples} of {made} samples teach something"
    return f"step {len(curve)} of {steps}: {reward}, {several}"


def examples_of(samples: Sequence[Sample], tokenizer: Any) -> dict[str, list[dict[str, Any]]]:
    """Return, by component, the answers that earned most and least, as JSON: what there was to learn from."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.component, []).append(sample)
    return {
        name: [
            {
                "example": sample.example,
                "reward": sample.reward,
                "text": tokenizer.decode(sample.tokens.sampled, skip_special_tokens=True)[:LETTERS],
            }
            for sample in {id(s): s for s in (max(own, key=_reward), min(own, key=_reward))}.values()
        ]
        for name, own in found.items()
    }


def _reward(sample: Sample) -> float:
    return sample.reward


def why_nothing(recipe: Recipe, drawn: Drawn) -> str:
    """Return why a step has no samples."""
    facts = drawn.facts
    if facts["failed"] and facts["failed"] >= len(drawn.credited.scores):
        return f"every run failed, most often by {facts['failure']}"
    if recipe.likelihood:
        return f"no attempt earned the threshold {drawn.credited.facts['threshold']:.3g}"
    if not drawn.credited.facts.get("groups"):
        return "no run called a component that is trained"
    return "the rewards of every group were all equal"


def peak() -> float:
    """Return the most memory so far in MiB: of the device where there is one, of this process otherwise."""
    import torch

    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated()) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
