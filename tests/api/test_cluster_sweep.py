"""Sweeps whose runs are tasks of a cluster: equal results, lost tasks, and refusals before anything is spent."""

from __future__ import annotations

import asyncio
import json
import platform
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clusters.tasks import ProcessTasks, ThreadTasks
from compound.api.sweeps import sweep as sweeps
from compound.api.sweeps.runs import Stopper
from compound.api.sweeps.sweep import plan, sweep
from compound.cluster.handshake import WorkerMismatch
from compound.core.errors import RunDirectoryError
from compound.optimization.runs.recorder import Interrupted
from compound.yaml import load
from run_files import lock_no_folders

pytestmark = pytest.mark.usefixtures("without_reports")
SETS = [("optimize.budget.system_runs", "120")]
RUNNER = ("optimize.runner", "{ray: {workers: 2, max_restarts: 2}}")


def run(
    monkeypatch: pytest.MonkeyPatch, tasks: ThreadTasks | None, folder: str = "out", **how: Any
) -> dict[str, Any]:
    """Run a sweep on a cluster, or in this process without tasks."""
    sets = [*SETS, RUNNER] if tasks is not None else SETS
    monkeypatch.setattr(sweeps, "open_tasks", lambda _: tasks)
    methods, seeds = how.pop("methods", ("random", "search")), how.pop("seeds", (0, 1))
    planned = plan([load(Path("game.yaml"), overrides=sets)], methods, seeds, Path(folder))
    found: Any = sweep(planned, Path(folder), cluster=tasks is not None, **how)
    return found  # type: ignore[no-any-return]


def timeless(value: Any) -> Any:
    """Return facts without times."""
    if isinstance(value, Mapping):
        return {key: timeless(item) for key, item in value.items() if key != "seconds"}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def statuses(facts: Mapping[str, Any]) -> list[str]:
    return [each["status"] for each in facts["runs"]]


