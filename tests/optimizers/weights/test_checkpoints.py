"""Which training step is proposed, what is kept on disk for it, and what outlasts a job."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from compound.core.narrowing import entry

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")
pytest.importorskip("peft")

from benchmarks.simulated.toys import Toy, toy  # noqa: E402
from compound import Budget, CompoundError, Example, Executor, Score, System  # noqa: E402
from compound.core.engine import Adapter  # noqa: E402
from compound.core.storage.artifacts import verify_reference  # noqa: E402
from compound.engines.local.engine import TransformersEngine  # noqa: E402
from compound.evaluation.metrics.scoring import apply_metric  # noqa: E402
from compound.execution.budget import Meter  # noqa: E402
from compound.execution.cache import MemoryCache  # noqa: E402
from compound.ext import Completion, Progress, Proposal, Request, Task  # noqa: E402
from compound.optimization.method import JobContext, Problem  # noqa: E402
from compound.optimization.scorer import JobScorer  # noqa: E402
from compound.optimizers.methods import method  # noqa: E402
from compound.optimizers.weights import training as session  # noqa: E402
from compound.optimizers.weights.learner.trainer import Trainer  # noqa: E402
from compound.optimizers.weights.steps import (  # noqa: E402
    MOMENTS,
    TrainingState,
    split,
    stored_moments,
)
from compound.testing import PlainMemory  # noqa: E402
from training_settings import training  # noqa: E402

SEED = 3
SHORT = {
    "steps": 4,
    "examples": 2,
    "runs": 3,
    "lr": 0.01,
    "evaluation__every": 1,
    "evaluation__examples": 4,
}


@dataclass
class Scripted:
    """A task's metric, but on held-out examples the next score of a script; counts what is scored."""

    task: Toy
    held_out: Sequence[Example]
    scores: Sequence[float]
    seen: Counter[str] = field(default_factory=Counter)
    name: str = "scripted"

    async def score(self, outputs: Mapping[str, Any], example: Example) -> Score:
        self.seen[example.id] += 1
        if example in self.held_out:
            return Score(self.scores[self.seen[example.id] - 1])
        return await apply_metric(self.task.metric, outputs, example)


@dataclass
class Run:
    """Jobs of one run: they share a memory, as in a run directory."""

    model: Path
    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    name: str = "mmgrpo"
    budget: float = float("inf")

    def __post_init__(self) -> None:
        self.task = toy("chain", str(self.model))
        self.memory = PlainMemory(self.folder)
        self.folder.mkdir(exist_ok=True)
        self.events: list[Progress] = []
        self.checkpoint: tuple[Any, Any] | None = None
        self.meter = Meter(Budget(system_runs=None if self.budget == float("inf") else self.budget))

    @property
    def held_out(self) -> Sequence[Example]:
        return split(self.task.train, 4, SEED)[1]

    def scripted(self, *scores: float) -> Scripted:
        return Scripted(self.task, self.held_out, scores)

    def job(
        self,
        metric: Any = None,
        system: System | None = None,
        number: int = 0,
        until: int | None = None,
        resume: Any = None,
    ) -> Proposal:
        return asyncio.run(
            self._job(metric or self.task.metric, system or self.task.system, number, until, resume)
        )

    async def _job(
        self, metric: Any, system: System, number: int, until: int | None, resume: Any
    ) -> Proposal:
        settings = training(self.name, {**SHORT, **self.settings})
        engine = TransformersEngine(str(self.model), dtype="float32", deterministic=True)
        executor = Executor(
            {str(self.model): engine}, cache=MemoryCache(), folder=self.folder, meter=self.meter
        )
        chosen = method(self.name, system, settings)
        problem = Problem(system, self.task.train, (), (), metric, settings, chosen, {})
        context = JobContext(executor, metric, problem.rules, self.memory)
        scorer = JobScorer(problem, executor, system, float("inf"), 0.0)
        job = chosen.jobs[0]
        given = Task(
            system,
            job.keys,
            self.task.train,
            scorer,
            7 + number,
            SEED,
            8,
            8,
            context,
            resume=resume,
        )
        proposal = Proposal({})
        try:
            async for event in chosen.optimizers[job.optimizer].propose(given):
                if isinstance(event, Proposal):
                    proposal = event
                    break
                self.events.append(event)
                self.checkpoint = json.loads(json.dumps([event.state, self.memory.state]))
                if len(self.events) == until:
                    break
        finally:
            await executor.aclose()
        return proposal

    @property
    def evaluations(self) -> list[Any]:
        return [event.facts["evaluation"] for event in self.events if "evaluation" in event.facts]

    def state_after(self, step: int) -> Any:
        return next(
            e.state for e in self.events if e.state["step"] == step and "evaluation" not in e.facts
        )

    def stored(self, kind: str) -> set[str]:
        return {path.name for path in self.folder.iterdir() if path.name.startswith(f"{kind}-")}


