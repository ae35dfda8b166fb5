"""Kill runs at random times by random signals, or at given calls, repeat the command, and compare the results.

A killed and resumed run must have the same decisions and the same configuration as an uninterrupted
one, and must not repeat a request unless it was in flight when the process ended.
"""

from __future__ import annotations

import json
import random
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from chaos.launcher import Attempt, Death, Launcher
from chaos.observe import Ending, ending
from chaos.server import FaultyServer
from chaos.workloads import IN_FLIGHT, Workload, answer

SIGNALS = (
    signal.SIGKILL,
    signal.SIGKILL,
    signal.SIGKILL,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
)
COMMAND = ("optimize", "system.yaml", "--run-dir", "run", "--quiet")
ENGINES = 3
MOST_STRIKES = 3
# a signal with its time as a fraction of an uninterrupted run, or a call
Strike = tuple[float, signal.Signals] | Death


@dataclass(frozen=True)
class KilledRun:
    """One run that was killed, possibly several times, and resumed each time."""

    workload: str
    strikes: tuple[str, ...]  # signals, with times as fractions of an uninterrupted run
    codes: tuple[int, ...]
    same_best: bool
    same_events: bool
    same_spent: bool
    repeated: int  # requests answered more than once
    bound: int  # requests in flight when the signals were sent, at most
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Reference:
    ending: Ending
    seconds: float
    requests: frozenset[str]


def reference(
    launcher: Launcher, workload: Workload, folder: Path, model: Path | None = None
) -> Reference:
    """Run a workload without interruption.

    Raises:
        AssertionError: the run failed, or made an equal request twice.
    """
    with FaultyServer(answer=answer) as server:
        workload.write(folder, server.url, model)
        attempt = launcher.run(COMMAND, folder)
        asked = _answered(server)
    assert attempt.code == 0, f"{workload.name} failed without a fault: {attempt.err}"
    assert max(asked.values(), default=1) == 1, f"{workload.name} made an equal request twice"
    return Reference(ending(folder / "run"), attempt.seconds, frozenset(asked))


def killed_runs(
    launcher: Launcher,
    workloads: Sequence[Workload],
    count: int,
    folder: Path,
    model: Path,
    seed: int,
) -> Iterator[KilledRun]:
    """Yield ``count`` runs, each killed one to three times, cycling through the workloads."""
    draws = random.Random(seed)
    references: dict[str, Reference] = {}
    for number in range(count):
        workload = workloads[number % len(workloads)]
        if workload.name not in references:
            place = folder / f"reference-{workload.name}"
            references[workload.name] = reference(launcher, workload, place, model)
        strikes: list[Strike] = [
            (draws.uniform(0.02, 1.02), draws.choice(SIGNALS))
            for _ in range(draws.randint(1, MOST_STRIKES))
        ]
        place = folder / f"killed-{number}-{workload.name}"
        yield killed_run(launcher, workload, references[workload.name], strikes, place, model)


def killed_run(
    launcher: Launcher,
    workload: Workload,
    expected: Reference,
    strikes: Sequence[Strike],
    folder: Path,
    model: Path | None = None,
) -> KilledRun:
    """Return a run that was killed by each strike in turn and then resumed to its end."""
    problems: list[str] = []
    codes: list[int] = []
    landed = 0
    with FaultyServer(answer=answer) as server:
        workload.write(folder, server.url, model)
        for strike in strikes:
            if isinstance(strike, Death):
                number = signal.SIGKILL
                attempt = launcher.run(COMMAND, folder, death=strike)
            else:
                fraction, number = strike
                attempt = launcher.run(
                    COMMAND, folder, strike=fraction * expected.seconds, number=number
                )
            codes.append(attempt.code)
            if attempt.has_traceback:
                problems.append(f"traceback: {attempt.err[-500:]}")
            if attempt.code == 0 or (landed and _had_finished(attempt)):
                break
            landed += 1
            if attempt.code not in {-number, 130}:
                problems.append(
                    f"exit code {attempt.code} after {number.name}: {attempt.err[-500:]}"
                )
        else:
            attempt = launcher.run(COMMAND, folder)
            codes.append(attempt.code)
        asked = _answered(server)
    ended = attempt.code == 0 or _had_finished(attempt)
    if not ended:
        problems.append(
            f"the run could not be continued: exit code {attempt.code}: {attempt.err[-500:]}"
        )
    found = ending(folder / "run") if ended else None
    repeated, bound = asked.total() - len(asked), landed * ENGINES * IN_FLIGHT
    problems += _differences(found, expected, asked)
    if repeated > bound:
        problems.append(f"{repeated} requests were made twice, but at most {bound} were in flight")
    return KilledRun(
        workload=workload.name,
        strikes=tuple(
            str(each) if isinstance(each, Death) else f"{each[1].name} at {each[0]:.2f}"
            for each in strikes
        ),
        codes=tuple(codes),
        same_best=found is not None and found.best == expected.ending.best,
        same_events=found is not None and found.events == expected.ending.events,
        same_spent=found is not None and found.spent == expected.ending.spent,
        repeated=repeated,
        bound=bound,
        problems=tuple(problems),
    )


def _had_finished(attempt: Attempt) -> bool:
    """Return whether the signal arrived after the run was reported, when only its process had to end."""
    return attempt.code == 2 and "holds a finished run" in attempt.err


def _differences(found: Ending | None, expected: Reference, asked: Counter[str]) -> Iterator[str]:
    """Yield the differences between a resumed run and the uninterrupted one."""
    if found is not None and found.best != expected.ending.best:
        yield "another configuration was found"
    if found is not None and found.events != expected.ending.events:
        yield "other decisions were recorded"
    if found is not None and found.records != expected.ending.records:
        yield "other traces, candidates or memories were recorded"
    if extra := set(asked) - expected.requests:
        yield f"{len(extra)} requests that the uninterrupted run does not make"


def _answered(server: FaultyServer) -> Counter[str]:
    return Counter(json.dumps(served.body, sort_keys=True) for served in server.served)
