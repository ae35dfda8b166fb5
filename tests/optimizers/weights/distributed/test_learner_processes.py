"""A process of a learner that fails is named with its cause, and none outlives the run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from trainings.learners import declared, drawn

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from compound import CompoundError  # noqa: E402
from compound.optimizers.weights.distributed import node, worker  # noqa: E402
from compound.optimizers.weights.distributed.learner import KEY  # noqa: E402
from compound.optimizers.weights.distributed.processes import (  # noqa: E402
    Processes,
    ShardedLearner,
)
from compound.optimizers.weights.learner.samples import Sample  # noqa: E402
from compound.optimizers.weights.learner.trainer import Trainer  # noqa: E402
from trainings.jobs import train_toy, training_records  # noqa: E402

ROOT = Path(__file__).parents[4]
GUARD = 120.0  # seconds; only a defect takes so long
STUCK = "from compound.optimizers.weights.learner.trainer import Trainer; import time\n"
STUCK += "def stuck(*_, **__): print('in the step', flush=True); time.sleep(600)\n"

Booting = Callable[[str], None]


def in_step(processes: Processes, ranks: Sequence[int], act: Callable[[], object]) -> None:
    """Act in a thread, once some processes are stuck in a step."""
    logs = [processes.launcher.logs / f"{rank}.log" for rank in ranks]

    def wait() -> None:
        while not all("in the step" in log.read_text() for log in logs):
            time.sleep(0.05)
        act()

    threading.Thread(target=wait, daemon=True).start()


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


@pytest.mark.slow
def test_a_killed_process_ends_the_step_and_all_others(toy_model: Path, booting: Booting) -> None:
    """While the other one waits for it in a collective."""
    booting(f"{STUCK}if rank == 1: Trainer.step = stuck")
    processes = Processes(2)
    learner = ShardedLearner(processes, declared(toy_model, ("x",)))
    in_step(processes, [1], lambda: os.kill(processes.launcher.pids[1], signal.SIGKILL))
    with pytest.raises(CompoundError) as caught:
        learner.step(drawn(("x",)), 0)
    for part in (
        "learner process 1 of 2 (counted from 0) was killed by SIGKILL, during: step",
        "    in the step",
        "lower optimize.<method>.optimizer.micro_tokens",
        "the same command resumes the run from its last step",
    ):
        assert part in str(caught.value)
    assert_end(processes.launcher.pids)
    shutil.rmtree(processes.launcher.logs)


@pytest.mark.slow
def test_a_process_out_of_memory_names_the_settings(toy_model: Path, booting: Booting) -> None:
    """The other one fails, too, since it lost its peer; the cause is reported."""
    full = "from compound.optimizers.weights.learner.trainer import Trainer\n"
    full += (
        "def fail(*_, **__): raise RuntimeError('not enough memory: you tried to allocate 9 GiB')\n"
    )
    booting(f"{full}if rank == 1: Trainer._loss = fail")
    processes = Processes(2)
    learner = ShardedLearner(processes, declared(toy_model, ("x",)))
    with pytest.raises(CompoundError) as caught:
        learner.step(drawn(("x",)), 0)
    assert caught.value.message.startswith(
        "learner process 1 of 2 (counted from 0): a training step ran out of memory: not enough memory"
    )
    assert "lower optimize.ppo.optimizer.micro_tokens" in caught.value.hint
    assert_end(processes.launcher.pids)
    with pytest.raises(CompoundError, match="ran out of memory"):  # the cause stays
        processes.call("step")


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (
            "if rank == 1: sys.exit('no GPU of this number')",
            ["during: starting", "exited with status 1", "no GPU of this number"],
        ),
        (
            "if rank == 1: import torch.distributed as d; d.init_process_group = lambda *a, **k: 1 / 0",
            ["during: starting", "failed: ZeroDivisionError: division by zero", "Traceback"],
        ),
    ],
)
def test_a_process_that_does_not_start_is_named_with_its_log(
    code: str, told: list[str], booting: Booting
) -> None:
    booting(code)
    with pytest.raises(CompoundError) as caught:
        Processes(2)
    assert "learner process 1 of 2 (counted from 0)" in str(caught.value)
    for part in told:
        assert part in str(caught.value)


def test_an_address_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            CompoundError, match="cannot listen at 127.0.0.1:[0-9]+: Address"
        ) as told:
            Processes(1, address=address)
    assert "a free port" in told.value.hint


DRIVER = """
import sys
from trainings.learners import declared, drawn
from compound.optimizers.weights.distributed.processes import Processes, ShardedLearner

