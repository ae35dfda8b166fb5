"""Measure how long the studio takes for its pages on a large run, and how much memory it uses.

    python -m benchmarks.measure.studio --output benchmarks/data/studio.json

The run has 10,000 test examples, each with two model calls, and 400 candidates. The server is a
process of its own. The first request of each page is made on a server that has just started; of
the further ones, the median is stated. Memory is the resident size of the server.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx

import compound as cp
from compound.core.engine import Message, Usage
from compound.evaluation.evaluate import Evaluation, ScoredRun
from compound.execution.exchange import Exchange
from compound.execution.rng import generator
from compound.execution.trace import Call, Trace, to_json
from compound.graph.configuration import Configuration
from compound.optimization.budget_plan import BudgetPlan
from compound.optimization.proposals import LedgerState
from compound.optimization.runs.candidates import Candidates, CandidateState, SplitRuns
from compound.optimization.runs.directory import RunDirectory
from compound.optimization.runs.state import FinalEvaluation, OptimizationState, SearchState
from compound.optimization.settings.base import LimitSettings

EXAMPLES, CANDIDATES, REPEATS = 10_000, 400, 9
PAGES = {
    "runs": "/",
    "overview": "/run/large",
    "candidates": "/run/large?view=candidates",
    "examples": "/run/large?view=examples",
    "worse examples": "/run/large?view=examples&show=worse&sort=gain",
    "search": "/run/large?view=examples&q=number+77",
    "example": "/run/large?view=example&example=e77",
}


def write_run(folder: Path, examples: int, candidates: int) -> None:
    """Write a finished run with random scores."""
    rng = generator(0, "studio")
    start = Configuration({"answerer.prompt": "Answer the question.", "finder.k": 1})
    best = start.replace({"answerer.prompt": "Answer the question in a few words.", "finder.k": 3})
    config = {
        "format": 3,
        "system": "large",
        "signature": "0",
        "defaults": {},
        "start": start.to_json(),
        "graph": {"nodes": [], "edges": [], "outputs": {}},
        "engines": {"m": "scripted"},
        "data": {"test": {"n": examples, "digest": "digest-of-test-rows"}},
        "metric": "exact_match",
        "versions": {},
        "optimize": {
            "method": "search",
            "seed": 0,
            "alpha": 0.05,
            "failure_score": 0.0,
            "budget": {"system_runs": 1e5},
        },
    }
    run = RunDirectory.create(folder, "", config)
    spent = {"system_runs": 1.0, "test_runs": 1.0, "calls": 1, "seconds": 1.0, "cost": 0.0}
    run.append("events.jsonl", {"event": "start", "spent": spent, "at": 1e9, **_mean(0.5)})
    sides: dict[str, list[ScoredRun]] = {start.digest: [], best.digest: []}
    for digest, rows in sides.items():
        for number in range(examples):
            name, score = f"e{number}", float(rng.random() < 0.5)
            rows.append(ScoredRun(name, 0, score))
            trace = _trace(name, digest, number, score)
            record = {"split": "test", "gold": {"answer": f"{number}"}, **to_json(trace)}
            run.append("traces.jsonl", record)
    tests = [Evaluation(d, tuple(rows), bounds=(0.0, 1.0)) for d, rows in sides.items()]
    known = [CandidateState(digest=start.digest, values={}, fate="start")]
    for number in range(candidates):
        values = {"answerer.prompt": f"Answer. Way {number}.", "finder.k": 1 + number % 5}
        if not number:
            values = best.to_json()
        digest = start.replace(values).digest
        known.append(CandidateState(digest=digest, values=values, source=f"source {number % 4}"))
    for each in known:
        scored = [(f"t{i}", 0, float(rng.random()), False) for i in range(40)]
        each.train = SplitRuns(rows=scored, usage=Usage(40, 4000, 400, 0.01), seconds=20.0)
    search = SearchState(
        plan=BudgetPlan(1, 1, 40.0, 0.05),
        free_runs=None,
        best=best.to_json(),
        incumbent=tests[1],
        ledger=LedgerState(),
        stopped="the planned decision was made",
    )
    final = [FinalEvaluation(evaluation=test) for test in tests]
    state = OptimizationState(
        before=tests[0],
        search=search,
        test_before=final[0],
        test_after=final[1],
        candidates=known,
        done=True,
    )
    ledger = Candidates(start, known, LimitSettings())
    run.write("candidates.jsonl", ledger.text(best.digest, (0.0, 1.0)))
    run.append("events.jsonl", {"event": "done", "spent": spent, "at": 1e9 + 60})
    run.checkpoint(state)
    run.close()


def _mean(value: float) -> dict[str, object]:
    return {"mean": value, "low": None, "high": None, "n": 1, "failed": 0}


def _trace(name: str, digest: str, number: int, score: float) -> Trace:
    """Return a trace of about six kilobytes, as those of a system with two model calls."""
    passages = [{"title": f"Title {i}", "text": "word " * 60, "score": 1.0} for i in range(3)]
    question = f"What is the number {number}?"
    calls = []
    for address, parents in (("namer", ()), ("answerer", ("namer",))):
        messages = (Message("user", f"{'Answer. ' * 100}{question}"),)
        calls.append(
            Call(
                address=address,
                node=address,
                component=address,
                parents=parents,
                inputs={"question": question, "passages": passages},
                outputs={"answer": f"{number}"},
                usage=Usage(1, 400, 8, 0.0001),
                seconds=0.5,
                counted=True,
                exchanges=(Exchange("m", messages, f"{number}", "stop"),),
            )
        )
    inputs, outputs = {"question": question}, {"answer": f"{number if score else 'unknown'}"}
    return Trace(name, digest, 0, 0, inputs, tuple(calls), outputs, score=score)


@contextmanager
def studio(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the address and the process of a new server."""
    command = [sys.executable, "-m", "compound", "ui", str(folder), "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found is not None
            yield found[0], process.pid
        finally:
            process.terminate()


def get(address: str) -> float:
    """Return the seconds until the answer of a page is complete."""
    start = time.perf_counter()
    httpx.get(address, timeout=60).raise_for_status()
    return time.perf_counter() - start


def mebibytes(process: int) -> float:
    """Return the resident memory of a process."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(folder: Path) -> Mapping[str, Any]:
    """Return seconds by page, and memory before and after all of them."""
    pages: dict[str, dict[str, float]] = {}
    for name, page in PAGES.items():
        if name == "runs":
            continue
        with studio(folder) as (address, _):
            pages[name] = {"first": get(address + page)}
    with studio(folder) as (address, process):
        before = mebibytes(process)
        pages["runs"] = {"first": get(address)}
        while "data-refresh" in _text(address + PAGES["examples"]):
            time.sleep(0.05)
        for name, page in PAGES.items():
            pages[name]["median"] = median(get(address + page) for _ in range(REPEATS))
        after = mebibytes(process)
        for _ in range(20):
            for page in PAGES.values():
                get(address + page)
        end = mebibytes(process)
    return {"pages": pages, "mebibytes": {"start": before, "all pages": after, "20 times": end}}


def _text(address: str) -> str:
    return httpx.get(address, timeout=60).raise_for_status().text


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--examples", type=int, default=EXAMPLES)
    parser.add_argument("--candidates", type=int, default=CANDIDATES)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder) / "large", options.examples, options.candidates)
        size = (Path(folder) / "large" / "traces.jsonl").stat().st_size
        found = {
            "examples": options.examples,
            "candidates": options.candidates,
            "traces_mebibytes": size / 2**20,
            "cores": os.cpu_count(),
            "python": sys.version.split()[0],
            "compound": cp.__version__,
            **measure(Path(folder)),
        }
    text = json.dumps(found, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
