"""Killed at any write, a run goes on to the same end, and asks nothing twice.

The harness of `chaos` runs the command in processes of their own, against a server on this machine
that counts its requests. Each process kills itself (``SIGKILL``) at a record, a checkpoint or a
cached call: before it, after it, or half-way through it.
"""

from __future__ import annotations

import json
import random
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")  # the harness imports what any workload needs
pytest.importorskip("peft")
pytest.importorskip("litellm")

from chaos.kills import Reference, killed_run, reference
from chaos.launcher import Death, Kind, Launcher
from chaos.workloads import Workload, workloads
from compound.optimization.runs.directory import read_records

pytestmark = pytest.mark.slow
RECORD = "compound.optimization.runs.directory:RunDirectory.append"
CHECKPOINT = "compound.optimization.runs.directory:RunDirectory.checkpoint"
CALL = "compound.execution.cache:DiskCache.put"
FILE = "os:replace"
OPTIMAS = next(workload for workload in workloads() if workload.name == "optimas")
SEARCH = Workload("search", "search")


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher(first_wait=0.05) as launcher:
        yield launcher


@dataclass(frozen=True)
class Whole:
    """An uninterrupted run."""

    workload: Workload
    run: Path
    reference: Reference

    def events(self, kind: str) -> list[dict[str, Any]]:
        events = read_records(self.run, "events.jsonl")
        return [event for event in events if event["event"] == kind]

    def writes(self) -> dict[str, int]:
        """Return how often each function is called at least."""
        names = ("events.jsonl", "traces.jsonl", "memory.jsonl")
        step = json.loads((self.run / "checkpoint.json").read_text("utf-8"))["step"]
        with closing(sqlite3.connect(self.run / "cache.sqlite")) as db:
            ((calls,),) = db.execute("SELECT count(*) FROM outcome")
        lines = sum(1 for name in names for _ in read_records(self.run, name))
        return {RECORD: lines, CHECKPOINT: step, CALL: calls, FILE: step}


@pytest.fixture(scope="module", params=[SEARCH, OPTIMAS], ids=lambda workload: workload.name)
def whole(
    request: pytest.FixtureRequest, launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    found = reference(launcher, request.param, folder)
    return Whole(request.param, folder / "run", found)


def test_the_uninterrupted_run_has_every_phase(whole: Whole) -> None:
    """Else the kills below would not reach them."""
    for kind in ("start", "job", "decision", "test_before", "test_after", "done"):
        assert whole.events(kind), kind
    assert any(decision["accepted"] for decision in whole.events("decision"))
    assert any('"writer"' in request for request in whole.reference.requests)
    if whole.workload is OPTIMAS:
        local = [event["facts"].get("local", {}) for event in whole.events("job")]
        assert any(each["evaluations"] for found in local for each in found.values())


@pytest.mark.parametrize("at", [RECORD, CALL, FILE], ids=lambda at: at.split(":")[1])
def test_killed_at_any_write_a_run_goes_on_to_the_same_end(
    at: str, whole: Whole, launcher: Launcher, tmp_path: Path
) -> None:
    """Late in the run, and at three writes in a row."""
    draw, count = random.Random(at), whole.writes()[at]
    last: Kind = "torn" if at == RECORD else "before"
    late = [Death(at, draw.randrange(count // 2, count) + 1, last)]
    kinds: tuple[Kind, ...] = ("before", "after", last)
    several = [Death(at, draw.randrange(count // 4) + 1, when) for when in kinds]
    for number, deaths in enumerate([late, several]):
        folder = tmp_path / str(number)
        record = killed_run(launcher, whole.workload, whole.reference, deaths, folder)
        assert not record.problems, record
        assert record.same_spent
        assert record.codes == (*[-signal.SIGKILL] * len(deaths), 0)


@pytest.mark.parametrize("whole", [OPTIMAS], indirect=True, ids=lambda workload: workload.name)
def test_killed_after_any_step_of_a_search_with_rewards_no_call_is_paid_twice(
    whole: Whole, launcher: Launcher, tmp_path: Path
) -> None:
    """Local evaluations are in the checkpoint of each step."""
    steps = whole.writes()[CHECKPOINT]
    for nth in range(2, steps, max(1, steps // 5)):
        death = [Death(CHECKPOINT, nth)]
        record = killed_run(launcher, whole.workload, whole.reference, death, tmp_path / str(nth))
        assert not record.problems, record
        assert record.same_spent


@pytest.mark.parametrize("share", [0.1, 0.6])
def test_interrupted_politely_a_run_asks_nothing_again(
    share: float, whole: Whole, launcher: Launcher, tmp_path: Path
) -> None:
    strikes = [(share, signal.SIGINT)]
    record = killed_run(launcher, whole.workload, whole.reference, strikes, tmp_path / "run")
    assert not record.problems, record
    assert record.codes[-1] == 0
    assert record.repeated == 0
