"""Measure the way of a call: its time beside a bare DSPy module, its stack frames, and memory.

Run ``python -m benchmarks.measure.node_call --against FOLDER``, where the folder holds the source
of another version, such as one made by ``git worktree add``.

One process for each version and one for DSPy stay open and are asked in turn, in rotating order,
for the CPU time of a call in chains of 5, 100 and 1,000 nodes with types and traces. Medians, the
smallest and the largest value, and the median of the ratios of pairs are printed and written to
``benchmarks/data/node_call.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
OUTPUT = ROOT / "benchmarks" / "data" / "node_call.json"
LENGTHS = (5, 100, 1000)
CALLS = 4000  # per measurement
EXAMPLES = 10_000


def successor(x: int) -> int:
    """Return the next number."""
    return x + 1


def compound_chain(length: int) -> Callable[[int], object]:
    """Return a function that runs a chain of new nodes several times."""
    import compound as cp

    source: Any = cp.Input("x", int)
    for i in range(length):
        source = cp.Function(f"n{i:04d}", successor)(x=source)
    system, executor = cp.System("chain", outputs={"y": source}), cp.Executor()

    async def run(times: int) -> None:
        for i in range(times):
            await executor.run(system, {"x": i})

    return lambda times: asyncio.run(run(times))


def dspy_chain(length: int) -> Callable[[int], object]:
    """Return a function that runs a chain of bare modules of DSPy several times."""
    import dspy

    class Step(dspy.Module):  # type: ignore[misc] # the library has no types
        def forward(self, x: int) -> int:
            return x + 1

    class Chain(dspy.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.steps = [Step() for _ in range(length)]

        def forward(self, x: int) -> int:
            for step in self.steps:
                x = step(x=x)
            return x

    chain = Chain()
    return lambda times: [chain(x=i) for i in range(times)]


def call_time(kind: str, length: int) -> float:
    """Return the CPU time of a call in microseconds."""
    run = (dspy_chain if kind == "dspy" else compound_chain)(length)
    run(1)
    times, started = CALLS // length, time.process_time()
    run(times)
    return (time.process_time() - started) / times / length * 1e6


def memory_growth(*_: object) -> float:
    """Return by how many MB the process grows while it evaluates examples of a diamond."""
    import compound as cp

    start = cp.Function("start", successor)(x=cp.Input("x", int))
    left, right = (cp.Function(name, successor)(x=start) for name in ("left", "right"))

    def add(a: int, b: int) -> int:
        return a + b

    system = cp.System("diamond", outputs={"y": cp.Function("join", add)(a=left, b=right)})
    rows = [cp.Example(str(i), {"x": i}, {"y": str(2 * i + 4)}) for i in range(EXAMPLES)]
    metric = cp.metrics.exact_match("y")
    cp.evaluate(system, rows[:500], metric)
    before = resident()
    found = cp.evaluate(system, rows, metric)
    assert found.mean == 1.0
    return resident() - before


def resident() -> float:
    """Return the resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def stack_frames(*_: object) -> int:
    """Return the number of the package's frames from `Executor.run` to the model of one LLM."""
    import compound as cp
    from compound.execution.cache import MemoryCache
    from compound.testing import ScriptedLM

    found: list[str] = []

    class Model(ScriptedLM):
        async def generate(self, request: cp.ext.Request) -> cp.ext.Completion:
            frame = sys._getframe(1)
            while frame is not None and frame.f_code.co_name != "_run":
                found.append(frame.f_code.co_filename)
                frame = frame.f_back  # type: ignore[assignment]
            return await super().generate(request)

    model = Model(["4"])
    answerer = cp.LLM("answerer", lm="model")(question=cp.Input("question"))
    system = cp.System("answer", outputs={"answer": answerer})
    executor = cp.Executor({"model": model}, cache=MemoryCache())
    asyncio.run(executor.run(system, {"question": "2 + 2"}))
    return 1 + sum(Path(name).is_relative_to(Path.cwd()) for name in found)


def import_time(*_: object) -> float:
    """Return the milliseconds of the import of the package in a new process, the least of nine."""
    code = "import time; t = time.perf_counter(); import compound; print(time.perf_counter() - t)"
    command = [sys.executable, "-c", code]
    done = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(9)]
    return 1000 * min(float(each.stdout) for each in done)


MEASURES: Mapping[str, Callable[..., float]] = {
    "call": call_time,
    "memory": memory_growth,
    "frames": stack_frames,
    "import": import_time,
}


class Process:
    """A process that measures on request.

    Args:
        kind: ``dspy`` or ``compound``.
        folder: the source of the version.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        command = [sys.executable, str(Path(__file__)), "--child", kind]
        self._child = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, measure: str, length: int = 0) -> float:
        """Return a measurement."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        print(measure, length, file=self._child.stdin, flush=True)
        return float(self._child.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._child.communicate()


def serve(kind: str) -> None:
    """Answer requests for measurements until the input ends."""
    for line in sys.stdin:
        measure, length = line.split()
        print(MEASURES[measure](kind, int(length)), flush=True)


def summary(values: list[float]) -> dict[str, float]:
    """Return median, smallest and largest value."""
    found = {"median": median(values), "least": min(values), "most": max(values)}
    return {name: round(value, 2) for name, value in found.items()}


def compare(folder: Path, rounds: int) -> dict[str, object]:
    """Measure both versions and DSPy in turn."""
    processes = {
        "before": Process("compound", folder),
        "now": Process("compound", ROOT),
        "dspy": Process("dspy", ROOT),
    }
    found: dict[str, object] = {"rounds": rounds}
    for length in LENGTHS:
        times: dict[str, list[float]] = {name: [] for name in processes}
        for i in range(rounds):
            names = [*processes]
            for name in names[i % 3 :] + names[: i % 3]:
                times[name].append(processes[name].ask("call", length))
        pairs = [a / b for a, b in zip(times["now"], times["dspy"], strict=True)]
        found[f"us_per_call_chain_{length}"] = {name: summary(row) for name, row in times.items()}
        found[f"ratio_to_dspy_chain_{length}"] = summary(pairs)
    for measure in ("import", "frames", "memory"):
        found[measure] = {
            name: round(processes[name].ask(measure), 2) for name in ("before", "now")
        }
    for process in processes.values():
        process.close()
    return found


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="folder of the other version")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        serve(arguments.child)
        return
    text = json.dumps(compare(arguments.against.resolve(), arguments.rounds), indent=2)
    print(text)
    OUTPUT.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
