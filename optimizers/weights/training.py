"""Weights as something an optimizer proposes: sample, credit, update, checkpoint, step after step.

The recipe says how rollouts are made and what they earn; all else is here. Each step samples with the
adapters of the step before, by reference, so that the executor's cache and the engines know which weights
they had. After a crash a job continues from its last step: calls that were made are in the cache, weights and
optimizers in files.

Where samples may be older than the trainer (`max_staleness`), the next step's are drawn while a step is
trained, with the weights that it began with.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from compound.components.engines.local import loading
from compound.components.engines.prefilled import Prefilled
from compound.concurrency.threads import compute
from compound.engine import Adapter
from compound.errors import BudgetExhausted, DeclarationError, first_of
from compound.example import Example
from compound.execution.rng import derive_seed, generator
from compound.execution.schedule import values_of
from compound.graph.configuration import components_of
from compound.graph.system import System
from compound.narrowing import entry
from compound.optimization.bounds import JobBound, Outlook
from compound.optimization.method import ROLLOUTS, Progress, Proposal, Task
from compound.optimizers.weights import moments
from compound.optimizers.weights.bases import base_format, base_model, check_sampling_engine, spaces
from compound.optimizers.weights.learner.adapters import Adapters, partition
from compound.optimizers.weights.learner.saved import Best, Saved, Step, Stored, TrainingState
from compound.optimizers.weights.learner.trainer import OPTIMIZERS, VALUE, Trainer
from compound.optimizers.weights.recipes.recipe import (
    Recipe,
    RecipeContext,
    Sharing,
    TrainingSettings,
    credited_by,
)
from compound.optimizers.weights.recipes.rollouts import Sampler, rolling
from compound.optimizers.weights.recipes.selection import held_out_size, is_better, split
from compound.optimizers.weights.step_batch import StepBatch
from compound.optimizers.weights.telling import examples_of, format_step, peak, why_nothing
from compound.storage.artifacts import Reference, discard, folder_digest, is_reference, put, verified

RECORD = "training"  # the kind of a memory record
WINDOW = 0.2  # of the steps, at either end, that a proposal's rewards are the mean of


@dataclass(frozen=True)
class WeightTraining:
    """Trains the weights that a job names.

    Attributes:
        recipe: makes rollouts and gives credit; says how many steps there are.
        adapters: which components share an adapter.
    """

    recipe: Recipe
    adapters: Sharing = "each"

    def bound(self, outlook: Outlook) -> JobBound:
        """Declare that no model is asked besides running the system."""
        return JobBound()

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Train, checkpointing after every step and evaluation; propose the weights of the best step."""
        session = TrainingSession(task, self.recipe, self.adapters)
        try:
            state = TrainingState() if task.resume is None else TrainingState.from_json(task.resume)
            await compute(session.open, state)
            await session.admit(state)
            while True:
                evaluates = session.is_due(state)
                if not (evaluates or session.goes_on(state)):
                    break
                try:
                    state = await (session.evaluate(state) if evaluates else session.step(state))
                except BudgetExhausted:
                    break
                session.forget(state)
                facts = {"evaluation": session.evaluation(state)} if evaluates else {}
                note = session.format_evaluation(state) if evaluates else format_step(state.curve[-1])
                yield Progress(state.to_json(), note, facts, step=state.step, of=self.recipe.settings.steps)
            yield session.proposal(state)
        finally:
            await compute(session.close)