processes = Processes(2)
learner = ShardedLearner(processes, declared(sys.argv[1], ("x",)))
print(*processes.launcher.pids, flush=True)
number = 0
while True:
    learner.step(drawn(("x",)), number)
    number += 1
    if number == 1:
        print("training", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_the_run(
    number: signal.Signals, toy_model: Path, tmp_path: Path
) -> None:
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'support'}"
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(toy_model)],
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as driver:
        assert driver.stdout
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert driver.stdout.readline() == "training\n"
        os.killpg(driver.pid, number)  # as a terminal does with Ctrl-C
        driver.wait(GUARD)
    assert_end(pids)


def test_a_process_that_starts_after_the_run_was_killed_ends(tmp_path: Path) -> None:
    """Neither its launcher nor the store of the run exists any more."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
    place = {"processes": 1, "machines": 1, "rank": 0, "local": 0, "job": 1, "launcher": -1}
    given = json.dumps({**place, "address": address, "log": str(tmp_path / "0.log")})
    command = [sys.executable, "-P", "-c", node.BOOT, json.dumps(sys.path), given]
    with subprocess.Popen(command, env={**os.environ, KEY: "key"}) as process:
        try:
            assert process.wait(GUARD) == 1
        finally:
            process.kill()


@pytest.mark.slow
def test_an_interrupt_ends_a_step_that_another_thread_waits_for(
    toy_model: Path, booting: Booting
) -> None:
    booting(f"{STUCK}Trainer.step = stuck")
    processes = Processes(2)
    learner = ShardedLearner(processes, declared(toy_model, ("x",)))
    in_step(processes, [0, 1], learner.interrupt)
    with pytest.raises(CompoundError, match="the learner processes have ended"):
        learner.step(drawn(("x",)), 0)
    assert_end(processes.launcher.pids)
    assert not processes.launcher.logs.exists()


def test_messages_arrive_exactly_and_only_with_the_right_signature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store listens on loopback, where other users of the machine can write to it."""
    monkeypatch.setattr(worker, "PART", 7)
    store = torch.distributed.HashStore()
    ours, theirs = worker.Channel(store, "ours"), worker.Channel(store, "theirs")
    message = {"action": "step", "numbers": [0.1, 1e-300, 2**70], "text": "ä\n"}
    ours.send("request/1", message)
    assert ours.receive("request/1") == message
    with pytest.raises(PermissionError, match="the signature of the message 'request/1' is wrong"):
        theirs.receive("request/1")
    ours.fail({"rank": 1})
    ours.fail({"rank": 2})
    assert ours.receive("failure") == {"rank": 1}
    ours.delete("request/1")
    assert not ours.has("request/1")


@pytest.mark.slow
def test_one_setting_starts_the_processes_and_a_killed_one_loses_no_step(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends with an error, and resumes from its last step, in one process."""

    def run(folder: Path, processes: int) -> None:
        given: Any = {"steps": 2, "examples": 4, "runs": 4, "micro_tokens": 64}
        train_toy(toy_model, folder, learner={"processes": processes}, **given)

    step = ShardedLearner.step

    def dying(self: ShardedLearner, samples: Sequence[Sample], number: int) -> dict[str, Any]:
        if number == 1:
            os.kill(self.processes.launcher.pids[0], signal.SIGKILL)
        return step(self, samples, number)

    with monkeypatch.context() as patch:
        patch.setattr(ShardedLearner, "step", dying)
        patch.setattr(Trainer, "step", lambda *_: pytest.fail("computed in this process"))
        with pytest.raises(CompoundError, match=r"learner process 0 of 2 .* was killed by SIGKILL"):
            run(tmp_path / "killed", 2)
    (first,) = training_records(tmp_path / "killed")
    run(tmp_path / "killed", 1)
    run(tmp_path / "whole", 1)
    resumed, whole = (training_records(tmp_path / name) for name in ("killed", "whole"))
    assert [record["step"] for record in resumed] == [record["step"] for record in whole] == [0, 1]
    assert resumed[0] == first  # not computed again
    assert first["norms"] == pytest.approx(whole[0]["norms"], rel=1e-6)
    shown = [
        [answer["tokens"] for group in record["excerpts"] for answer in group["answers"]]
        for record in (first, whole[0])
    ]
    assert shown[0] == shown[1] != []
