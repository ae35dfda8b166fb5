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
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from compound.core.engine import (
    Adapter,
    AdapterEngine,
    Capabilities,
    Engine,
    Prefilled,
    SleepingEngine,
)
from compound.core.errors import (
    FRESH,
    BudgetExhausted,
    ConfigurationError,
    DeclarationError,
    RunDirectoryError,
    first_leaf,
)
from compound.core.narrowing import entry
from compound.core.storage.artifacts import (
    TEMPORARY,
    discard,
    folder_digest,
    is_reference,
    store_folder,
    sync,
    verify_reference,
)
from compound.core.threads import compute
from compound.execution.rng import derive_seed
from compound.execution.schedule import setting_values
from compound.graph.configuration import components_of
from compound.graph.system import System
from compound.optimization.method import JobPlan, PlannedJob, Progress, Proposal, Task
from compound.optimizers.weights.bases import PlannedTraining, load_adapters
from compound.optimizers.weights.distributed.processes import Learner, open_learner
from compound.optimizers.weights.interchange import FIELD as STORED_SAMPLES
from compound.optimizers.weights.interchange import write_samples
from compound.optimizers.weights.learner.excerpts import TokenTexts
from compound.optimizers.weights.learner.samples import SECTION
from compound.optimizers.weights.learner.trainer import OPTIMIZERS, LearnerSpec, Saved
from compound.optimizers.weights.learner.updates import VALUE
from compound.optimizers.weights.recipes.recipe import Recipe, RecipeContext, Sharing, credited_by
from compound.optimizers.weights.recipes.rollouts import Sampler, rollout_rules
from compound.optimizers.weights.steps import (
    CurvePoint,
    StepBatch,
    StepPlan,
    TrainingState,
    answer_metrics,
    describe_evaluation,
    describe_samples,
    find_moments,
    format_step,
    make_proposal,
    peak_memory,
    reason_without_samples,
    remember_moments,
    stored_moments,
)

RECORD = "training"  # the kind of a memory record


