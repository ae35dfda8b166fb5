"""Optimize an agent with two MCP servers in its texts and worked examples, and train it one step.

    nice -n 5 python -m benchmarks.measure.prompts.agent_tools

Writes ``benchmarks/data/agent_tools.json``: the score of each stage of ``benchmarks/agent.yaml`` on
the same test questions, with its 95 % interval, by kind of question (a search in the catalogue, a
calculation), and the controls: the best constant answer, and one direct call of the model without
tools.

1. The agent without worked examples.
2. As declared, with a worked example of each tool.
3. After `search` has tuned its prompt, worked examples and tool texts.
4. After one step of `mmgrpo` on the weights of 3, whether or not the step would be accepted.

Stages 3 and 4 are measured with several seeds of the search and the training. The model is the
embedded SmolLM2 with 135 million parameters; the servers are started as programs. About 20 minutes
on one core.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import compound as cp
from benchmarks.agents import catalogue
from compound.api.sweeps.controls import constant_answer, direct_system, evaluate_constant
from compound.core.example import Metric
from compound.core.narrowing import entry
from compound.evaluation.evaluate import Evaluation, evaluate
from compound.evaluation.examples import read_examples
from compound.execution.cache import MemoryCache
from compound.execution.executor import Executor
from compound.execution.rng import derive_seed
from compound.optimization.method import JobContext, Problem, Proposal, Task
from compound.optimization.scorer import JobScorer
from compound.optimization.settings.optimize import make_settings
from compound.optimizers.methods import method
from compound.testing import PlainMemory
from compound.yaml import Program, load

FILE = Path(__file__).parents[2] / "agent.yaml"
OUTPUT = Path(__file__).parents[2] / "data" / "agent_tools.json"
DEMOS, WEIGHTS = "clerk_turn.demos", "clerk_turn.weights"
SEEDS = 3
STEP = {
    "method": "mmgrpo",
    "mmgrpo": {
        "steps": 1,
        "rollouts": {"examples": 6, "runs": 6},
        "optimizer": {"lr": 5e-4},
        "evaluation": {"every": 0},
    },
}
CALLS = 200  # system runs that the training step may spend


class Measurement:
    """The stages of the agent, and their scores on the test questions.

    Args:
        program: the benchmark with its data.
        folder: where run directories and adapters are written.

    Attributes:
        seed: the seed of searches and trainings; set by `begin`.
    """

    def __init__(self, program: Program, folder: Path) -> None:
        assert program.metric is not None
        assert program.data is not None
        self.program, self.folder = program, folder
        self.begin(0)
        self.metric: Metric = program.metric
        self.train, self.valid, self.test = (
            read_examples(program.data, split, program.system.inputs)
            for split in ("train", "valid", "test")
        )
        self.stages: dict[str, object] = {}

    def begin(self, seed: int) -> None:
        """Use a seed, and an empty memory for the training."""
        self.seed, self.memory = seed, PlainMemory(self.folder / f"memory-{seed}")
        self.memory.folder.mkdir(exist_ok=True)

    def score(self, stage: str, system: cp.System) -> None:
        """Evaluate a stage on the test questions."""
        executor = self.executor()
        started = time.process_time()

        async def run() -> Evaluation:
            try:
                return await evaluate(executor, system, self.test, self.metric)
            finally:
                await executor.aclose()

        found = asyncio.run(run())
        calls = found.usage.calls / len(self.test)
        seconds = time.process_time() - started
        self.add(stage, found, {"model_calls": round(calls, 2), "cpu_seconds": round(seconds, 1)})

    def add(self, stage: str, found: Evaluation, facts: Mapping[str, object]) -> None:
        """Record and print the scores of a stage."""
        kinds = {
            "search": found.scores[0::2],
            "calculate": found.scores[1::2],
        }  # the questions alternate
        row = {
            **{name: round(value, 4) for name, value in _interval(found).items()},
            **{name: round(sum(scores) / len(scores), 4) for name, scores in kinds.items()},
            **facts,
        }
        self.stages[stage] = row
        print(stage, row, flush=True)

    def executor(self) -> Executor:
        """Return an executor with the engines of the program."""
        return Executor(
            self.program.find_engine, cache=MemoryCache(), seed=0, folder=self.memory.folder
        )

    def controls(self) -> None:
        """Evaluate the best constant answer, and a direct call of the model."""
        answer = constant_answer(self.metric, self.program.system.outputs, self.train)
        found = evaluate_constant(self.metric, answer, self.test, self.program.optimize)
        self.add("constant answer", found, {"answer": answer})
        self.score("direct call without tools", direct_system(self.program.system, self.metric))

    def searched(self, system: cp.System) -> tuple[cp.System, dict[str, object]]:
        """Tune all texts and worked examples; return the best system and the facts of the run."""
        data = {"train": self.train, "valid": self.valid}
        frozen = {key: value for key, value in system.parameters.items() if "weights" not in key}
        started = time.process_time()
        result = cp.optimize(
            system,
            data,
            self.metric,
            settings=self.program.optimize,
            engines=self.program.find_engine,
            run_dir=self.folder / f"search-{self.seed}",
            progress=False,
            seed=self.seed,
        )
        best = system.bind({**system.configuration, **{key: result.best[key] for key in frozen}})
        changed = [key for key in frozen if best.configuration[key] != system.configuration[key]]
        facts: dict[str, object] = {
            "valid_before": result.before.mean,
            "valid_after": result.after.mean,
            "system_runs": round(float(result.spent["system_runs"]), 1),
            "cpu_seconds": round(time.process_time() - started, 1),
            "changed": {key: best.configuration[key] for key in changed},
        }
        return best, facts

    def trained(self, system: cp.System) -> tuple[cp.System, dict[str, object]]:
        """Train the weights for one step; return the trained system and the facts of the step."""
        return asyncio.run(self._trained(system))

    async def _trained(self, system: cp.System) -> tuple[cp.System, dict[str, object]]:
        settings = make_settings({**STEP, "seed": self.seed})
        made = method("mmgrpo", system, settings)
        executor = self.executor()
        problem = Problem(
            system, self.train, (), (), self.metric, settings, made, self.program.find_engine
        )
        context = JobContext(executor, self.metric, problem.rules, self.memory)
        started = time.process_time()
        try:
            for job in made.jobs:
                scorer = JobScorer(problem, executor, system, CALLS, executor.meter.system_runs)
                seed = derive_seed(self.seed, "job")
                task = Task(system, job.keys, self.train, scorer, seed, 0, 4, 8, context)
                async for event in made.optimizers[job.optimizer].propose(task):
                    if isinstance(event, Proposal):
                        system = system.bind({**system.configuration, **event.values})
        finally:
            await executor.aclose()
        (step,) = self.memory.records()
        if system.configuration[WEIGHTS] is None:
            raise SystemExit(f"the step changed no weights: {step}")
        adapter = entry(system.configuration, WEIGHTS, dict)
        stored = self.memory.folder / str(adapter["path"])
        files = sorted(path for path in stored.rglob("*") if path.is_file())
        facts = {
            "cpu_seconds": round(time.process_time() - started, 1),
            "adapter": {path.name: path.stat().st_size for path in files},
            "step": step,
        }
        return system, facts


def _interval(found: Evaluation) -> dict[str, float]:
    interval = found.interval
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}


def main() -> None:
    """Measure all stages, and write the file."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        catalogue.main(str(folder / "shop"))
        measured = Measurement(load(FILE, overrides=[("data.path", str(folder / "shop"))]), folder)
        declared = measured.program.system
        measured.controls()
        measured.score("agent without worked examples", declared.bind({DEMOS: []}))
        measured.score("with two worked examples", declared)
        searches, steps = [], []
        for seed in range(SEEDS):
            measured.begin(seed)
            best, search = measured.searched(declared)
            measured.score(f"after search, seed {seed}", best)
            after, step = measured.trained(best)
            measured.score(f"after one training step, seed {seed}", after)
            searches.append(search)
            steps.append(step)
        found = {
            "questions": len(measured.test),
            "stages": measured.stages,
            "search": searches,
            "training": steps,
        }
    OUTPUT.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
