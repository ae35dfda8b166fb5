"""Measure what new adapters in every step cost while many graphs run, as in the sampling of a training.

Run ``python -m benchmarks.measure.training.adapter_swaps [--engine transformers|vllm]``.

A system has `AGENTS` components in a chain, each with its own adapter. A step executes `RUNS`
graphs concurrently. Steps with the adapters of the step before (``same``) and with new versions of
all adapters (``new``) alternate, in reverse order in every other round. The time of a step includes
loading, verifying and checking the versions, but not their training. Servers load the versions of a
step together before its first call; for them there are also steps that load each version at its
first use (``first use``). ``vllm`` starts a server with the command in ``COMPOUND_VLLM``. Results
of an engine are written to ``benchmarks/data/adapter_swaps.json``; those of the other one are kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING

import compound as cp
from compound.core.engine import AdapterEngine
from compound.execution.executor import Executor
from compound.graph.component import Input
from compound.graph.space import LoRA
from compound.optimizers.weights.bases import load_adapters
from compound.optimizers.weights.learner.adapters import Adapters

if TYPE_CHECKING:
    from compound.graph.component import Output
    from compound.graph.system import System

OUTPUT = Path(__file__).parents[2] / "data" / "adapter_swaps.json"
AGENTS = ("planner", "writer", "critic", "editor")
RUNS = 64  # graphs that are executed at the same time
TOKENS = 16  # maximum number of tokens of an answer
RANK = 8
VLLM = ("--dtype", "bfloat16", "--gpu-memory-utilization", "0.3", "--max-model-len", "1024")
Versions = Mapping[str, Mapping[str, str]]  # references of the adapters by component

ENGINES: Mapping[str, Callable[[], cp.ext.Engine]] = {
    "transformers": lambda: cp.engines.Transformers("smollm2"),
    "vllm": lambda: cp.engines.VLLM(
        "smollm2", args=VLLM, max_lora_rank=RANK, max_loras=len(AGENTS)
    ),
}


def chain() -> System:
    """Return agents that each continue the text of the one before."""
    text: Input | Output = Input("topic")
    for name in AGENTS:
        agent = cp.LLM(
            name,
            prompt=f"You are the {name} of a short text. Write the next sentence.",
            max_tokens=TOKENS,
            temperature=1.0,
            weights=LoRA(rank=RANK),
        )
        text = agent(text=text)
    return cp.System("chain", outputs={"text": text}, lm="lm")


class Trained:
    """Adapters that change as those of a training do.

    Args:
        folder: the folder that versions are stored in.
    """

    def __init__(self, folder: Path) -> None:
        import torch

        self._folder, self._noise = folder, torch.Generator().manual_seed(0)
        self._adapters = Adapters("smollm2", {name: LoRA(rank=RANK) for name in AGENTS})

    def next(self) -> Versions:
        """Change each weight by about the size of a training step, and store the versions."""
        import torch

        found = {}
        for name in AGENTS:
            for _, weight in self._adapters.parameters(name):
                weight.data += 1e-3 * torch.randn(weight.shape, generator=self._noise)
            reference = self._adapters.save(name, self._folder)
            assert reference is not None
            found[f"{name}.weights"] = {**reference, "path": str(self._folder / reference["path"])}
        return found


async def step(
    engine: cp.ext.Engine, versions: Versions, number: int, *, together: bool = True
) -> float:
    """Execute the graphs of a step; return the number of completion tokens per second."""
    system, executor = chain().bind(versions), Executor({"lm": engine}, seed=number)
    topics = [f"the number {topic} and what people say of it" for topic in range(RUNS)]
    start = time.perf_counter()
    if together:
        await load_adapters(system, AGENTS, executor.engine, Path())  # as a training does
    traces = await asyncio.gather(
        *(executor.run(system, {"topic": topic}, example=topic, sample=number) for topic in topics)
    )
    seconds = time.perf_counter() - start
    calls = [call for trace in traces for call in trace.calls]
    assert len(calls) == RUNS * len(AGENTS)
    return sum(call.usage.completion_tokens for call in calls) / seconds


async def measure(engine: cp.ext.Engine, trained: Trained, rounds: int) -> dict[str, object]:
    """Alternate steps with the same adapters and with new ones."""
    kinds = ("same", "new", "first use") if isinstance(engine, AdapterEngine) else ("same", "new")
    versions = trained.next()
    await step(engine, versions, 0)
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        for place, kind in enumerate(kinds if number % 2 else kinds[::-1]):
            if kind != "same":
                versions = trained.next()
            index = 1 + len(kinds) * number + place
            rates[kind].append(await step(engine, versions, index, together=kind != "first use"))
            print(
                f"round {number + 1}, {kind}: {rates[kind][-1]:.1f} tokens/s",
                file=sys.stderr,
                flush=True,
            )
    await engine.aclose()
    ratios = {
        kind: [new / same for same, new in zip(rates["same"], rates[kind], strict=True)]
        for kind in kinds[1:]
    }
    return {
        "rounds": rounds,
        "tokens_per_second": {kind: _spread(found) for kind, found in rates.items()},
        "by_same": {kind: _spread(found) for kind, found in ratios.items()},
    }


def _spread(values: list[float]) -> dict[str, float]:
    low, _, high = quantiles(values, n=4)
    found = {
        "median": median(values),
        "p25": low,
        "p75": high,
        "least": min(values),
        "most": max(values),
    }
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    """Measure one engine, and keep the results of the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--engine", choices=list(ENGINES), default="transformers")
    parser.add_argument("--rounds", type=int, default=8, help="steps of each kind")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        trained = Trained(Path(folder))
        found = asyncio.run(measure(ENGINES[given.engine](), trained, given.rounds))
    machine = {"processor": platform.machine(), "processors": os.cpu_count(), "load": load}
    known = json.loads(given.output.read_text(encoding="utf-8")) if given.output.exists() else {}
    known[given.engine] = {
        "runs": RUNS,
        "adapters": len(AGENTS),
        "tokens": TOKENS,
        **machine,
        **found,
    }
    given.output.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(known[given.engine], indent=1))


if __name__ == "__main__":
    main()
