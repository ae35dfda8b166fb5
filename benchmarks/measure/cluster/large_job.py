"""Evaluate a million examples on three nodes of Ray, with failures, and once more in this process.

Run ``python -m benchmarks.measure.cluster.large_job`` where the extras ``ray`` and ``hub`` are
installed. It starts three nodes on this machine. After a quarter of the examples, one of them uses
memory until its worker is killed: with ``--monitor`` by Ray's memory monitor, 4 GB above what is in
use at the start, and otherwise by itself after 0.5 GB, since the monitor would also kill workers
because of other programs. After a half, a node with a worker is killed. The examples are read from a Parquet
file; the component is a Python function. Both runs are processes of their own. The resident memory
of each is written to ``benchmarks/data/large_job.json`` after each fiftieth of the examples.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure.cluster.ray_overhead import resident_mb
from compound.api.runners import executor_opener
from compound.core.example import Example
from compound.evaluation.dataset import Dataset
from compound.evaluation.evaluate import EvaluationRules, evaluate
from compound.evaluation.examples import read_or_stream
from compound.evaluation.metrics.built_in import exact_match
from compound.execution.executor import Executor
from compound.execution.trace import Trace
from compound.graph.registry.engines import for_system
from compound.optimization.settings.base import RaySettings, RunnerSettings
from compound.optimization.settings.optimize import OptimizeSettings
from compound.yaml.program import load

OUTPUT = Path(__file__).parents[2] / "data" / "large_job.json"
NODES, IN_FLIGHT, GROUP = 3, 64, 20_000
HEADROOM, STEP = 4e9, 64 * 2**20  # bytes
OWNER, MOST = (
    "COMPOUND_LARGE_JOB",
    "COMPOUND_LARGE_JOB_BYTES",
)  # process that survives; limit of others
FILE = """
system: large
inputs: {text: str}
components:
  counter: {function: {call: "benchmarks.measure.cluster.large_job:count_words"}, in: {text: $text}}
