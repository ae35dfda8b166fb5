"""A process of a learner that fails is named with its cause, and none outlives the run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from trainings.learners import declared, drawn

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from compound.errors import CompoundError, RunDirectoryError  # noqa: E402
from compound.optimizers.weights.distributed import processes as module  # noqa: E402
from compound.optimizers.weights.distributed.logs import KEPT, LogFolder  # noqa: E402
from compound.optimizers.weights.distributed.processes import BOOT, Processes  # noqa: E402
from compound.optimizers.weights.distributed.sharded import ShardedLearner  # noqa: E402

ROOT = Path(__file__).parents[4]
GUARD = 120.0  # seconds; only a defect takes so long


def booting(code: str) -> tuple[str, ...]:
    """Return the command of a process that runs some code before it serves; `rank` is its rank."""
    lines = BOOT.splitlines()
    return (sys.executable, "-P", "-c", "\n".join([*lines[:2], "rank = int(sys.argv[3])", code, *lines[2:]]))


def is_running(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_end(pids: list[int]) -> None:
    deadline = time.monotonic() + GUARD
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)


def test_a_killed_process_ends_the_step_and_all_others(toy_model: Path) -> None:
    """While the other one waits for it in a collective."""
    stuck = "from compound.optimizers.weights.learner.trainer import Trainer; import time\n"
    stuck += "if rank == 1: Trainer.step = lambda *_: (print('before the end', flush=True), time.sleep(600))"
    processes = Processes(2, command=booting(stuck))
    learner = ShardedLearner(processes, declared(toy_model, ("x",)))
    (victim,) = [each.pid for each in processes._processes[1:]]

    def kill() -> None:
        while "before the end" not in (processes.logs / "1.log").read_text():
            time.sleep(0.05)
        os.kill(victim, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(CompoundError) as caught:
        learner.step(drawn(("x",)), 0)
    text = str(caught.value)
    assert "learner process 1 of 2 (counted from 0) was killed by signal 9 (SIGKILL), during: step" in text
    assert "    before the end" in text
    assert "lower optimize.<method>.optimizer.micro_tokens" in text
    assert "the same command resumes the run from its last step" in text
    assert processes.ended


def test_a_process_out_of_memory_names_the_settings(toy_model: Path) -> None:
    """The other one fails, too, since it lost its peer; the cause is reported."""
    full = "from compound.optimizers.weights.learner.trainer import Trainer\n"
    full += "def fail(*_, **__): raise RuntimeError('not enough memory: you tried to allocate 9 GiB')\n"
    full += "if rank == 1: Trainer._loss = fail"
    processes = Processes(2, command=booting(full))
    learner = ShardedLearner(processes, declared(toy_model, ("x",)))
    with pytest.raises(CompoundError) as caught:
        learner.step(drawn(("x",)), 0)
    assert caught.value.message.startswith(
        "learner process 1 of 2 (counted from 0): a training step ran out of memory: not enough memory"
    )
    assert "lower optimize.ppo.optimizer.micro_tokens" in caught.value.hint
    assert processes.ended


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("if rank == 1: sys.exit('no GPU of this number')", ["exited with status 1", "no GPU of this number"]),
        ("if rank == 1: import torch.distributed as d; d.init_process_group = lambda *a, **k: 1 / 0",
         ["failed: ZeroDivisionError: division by zero", "Traceback"]),
    ],
)  # fmt: skip
def test_a_process_that_does_not_start_is_named_with_its_log(code: str, told: list[str]) -> None:
    with pytest.raises(CompoundError) as caught:
        Processes(2, command=booting(code))
    assert "learner process 1 of 2 (counted from 0)" in str(caught.value)
    assert "during: starting" in str(caught.value)
    for part in told:
        assert part in str(caught.value)


def test_a_process_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START", 2.0)
    monkeypatch.setattr(module, "END", 0.1)
    with pytest.raises(CompoundError, match=r"learner process \d of 2 .* failed: not ready after 2 s"):
        Processes(2, command=booting("if rank == 1: import time; time.sleep(600)"))


def test_a_program_that_is_missing_is_an_error_without_processes(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nothing-here"):
        Processes(2, command=[str(tmp_path / "nothing-here")])


DRIVER = """
import sys, threading, time
from trainings.learners import declared, drawn
from compound.optimizers.weights.distributed.processes import Processes
from compound.optimizers.weights.distributed.sharded import ShardedLearner

