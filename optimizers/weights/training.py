"""Optimizer that trains weights: sample, assign credit, update and checkpoint, step by step.

The recipe defines the rollouts and their credit; everything else is implemented here. Each step
samples with the adapters of the previous step, passed by reference, so that the executor's cache
and the engines know which weights were used. After a crash, a job resumes from its last step:
completed calls are in the cache, weights and optimizer states are in files.

If samples may be older than the trainer's weights (`max_staleness`), the samples of the next step
are drawn while the current step is trained, with the weights that the current step started from.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from compound.core.engine import Adapter, AdapterEngine, Capabilities, Prefilled
from compound.core.errors import BudgetExhausted, DeclarationError, first_leaf
from compound.core.narrowing import entry
from compound.core.storage.artifacts import (
    discard,
    folder_digest,
    is_reference,
    store_folder,
    verify_reference,
)
from compound.core.threads import compute
from compound.execution.rng import derive_seed
from compound.execution.schedule import setting_values
from compound.graph.configuration import components_of
from compound.optimization.method import JobPlan, PlannedJob, Progress, Proposal, Task
from compound.optimizers.weights.bases import (
    AdapterGroups,
    base_format,
    base_model,
    base_quantization,
    check_sampling_engine,
    load_adapters,
    spaces,
    teacher_model,
)
from compound.optimizers.weights.distributed.learner import Learner, LearnerSpec
from compound.optimizers.weights.distributed.processes import open_learner
from compound.optimizers.weights.interchange.group_export import FIELD as STORED_SAMPLES
from compound.optimizers.weights.interchange.group_export import write_samples
from compound.optimizers.weights.learner.adapters import partition
from compound.optimizers.weights.learner.critic import VALUE
from compound.optimizers.weights.learner.losses import ImitationObjective, PolicyObjective
from compound.optimizers.weights.learner.samples import SECTION
from compound.optimizers.weights.learner.saved import (
    Best,
    CurvePoint,
    Saved,
    Stored,
    TrainingState,
    drop_moments,
    find_moments,
    remember_moments,
    stored_moments,
)
from compound.optimizers.weights.learner.trainer import OPTIMIZERS
from compound.optimizers.weights.outcome import (
    Outcome,
    answer_metrics,
    examples_of,
    format_step,
    is_better,
    peak_memory,
    reason_without_samples,
)
from compound.optimizers.weights.recipes.recipe import (
    Recipe,
    RecipeContext,
    Sharing,
    TrainingSettings,
    credited_by,
)
from compound.optimizers.weights.recipes.rollouts import Sampler, rollout_rules
from compound.optimizers.weights.steps import StepBatch, StepPlan

RECORD = "training"  # the kind of a memory record


@dataclass(frozen=True)
class WeightTraining:
    """Optimizer that trains the weights of a job.

    Attributes:
        recipe: makes rollouts and assigns credit; defines the number of steps.
        adapters: which components share an adapter.
        section: the path of the recipe's settings, for error messages.
    """

    requires: ClassVar[tuple[str, ...]] = ("torch", "transformers", "peft")

    recipe: Recipe
    adapters: Sharing = "each"
    section: str = SECTION

    def plan(self, job: PlannedJob) -> JobPlan:
        """Return no requests: the job sends none except the runs of the system."""
        return JobPlan()

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Train, checkpoint after every step and evaluation, and propose the weights of the best step."""
        session = TrainingSession(task, self.recipe, self.adapters, self.section)
        if obstacle := self.recipe.obstacle(task.system, session.trained):
            yield Proposal({}, note=f"nothing to learn: {obstacle}")
            return
        try:
            state = TrainingState() if task.resume is None else TrainingState.from_json(task.resume)
            await compute(session.open, state)
            await session.check_engines(state)
            while True:
                evaluates = session.plan.is_evaluation_due(state)
                if not (evaluates or session.plan.has_next_step(state)):
                    break
                try:
                    state = await (session.evaluate(state) if evaluates else session.step(state))
                except BudgetExhausted:
                    break
                session.delete_unused(state)
                outcome = session.outcome(state)
                facts = {"evaluation": outcome.evaluation()} if evaluates else {}
                note = outcome.format_evaluation() if evaluates else format_step(state.curve[-1])
                yield Progress(
                    state.to_json(), note, facts, step=state.step, of=self.recipe.settings.steps
                )
            yield session.proposal(state)
        except asyncio.CancelledError:
            session.interrupt()  # else `close` would wait for a step in other processes
            raise
        finally:
            await compute(session.close)