outputs: {answer: $counter}
data: {path: rows.parquet, valid: rows, split_by: {valid: 1.0}}
"""


def count_words(text: str) -> str:
    """Return the number of words; on a worker, use all memory for the text that asks for it, once."""
    if text.startswith("/") and os.environ.get(OWNER) != str(os.getpid()):
        try:
            Path(text).mkdir()
        except FileExistsError:
            pass
        else:
            _fill_memory(Path(text))
    return str(len(text.split()) % 7)


def _fill_memory(mark: Path) -> None:
    held = list[bytearray]()
    while len(held) * STEP < float(os.environ[MOST]):
        held.append(bytearray(os.urandom(4096) * (STEP // 4096)))
        (mark / "bytes").write_text(str(len(held) * STEP), encoding="utf-8")
        time.sleep(0.02)
    (mark / "not_killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def write_rows(path: Path, count: int, mark: Path) -> None:
    """Write texts of 20 to 40 words; one of them asks for all memory."""
    import pyarrow as pa
    from pyarrow import parquet

    texts = ("text " * (20 + number * 7919 % 21) + str(number) for number in range(count))
    schema = pa.schema({"text": pa.string(), "answer": pa.string()})
    with parquet.ParquetWriter(path, schema) as file:
        for start in range(0, count, GROUP):
            rows = [next(texts) for _ in range(min(GROUP, count - start))]
            if start <= count // 4 < start + GROUP:
                rows[count // 4 - start] = str(mark)
            answers = [str(len(text.split()) % 7) for text in rows]
            file.write_table(pa.table({"text": rows, "answer": answers}, schema))


class Progress:
    """Digest of all results, and the memory of the process by time."""

    def __init__(self, count: int, output: Path, middle: Callable[[], None]) -> None:
        self._count, self._output, self._middle = count, output, middle
        self._digest = hashlib.sha256()
        self._start, self._done = time.perf_counter(), 0
        self.found: dict[str, Any] = {"seconds": [], "examples": [], "mb": [], "notices": []}

    def add(self, example: Example, trace: Trace) -> None:
        """Add a scored trace."""
        if not self._done:
            self._start = time.perf_counter()
            self.save()
        self._digest.update(
            f"{example.id} {trace.outputs} {trace.score} {trace.failure}\n".encode()
        )
        self._done += 1
        if self._done == self._count // 2:
            threading.Thread(target=self._middle).start()
        if self._done % (self._count // 50) == 0:
            self.save()

    def save(self, **facts: object) -> None:
        """Write what is known."""
        self.found["seconds"].append(round(time.perf_counter() - self._start, 1))
        self.found["examples"].append(self._done)
        self.found["mb"].append(round(resident_mb(), 1))
        self.found |= {"digest": self._digest.hexdigest(), **facts}
        self._output.write_text(json.dumps(self.found), encoding="utf-8")


def run(folder: Path, output: Path, *, with_ray: bool, monitor: bool) -> None:
    """Evaluate all examples once."""
    os.environ[OWNER] = str(os.getpid())
    program = load(folder / "system.yaml")
    assert program.data is not None
    open_executor: Callable[..., Executor] = Executor
    nodes: list[Any] = []
    if with_ray:
        nodes = _start_nodes(monitor)
        runner = RunnerSettings(ray=RaySettings(workers=NODES, max_restarts=100))
        settings = OptimizeSettings(runner=runner)
        open_executor = executor_opener(settings, program.system, program.find_engine)
    data: Dataset = program.data
    examples = read_or_stream(data, "valid", program.system.inputs)

    def kill_node() -> None:
        if nodes:
            progress.found["node_killed_at"] = progress.found["examples"][-1]
            nodes[0].remove_node(max(nodes[1:], key=_workers_of), allow_graceful=False)

    progress = Progress(len(examples), output, kill_node)
    executor = open_executor(
        for_system(program.find_engine, program.system), on_notice=progress.found["notices"].append
    )

    async def work() -> None:
        found = await evaluate(
            executor,
            program.system,
            examples,
            exact_match("answer"),
            rules=EvaluationRules(concurrency=IN_FLIGHT),
            on_trace=progress.add,
        )
        await executor.aclose()
        progress.save(mean=found.mean, failed=found.failed, rows=len(found.rows))

    asyncio.run(work())


def _start_nodes(monitor: bool) -> list[Any]:
    """Start the nodes and return the cluster, followed by those that may be killed."""
    import psutil
    import ray
    from ray.cluster_utils import Cluster

    memory = psutil.virtual_memory()
    used = memory.total - memory.available
    share = f"{(used + HEADROOM) / memory.total:.3f}"
    os.environ[MOST] = str(HEADROOM * 2 if monitor else HEADROOM / 8)
    interval = "100" if monitor else "0"
    os.environ.update(RAY_memory_usage_threshold=share, RAY_memory_monitor_refresh_ms=interval)
    size = {"num_cpus": 2, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    others = [cluster.add_node(**size) for _ in range(NODES - 1)]
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    return [cluster, *others]


def _workers_of(node: Any) -> int:  # noqa: ANN401 - of Ray, without types
    """Return the number of workers that compute calls on a node."""
    import psutil

    (raylet,) = node.all_processes["raylet"]
    commands = (child.cmdline() for child in psutil.Process(raylet.process.pid).children())
    return sum("".join(command).startswith("ray::CallWorker") for command in commands)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--examples", type=int, default=1_000_000)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--monitor", action="store_true", help="let Ray end the worker")
    parser.add_argument("--run", choices=["ray", "here"], help="one run, in a folder with the data")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args(arguments)
    if args.run:
        run(args.folder, args.output, with_ray=args.run == "ray", monitor=args.monitor)
        return
    found: dict[str, Any] = {"python": platform.python_version(), "examples": args.examples}
    found["processors"] = len(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "benchmarks.measure.cluster.large_job"]
    command += [*(["--monitor"] if args.monitor else []), "--output"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mark = folder / "memory"
        (folder / "system.yaml").write_text(FILE, encoding="utf-8")
        write_rows(folder / "rows.parquet", args.examples, mark)
        for kind in ("ray", "here"):
            part = args.output.with_suffix(f".{kind}.json")
            subprocess.run([*command, str(part), "--run", kind, "--folder", name], check=True)
            found[kind] = json.loads(part.read_text(encoding="utf-8"))
            part.unlink()
            args.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        found["out_of_memory_at"] = int((mark / "bytes").read_text(encoding="utf-8"))
        found["killed_by_ray"] = not (mark / "not_killed").exists()
    same = ("digest", "mean", "failed", "rows")
    found["equal"] = all(found["ray"][name] == found["here"][name] for name in same)
    args.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print({name: value for name, value in found.items() if name not in ("ray", "here")})


if __name__ == "__main__":
    main()
