"""Measure what calls on Ray workers cost and gain, with a simulated model.

Run ``python -m benchmarks.measure.cluster.ray_overhead`` where the extra ``ray`` is installed. It
starts a Ray cluster on this machine, prints one JSON object and writes it to
``benchmarks/data/ray_overhead.json``.

- ``overhead``: wall time per example of an evaluation with one worker, minus that here, of a system
  with one Python function; pairs are interleaved. With one example in flight the whole latency of
  the messages shows.
- ``scaling``: examples per second with 8 workers and with 1, with a model in the process of each worker that
  answers 4 requests at a time, each after 200 ms.
- ``memory``: resident memory of the driver while it evaluates different examples one batch after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from compound.api.runners import executor_opener
from compound.core.example import Example
from compound.evaluation.evaluate import EvaluationRules, evaluate
from compound.evaluation.metrics.built_in import exact_match
from compound.execution.executor import Executor
from compound.graph.registry.engines import for_system
from compound.optimization.settings.base import RaySettings, RunnerSettings
from compound.optimization.settings.optimize import OptimizeSettings
from compound.testing import ScriptedLM
from compound.yaml.program import Program, load

OUTPUT = Path(__file__).parents[2] / "data" / "ray_overhead.json"
SECONDS = 0.2  # latency of the simulated model
EACH = 4  # examples in flight per worker
INSTANT = """
system: simulated
inputs: {question: str}
components:
  answerer: {function: {call: "benchmarks.measure.cluster.ray_overhead:answer"}, in: {question: $question}}
outputs: {answer: $answerer}
"""
WAITING = """
system: simulated
lm: simulated
inputs: {question: str}
components:
  answerer: {llm: {prompt: {tune: Answer.}}, in: {question: $question}}
outputs: {answer: $answerer}
engines:
  simulated:
    class: "benchmarks.measure.cluster.ray_overhead:Simulated"
    settings: {at_once: AT_ONCE, remote: false}
""".replace("AT_ONCE", str(EACH))


def answer(question: str) -> str:
    """Return the answer to every question."""
    return "yes" if question else ""


class Simulated(ScriptedLM):
    """A model that answers a number of requests at a time, each after a fixed time.

    Args:
        seconds: the time.
        at_once: the number of requests.
        remote: whether it is behind a server, or in the process.
    """

    def __init__(self, seconds: float = SECONDS, at_once: int = 1024, remote: bool = True) -> None:
        super().__init__(
            lambda _: "yes", name="simulated", latency=seconds, concurrency=at_once, remote=remote
        )

    async def generate(self, request: object) -> object:  # type: ignore[override]
        """Answer without recording the request, so that memory stays flat."""
        self.requests.clear()
        return await super().generate(request)  # type: ignore[arg-type]


def opened(program: Program, workers: int) -> Executor:
    """Return an executor with workers, or without for 0."""
    engines = for_system(program.find_engine, program.system)
    if workers == 0:
        return Executor(engines)
    runner = RunnerSettings(ray=RaySettings(workers=workers, cpus=0))
    open_executor = executor_opener(
        OptimizeSettings(runner=runner), program.system, program.find_engine
    )
    return open_executor(engines)


async def seconds_per_example(
    executor: Executor, program: Program, count: int, concurrency: int, start: int = 0
) -> float:
    """Evaluate examples that no cache or earlier evaluation has; return the wall time of each."""
    rows = [
        Example(str(i), {"question": f"question {i}"}, {"answer": "yes"})
        for i in range(start, start + count)
    ]
    started = time.perf_counter()
    found = await evaluate(
        executor,
        program.system,
        rows,
        exact_match("answer"),
        rules=EvaluationRules(concurrency=concurrency),
    )
    assert found.mean == 1.0
    assert len(found.rows) == count
    return (time.perf_counter() - started) / count


async def overhead(program: Program, repeats: int) -> dict[str, object]:
    """Return milliseconds per example that a worker adds, with 64 examples in flight and with 1."""
    found: dict[str, object] = {}
    for concurrency, count in ((64, 640), (1, 100)):
        here, there = opened(program, 0), opened(program, 1)
        await seconds_per_example(there, program, 64, concurrency)  # starts the worker
        pairs = [
            (
                await seconds_per_example(here, program, count, concurrency, start),
                await seconds_per_example(there, program, count, concurrency, start),
            )
            for start in range(1000, 1000 * (repeats + 1), 1000)
        ]
        added = sorted(1000 * (remote - local) for local, remote in pairs)
        found[f"in_flight_{concurrency}"] = {
            "ms_per_example_here": round(1000 * statistics.median(local for local, _ in pairs), 3),
            "ms_per_example_on_worker": round(
                1000 * statistics.median(remote for _, remote in pairs), 3
            ),
            "ms_added_median": round(statistics.median(added), 3),
            "ms_added_range": [round(added[0], 3), round(added[-1], 3)],
            "examples": count,
            "pairs": repeats,
        }
        await here.aclose()
        await there.aclose()
    return found


async def scaling(program: Program, repeats: int) -> dict[str, object]:
    """Return the throughput of 8 workers relative to 1, with the same concurrency of each."""
    executors = {workers: opened(program, workers) for workers in (1, 8)}
    for workers, executor in executors.items():
        await seconds_per_example(
            executor, program, workers * EACH, workers * EACH
        )  # starts the workers
    ratios, rates = [], dict[int, list[float]]()
    for _ in range(repeats):
        for workers, executor in executors.items():
            slots = workers * EACH
            each = await seconds_per_example(executor, program, 10 * slots, slots)
            rates.setdefault(workers, []).append(1 / each)
        ratios.append(rates[8][-1] / rates[1][-1])
    for executor in executors.values():
        await executor.aclose()
    return {
        "seconds_per_request": SECONDS,
        "in_flight_per_worker": EACH,
        "examples_per_second": {str(k): round(statistics.median(v), 2) for k, v in rates.items()},
        "bound_examples_per_second": {str(k): k * EACH / SECONDS for k in rates},
        "ratio_8_to_1_median": round(statistics.median(ratios), 2),
        "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
        "repeats": repeats,
    }


def resident_mb() -> float:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def memory(program: Program, examples: int) -> dict[str, object]:
    """Return the driver's memory after each fifth of the examples."""
    executor, step, seen = opened(program, 1), examples // 5, []
    await seconds_per_example(executor, program, 1000, 64)
    for number in range(5):
        await seconds_per_example(executor, program, step, 64, 1000 + number * step)
        gc.collect()
        seen.append(round(resident_mb(), 1))
    await executor.aclose()
    return {
        "examples": examples,
        "driver_mb": seen,
        "kb_per_example_after_first_fifth": round(1000 * (seen[-1] - seen[0]) / (4 * step), 3),
    }


async def measure(
    instant: Program, waiting: Program, repeats: int, examples: int
) -> Mapping[str, object]:
    """Run every measurement."""
    import ray

    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    return {
        "python": platform.python_version(),
        "ray": ray.__version__,
        "processors": len(os.sched_getaffinity(0)),
        "overhead": await overhead(instant, repeats),
        "scaling": await scaling(waiting, repeats),
        "memory": await memory(instant, examples),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--examples", type=int, default=100_000, help="examples of the measurement of memory"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        programs = []
        for name, text in (("instant", INSTANT), ("waiting", WAITING)):
            path = Path(folder) / f"{name}.yaml"
            path.write_text(text, encoding="utf-8")
            programs.append(load(path))
        text = json.dumps(
            asyncio.run(measure(programs[0], programs[1], args.repeats, args.examples)), indent=2
        )
    print(text)
    args.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
