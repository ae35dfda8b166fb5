"""Optimize against a server that injects one kind of fault, and compare with a run against a healthy one.

After transient faults the run must have the same result as without them. After all others it must
end with an exit code and a message. In no case may the server bill more than the meter counts or
the budget allows, or may the key or a terminal escape sequence reach a file or the terminal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.launcher import KEY, Attempt, Launcher
from chaos.observe import Ending, ending
from chaos.server import TRANSIENT, Bill, Fault, FaultyServer
from chaos.workloads import CALL_SECONDS, PRICES, Workload, answer

COMMAND = ("optimize", "system.yaml", "--run-dir", "run", "--quiet", "--json")
SLOW = (Fault.DRIP, Fault.STALL)
PASSING = (*TRANSIENT, *SLOW)  # retries succeed, those of the slow ones after a timeout
SHORT_SECONDS = 1.5  # less than a stalled or dripping answer takes


@dataclass(frozen=True)
class FaultyRun:
    """One optimization against a server with faults; `problems` are violations."""

    kind: str
    rate: float
    code: int
    injected: int
    failed: int
    same_best: bool | None  # as `best.json` of a run without faults; None if it may differ
    billed: float  # dollars of the server
    metered: float  # dollars that the run counted
    problems: tuple[str, ...]


def faulty_runs(
    launcher: Launcher,
    workload: Workload,
    kinds: Sequence[Fault],
    rates: Sequence[float],
    folder: Path,
    seed: int = 0,
) -> Iterator[FaultyRun]:
    healthy = healthy_ending(launcher, workload, folder / "healthy")
    for rate in rates:
        for kind in kinds:
            place = folder / f"{kind}-{rate:g}"
            yield faulty_run(launcher, workload, kind, rate, place, healthy, seed)


def healthy_ending(launcher: Launcher, workload: Workload, folder: Path) -> Ending:
    with FaultyServer(answer=answer, prices=PRICES) as server:
        workload.write(folder, server.url)
        attempt = launcher.run(COMMAND, folder)
    assert attempt.code == 0, attempt.err
    return ending(folder / "run")


def faulty_run(
    launcher: Launcher,
    workload: Workload,
    kind: Fault,
    rate: float,
    folder: Path,
    healthy: Ending,
    seed: int,
) -> FaultyRun:
    with FaultyServer(
        rate, [kind], seed, answer=answer, prices=PRICES, retry_after="0.05", stall=5.0
    ) as server:
        workload.write(folder, server.url, timeout=SHORT_SECONDS if kind in SLOW else CALL_SECONDS)
        attempt = launcher.run(COMMAND, folder)
        billed, injected = server.billed, sum(server.faults.values())
    spent = _spent(folder / "run")
    passing = kind in PASSING
    problems = [*_leaks(folder / "run", attempt), *_unmetered(billed, spent, attempt)]
    same_best = None
    if attempt.has_traceback or attempt.code < 0 or attempt.code not in {0, 1, 2}:
        problems.append(f"exit code {attempt.code}: {attempt.err[-500:]}")
    if passing:
        same_best = attempt.code == 0 and ending(folder / "run").best == healthy.best
        if not same_best:
            problems.append(f"transient faults changed the result (exit code {attempt.code})")
    elif attempt.code and not attempt.err.strip():
        problems.append(f"exit code {attempt.code} without a message")
    failed = _failed_calls(folder / "run")
    if passing and failed:
        problems.append(f"{failed} calls failed although every fault is transient")
    return FaultyRun(
        str(kind),
        rate,
        attempt.code,
        injected,
        failed,
        same_best,
        billed.cost,
        spent.get("cost", 0.0),
        tuple(problems),
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def _spent(run: Path) -> dict[str, float]:
    events = [event for event in _lines(run / "events.jsonl") if "spent" in event]
    return dict(events[-1]["spent"]) if events else {}


def _failed_calls(run: Path) -> int:
    traces = _lines(run / "traces.jsonl")
    return sum(call.get("failure") is not None for trace in traces for call in trace["calls"])


def _leaks(run: Path, attempt: Attempt) -> list[str]:
    problems = [
        f"the key is in {path.name}"
        for path in sorted(run.rglob("*"))
        if path.is_file() and KEY.encode() in path.read_bytes()
    ]
    for name, text in (("stdout", attempt.out), ("stderr", attempt.err)):
        if KEY in text:
            problems.append(f"the key is on {name}")
        if "\x1b" in text or "\x00" in text:
            problems.append(f"an escape sequence is on {name}")
    return problems


def _unmetered(billed: Bill, spent: dict[str, float], attempt: Attempt) -> list[str]:
    """Compare the server's bill with the run's recorded spending; an aborted run may lose its last event."""
    if attempt.code != 0:
        return []
    problems = []
    if billed.cost > spent["cost"] + 1e-9:
        problems.append(
            f"the server billed ${billed.cost:.6f}, the run counted ${spent['cost']:.6f}"
        )
    tokens = spent["prompt_tokens"] + spent["completion_tokens"]
    if billed.tokens > tokens:
        problems.append(f"the server billed {billed.tokens} tokens, the run counted {tokens}")
    return problems