def adapters_of(state: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name}.weights": reference for name, reference in state["saved"]["adapters"].items()}


class TestBestStep:
    def test_the_best_evaluated_step_is_proposed_and_the_earliest_of_equals(
        self, toy_model: Path, tmp_path: Path
    ) -> None:
        run = Run(toy_model, tmp_path)
        found = run.job(run.scripted(0.1, 0.3, 0.5, 0.4, 0.5))
        assert found.values == adapters_of(run.state_after(2))
        assert found.values != adapters_of(run.state_after(4))
        assert (found.before, found.after) == (0.1, 0.5)
        assert found.facts["best_step"] == 2
        assert found.facts["evaluated"] == [[0, 0.1], [1, 0.3], [2, 0.5], [3, 0.4], [4, 0.5]]
        assert (
            "step 2 is the best of 4 evaluated: 0.500 on 4 held-out train examples, from 0.100"
            in found.note
        )
        assert [e["best"] for e in run.evaluations] == [0, 1, 2, 2, 2]
        for reference in found.values.values():
            verify_reference(reference, tmp_path)

    def test_no_step_trains_on_an_example_that_chooses_among_steps(
        self, toy_model: Path, tmp_path: Path
    ) -> None:
        run = Run(toy_model, tmp_path, {"examples": 12})
        metric = run.scripted(*[0.5] * 5)
        run.job(metric)
        held_out = {example.id for example in run.held_out}
        assert len(held_out) == 4
        assert {metric.seen[name] for name in held_out} == {
            5
        }  # by evaluations, and by nothing else
        assert {example.id for example in run.task.train} == set(metric.seen)

    @pytest.mark.slow
    def test_where_every_step_scores_less_than_the_start_nothing_is_proposed(
        self, toy_model: Path, tmp_path: Path
    ) -> None:
        run = Run(toy_model, tmp_path)
        found = run.job(run.scripted(0.6, 0.5, 0.5, 0.4, 0.5))
        assert found.values == {}
        assert "no step scored higher than the starting weights, 0.600" in found.note
        run = Run(toy_model, tmp_path / "equal")
        assert run.job(run.scripted(0.5, 0.2, 0.5, 0.4, 0.5)).values == adapters_of(
            run.state_after(2)
        )

    def test_evaluations_are_every_few_steps_and_after_the_last(
        self, toy_model: Path, tmp_path: Path
    ) -> None:
        run = Run(toy_model, tmp_path, {"steps": 5, "evaluation__every": 2})
        run.job(run.scripted(0.1, 0.2, 0.3, 0.4))
        assert [e["step"] for e in run.evaluations] == [0, 2, 4, 5]

    @pytest.mark.parametrize("given", [{"evaluation__every": 0}, {"evaluation__every": 4}])
    def test_a_job_with_nothing_to_choose_among_proposes_its_last_step(
        self, given: dict[str, int], toy_model: Path, tmp_path: Path
    ) -> None:
        run = Run(toy_model, tmp_path, given)
        found = run.job()
        assert run.evaluations == []
        assert found.values == adapters_of(run.state_after(4))
        assert "best_step" not in found.facts

    def test_the_budget_pays_for_evaluations_and_keeps_the_last_one(
        self, toy_model: Path, tmp_path: Path
    ) -> None:
        """A step takes 6 runs, an evaluation 4: five runs are too few for another step with its evaluation."""
        run = Run(toy_model, tmp_path, {"steps": 20}, budget=4 + 3 * 10 + 5)
        found = run.job(run.scripted(0.1, 0.2, 0.3, 0.4))
        assert [e["step"] for e in run.evaluations] == [0, 1, 2, 3]
        assert run.meter.system_runs <= 39
        assert found.facts["best_step"] == 3
        short = Run(
            toy_model, tmp_path / "short", {"steps": 20}, budget=20
        )  # does not hold two evaluated steps
        assert (short.job().facts["steps"], short.evaluations) == (3, [])

    def test_the_best_step_s_adapters_stay_until_a_better_step_takes_their_place(
        self, toy_model: Path, tmp_path: Path
    ) -> None:
        run = Run(toy_model, tmp_path, {"steps": 6})
        present: list[set[str]] = []
        forget = session.TrainingSession.delete_unused

        def watched(job: session.TrainingSession, state: TrainingState) -> None:
            forget(job, state)
            present.append(run.stored("first"))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session.TrainingSession, "delete_unused", watched)
            found = run.job(run.scripted(0.1, 0.5, 0.2, 0.2, 0.2, 0.7, 0.1))
        of_step = {n: run.state_after(n)["saved"]["adapters"]["first"]["path"] for n in range(1, 7)}
        assert found.values["first.weights"]["path"] == of_step[5]
        assert of_step[1] in present[8]  # step 4 is evaluated, and step 1 still the best
        assert of_step[2] not in present[8]
        assert of_step[1] not in present[-1]  # step 5 took its place
        assert max(map(len, present)) <= 4