processes = Processes(2)
learner = ShardedLearner(processes, declared(sys.argv[1], ("x",)))
print(*[each.pid for each in processes._processes], processes._shared, flush=True)
number = 0
while True:
    learner.step(drawn(("x",)), number)
    number += 1
    if number == 1:
        print("training", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_the_run(number: signal.Signals, toy_model: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'support'}"}
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(toy_model)], env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, start_new_session=True,
    ) as driver:  # fmt: skip
        assert driver.stdout
        *pids, shared = driver.stdout.readline().split()
        assert driver.stdout.readline() == "training\n"
        os.killpg(driver.pid, number)  # as a terminal does with Ctrl-C
        driver.wait(GUARD)
    assert_end([int(pid) for pid in pids])
    assert not Path(shared).exists()


def test_processes_share_the_cores_and_talk_on_this_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    found: dict[str, Any] = module._environment(1, 3)
    assert (found["OMP_NUM_THREADS"], found["RANK"], found["WORLD_SIZE"]) == ("2", "1", "3")
    assert found["GLOO_SOCKET_IFNAME"] == found["NCCL_SOCKET_IFNAME"] == module.LOOPBACK
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert module._environment(0, 3)["OMP_NUM_THREADS"] == "5"


def test_old_logs_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPOUND_CACHE", str(tmp_path))
    for _ in range(KEPT + 3):
        newest = LogFolder()
        newest.close()
    left = list((tmp_path / "learner").iterdir())
    assert len(left) == KEPT + 1
    assert newest.path in left


def test_logs_of_running_processes_are_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By any number of later learners, such as those of other runs."""
    monkeypatch.setenv("COMPOUND_CACHE", str(tmp_path))
    monkeypatch.setattr("time.strftime", lambda _: "the-same-second-")
    running = Processes(1)
    for _ in range(KEPT + 3):
        LogFolder().close()
    assert (running.logs / "0.log").exists()
    running.close()
    others = [path for path in running.logs.parent.iterdir() if path != running.logs]
    for number, path in enumerate(others):  # the last ones by name
        path.rename(path.with_name(f"z{number:02}"))
    LogFolder().close()
    assert not running.logs.exists()


def test_no_log_is_deleted_where_folders_cannot_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPOUND_CACHE", str(tmp_path))

    def none(*_: object) -> None:
        raise RunDirectoryError("the file system has no locks")

    monkeypatch.setattr("compound.optimizers.weights.distributed.logs.Lock", none)
    for _ in range(KEPT + 3):
        LogFolder().close()
    assert len(list((tmp_path / "learner").iterdir())) == KEPT + 3


def test_a_call_after_a_failure_does_not_wait(toy_model: Path) -> None:
    processes = Processes(2)
    ShardedLearner(processes, declared(toy_model, ("x",)))
    with pytest.raises(CompoundError, match="learner process 0 of 2"):
        processes.call("unknown")
    with pytest.raises(CompoundError, match="the learner processes have ended, so they cannot step"):
        processes.call("step")


def test_a_deleted_log_hides_no_failure(toy_model: Path) -> None:
    processes = Processes(2)
    ShardedLearner(processes, declared(toy_model, ("x",)))
    shutil.rmtree(processes.logs)
    with pytest.raises(CompoundError, match=r"during: unknown(.|\n)*the log cannot be read: No such file"):
        processes.call("unknown")


def test_processes_communicate_on_loopback_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "eth0")
        assert module._environment(0, 2)[name] == module.LOOPBACK


def test_an_interrupt_ends_a_step_that_another_thread_waits_for(toy_model: Path) -> None:
    stuck = "from compound.optimizers.weights.learner.trainer import Trainer; import time\n"
    stuck += "Trainer.step = lambda *_: (print('in the step', flush=True), time.sleep(600))"
    processes = Processes(2, command=booting(stuck))
    learner = ShardedLearner(processes, declared(toy_model, ("x",)))
    pids = [each.pid for each in processes._processes]

    def interrupt() -> None:
        while not all("in the step" in (processes.logs / f"{rank}.log").read_text() for rank in range(2)):
            time.sleep(0.05)
        learner.interrupt()

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(CompoundError, match="learner process"):
        learner.step(drawn(("x",)), 0)
    assert_end(pids)
