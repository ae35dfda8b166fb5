"""Measure whether every training recipe learns, on toy tasks with a known optimum, with controls.

    python -m benchmarks.measure.learning_curves [--only TASK/METHOD] [--seeds 0,1,2]

Writes ``benchmarks/data/learning_curves.json``: for each task, method and seed, the mean reward of
rollouts by step, and the greedy score of the trained system, in total and by node. Controls are
trained in the same way, some of them for fewer steps, with frozen weights, with random rewards, and
with rewards of the opposite sign: they must stay at chance level or below.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.progress import track

from benchmarks.simulated.toy_model import make_toy_model
from benchmarks.simulated.toys import Toy, toy
from compound.core.example import Example, Metric, Score
from compound.core.narrowing import entry
from compound.engines.local.engine import TransformersEngine
from compound.evaluation.evaluate import evaluate
from compound.evaluation.metrics.scoring import apply_metric
from compound.execution.cache import MemoryCache
from compound.execution.executor import Executor
from compound.execution.rng import derive_seed, generator
from compound.graph.system import System
from compound.optimization.method import JobContext, Problem, Proposal, Task
from compound.optimization.scorer import JobScorer
from compound.optimization.settings.optimize import make_settings
from compound.optimizers.methods import method
from compound.report.training import Step, get_number
from compound.testing import PlainMemory

OUTPUT = Path(__file__).parents[1] / "data" / "learning_curves.json"
SEEDS = (0, 1, 2)
LAST = {"every": 0}  # keep the weights of the last step, without validation during training
SHARED = {
    "steps": 80,
    "rollouts": {"examples": 8, "runs": 8},
    "loss": {"grpo": {"entropy": 0.01}},
    "optimizer": {"lr": 3e-3},
    "evaluation": LAST,
}
TALK = {**SHARED, "steps": 120, "rollouts": {"examples": 8, "runs": 16}, "optimizer": {"lr": 2e-3}}
IMITATION = {
    "steps": 160,
    "rollouts": {"examples": 24},
    "optimizer": {"lr": 5e-3, "epochs": 2},
    "evaluation": LAST,
    "attempts": 24,
    "threshold": 0.35,
    "pace": 0.1,
}
CRITIC = {
    **SHARED,
    "critic": {"lr": 1e-2, "lam": 0.95},
    "optimizer": {"lr": 3e-3, "epochs": 2},
}
ALONE = {**CRITIC, "steps": 40}
METHODS: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "chain": {
        "ppo": ALONE,
        "mappo": CRITIC,
        "mmgrpo": SHARED,
        "mhgpo_is": SHARED,
        "mhgpo_fof": SHARED,
        "mhgpo_rr": SHARED,
    },
    "conversation": {"prompt_r1": TALK},
    "planning": {"mygo": IMITATION},
}
CONTROLS = ("frozen", "shuffled", "flipped")
CONTROLLED = {"chain": "mmgrpo", "conversation": "prompt_r1", "planning": "mygo"}
SHORTER: Mapping[str, Mapping[str, object]] = {  # controls need all attempts, which takes long
    "conversation": {"steps": 60},
    "planning": {"steps": 40, "rollouts": {"examples": 8}, "attempts": 6},
}


@dataclass(frozen=True)
class Case:
    """One training run: a toy task, a method, a seed, and the control, if it is one."""

    task: str
    method: str
    seed: int
    control: str = ""

    @property
    def name(self) -> str:
        """Name of the case, without the seed."""
        return f"{self.task}/{self.method}" + (f"/{self.control}" if self.control else "")


@dataclass(frozen=True)
class Misleading:
    """Rewards of a control: of the opposite sign, or random."""

    metric: Metric
    control: str
    seed: int
    drawn: itertools.count[int]

    @property
    def name(self) -> str:
        """Name of the control."""
        return self.control

    async def score(self, outputs: Mapping[str, object], example: Example) -> Score:
        """Return a misleading or uninformative score."""
        if self.control == "flipped":
            return Score(1.0 - (await apply_metric(self.metric, outputs, example)).value)
        return Score(float(generator(self.seed, "shuffled", next(self.drawn)).random()))


@dataclass(frozen=True)
class Setup:
    """A training that differs from those of `METHODS`.

    Attributes:
        settings: the settings of the method.
        numbers: further numbers of the records of steps to return, by name.
        runs: the budget of the training, in system runs.
        engine: returns the engine of a model folder.
    """

    settings: Mapping[str, object]
    numbers: Sequence[str] = ()
    runs: float = float("inf")
    engine: Callable[[str], TransformersEngine] | None = None


def train(case: Case, setup: Setup | None = None) -> dict[str, object]:
    """Train from scratch; return the learning curve and the scores before and after."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = make_toy_model(Path(folder) / "model", case.seed)
        task, chosen = toy(case.task, str(model)), setup or Setup(_settings(case))
        return asyncio.run(_trained(case, chosen, task, str(model), Path(folder)))


