"""Compare fast-slow training with stages of prompts and weights, at equal numbers of system runs.

    python -m benchmarks.measure.prompts.fast_slow [--seeds 0,1,2,3,4]

Writes ``benchmarks/data/fast_slow.json``: for each method and seed, the system runs, the score of
the trained system, the mean reward of rollouts by step, and the prompt. All methods may spend the
same number of system runs, including those of prompt search.

The task couples prompt and weights. An agent with weights reads a colour, an animal and a fruit,
and must name the place of the colour. A gate lets through only the places that its text names, one
of four at the start. A right answer is worth one half, and another half if the gate lets it
through; so another word helps the more, the better the agent is. A scripted model rewrites the
text: it adds a word, and does not know which one helps. Another text for the gate costs no system
runs while the agent's answers come from the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.simulated.toy_model import ANIMALS, COLOURS, FRUITS, PLACES, make_toy_model
from benchmarks.simulated.toys import place_of
from compound.components.function import Function
from compound.components.llm import LLM
from compound.core.engine import Engine
from compound.core.example import Example
from compound.core.narrowing import entry
from compound.engines.local.engine import TransformersEngine
from compound.evaluation.evaluate import evaluate
from compound.evaluation.metrics.custom import custom
from compound.execution.cache import MemoryCache
from compound.execution.executor import Executor
from compound.execution.rng import derive_seed
from compound.graph.component import Input
from compound.graph.space import ATTENTION, LoRA, Text
from compound.graph.system import System
from compound.optimization.method import JobContext, Problem, Proposal, Task
from compound.optimization.scorer import JobScorer
from compound.optimization.settings.optimize import make_settings
from compound.optimizers.methods import method
from compound.testing import PlainMemory, ScriptedLM

OUTPUT = Path(__file__).parents[2] / "data" / "fast_slow.json"
SEEDS = (0, 1, 2, 3, 4)
RUNS = 1200  # system runs of each method
KINDS = ("colour", "animal", "fruit")
SEARCH = 0.2  # share of prompt search in all of them
WORDS = (*PLACES, *FRUITS[:2])  # words that a rewritten text may add
WEIGHTS = {
    "steps": 100,
    "rollouts": {"examples": 4, "runs": 8},
    "loss": {"grpo": {"entropy": 0.01}},
    "optimizer": {"lr": 5e-3},
    "evaluation": {"every": 0},
}
METHODS: Mapping[str, Mapping[str, object]] = {
    "weights": {"stages": ["mmgrpo"]},
    "prompts, then weights": {"stages": ["gepa", "mmgrpo"]},
    "weights, then prompts": {"stages": ["mmgrpo", "gepa"]},
    "fast-slow": {
        "stages": ["mmgrpo"],
        "interleave": {"every": 10, "share": SEARCH / (1 - SEARCH)},
    },
}


def gate(said: str, text: str) -> str:
    """Let a word through if the text names it."""
    return said if said in text.split() else "nothing"


def graded(outputs: Mapping[str, object], example: Example) -> float:
    """Return one half for the right place, and another half if it passed the gate."""
    return float(outputs["said"] == example.gold["place"]) / 2 + (
        float(outputs["place"] == example.gold["place"]) / 2
    )


def coupled(model: str) -> System:
    """Return the system; one of the four places passes the gate at the start."""
    weights = LoRA(rank=8, targets=ATTENTION)
    agent = LLM("agent", output={"say": str}, max_tokens=1, temperature=1.0, weights=weights)(
        word=Input("colour", str), before=Input("animal", str), found=Input("fruit", str)
    )
    passed = Function("gate", gate, text=Text(PLACES[0]))(said=agent)
    return System("coupled", {"said": agent, "place": passed}, lm=model)


def examples() -> list[Example]:
    """Return all combinations of a colour, an animal and a fruit; only the colour matters."""
    return [
        Example(
            "-".join(words), dict(zip(KINDS, words, strict=True)), {"place": place_of(words[0])}
        )
        for words in itertools.product(COLOURS, ANIMALS, FRUITS)
    ]


def reflect(message: str, rng: np.random.Generator) -> str:
    """Rewrite a text: add any word that it does not have."""
    text = message.split("```")[1].strip()
    added = [word for word in WORDS if word not in text.split()]
    return f"```\n{text} {added[rng.integers(len(added))]}\n```" if added else f"```\n{text}\n```"


def train(
    chosen: Mapping[str, object],
    seed: int,
    runs: float = RUNS,
    weights: Mapping[str, object] = WEIGHTS,
) -> dict[str, object]:
    """Optimize the system from scratch; return the scores and the learning curve."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = make_toy_model(Path(folder) / "model", seed)
        return asyncio.run(_trained(chosen, seed, runs, weights, str(model), Path(folder)))


