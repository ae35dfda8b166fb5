"""A small program for tests of clusters, written as files, and the evaluations that they compare."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from compound import Example, Executor, System, Trace
from compound.cluster.executor import RemoteExecutor
from compound.cluster.handshake import facts_of, rebuild
from compound.cluster.messages import Hello, Transport
from compound.cluster.pool import WorkerPool
from compound.evaluation.evaluate import Evaluation, EvaluationRules, evaluate_all
from compound.execution.budget import Budget, Meter
from compound.execution.cache import Cache, MemoryCache
from compound.graph.registry.engines import for_system
from compound.metrics import custom
from compound.yaml.program import SystemFile

CODE = '''
import os
import re
from dataclasses import dataclass

from compound.core.engine import Usage
from compound.core.errors import RateLimited
from compound.testing import ScriptedLM

LOG = os.path.join(os.path.dirname(__file__), "requests.log")


@dataclass
class Verdict:
    word: str
    length: int


def judge(text: str) -> Verdict:
    return Verdict(text.strip("-").split()[0], len(text))


def shorten(verdict: Verdict) -> str:
    return f"{verdict.word}{verdict.length}"


def score(outputs, example):
    return float(outputs["answer"][4:5] or 0) / 4


def answer(message, rng):
    with open(LOG, "a") as file:
        file.write("x\\n")
    if "Name the kind" in message:  # at temperature 0, the seed selects nothing
        return f"sort{message.count('1')}"
    if "poor" in message and rng.random() < 0.4:
        return "-"
    return f"word{int(rng.integers(5))} {len(message) % 7}"


class Simulated(ScriptedLM):
    """Answers from the request's random stream; a request is a line of the log."""

    def __init__(self, seconds: float = 0.0, limit: int = 8, local: bool = False):
        super().__init__(answer, name="simulated", latency=seconds, price=0.001, concurrency=limit,
                         remote=not local)
'''

FILE = """
system: pair
lm: simulated
inputs: {topic: str, kind: str}
components:
  sorter: {llm: {prompt: {tune: "Name the kind."}}, in: {kind: $kind}}
  writer: {llm: {prompt: {tune: "Write about it."}, temperature: 1.0}, in: {topic: $topic, kind: $sorter}}
  judged: {function: {call: "parts:judge"}, in: {text: $writer}}
  short: {function: {call: "parts:shorten"}, in: {verdict: $judged}}
  closer: {llm: {prompt: {tune: "Close it."}, temperature: 1.0}, in: {text: $short}}
outputs: {answer: $closer, verdict: $judged}
engines: {simulated: {class: "parts:Simulated", settings: {}}}
"""


def write_program(folder: Path, text: str = FILE, **settings: object) -> SystemFile:
    """Write the program to a folder and return its source; ``settings`` are those of the engine."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "parts.py").write_text(CODE)
    shown = ", ".join(f"{name}: {str(value).lower()}" for name, value in settings.items())
    text = text.replace("settings: {}", f"settings: {{{shown}}}")
    (folder / "system.yaml").write_text(text)
    return SystemFile(text=text, path=str(folder / "system.yaml"))


def requests(folder: Path) -> int:
    """Return the number of requests that were sent to the model, by any process."""
    log = folder / "requests.log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def examples(count: int) -> list[Example]:
    """Return examples; three of four share their kind."""
    return [
        Example(
            f"e{i}", {"topic": f"topic {i}" + " poor" * (i % 5 == 0), "kind": f"kind {i % 4}"}, {}
        )
        for i in range(count)
    ]


METRIC = custom(lambda outputs, _: float(len(str(outputs["answer"])) % 3) / 2, "length", (0.0, 1.0))


def remote_executor(
    source: SystemFile,
    transport: Transport,
    workers: int | None,
    *,
    cache: Cache | None = None,
    budget: Budget | None = None,
    seed: int = 0,
    notify: Callable[[str], object] = lambda _: None,
    start_seconds: float = 300.0,
    max_restarts: int = 20,
) -> RemoteExecutor:
    """Return an executor whose workers are started by a transport."""
    program = rebuild(source)

    def open_pool() -> WorkerPool:
        facts = facts_of(program.system, program.folder)
        return WorkerPool(
            transport,
            workers,
            Hello(program=source),
            facts,
            notify,
            start_seconds=start_seconds,
            max_restarts=max_restarts,
        )

    engines = for_system(program.find_engine, program.system)
    return RemoteExecutor(
        engines,
        program.system,
        open_pool,
        cache=cache,
        meter=Meter(budget),
        seed=seed,
        on_notice=notify,
    )


def local_executor(
    source: SystemFile, *, cache: Cache | None = None, budget: Budget | None = None
) -> Executor:
    """Return an executor that runs everything here."""
    program = rebuild(source)
    return Executor(
        for_system(program.find_engine, program.system), cache=cache, meter=Meter(budget)
    )


async def evaluated(
    executor: Executor, system: System, count: int = 12, concurrency: int = 6
) -> tuple[list[Evaluation], list[Trace]]:
    """Evaluate two configurations; return evaluations and traces, without times."""
    other = system.bind({"writer.prompt": "Write little about it."})
    traces: list[Trace] = []
    try:
        found = await evaluate_all(
            executor,
            [system, other],
            examples(count),
            METRIC,
            samples=(0, 1),
            rules=EvaluationRules(concurrency),
            on_trace=lambda _, trace: traces.append(trace),
        )
    finally:
        await executor.aclose()
    for trace in traces:
        for call in trace.calls:
            call.seconds = 0.0
    return found, traces


def local_result(source: SystemFile, **sizes: int) -> tuple[list[Evaluation], list[Trace], Meter]:
    """Return what an evaluation in one process gives."""
    executor = local_executor(source, cache=MemoryCache())
    found, traces = asyncio.run(evaluated(executor, rebuild(source).system, **sizes))
    return found, traces, executor.meter