@dataclass
class TrainingSession:
    """The training of one job, with its model in memory.

    Attributes:
        task: the job.
        recipe: makes rollouts and gives credit.
        sharing: which components share an adapter.
        trained: the components whose weights are trained.
        trainer: updates the weights; there is one once the session is open.
    """

    task: Task
    recipe: Recipe
    sharing: Sharing = "each"
    trained: tuple[str, ...] = field(init=False)
    trainer: Trainer = field(init=False)

    def __post_init__(self) -> None:
        self.trained = tuple(components_of(self.task.keys))
        self._groups = partition(self.trained, self.sharing)
        self._adapter_of = {c: name for name, some in self._groups.items() for c in some}
        train, evaluation = self.task.train, self.settings.evaluation
        aside = held_out_size(len(train), evaluation.examples, evaluation.every)
        aside = aside if self.settings.steps > evaluation.every else 0  # there is nothing to choose among
        self.split = split(train, aside, self.task.pool_seed if aside else 0)
        self._batch = min(self.recipe.sampling.examples, len(self.split.trained))

    @property
    def settings(self) -> TrainingSettings:
        """How many steps are made, and how."""
        return self.recipe.settings

    @property
    def folder(self) -> Path:
        """Where adapters and checkpoints are."""
        return self.task.context.memory.folder

    @property
    def cost(self) -> float:
        """System runs of a step, about."""
        return self.recipe.cost(self._batch, len(self.trained))

    def open(self, state: TrainingState) -> None:
        """Load the base, and continue from where the job was, or from what earlier jobs of the run left."""
        system = self.task.system
        engine_of = self.task.context.executor.engine
        model = base_model(system, self.trained, engine_of)
        if not self.recipe.likelihood:
            check_sampling_engine(system, self.trained, engine_of)
        dtype = base_format(system, self.trained, engine_of)
        adapters = Adapters(model, spaces(system, self._groups), seed=self.task.seed, dtype=dtype)
        self.trainer = Trainer(
            adapters, self._adapter_of, self.recipe.loss, self.settings.optimizer, self.recipe.sampling,
            self.recipe.critic, seed=self.task.seed, steps=self.settings.steps, longest=self._longest(),
        )  # fmt: skip
        values = system.configuration.values()
        moments.drop_rejected(self._memory, {v["sha256"] for v in values if is_reference(v)})
        if state.saved is not None:
            self.trainer.restore(state.saved, self.folder)
            return
        for name, some in self._groups.items():
            reference = _weights(system, some[0])
            if any(system.configuration[f"{c}.weights"] != reference for c in some):
                raise DeclarationError(
                    f"the adapter {name!r} is shared by components that start from different ones",
                    hint="let them start from the same, or train them apart: adapters: each",
                )
            adapters.begin(name, reference, self.folder)
            self.trainer.versions[name] = [adapters.version(name)]
        for name, kept in moments.find(self._memory, self._recipe, self._starts()).items():
            self.trainer.take(name, kept.reference, self.folder)
            if self.recipe.critic and set(kept.adapters) == set(self._groups):
                self.trainer.take(VALUE, kept.reference, self.folder)

    async def admit(self, state: TrainingState) -> None:
        """Have engines that can say so take adapters of these shapes, before a step is spent on them."""
        if state.saved is not None:
            return
        system, engine_of = self.task.system, self.task.context.executor.engine
        for name, some in self._groups.items():
            engine = engine_of(entry(values_of(system.components[some[0]], system), "lm", str))
            if hasattr(engine, "admit"):
                with tempfile.TemporaryDirectory(prefix=".shape-", dir=self.folder) as folder:
                    path = Path(folder)
                    await compute(self.trainer.adapters.write, name, path)
                    await engine.admit(Adapter(str(path), folder_digest(path)))

    @property
    def _memory(self) -> dict[str, Any]:
        return self.task.context.memory.state

    @property
    def _recipe(self) -> str:
        return type(self.recipe).__name__

    def _starts(self) -> dict[str, str]:
        """Return the digest of the adapter that each group of components starts from."""
        found = {name: _weights(self.task.system, some[0]) for name, some in self._groups.items()}
        return {name: reference["sha256"] if reference else "" for name, reference in found.items()}

    def _longest(self) -> int:
        """Return the most tokens that an answer may have.

        Raises:
            DeclarationError: a wire says how many, and the loss divides by it.
        """
        system = self.task.system
        wired = [n.component.name for n in system.all_nodes() if "max_tokens" in n.wires]
        if self.recipe.loss.name == "dr_grpo" and not set(wired).isdisjoint(self.trained):
            raise DeclarationError(
                f"the loss dr_grpo divides by max_tokens, which is wired in {', '.join(wired)}",
                hint="set it in the component, or take another loss",
            )
        return max(entry(values_of(system.components[c], system), "max_tokens", int) for c in self.trained)

    def close(self) -> None:
        """Free the model."""
        if hasattr(self, "trainer"):
            del self.trainer
            loading.release()

    def values(self, saved: Saved | None) -> dict[str, Stored | None]:
        """Return the weights of a checkpoint, as values of the configuration."""
        if saved is None:
            return {}
        return {f"{c}.weights": saved.adapters[name] for c, name in self._adapter_of.items()}

    def affords(self, number: int, max_runs: float, evaluations: int = 0) -> bool:
        """Return whether a step is to be taken, and the job's share of the budget holds one.

        Args:
            number: of the step.
            max_runs: the most system runs of a step so far: with loops it may be more than was expected.
            evaluations: how many evaluations it must hold as well.
        """
        needed = self.cost if max_runs <= self.cost else max_runs + 1.0  # the last of its runs is held whole
        held = evaluations * self.evaluation_cost
        return number < self.settings.steps and self.task.scorer.left >= needed + held

    def goes_on(self, state: TrainingState) -> bool:
        """Return whether another step follows: its samples are drawn already, or the budget holds it.

        Where steps are evaluated, the budget must hold the step's evaluation, too.
        """
        evaluations = bool(state.evaluated)
        return state.ahead is not None or self.affords(state.step, state.max_runs, evaluations)

    # -- which step is the best ------------------------------------------------------------------------

    @property
    def evaluation_cost(self) -> float:
        """System runs of an evaluation, at most."""
        return self.recipe.evaluation_cost(len(self.split.held_out))

    def is_due(self, state: TrainingState) -> bool:
        """Return whether the weights of a state are to be evaluated before anything else.

        The starting weights are, where the budget holds enough steps to choose among; then those of every
        `evaluation.every`-th step, and those of the last.
        """
        every, step = self.settings.evaluation.every, state.step
        if not self.split.held_out:
            return False
        if not state.evaluated:
            enough = (every + 1) * self.cost + 3 * self.evaluation_cost
            return step == 0 and self.task.scorer.left >= enough
        if state.evaluated[-1][0] == step or self.task.scorer.left < self.evaluation_cost:
            return False
        return step % every == 0 or not self.goes_on(state)

    async def evaluate(self, state: TrainingState) -> TrainingState:
        """Score the weights of a state on the held-out train examples; return the next state."""
        meter, step = self.task.context.executor.meter, state.step
        context = self._work(state, step, dict(state.kept))
        with meter.capped(self.task.scorer.left):
            scores = await self.recipe.evaluate(context, self.values(state.saved), self.split.held_out)
        score, best = fmean(scores) if scores else None, state.best
        if score is not None and is_better(score, step, best):
            best = Best(step=step, score=score, saved=state.saved)
        return state.model_copy(update={"evaluated": [*state.evaluated, (step, score)], "best": best})

    def evaluation(self, state: TrainingState) -> dict[str, float | None]:
        """Return the last evaluation, as JSON."""
        step, score = state.evaluated[-1]
        best = state.best.step if state.best else None
        return {"step": step, "score": score, "examples": len(self.split.held_out), "best": best}

    def format_evaluation(self, state: TrainingState) -> str:
        """Return the last evaluation as a note."""
        _, score = state.evaluated[-1]
        if score is None or state.best is None:
            return "not evaluated, every run was lost"
        return (
            f"score {score:.3f} on {len(self.split.held_out)} held-out train examples; "
            f"the best so far is step {state.best.step}"
        )

    # -- a step ----------------------------------------------------------------------------------------

    async def step(self, state: TrainingState) -> TrainingState:
        """Sample with the weights of a state, give credit, update; return the next state."""
        number, kept = state.step, dict(state.kept)
        drawn, ahead = await self._drawn(state, kept), None
        max_runs = max(state.max_runs, drawn.facts["runs"])
        try:
            async with asyncio.TaskGroup() as group:
                training = group.create_task(self._train(drawn, number))
                pending = 2 * bool(state.evaluated)  # of this step and of the next
                if self.recipe.sampling.max_staleness and self.affords(number + 1, max_runs, pending):
                    await asyncio.sleep(0)  # so that values are those of the trained value head
                    ahead = await self._ahead(state, number + 1, kept)
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None
        saved, trained = training.result()
        credited = drawn.credited
        made = credited.facts.get("samples", len(credited.samples))  # of all groups
        brief = Step(
            reward=credited.reward,
            samples=len(credited.samples),
            made=made,
            skipped=trained["skipped_updates"],
            why="" if credited.samples else why_nothing(self.recipe, drawn),
        )
        found = {"step": number + 1, "saved": saved, "ahead": ahead, "kept": kept, "max_runs": max_runs}
        return state.model_copy(update={**found, "curve": [*state.curve, brief]})

    async def _drawn(self, state: TrainingState, kept: dict[str, object]) -> StepBatch:
        """Return the samples of a state's step: those that were drawn ahead, or new ones."""
        if state.ahead:
            return StepBatch.read(verified(state.ahead, self.folder))
        return await self._draw(state, state.step, kept)

    async def _ahead(self, state: TrainingState, number: int, kept: dict[str, object]) -> Stored | None:
        """Draw the samples of a later step with the weights of a state, and store them."""
        try:
            drawn = await self._draw(state, number, kept)
        except BudgetExhausted:
            return None
        return put(drawn.write, self.folder, "ahead")

    async def _draw(self, state: TrainingState, number: int, kept: dict[str, object]) -> StepBatch:
        """Sample with the weights of a state, and give credit, within the job's share of the budget."""
        meter, begun = self.task.context.executor.meter, time.perf_counter()
        context, before, runs = self._work(state, number, kept), self._prefilled(), meter.system_runs
        with meter.capped(self.task.scorer.left):
            credited = await credited_by(self.recipe, context, self.examples(number))
        context.sampler.check_failures()
        read, seconds = self._prefilled() - before, time.perf_counter() - begun
        facts = {
            "prompt_tokens": read.tokens, "prompt_tokens_cached": read.cached, **context.sampler.facts,
            "runs": meter.system_runs - runs, "sample_seconds": seconds,
        }  # fmt: skip
        return StepBatch(credited, facts)

    async def _train(self, drawn: StepBatch, number: int) -> tuple[Saved, dict[str, Any]]:
        """Update, store, and record; return what is to be restored from, and what the trainer saw."""
        facts = await compute(self.trainer.step, drawn.credited.samples, number)
        saved = await compute(self.trainer.save, self.folder)
        self.task.context.memory.append(self._record(number, drawn, facts))
        return saved, facts

    def _prefilled(self) -> Prefilled:
        """Return what the engine says it read so far."""
        system = self.task.system
        lm = entry(values_of(system.components[self.trained[0]], system), "lm", str)
        return getattr(self.task.context.executor.engine(lm), "prefill", Prefilled())

    def _work(self, state: TrainingState, number: int, kept: dict[str, object]) -> RecipeContext:
        """Return what the recipe works with."""
        task = self.task
        rules = rolling(task.context.rules, task.system, self.trained, self.recipe.sampling)
        system = task.system.bind({**task.system.configuration, **self.values(state.saved)})
        sampler = Sampler(task.context.executor, system, task.context.metric, rules, self._index(number))
        seed = derive_seed(task.seed, "step", number)
        return RecipeContext(sampler, self.trained, seed, self.trainer, task, kept, task.context.folder)

    def _index(self, number: int) -> int:
        """Return a number for the step that no step of another job has."""
        return self.task.seed % 100_000 * 1_000 + number

    def examples(self, number: int) -> list[Example]:
        """Return a step's examples: each epoch goes through all of them in an order of its own."""
        train, first = self.split.trained, number * self._batch
        found = []
        for place in range(first, first + self._batch):
            epoch, at = divmod(place, len(train))
            found.append(train[generator(self.task.seed, "epoch", epoch).permutation(len(train))[at]])
        return list({example.id: example for example in found}.values())  # an epoch's end may meet its next

    def _record(self, number: int, drawn: StepBatch, trained: Mapping[str, Any]) -> dict[str, Any]:
        credited = drawn.credited
        scores = {"reward": credited.reward, "rollouts": len(credited.scores)}
        job = {"seed": self.task.seed, "recipe": type(self.recipe).__name__, "keys": list(self.task.keys)}
        found = {**job, **scores, **credited.facts, **trained, **drawn.facts}
        answers = examples_of(credited.samples, self.trainer.adapters.tokenizer)
        return {"kind": RECORD, "step": number, **found, "answers": answers, "memory": peak()}

    def forget(self, state: TrainingState) -> None:
        """Delete optimizer states and adapters that neither this state nor the one before needs.

        A state needs its last and its best step. The one before is still in the checkpoint until this one's
        is written. Of other jobs, which are over, only optimizer states that belong to no present adapter
        are deleted.
        """
        needed = [state.ahead]
        for saved in (state.saved, state.best.saved if state.best else None):
            needed += [saved.optimizers, *saved.adapters.values()] if saved else []
        present = {reference["path"] for reference in needed if reference} | self._given(state)
        present |= moments.folders(self._memory)
        over = [path.name for path in self.folder.glob(f"{OPTIMIZERS}-*")]
        for name in {*state.folders_before, *over}.difference(present, state.folders):
            discard(name, self.folder)
        state.folders_before, state.folders = state.folders, sorted(present)

    def _given(self, state: TrainingState) -> set[str]:
        """Return the names of folders that the job began with, or that its recipe keeps: others need them."""
        held = [self.task.system.configuration, *state.kept.values()]
        values = [value for some in held if isinstance(some, Mapping) for value in some.values()]
        return {Path(value["path"]).name for value in values if is_reference(value)}

    def _done(self, state: TrainingState) -> str:
        """Return how many steps were made, and why not more."""
        if state.step == self.settings.steps:
            return f"{state.step} steps"
        return f"{state.step} of {self.settings.steps} steps, which is all that the budget holds"

    def proposal(self, state: TrainingState) -> Proposal:
        """Return the weights of the best step, or of the last one where steps were not evaluated.

        ``before`` and ``after`` compare the starting weights with the proposed ones on the held-out examples.
        Without evaluations they are what rollouts earned at either end, which is no such comparison: examples
        differ, and the temperature is that of rollouts. Schedulers take it for want of a better one.
        """
        curve = [point.reward for point in state.curve if point.reward is not None]
        facts: dict[str, Any] = {"steps": state.step, "samples": sum(point.samples for point in state.curve)}
        if not curve or not facts["samples"]:
            whys = Counter(point.why for point in state.curve if point.why)
            why = whys.most_common(1)[0][0] if whys else "the budget does not hold a step"
            return Proposal({}, note=f"nothing to learn from: {why}", facts=facts)
        few = max(1, round(WINDOW * len(curve)))
        before, after = fmean(curve[:few]), fmean(curve[-few:])
        kind = "local reward of answers" if self.recipe.local else "reward of rollouts"
        note = f"{self._done(state)}: mean {kind} {before:.3f} -> {after:.3f}"
        best, chosen, scores = state.best, state.saved, {}
        if len(state.evaluated) > 1 and best:
            chosen, note = best.saved, f"{note}; {self._chosen(state, best)}"
            facts |= {"best_step": best.step, "evaluated": [list(pair) for pair in state.evaluated]}
            if not self.recipe.local and state.evaluated[0][1] is not None:
                scores = {"before": state.evaluated[0][1], "after": best.score}
        elif not self.recipe.local:
            scores, facts = {"before": before, "after": after}, {**facts, ROLLOUTS: True}
        if chosen is not None:
            moments.remember(self._memory, self._recipe, chosen)
        return Proposal(self.values(chosen), **scores, tried=state.step, note=note, facts=facts)

    def _chosen(self, state: TrainingState, best: Best) -> str:
        """Return which step is proposed, and why, for people."""
        count = len(self.split.held_out)
        if best.step == 0:
            told = f"no step scored higher than the starting weights, {best.score:.3f}"
            return f"{told} on {count} held-out train examples"
        tried = len(state.evaluated) - 1
        start = state.evaluated[0][1]
        told = f"step {best.step} is the best of {tried} evaluated: {best.score:.3f}"
        return f"{told} on {count} held-out train examples" + ("" if start is None else f", from {start:.3f}")


def _weights(system: System, component: str) -> Reference | None:
    """Return where the weights of a component are stored; ``None`` is the base."""
    value = system.configuration[f"{component}.weights"]
    return value if is_reference(value) else None