@pytest.mark.slow
def test_results_are_those_of_a_local_sweep(game: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(monkeypatch, None, "here")
    tasks, said = ThreadTasks(), list[str]()
    facts = run(monkeypatch, tasks, "there", log=said.append)
    assert timeless(facts) == timeless(expected)
    assert (tasks.started, tasks.most, tasks.closed) == (4, 2, True)
    assert sum(line.endswith(": finished") for line in said) == 4
    here, there = (
        json.loads(Path(name, "game/random/0/config.json").read_text())
        for name in ("here", "there")
    )
    assert here == there
    assert not list(Path("there").glob("cluster-token"))
    said.clear()
    assert timeless(run(monkeypatch, None, "there", log=said.append)) == timeless(expected)
    assert sum("finished before" in line for line in said) == 4


@pytest.mark.slow
def test_a_killed_task_uses_its_checkpoint(game: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, code = "    time.sleep(", (game / "game.py").read_text()
    dies = """
    if "DIES" in os.environ and aim != 0.25:  # a candidate, in a task
        try:
            os.mkdir(os.environ["DIES"])
            os.kill(os.getpid(), 9)
        except FileExistsError:
            pass
"""
    (game / "game.py").write_text(code.replace(place, dies + place, 1))
    expected = run(monkeypatch, None, "here", methods=("search",), seeds=(0,), controls=False)
    tasks, said = ProcessTasks({"DIES": str(game / "died")}), list[str]()
    facts = run(
        monkeypatch,
        tasks,
        "there",
        methods=("search",),
        seeds=(0,),
        log=said.append,
        controls=False,
    )
    assert facts["runs"][0]["reason"] == ""
    assert timeless(facts) == timeless(expected)
    assert any("was lost (its process ended), and will be resumed" in line for line in said)
    assert tasks.started == 2
    lines = Path("there/game/search/0/events.jsonl").read_text().splitlines()
    events = [json.loads(line)["event"] for line in lines]
    assert events.count("start") == 1  # the second task resumed the run


def test_machines_without_the_folder_fail(game: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = ThreadTasks(lambda text: text.replace(f"{game}/out", f"{game}/elsewhere"))
    with pytest.raises(WorkerMismatch, match="machine first cannot be used: .*not share") as caught:
        run(monkeypatch, tasks)
    assert "in a folder that all machines of the cluster share" in caught.value.hint
    assert (tasks.started, tasks.closed) == (0, True)
    assert not Path("out/game").exists()


def test_a_machine_with_other_code_is_refused(game: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def edit(text: str) -> str:
        found = json.loads(text)
        found["files"][0]["facts"]["components"]["guesser"] = "0123"
        return json.dumps(found)

    with pytest.raises(WorkerMismatch) as caught:
        run(monkeypatch, ThreadTasks(edit))
    expected = "machine first cannot be used: its component 'guesser' differs from the driver's"
    assert caught.value.message.startswith(expected)
    assert "install the same versions on every machine" in caught.value.hint


def test_a_machine_with_other_data_fails_its_runs_before_they_begin(
    game: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(text: str) -> str:
        found = json.loads(text)
        if "description" in found and found["seed"] == 1:
            found["description"]["data"]["train"]["digest"] = "0123"
        return json.dumps(found)

    facts = run(monkeypatch, ThreadTasks(edit), methods=("random",))
    assert statuses(facts) == ["finished", "failed"]
    reason = facts["runs"][1]["reason"]
    assert reason.startswith(
        f"machine {platform.node()} cannot be used: its data differ from the driver's"
    )
    assert "install the same versions on every machine" in reason
    assert not Path("out/game/random/1").exists()


def test_a_task_does_not_begin_if_the_driver_could_not_read_its_data(
    game: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(text: str) -> str:
        found = json.loads(text)
        return json.dumps({**found, "description": None} if "description" in found else found)

    facts = run(monkeypatch, ThreadTasks(edit), methods=("random",))
    assert statuses(facts) == ["failed", "failed"]
    assert "cannot read the data of this run" in facts["runs"][0]["reason"]


def test_a_forced_interrupt_stops_one_command(game: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopper, file = Stopper(), Path("out/STOP")

    def wait() -> None:
        while not file.exists():
            time.sleep(0.01)

    class Interrupted(ThreadTasks):
        async def run(self, text: str) -> str:
            stopper.stop()
            await asyncio.to_thread(
                wait
            )  # for the file, which tells the tasks of the first interrupt
            raise KeyboardInterrupt  # the second one

    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, Interrupted(), stopper=stopper)
    assert not file.exists()


def test_a_folder_has_one_sweep_at_a_time(game: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one would replace the token that the tasks of the first one look for."""

    class Second(ThreadTasks):
        async def run(self, text: str) -> str:
            with pytest.raises(RunDirectoryError, match="out is in use by another process"):
                await asyncio.to_thread(run, monkeypatch, ThreadTasks())
            return await super().run(text)

    assert set(statuses(run(monkeypatch, Second()))) == {"finished"}


@pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be deleted")
@pytest.mark.parametrize("cluster", [False, True])
def test_a_sweep_ends_if_another_one_may_use_its_folder(
    game: Path, monkeypatch: pytest.MonkeyPatch, cluster: bool
) -> None:
    """Where folders cannot be locked, and the lock file was deleted because its owner seemed to be gone."""

    def log(_: str) -> None:
        Path("out/lock").unlink(missing_ok=True)

    lock_no_folders(monkeypatch)
    tasks = ThreadTasks() if cluster else None
    with pytest.raises(RunDirectoryError, match="out/lock was deleted or replaced"):
        run(monkeypatch, tasks, methods=("random",), seeds=(0, 1), log=log)


def test_tasks_lost_too_often_fail_their_run(game: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compound.api.sweeps.runs.RESEND_SECONDS", 0)
    facts = run(monkeypatch, ThreadTasks(losses=3), methods=("random",), seeds=(0,))
    assert statuses(facts) == ["failed"]
    assert "its task was lost (killed), and max_restarts is used up" in facts["runs"][0]["reason"]
    assert statuses(run(monkeypatch, ThreadTasks(losses=2), methods=("random",), seeds=(0,))) == [
        "finished"
    ]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("nonsense", "its answer cannot be read"),
        (
            '{"status": "finished"}',
            "its task has ended, but .* is not finished here: is the folder shared",
        ),
    ],
)
def test_an_answer_is_not_trusted(
    game: Path, monkeypatch: pytest.MonkeyPatch, answer: str, message: str
) -> None:
    class Lying(ThreadTasks):
        async def _execute(self, text: str) -> str:
            return answer

    facts = run(monkeypatch, Lying(), methods=("random",), seeds=(0,))
    assert statuses(facts) == ["failed"]
    assert re.search(message, facts["runs"][0]["reason"])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["file", "signal"])
def test_a_stop_ends_all_tasks_and_the_same_call_goes_on(
    game: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    expected = timeless(run(monkeypatch, None, "whole"))
    stopper, file = Stopper(), Path("out/STOP")
    stop = stopper.stop if how == "signal" else file.touch

    class Stopping(ThreadTasks):
        async def run(self, text: str) -> str:
            if self.started == 2:
                stop()
            return await super().run(text)

    with pytest.raises(Interrupted, match="progress is saved in out"):
        run(monkeypatch, Stopping(), stopper=stopper)
    assert not file.exists()
    found = statuses(json.loads(Path("out/sweep.json").read_text()))
    assert found[3] == "unfinished"
    assert timeless(run(monkeypatch, ThreadTasks())) == expected


def test_the_command_runs_tasks(game: Path, monkeypatch: pytest.MonkeyPatch, cli: Any) -> None:
    tasks = ThreadTasks()
    monkeypatch.setattr(sweeps, "open_tasks", lambda _: tasks)
    arguments = ["game.yaml", "--methods", "random", "--no-controls", "--run", "out", "--cluster"]
    code, _, err = cli("sweep", *arguments)
    assert code == 2
    assert "needs the same optimize.runner.ray in every file" in err
    runner, budget = (f"{name}={value}" for name, value in (RUNNER, SETS[0]))
    code, out, err = cli("sweep", *arguments, "--seeds", "0,1", "--set", runner, "--set", budget)
    assert (code, tasks.started) == (0, 2)
    assert "[2 of 2] game, random, seed 1: finished" in err
    assert "table: out/sweep.md" in out