async def _trained(
    chosen: Mapping[str, object],
    seed: int,
    runs: float,
    weights: Mapping[str, object],
    model: str,
    folder: Path,
) -> dict[str, object]:
    settings = make_settings(
        {
            "method": "better_together",
            "seed": seed,
            "better_together": chosen,
            "mmgrpo": weights,
            "gepa": {"lm": "writer", "batch": 8, "held_out": 24},
        }
    )
    system, rows, metric = coupled(model), examples(), custom(graded)
    made = method("better_together", system, settings)
    memory = PlainMemory(folder / "memory")
    memory.folder.mkdir()
    engines: dict[str, Engine] = {
        model: TransformersEngine(model, dtype="float32"),
        "writer": ScriptedLM(reflect),
    }
    executor = Executor(engines, cache=MemoryCache(), seed=seed, folder=memory.folder)
    problem = Problem(system, rows, (), (), metric, settings, made, engines)
    context = JobContext(executor, metric, problem.rules, memory)
    try:
        before = (await evaluate(executor, system, rows, metric)).mean
        start = executor.meter.system_runs
        for number, job in enumerate(made.jobs):
            spent = executor.meter.system_runs
            part = SEARCH if job.optimizer.endswith("gepa") else 1 - SEARCH
            share = runs * part if number < len(made.jobs) - 1 else runs - (spent - start)
            scorer = JobScorer(problem, executor, system, share, spent)
            given = Task(
                system,
                job.keys,
                rows,
                scorer,
                derive_seed(seed, "job", number),
                seed,
                4,
                8,
                context,
            )
            async for event in made.optimizers[job.optimizer].propose(given):
                if isinstance(event, Proposal):
                    system = system.bind({**system.configuration, **event.values})
        used = executor.meter.system_runs - start
        after = (await evaluate(executor, system, rows, metric)).mean
    finally:
        await executor.aclose()
    steps = memory.records()
    return {
        "before": before,
        "after": after,
        "system_runs": round(used, 2),
        "rollouts": sum(entry(step, "rollouts", int) for step in steps),
        "text": system.configuration["gate.text"],
        "weights": entry(system.configuration, "agent.weights", dict)["sha256"],
        "curve": [round(entry(step, "reward", float), 3) for step in steps],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Train with each method and seed, and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    seeds = [int(seed) for seed in parser.parse_args(arguments).seeds.split(",")]
    cases = [(name, seed) for name in METHODS for seed in seeds]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        rows = pool.map(train, (METHODS[name] for name, _ in cases), (seed for _, seed in cases))
        results = dict(zip(cases, rows, strict=True))
    found: dict[str, object] = {"system_runs": RUNS, "search": SEARCH}
    for name in METHODS:
        of_seeds = {str(seed): results[name, seed] for seed in seeds}
        scores = [entry(row, "after", float) for row in of_seeds.values()]
        found[name] = {"mean": round(fmean(scores), 4), "seeds": of_seeds}
        print(f"{name}: {fmean(scores):.3f}", scores)
    OUTPUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