@dataclass(frozen=True)
class WeightTraining:
    """Optimizer that trains the weights of a job."""

    requires: ClassVar[tuple[str, ...]] = ("torch", "transformers", "peft")

    recipe: Recipe
    adapters: Sharing = "each"
    section: str = SECTION

    def planned(
        self, system: System, trained: tuple[str, ...], engine_of: Callable[[str], Engine]
    ) -> PlannedTraining:
        """Return the training of some components."""
        given = self.recipe.settings, self.section, self.adapters, self.recipe.teacher
        return PlannedTraining(system, trained, engine_of, *given)

    def plan(self, job: PlannedJob) -> JobPlan:
        """Return no requests: the job sends none except the runs of the system."""
        return JobPlan()

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Train, checkpoint after every step and evaluation, and propose the weights of the best step."""
        trained, engine_of = tuple(components_of(task.keys)), task.context.executor.engine
        session = TrainingSession(task, self.recipe, self.planned(task.system, trained, engine_of))
        if obstacle := self.recipe.obstacle(task.system, session.trained):
            yield Proposal({}, note=f"nothing to learn: {obstacle}")
            return
        try:
            state = TrainingState() if task.resume is None else TrainingState.from_json(task.resume)
            await session.begin(state)
            while True:
                evaluates = session.plan.is_evaluation_due(state)
                if not (evaluates or session.plan.has_next_step(state)):
                    break
                try:
                    state = await (session.evaluate(state) if evaluates else session.step(state))
                except BudgetExhausted:
                    break
                session.delete_unused(state)
                if evaluates:
                    note, facts = describe_evaluation(state, len(session.plan.held_out))
                else:
                    note, facts = format_step(state.curve[-1]), {}
                yield Progress(
                    state.to_json(),
                    note,
                    facts,
                    step=state.step,
                    of=self.recipe.settings.steps,
                    written=partial(sync, *session.folders(state)),
                )
            yield session.proposal(state)
        except asyncio.CancelledError:
            session.interrupt()  # else `close` would wait for a step in other processes
            raise
        finally:
            await compute(session.close)


@dataclass
class TrainingSession:
    """Training of one job, with its model in memory, which `begin` loads."""

    task: Task
    recipe: Recipe
    planned: PlannedTraining
    trainer: Learner = field(init=False)

    def __post_init__(self) -> None:
        self.trained, self.groups = self.planned.trained, self.planned.groups
        self.section = self.planned.section
        self.plan = StepPlan(self.task, self.recipe, len(self.trained))
        self.folder = self.task.context.memory.folder  # of adapters and checkpoints
        self._memory = self.task.context.memory.state
        self._recipe = type(self.recipe).__name__

    async def begin(self, state: TrainingState) -> None:
        """Load the base model and the state; check that engines take the adapters, before the first step."""
        await compute(self._load, state)
        if state.saved is not None:
            return
        for name, components in self.groups.items():
            engine = self.planned.engines[components[0]]
            if isinstance(engine, AdapterEngine):
                with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=self.folder) as folder:
                    path = Path(folder)
                    await compute(self.trainer.write_adapter, name, path)
                    await engine.admit(Adapter(str(path), folder_digest(path)))

    def _load(self, state: TrainingState) -> None:
        planned, recipe, settings = self.planned, self.recipe, self.recipe.settings
        model = planned.base
        if not recipe.likelihood:
            planned.check_sampling()
        placement = planned.placement
        self._gpus = settings.learner.gpus(placement)
        spec = LearnerSpec(
            model=model,
            shapes=planned.spaces,
            adapter_of={name: adapter for adapter, some in self.groups.items() for name in some},
            loss=recipe.loss,
            teacher=planned.teacher,
            optimizer=settings.optimizer,
            rollouts=recipe.sampling,
            critic=recipe.critic,
            seed=self.task.seed,
            steps=settings.steps,
            longest=self._max_answer_tokens(),
            section=self.section,
            placement=placement,
            checkpointing=settings.base.gradient_checkpointing,
        )
        self.trainer = open_learner(spec, settings.learner, self.folder)
        self._texts = TokenTexts(self.trainer.tokenizer)
        if state.saved is not None:
            try:
                self.trainer.restore(state.saved, self.folder)
            except ConfigurationError as error:
                raise RunDirectoryError(
                    f"step {state.step} of {self.section} cannot be restored: {error.message}",
                    hint=f"restore its folders from a copy of the run directory, or {FRESH}",
                ) from None
            return
        starts = planned.starts
        self.trainer.start(starts, self.folder)
        values = self.task.system.configuration.values()
        live = {value["sha256"] for value in values if is_reference(value)}
        for name, kept in find_moments(self._memory, self._recipe, live, starts).items():
            self.trainer.restore_optimizer(name, kept.reference, self.folder)
            if recipe.critic and set(kept.adapters) == set(self.groups):
                self.trainer.restore_optimizer(VALUE, kept.reference, self.folder)

    def _max_answer_tokens(self) -> int:
        """Return the maximum number of tokens of an answer, which the loss may divide by."""
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
        """Return the values of a checkpoint by key of the configuration; ``None``: the starting weights."""
        weights = {
            f"{component}.weights": saved.adapters[name]
            for name, components in self.groups.items()
            for component in components
            if saved is not None
        }
        return {**self.recipe.values(self.task.system, self.trained), **weights}

    # -- evaluation --------------------------------------------------------------------------------------

    async def evaluate(self, state: TrainingState) -> TrainingState:
        """Score the weights of a state on the held-out train examples, and return the next state."""
        meter, step = self.task.context.executor.meter, state.step
        context = await self._context(state, step, dict(state.kept))
        with meter.cap_runs(self.task.scorer.runs_left):
            scores = await self.recipe.evaluate(
                context, self.values(state.saved), self.plan.held_out
            )
        return state.evaluate(fmean(scores) if scores else None)

    def proposal(self, state: TrainingState) -> Proposal:
        """Propose the weights of the best step, and keep their optimizer states for later jobs."""
        if (chosen := state.chosen) is not None:
            remember_moments(self._memory, self._recipe, chosen)
        values = self.values(chosen) if state.learned else {}
        return make_proposal(state, self.recipe, len(self.plan.held_out), values)

    # -- training steps ----------------------------------------------------------------------------------

    async def step(self, state: TrainingState) -> TrainingState:
        """Sample with the weights of a state, assign credit, update, and return the next state."""
        number, kept, sampling = state.step, dict(state.kept), self.recipe.sampling
        if state.ahead:
            drawn = StepBatch.read(verify_reference(state.ahead, self.folder))
        else:
            drawn = await self._draw(state, number, kept)
        ahead, max_runs = None, max(state.max_runs, self.plan.max_runs(number, drawn))
        pending = 2 * bool(state.evaluated)  # evaluations, of this step and of the next
        try:
            async with asyncio.TaskGroup() as group:
                training = group.create_task(self._train(drawn, number))
                if sampling.max_staleness and self.plan.affords(number + 1, max_runs, pending):
                    # The update starts first, so values come from the updated value head: `compute`
                    # runs one call at a time.
                    await asyncio.sleep(0)
                    ahead = await self._ahead(state, number + 1, kept)
        except BaseExceptionGroup as errors:
            raise first_leaf(errors) from None
        saved, trained = training.result()
        credited = drawn.credited
        learned = sum(map(sampling.learns_from, credited.samples))
        point = CurvePoint(
            reward=credited.reward,
            samples=learned,
            # including those of skipped groups
            made=credited.facts.get("samples", len(credited.samples)),
            skipped=trained["skipped_updates"],
            why="" if learned else reason_without_samples(self.recipe, drawn),
        )
        found = {"step": number + 1, "saved": saved, "ahead": ahead, "kept": kept}
        return state.model_copy(
            update={**found, "max_runs": max_runs, "curve": [*state.curve, point]}
        )

    async def _ahead(
        self, state: TrainingState, number: int, kept: dict[str, object]
    ) -> dict[str, str] | None:
        """Draw and store the samples of a later step with the weights of a state; ``None`` out of budget."""
        try:
            drawn = await self._draw(state, number, kept)
        except BudgetExhausted:
            return None
        return store_folder(drawn.write, self.folder, "ahead")

    async def _draw(self, state: TrainingState, number: int, kept: dict[str, object]) -> StepBatch:
        meter, started = self.task.context.executor.meter, time.perf_counter()
        before, runs, usage = self._prefilled(), meter.system_runs, meter.usage
        context = await self._context(state, number, kept)
        with meter.cap_runs(self.task.scorer.runs_left):
            credited = await credited_by(self.recipe, context, self.plan.examples(number))
        context.sampler.check_failures()
        read = self._prefilled() - before
        facts = {
            "prompt_tokens": read.tokens,
            "prompt_tokens_cached": read.cached,
            **context.sampler.facts,
            "runs": meter.system_runs - runs,
            "sampled": meter.usage.completion_tokens - usage.completion_tokens,
            "sample_seconds": time.perf_counter() - started,
            "components": answer_metrics(credited.answers or credited.samples),
        }
        return StepBatch(credited, facts, version=state.step)

    async def _train(self, drawn: StepBatch, number: int) -> tuple[Saved, dict[str, Any]]:
        """Update, checkpoint and record; return the checkpoint and the trainer's statistics."""
        samples = drawn.credited.samples
        async with self._trainer_turn():
            facts = await compute(self.trainer.step, samples, number)
            saved = await compute(self.trainer.save, self.folder)
        record = self._record(number, drawn, facts)
        if self.recipe.sampling.max_staleness:
            record["staleness"] = number - drawn.version
        if self.recipe.settings.keep_samples:
            write = partial(write_samples, samples, self.trainer.tokenizer)
            record[STORED_SAMPLES] = await compute(store_folder, write, self.folder, "samples")
        self.task.context.memory.append(record)
        return saved, facts

    @contextlib.asynccontextmanager
    async def _trainer_turn(self) -> AsyncIterator[None]:
        """Let engines on the trainer's GPUs sleep while the block runs; see `SleepingEngine`.

        They have all the memory of the GPUs but that of the trainer's weights again when the block
        ends.
        """
        async with contextlib.AsyncExitStack() as stack:
            slept = False
            for engine in self.task.context.executor.engines.values():
                if self._gpus and isinstance(engine, SleepingEngine):
                    slept |= await stack.enter_async_context(engine.asleep(self._gpus))
            yield
            if slept:
                await compute(self.trainer.release_cache)

    def _prefilled(self) -> Prefilled:
        return Capabilities(self.planned.engines[self.trained[0]]).prefill

    async def _context(
        self, state: TrainingState, number: int, kept: dict[str, object]
    ) -> RecipeContext:
        """Load the weights of a state into the engines, and return the inputs of the recipe for one step."""
        task = self.task
        rules = rollout_rules(task.context.rules, task.system, self.trained, self.recipe.sampling)
        system = task.system.bind({**task.system.configuration, **self.values(state.saved)})
        # no other step of the run has this index, so that samples are not reused
        index = task.seed % 100_000 * 1_000 + number
        sampler = Sampler(task.context.executor, system, task.context.metric, rules, index)
        await load_adapters(system, self.trained, task.context.executor.engine, self.folder)
        return RecipeContext(
            sampler,
            self.trained,
            derive_seed(task.seed, "step", number),
            self.trainer,
            task,
            kept,
            task.context.folder,
            self._trainer_turn,
        )

    def _record(self, number: int, drawn: StepBatch, facts: Mapping[str, Any]) -> dict[str, Any]:
        credited, trained = drawn.credited, dict(facts)
        logps = trained.pop("shown_logps", ())
        of_all, of_trained = drawn.facts.get("components", {}), trained["components"]
        return {
            "kind": RECORD,
            "step": number,
            "seed": self.task.seed,
            "recipe": self._recipe,
            "keys": list(self.task.keys),
            "reward": credited.reward,
            "rollouts": len(credited.scores),
            **credited.facts,
            **trained,
            **drawn.facts,
            "components": {
                name: {**of_all.get(name, {}), **of_trained.get(name, {})}
                for name in sorted({*of_all, *of_trained})
            },
            "excerpts": describe_samples(credited, self.recipe, number, self._texts, logps),
            "memory": peak_memory(),
        }

    def folders(self, state: TrainingState) -> list[Path]:
        """Return the folders of the checkpoints that a state needs."""
        found = [state.ahead]
        for saved in (state.saved, state.best.saved if state.best else None):
            found += [saved.optimizers, *saved.adapters.values()] if saved else []
        return [self.folder / reference["path"] for reference in found if reference]

    def delete_unused(self, state: TrainingState) -> None:
        """Delete the optimizer states and adapters that neither this state nor the previous one needs.

        A state needs its last and its best step. The previous state is still the checkpoint until
        this one is written. Of finished jobs, only the optimizer states whose adapters are no
        longer in the configuration are deleted.
        """
        present = {folder.name for folder in self.folders(state)}
        present |= {stored.reference["path"] for stored in stored_moments(self._memory)}
        start = self.task.system.configuration.values()
        present |= {Path(value["path"]).name for value in start if is_reference(value)}
        self.task.context.memory.flush()  # the previous state is the checkpoint from here on
        over = [path.name for path in self.folder.glob(f"{OPTIMIZERS}-*")]
        for name in {*state.folders_before, *over}.difference(present, state.folders):
            discard(name, self.folder)
        state.folders_before, state.folders = state.folders, sorted(present)