def test_adapters_that_an_engine_does_not_take_end_a_job_before_its_first_run(
    toy_model: Path, tmp_path: Path
) -> None:
    run, shapes = Run(toy_model, tmp_path), list[int]()

    async def admit(_: TransformersEngine, adapter: Adapter) -> None:
        shapes.append(json.loads((Path(adapter.path) / "adapter_config.json").read_text())["r"])
        verify_reference({"path": adapter.path, "sha256": adapter.sha256})
        if len(shapes) == 3:
            raise CompoundError("the server does not load it")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformersEngine, "admit", admit, raising=False)
        patch.setattr(TransformersEngine, "max_loras", 4, raising=False)
        with pytest.raises(CompoundError, match="does not load it"):
            run.job()
    assert shapes == [8, 8, 8]  # one of each agent
    assert (run.meter.system_runs, run.events) == (0.0, [])
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".shape")]


def test_each_version_is_loaded_before_the_first_call_of_its_step(
    toy_model: Path, tmp_path: Path
) -> None:
    """Adapters that are loaded at their first use wait for the calls in flight, one component at a time."""
    run, loaded, sampled = Run(toy_model, tmp_path), set[str](), set[str]()
    generate = TransformersEngine.generate

    async def admit(_: TransformersEngine, adapter: Adapter) -> None:
        loaded.add(adapter.sha256)

    async def watched(engine: TransformersEngine, request: Request) -> Completion:
        if request.adapter is not None:
            assert request.adapter.sha256 in loaded
            sampled.add(request.adapter.sha256)
            assert len(sampled) <= len(loaded) - 3  # without the three that check the shapes
        return await generate(engine, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformersEngine, "admit", admit, raising=False)
        patch.setattr(TransformersEngine, "max_loras", 4, raising=False)
        patch.setattr(TransformersEngine, "generate", watched)
        run.job()
    assert len(sampled) == 3 * SHORT["steps"]


class TestNextJob:
    """Optimizer states of a proposal go on in the next job that starts from the proposed adapters."""

    def steps(self, run: Run, proposal: Proposal, number: int) -> dict[str, float]:
        """Return the number of updates that each adapter's Adam state counts after another job's first step."""
        found: dict[str, float] = {}
        opened = session.TrainingSession._load

        def watched(job: session.TrainingSession, state: TrainingState) -> None:
            opened(job, state)
            assert isinstance(job.trainer, Trainer)
            for name, updater in job.trainer._updaters.items():
                counts = [v for key, v in updater.state().items() if key.endswith("|step")]
                found[name] = float(counts[0]) if counts else 0.0

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session.TrainingSession, "_load", watched)
            system = run.task.system.bind({**run.task.system.configuration, **proposal.values})
            run.job(system=system, number=number)
        return found

    @pytest.mark.slow
    def test_adam_s_moments_are_those_of_the_proposed_step(
        self, toy_model: Path, tmp_path: Path
    ) -> None:
        run = Run(toy_model, tmp_path)
        first = run.job(run.scripted(0.1, 0.3, 0.5, 0.4, 0.5))
        assert set(self.steps(run, first, 1).values()) == {2.0}

    @pytest.mark.slow
    def test_the_critic_goes_on_too(self, toy_model: Path, tmp_path: Path) -> None:
        run = Run(toy_model, tmp_path, {"evaluation__every": 0}, name="mappo")
        first = run.job()
        counts = self.steps(run, first, 1)
        assert counts == dict.fromkeys(["first", "second", "third", "|value"], 4.0)

    @pytest.mark.slow
    def test_those_of_rejected_adapters_are_dropped_and_their_folder_is_deleted(
        self, toy_model: Path, tmp_path: Path
    ) -> None:
        run = Run(toy_model, tmp_path, {"evaluation__every": 0})
        first = run.job()
        second = run.job(
            system=run.task.system.bind({**run.task.system.configuration, **first.values}), number=1
        )
        rejected = {each.reference["path"] for each in stored_moments(run.memory.state)}
        assert len(rejected) == 2
        # the first proposal's, the second was rejected
        assert self.steps(run, first, 2)["first"] == 4.0
        assert second.values["first.weights"]["sha256"] not in {
            digest
            for kept in entry(run.memory.state, MOMENTS, list)
            for digest in kept["adapters"].values()
        }
        assert len(run.stored("optimizer-states")) <= 4
        # all were rejected: as at the beginning
        assert self.steps(run, Proposal({}), 3)["first"] == 0.0

    def test_another_recipe_begins_anew(self, toy_model: Path, tmp_path: Path) -> None:
        run = Run(toy_model, tmp_path, {"evaluation__every": 0})
        first = run.job()
        run.name = "mhgpo_fof"
        assert self.steps(run, first, 1)["first"] == 0.0
