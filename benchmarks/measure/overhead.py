"""Measure the overhead of the framework, without models.

Run ``python -m benchmarks.measure.overhead``.

Prints one JSON object and writes it to ``benchmarks/data/overhead.json``. Times are the best of
several repeats. Compare the ratios, as times differ between machines.
"""

from __future__ import annotations

import asyncio
import gc
import json
import platform
import time
import tracemalloc
from pathlib import Path

from compound.components.function import Function
from compound.core.example import Example
from compound.evaluation.evaluate import EvaluationRules, evaluate
from compound.evaluation.metrics.built_in import exact_match
from compound.execution.executor import Executor
from compound.graph.component import Input, Source
from compound.graph.system import System

OUTPUT = Path(__file__).parents[1] / "data" / "overhead.json"
WAIT = 0.05  # seconds a branch of the diamond waits


def successor(x: int) -> int:
    """Return the next number, with almost no work."""
    return x + 1


async def slow(x: int) -> int:
    """Wait, like a call of a remote model."""
    await asyncio.sleep(WAIT)
    return x


def add(a: int, b: int) -> int:
    """Add the results of two branches."""
    return a + b


def chain(length: int) -> System:
    """Return a chain of ``length`` nodes, each a separate component."""
    source: Source = Input("x", int)
    for i in range(length):
        source = Function(f"n{i:04d}", successor)(x=source)
    return System("chain", outputs={"y": source})


def diamond() -> System:
    """Return a system of two branches that wait, between two nodes that do not."""
    start = Function("start", successor)(x=Input("x", int))
    left = Function("left", slow)(x=start)
    right = Function("right", slow)(x=start)
    return System("diamond", outputs={"y": Function("join", add)(a=left, b=right)})


async def per_call(length: int, repeats: int) -> float:
    """Return microseconds per node call on a chain, the minimum of five."""
    system, executor = chain(length), Executor()
    await executor.run(system, {"x": 0})
    times = []
    for _ in range(5):
        started = time.perf_counter()
        for i in range(repeats):
            await executor.run(system, {"x": i})
        times.append(time.perf_counter() - started)
    return min(times) / repeats / length * 1e6


async def critical_path() -> float:
    """Return the ratio of the diamond's time to its critical path (one wait), the median of nine."""
    system, executor = diamond(), Executor()
    await executor.run(system, {"x": 0})
    ratios = []
    for i in range(9):
        started = time.perf_counter()
        await executor.run(system, {"x": i})
        ratios.append((time.perf_counter() - started) / WAIT)
    return sorted(ratios)[4]


async def fork_counts(length: int) -> dict[str, int]:
    """Return the number of nodes that a fork at each position of a chain executes."""
    system, executor = chain(length), Executor()
    trace = await executor.run(system, {"x": 0})
    counts = {}
    for k in range(length):
        fork = await executor.fork(system, trace, f"n{k:04d}", outputs={"output": 100})
        counts[f"at node {k + 1} of {length}"] = sum(not call.reused for call in fork.calls)
    return counts


async def memory(examples: int) -> dict[str, float]:
    """Evaluate many examples at concurrency 256; return seconds and peak memory in MB."""
    system = chain(5)
    rows = [Example(str(i), {"x": i}, {"y": str(i + 5)}) for i in range(examples)]
    gc.collect()
    tracemalloc.start()
    started = time.perf_counter()
    result = await evaluate(
        Executor(), system, rows, exact_match("y"), rules=EvaluationRules(concurrency=256)
    )
    seconds = time.perf_counter() - started
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    assert len(result.rows) == examples
    assert result.mean == 1.0
    return {
        "examples": examples,
        "seconds_while_traced": round(seconds, 2),
        "peak_mb": round(peak, 2),
    }


async def measure() -> dict[str, object]:
    """Run every measurement."""
    short, long = await per_call(5, 2000), await per_call(1000, 10)
    small, large = await memory(2_500), await memory(10_000)
    return {
        "python": platform.python_version(),
        "us_per_call_chain_5": round(short, 2),
        "us_per_call_chain_1000": round(long, 2),
        "ratio_1000_to_5": round(long / short, 3),
        "diamond_over_critical_path": round(await critical_path(), 4),
        "fork_executed_nodes": await fork_counts(5),
        "evaluate_concurrency_256": [small, large],
        "peak_bytes_per_extra_example": round(
            (large["peak_mb"] - small["peak_mb"]) * 1e6 / 7_500, 1
        ),
    }


def main() -> None:
    """Measure, print and save."""
    text = json.dumps(asyncio.run(measure()), indent=2)
    print(text)
    OUTPUT.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
