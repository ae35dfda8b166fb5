"""Jobs of every method that trains weights, run on one small file as the loop runs them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.simulated.toys import toy
from compound import Dataset, Example, Executor, Score
from compound.api.optimize import run_optimization
from compound.engines.local.engine import TransformersEngine
from compound.execution.cache import MemoryCache
from compound.ext import Engine, Metric
from compound.graph.configuration import to_readable_json
from compound.metrics import custom
from compound.optimization.method import JobContext, Problem, Proposal, Task
from compound.optimization.runs.directory import read_records
from compound.optimization.scorer import JobScorer
from compound.optimization.settings.optimize import make_settings
from compound.optimizers.methods import method
from compound.optimizers.weights.recipes.mmgrpo import GRPOSettings
from compound.optimizers.weights.recipes.ppo import PPOSettings
from compound.testing import PlainMemory
from compound.yaml import load
from training_settings import placed, read_by, trainings

ATLAS = Path(__file__).parents[3] / "benchmarks" / "atlas.yaml"
SMALL = {
    "steps": 2,
    "examples": 2,
    "runs": 3,
    "lr": 0.01,
    "attempts": 3,
    "keep": 2,
    "threshold": 0.0,
    "prompts": {"namer": "Name it.", "answerer": "Answer."},
}
REWARDS = {
    "backbone": {"model": "none"},
    "pairs": {"inputs": 6, "samples": 2, "min_rollouts": 1, "max_rollouts": 1, "level": 1},
    "reward": {"min_accuracy": 0.5, "trust_level": 1},
}


def letters(outputs: Mapping[str, Any], example: Example) -> Score:
    """Reward answers of many different letters: a random model says something else each time."""
    return Score(len(set(outputs["answer"])) / 60)


async def trained(
    model: Path,
    name: str,
    folder: Path,
    start: Mapping[str, Any] | None = None,
    share: float = float("inf"),
    local: str = "ppo",
    dtype: str = "bfloat16",
    **more: Any,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run the jobs of a method as the loop does, without decisions; return the values and the records."""
    kind = PPOSettings if local == "ppo" else GRPOSettings
    learned = placed(kind, **read_by(kind, {**SMALL, **more}))
    program = load(
        ATLAS,
        overrides=[
            ("lm", "tiny"),
            (
                "engines",
                json.dumps({"tiny": {"transformers": {"model": str(model), "dtype": dtype}}}),
            ),
            *(
                (f"optimize.{each}", json.dumps(section))
                for each, section in trainings(**{**SMALL, **more}).items()
            ),
            ("optimize.optimas", json.dumps({**REWARDS, "training": {local: learned}})),
            ("optimize.better_together", json.dumps({"stages": ["random", "mmgrpo"]})),
        ],
    )
    metric, settings = custom(letters, "letters"), program.optimize
    memory = PlainMemory(folder)
    executor = Executor(program.find_engine, cache=MemoryCache(), folder=folder)
    chosen = method(name, program.system, settings)
    problem = Problem(program.system, (), (), (), metric, settings, chosen, program.find_engine)
    assert program.data
    train = program.data.examples("train", list(program.system.inputs), limit=12, seed=0)
    context = JobContext(executor, metric, problem.rules, memory)
    values: dict[str, Any] = dict(start or {})
    jobs = [*([chosen.opening] if chosen.opening else []), *chosen.jobs]
    for number, job in enumerate(jobs):
        system = program.system.bind({**program.system.configuration, **values})
        begun = executor.meter.system_runs
        scorer = JobScorer(problem, executor, system, share, begun)
        task = Task(system, job.keys, train, scorer, number, 0, 2, 2, context)
        async for event in chosen.optimizers[job.optimizer].propose(task):
            if isinstance(event, Proposal):
                values |= event.values
                spent, facts = executor.meter.system_runs - begun, to_readable_json(event.facts)
                found = {"spent": spent, "facts": facts, "note": event.note}
                memory.append({"kind": "job", "optimizer": job.optimizer, **found})
    await executor.aclose()
    return values, memory.records()


def train_toy(
    model: Path,
    folder: Path,
    *,
    metric: Metric | None = None,
    engine: Engine | None = None,
    learner: Mapping[str, Any] | None = None,
    **settings: Any,
) -> None:
    """Train the agents of a toy chain with mmGRPO in a run directory."""
    task = toy("chain", str(model))
    rows = [[{"id": e.id, **e.inputs, **e.gold} for e in some] for some in (task.train, task.valid)]
    data = Dataset.of(train=rows[0], valid=rows[1], test=rows[1][:2])
    section = trainings(**{"lr": 0.01, **settings})["mmgrpo"]
    section["learner"] = dict(learner or {})
    given = make_settings({"method": "mmgrpo", "valid_size": None, "mmgrpo": section})
    lm = engine or TransformersEngine(str(model), dtype="float32", deterministic=True)
    engines = {str(model): lm}
    run_optimization(
        task.system, data, metric or task.metric, given, run_dir=folder, engines=engines
    )


def training_records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of the training steps of a run."""
    return [r for r in read_records(folder / "memory.jsonl") if r["kind"] == "training"]