@dataclass
class TrainingSession:
    """Training of one job, with its model in memory.

    Attributes:
        task: the job.
        recipe: makes rollouts and assigns credit.
        sharing: which components share an adapter.
        section: the path of the recipe's settings, for error messages.
        trained: the components whose weights are trained.
        adapters: the adapters of the components.
        plan: the examples of its steps, and whether the budget covers them.
        trainer: updates the weights; set by `open`.
    """

    task: Task
    recipe: Recipe
    sharing: Sharing = "each"
    section: str = SECTION
    trained: tuple[str, ...] = field(init=False)
    adapters: AdapterGroups = field(init=False)
    plan: StepPlan = field(init=False)
    trainer: Learner = field(init=False)
    _gpus: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        self.trained = tuple(components_of(self.task.keys))
        groups = partition(self.trained, self.sharing, self.section)
        self.adapters = AdapterGroups(self.task.system, groups, self.section)
        self.plan = StepPlan(self.task, self.recipe, len(self.trained))

    @property
    def settings(self) -> TrainingSettings:
        """The settings of the recipe."""
        return self.recipe.settings

    @property
    def folder(self) -> Path:
        """The folder of adapters and checkpoints."""
        return self.task.context.memory.folder

    def open(self, state: TrainingState) -> None:
        """Load the base model, and restore the state of the job or the optimizer states of earlier jobs."""
        system = self.task.system
        engine_of = self.task.context.executor.engine
        model = base_model(system, self.trained, engine_of)
        if not self.recipe.likelihood:
            check_sampling_engine(system, self.trained, engine_of)
        placement = self.settings.base.placement(
            base_format(system, self.trained, engine_of),
            base_quantization(system, self.trained, engine_of),
            self.section,
        )
        loss, teacher = self.recipe.loss, self.recipe.teacher
        spec = LearnerSpec(
            model=model,
            shapes=spaces(system, self.adapters.groups),
            adapter_of=self.adapters.adapter_of,
            policy=loss if isinstance(loss, PolicyObjective) else None,
            teacher=teacher and teacher_model(teacher, engine_of, self.section),
            imitation=loss if isinstance(loss, ImitationObjective) else None,
            optimizer=self.settings.optimizer,
            rollouts=self.recipe.sampling,
            critic=self.recipe.critic,
            seed=self.task.seed,
            steps=self.settings.steps,
            longest=self._max_answer_tokens(),
            section=self.section,
            placement=placement,
            checkpointing=self.settings.base.gradient_checkpointing,
        )
        self.trainer = open_learner(spec, self.settings.learner)
        values = system.configuration.values()
        drop_moments(self._memory, {v["sha256"] for v in values if is_reference(v)})
        if state.saved is not None:
            self.trainer.restore(state.saved, self.folder)
            return
        self.trainer.start(self.adapters.starts(), self.folder)
        for name, kept in find_moments(self._memory, self._recipe, self.adapters.digests()).items():
            self.trainer.restore_optimizer(name, kept.reference, self.folder)
            if self.recipe.critic and set(kept.adapters) == set(self.adapters.groups):
                self.trainer.restore_optimizer(VALUE, kept.reference, self.folder)

    async def check_engines(self, state: TrainingState) -> None:
        """Load adapters of these shapes into the engines that support a check, before any step is run."""
        if state.saved is not None:
            return
        system, engine_of = self.task.system, self.task.context.executor.engine
        for name, some in self.adapters.groups.items():
            engine = engine_of(entry(setting_values(system.components[some[0]], system), "lm", str))
            if isinstance(engine, AdapterEngine):
                with tempfile.TemporaryDirectory(prefix=".shape-", dir=self.folder) as folder:
                    path = Path(folder)
                    await compute(self.trainer.write_adapter, name, path)
                    await engine.admit(Adapter(str(path), folder_digest(path)))

    @property
    def _memory(self) -> dict[str, Any]:
        return self.task.context.memory.state

    @property
    def _recipe(self) -> str:
        return type(self.recipe).__name__

    def _max_answer_tokens(self) -> int:
        """Return the maximum number of tokens of an answer.

        Raises:
            DeclarationError: the loss divides by ``max_tokens``, but that is an input wired in the
                system.
        """
        system = self.task.system
        wired = [n.component.name for n in system.all_nodes() if "max_tokens" in n.wires]
        if self.recipe.loss.name == "dr_grpo" and not set(wired).isdisjoint(self.trained):
            raise DeclarationError(
                f"the loss dr_grpo divides by max_tokens, which is wired in {', '.join(wired)}",
                hint=f"set max_tokens in the component, or choose another loss in {self.section}.loss",
            )
        return max(
            entry(setting_values(system.components[c], system), "max_tokens", int)
            for c in self.trained
        )

    def interrupt(self) -> None:
        """End a step in other processes, without waiting for it."""
        if hasattr(self, "trainer"):
            self.trainer.interrupt()

    def close(self) -> None:
        """Release the model's memory, and end the processes of the learner."""
        if hasattr(self, "trainer"):
            self.trainer.close()
            del self.trainer

    def values(self, saved: Saved | None) -> Mapping[str, object]:
        """Return the values of a checkpoint by key of the configuration."""
        return {**self.recipe.values(self.task.system, self.trained), **self.adapters.values(saved)}

    # -- evaluation --------------------------------------------------------------------------------------

    async def evaluate(self, state: TrainingState) -> TrainingState:
        """Score the weights of a state on the held-out train examples, and return the next state."""
        meter, step = self.task.context.executor.meter, state.step
        context = self._context(state, step, dict(state.kept))
        await self._load_adapters(context)
        with meter.cap_runs(self.task.scorer.runs_left):
            scores = await self.recipe.evaluate(
                context, self.values(state.saved), self.plan.held_out
            )
        score, best = fmean(scores) if scores else None, state.best
        if score is not None and is_better(score, step, best):
            best = Best(step=step, score=score, saved=state.saved)
        return state.model_copy(
            update={"evaluated": [*state.evaluated, (step, score)], "best": best}
        )

    def outcome(self, state: TrainingState) -> Outcome:
        """Return the result of the job in a state."""
        return Outcome(state, self.settings.steps, len(self.plan.held_out), self.recipe.local)

    def proposal(self, state: TrainingState) -> Proposal:
        """Propose the weights of the best step, and keep their optimizer states for later jobs."""
        outcome = self.outcome(state)
        if outcome.chosen is not None:
            remember_moments(self._memory, self._recipe, outcome.chosen)
        proposal = outcome.proposal(self.values)
        needs_weights = bool(self.recipe.values(self.task.system, self.trained))
        return replace(proposal, values={}) if needs_weights and not outcome.learned else proposal

    # -- training steps ----------------------------------------------------------------------------------

    async def step(self, state: TrainingState) -> TrainingState:
        """Sample with the weights of a state, assign credit, update, and return the next state."""
        number, kept = state.step, dict(state.kept)
        drawn, ahead = await self._drawn(state, kept), None
        max_runs = max(state.max_runs, self.plan.max_runs(number, drawn))
        try:
            async with asyncio.TaskGroup() as group:
                training = group.create_task(self._train(drawn, number))
                pending = 2 * bool(state.evaluated)  # of this step and of the next
                if self.recipe.sampling.max_staleness and self.plan.affords(
                    number + 1, max_runs, pending
                ):
                    # The update starts first, so values come from the updated value head: `compute`
                    # runs one call at a time.
                    await asyncio.sleep(0)
                    ahead = await self._ahead(state, number + 1, kept)
        except BaseExceptionGroup as errors:
            raise first_leaf(errors) from None
        saved, trained = training.result()
        credited = drawn.credited
        made = credited.facts.get(
            "samples", len(credited.samples)
        )  # including those of skipped groups
        learned = sum(map(self.recipe.sampling.learns_from, credited.samples))
        brief = CurvePoint(
            reward=credited.reward,
            samples=learned,
            made=made,
            skipped=trained["skipped_updates"],
            refilled=credited.facts.get("refilled", 0),
            why="" if learned else reason_without_samples(self.recipe, drawn),
        )
        found = {
            "step": number + 1,
            "saved": saved,
            "ahead": ahead,
            "kept": kept,
            "max_runs": max_runs,
        }
        return state.model_copy(update={**found, "curve": [*state.curve, brief]})

    async def _drawn(self, state: TrainingState, kept: dict[str, object]) -> StepBatch:
        """Return the samples of the next step: those drawn ahead, or new ones."""
        if state.ahead:
            drawn = StepBatch.read(verify_reference(state.ahead, self.folder), state.step)
            drawn.check_staleness(state.step, self.recipe.sampling.max_staleness, self.section)
            return drawn
        return await self._draw(state, state.step, kept)

    async def _ahead(
        self, state: TrainingState, number: int, kept: dict[str, object]
    ) -> Stored | None:
        """Draw and store the samples of a later step with the weights of a state; ``None`` out of budget."""
        try:
            drawn = await self._draw(state, number, kept)
        except BudgetExhausted:
            return None
        return store_folder(drawn.write, self.folder, "ahead")

    async def _draw(self, state: TrainingState, number: int, kept: dict[str, object]) -> StepBatch:
        """Sample with the weights of a state and assign credit, within the job's share of the budget."""
        meter, started = self.task.context.executor.meter, time.perf_counter()
        context, before, runs = (
            self._context(state, number, kept),
            self._prefilled(),
            meter.system_runs,
        )
        await self._load_adapters(context)
        with meter.cap_runs(self.task.scorer.runs_left):
            credited = await credited_by(self.recipe, context, self.plan.examples(number))
        context.sampler.check_failures()
        read, seconds = self._prefilled() - before, time.perf_counter() - started
        facts = {
            "prompt_tokens": read.tokens,
            "prompt_tokens_cached": read.cached,
            **context.sampler.facts,
            "runs": meter.system_runs - runs,
            "sample_seconds": seconds,
            "components": answer_metrics(credited.answers or credited.samples),
        }
        return StepBatch(credited, facts, version=state.step)

    async def _train(self, drawn: StepBatch, number: int) -> tuple[Saved, dict[str, Any]]:
        """Update, checkpoint and record; return the checkpoint and the trainer's statistics."""
        samples = drawn.credited.samples
        facts = await compute(self.trainer.step, samples, number)
        saved = await compute(self.trainer.save, self.folder)
        record = self._record(number, drawn, facts)
        if self.recipe.sampling.max_staleness:
            record["staleness"] = number - drawn.version
        if self.settings.keep_samples:
            write = partial(write_samples, samples, self.trainer.tokenizer)
            record[STORED_SAMPLES] = await compute(store_folder, write, self.folder, "samples")
        self.task.context.memory.append(record)
        return saved, facts

    def _prefilled(self) -> Prefilled:
        """Return the engine's counts of prompt tokens so far."""
        system = self.task.system
        lm = entry(setting_values(system.components[self.trained[0]], system), "lm", str)
        return Capabilities(self.task.context.executor.engine(lm)).prefill

    def _context(self, state: TrainingState, number: int, kept: dict[str, object]) -> RecipeContext:
        """Return the inputs of the recipe for one step."""
        task = self.task
        rules = rollout_rules(task.context.rules, task.system, self.trained, self.recipe.sampling)
        system = task.system.bind({**task.system.configuration, **self.values(state.saved)})
        sampler = Sampler(
            task.context.executor, system, task.context.metric, rules, self._index(number)
        )
        seed = derive_seed(task.seed, "step", number)
        folder, spare = task.context.folder, self.plan.spare_examples(number)
        return RecipeContext(sampler, self.trained, seed, self.trainer, task, kept, folder, spare)

    async def _load_adapters(self, context: RecipeContext) -> None:
        """Load the weights that a step samples with into engines that can load them in advance."""
        system, engine_of = context.sampler.system, self.task.context.executor.engine
        await load_adapters(system, self.trained, engine_of, self.folder)

    def _index(self, number: int) -> int:
        """Return an index for a step that no other step of the run uses, so that samples are not reused."""
        return self.task.seed % 100_000 * 1_000 + number

    def _record(self, number: int, drawn: StepBatch, trained: Mapping[str, Any]) -> dict[str, Any]:
        credited = drawn.credited
        scores = {"reward": credited.reward, "rollouts": len(credited.scores)}
        job = {
            "seed": self.task.seed,
            "recipe": type(self.recipe).__name__,
            "keys": list(self.task.keys),
        }
        found = {**job, **scores, **credited.facts, **trained, **drawn.facts}
        of_all, of_trained = drawn.facts.get("components", {}), trained["components"]
        found["components"] = {
            name: {**of_all.get(name, {}), **of_trained.get(name, {})}
            for name in sorted({*of_all, *of_trained})
        }
        answers = examples_of(credited.samples, self.trainer.tokenizer)
        return {
            "kind": RECORD,
            "step": number,
            **found,
            "answers": answers,
            "memory": peak_memory(),
        }

    def delete_unused(self, state: TrainingState) -> None:
        """Delete the optimizer states and adapters that neither this state nor the previous one needs.

        A state needs its last and its best step. The previous state is still the checkpoint until
        this one is written. Of finished jobs, only the optimizer states whose adapters are no
        longer in the configuration are deleted.
        """
        needed = [state.ahead]
        for saved in (state.saved, state.best.saved if state.best else None):
            needed += [saved.optimizers, *saved.adapters.values()] if saved else []
        present = {reference["path"] for reference in needed if reference} | self._given(state)
        present |= {stored.reference["path"] for stored in stored_moments(self._memory)}
        over = [path.name for path in self.folder.glob(f"{OPTIMIZERS}-*")]
        for name in {*state.folders_before, *over}.difference(present, state.folders):
            discard(name, self.folder)
        state.folders_before, state.folders = state.folders, sorted(present)

    def _given(self, state: TrainingState) -> set[str]:
        """Return the folders of the job's starting configuration and recipe state, which must be kept."""
        held = [self.task.system.configuration, *state.kept.values()]
        values = [value for some in held if isinstance(some, Mapping) for value in some.values()]
        return {Path(value["path"]).name for value in values if is_reference(value)}