async def _trained(
    case: Case, setup: Setup, task: Toy, model: str, folder: Path
) -> dict[str, object]:
    settings = make_settings(
        {"method": case.method, "seed": case.seed, case.method: setup.settings}
    )
    metric = task.metric
    if case.control in ("flipped", "shuffled"):
        metric = Misleading(task.metric, case.control, case.seed, itertools.count())
    memory = PlainMemory(folder / "memory")
    memory.folder.mkdir()
    engine = (
        TransformersEngine(model, dtype="float32") if setup.engine is None else setup.engine(model)
    )
    executor = Executor({model: engine}, cache=MemoryCache(), seed=case.seed, folder=memory.folder)
    chosen = method(case.method, task.system, settings)
    problem = Problem(task.system, task.train, (), (), metric, settings, chosen, {})
    bench = JobContext(executor, metric, problem.rules, memory)
    system, ended = task.system, list[float]()
    try:
        before = await _measured(executor, system, task)
        for number, job in enumerate(chosen.jobs):
            seed = derive_seed(case.seed, "job", number)
            scorer = JobScorer(problem, executor, system, setup.runs, executor.meter.system_runs)
            given = Task(system, job.keys, task.train, scorer, seed, case.seed, 8, 8, bench)
            async for event in chosen.optimizers[job.optimizer].propose(given):
                ended.append(time.perf_counter())
                if isinstance(event, Proposal):
                    system = system.bind({**system.configuration, **event.values})
        after = await _measured(executor, system, task)
    finally:
        await executor.aclose()
    records = memory.records()
    return {
        "task": case.task,
        "method": case.method,
        "control": case.control,
        "seed": case.seed,
        "chance": task.chance,
        "optimum": task.optimum,
        "before": before,
        "after": after,
        "curve": [round(value, 4) for value in _known(records, "reward")],
        "thresholds": [round(value, 4) for value in _known(records, "threshold")],
        "rollouts": sum(_known(records, "rollouts")),
        "seconds": {k: round(sum(_known(records, f"{k}_seconds")), 1) for k in ("sample", "train")},
        **{name: [round(value, 4) for value in _known(records, name)] for name in setup.numbers},
        "step_seconds": [round(b - a, 4) for a, b in itertools.pairwise(ended)][:-1],
    }


def _known(records: Sequence[Step], name: str) -> list[float]:
    return [value for record in records if (value := get_number(record, name)) is not None]


def _settings(case: Case) -> dict[str, object]:
    wanted: dict[str, object] = dict(METHODS[case.task][case.method])
    if case.control:
        wanted |= SHORTER.get(case.task, {})
    if case.control == "frozen":
        wanted["optimizer"] = {**entry(wanted, "optimizer", dict), "lr": 1e-12}
        wanted |= {"critic": {"lr": 1e-12}} if "critic" in wanted else {}
    return wanted


async def _measured(executor: Executor, system: System, task: Toy) -> dict[str, float]:
    """Return the greedy score on the test examples, and the mean of every part of the metric."""
    traces: list[Mapping[str, float]] = []
    found = await evaluate(
        executor,
        system,
        task.test,
        task.metric,
        on_trace=lambda _, trace: traces.append(trace.parts),
    )
    parts = {
        name: fmean(row.get(name, 0.0) for row in traces) for name in (traces[0] if traces else {})
    }
    return {"score": found.mean, **parts}


def cases(seeds: Sequence[int]) -> list[Case]:
    """Return all cases: every method, and the controls of one method per task."""
    plain = [Case(t, m, s) for t, methods in METHODS.items() for m in methods for s in seeds]
    return plain + [
        Case(t, m, s, c) for t, m in CONTROLLED.items() for c in CONTROLS for s in seeds
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the selected cases, and keep the results of all others."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="prefix of the cases to train, such as chain/mmgrpo"
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(arguments)
    wanted = [
        c for c in cases([int(s) for s in args.seeds.split(",")]) if c.name.startswith(args.only)
    ]
    known = json.loads(OUTPUT.read_text(encoding="utf-8")) if OUTPUT.exists() else {}
    with ProcessPoolExecutor(args.processes) as pool:
        for case, found in track(
            zip(wanted, pool.map(train, wanted), strict=True), total=len(wanted)
        ):
            known[f"{case.name}/{case.seed}"] = found
            OUTPUT.write_text(
                json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8"
            )
            print(
                f"{case.name} seed {case.seed}: {found['before']} -> {found['after']}",
                file=sys.stderr,
            )


if __name__ == "__main__":
    main()
