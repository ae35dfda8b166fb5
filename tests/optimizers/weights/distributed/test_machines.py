"""Machines that share a training: launchers on loopback, which are killed, differ or do not answer."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainings.learners import declared, difference, drawn, weights_of

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from compound import CompoundError  # noqa: E402
from compound.optimization.runs.directory import read_records  # noqa: E402
from compound.optimizers.weights.distributed import node, processes, worker  # noqa: E402
from compound.optimizers.weights.distributed.learner import (  # noqa: E402
    KEY,
    LearnerSettings,
    open_trainer,
)
from compound.optimizers.weights.distributed.processes import (  # noqa: E402
    Learner,
    ShardedLearner,
    open_learner,
)
from trainings.jobs import training_records  # noqa: E402

ROOT = Path(__file__).parents[4]
GUARD = 120.0  # seconds; only a defect takes so long
EQUAL = 1e-6
# starts the command with some code before it; `BOOT` is what its processes run
STARTED = "import sys; from compound.optimizers.weights.distributed import node, worker\n{code}\n"
STARTED += "sys.argv = ['node', *sys.argv[1:]]; node.main()"


class Machine:
    """The command of another machine."""

    def __init__(self, address: str, log: Path, code: str = "", **variables: str) -> None:
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", STARTED.format(code=code), address],
                env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
                stdout=out,
                stderr=out,
            )

    def said(self, text: str) -> None:
        """Wait until the command has printed a text."""
        deadline = time.monotonic() + GUARD
        while text not in self.log.read_text():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def end(self, number: int = signal.SIGKILL) -> int:
        self.process.send_signal(number)
        return self.process.wait(GUARD)


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(KEY, "a text that both machines know")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", worker.LOOPBACK)
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def machine(address: str, tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    started: list[Machine] = []

    def start(code: str = "", **variables: str) -> Machine:
        log = tmp_path / f"machine{len(started)}.log"
        started.append(Machine(address, log, code, **variables))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()


def settings(address: str, count: int = 1, sharding: str = "data") -> LearnerSettings:
    return LearnerSettings.model_validate(
        {"processes": count, "machines": 2, "address": address, "sharding": sharding}
    )


def trained(learner: Learner, folder: Path) -> Mapping[str, Any]:
    """Train one step, and return the weights."""
    folder.mkdir(exist_ok=True)
    learner.step(drawn(("x",), groups=12, prompt=40), 0)
    saved = learner.save(folder)
    learner.close()
    return weights_of(saved, folder)


@pytest.mark.parametrize(
    "wrong", ["", "trainer", "trainer:", "trainer:0", "trainer:99999", "http://trainer:80", ":80"]
)
def test_a_wrong_address_is_named(
    wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["node", wrong])
    with pytest.raises(SystemExit, match="2"):
        node.main()
    assert f"{wrong!r} is not HOST:PORT, such as trainer:29500" in capsys.readouterr().err


def test_a_machine_that_waits_says_why(machine: Callable[..., Machine]) -> None:
    waiting = machine()
    waiting.said("Connection refused); trying again until there is one")
    assert waiting.end(signal.SIGINT) == 130


def test_another_program_at_the_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch waits for its answer without a limit."""
    monkeypatch.setattr(node, "CONNECT", timedelta(seconds=1))
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = other.getsockname()
        with pytest.raises(CompoundError) as caught:
            node.LearnerMachine(address, "key").serve()
    assert f"listens at 127.0.0.1:{address[1]} did not answer as a run" in caught.value.message
    assert "learner.address" in caught.value.hint


@pytest.mark.slow
def test_one_command_serves_all_jobs_and_layouts_train_to_equal_weights(
    toy_model: Path, tmp_path: Path, address: str, machine: Callable[..., Machine]
) -> None:
    """Two launchers of two processes; equal bits within one layout."""
    spec = declared(toy_model, ("x",), micro_tokens=64)
    other, found = machine(), {}
    for sharding in ("data", "fsdp"):
        alone = trained(open_trainer(spec), tmp_path / f"{sharding} alone")
        for number in range(2):
            learner = open_learner(spec, settings(address, 2, sharding), tmp_path)
            assert isinstance(learner, ShardedLearner)
            assert (learner.processes.count, len(learner.processes.launcher.pids)) == (4, 2)
            found[number] = trained(learner, tmp_path / f"{sharding} {number}")
        assert difference(found[0], alone) <= EQUAL
        assert all(torch.equal(found[0][name], found[1][name]) for name in alone)
    assert other.process.poll() is None


@pytest.mark.slow
def test_a_machine_that_differs_is_refused_before_a_step(
    toy_model: Path, tmp_path: Path, address: str, machine: Callable[..., Machine]
) -> None:
    spec, host = declared(toy_model, ("x",)), socket.gethostname()
    versions = "versions = worker.find_versions()\nworker.find_versions = lambda: versions | "
    for code, variables, told in (
        (versions + "{'torch': '1.0'}", {}, f"the machine {host} has torch 1.0, but this machine"),
        ("worker.package_digest = lambda: '1f'", {}, "has source of compound 1f, but this machine"),
        (
            "node.models.folder_digest = lambda model: '1f'",
            {},
            f"the machine {host} has base weights 1f",
        ),
        ("node.TOKEN = '.other'", {}, f"the machine {host} has run directory none"),
        ("", {KEY: "guessed"}, f"a machine that joined at {address} has another {KEY}"),
    ):
        other = machine(code, **variables)
        with pytest.raises(CompoundError, match=re.escape(told)):
            open_learner(spec, settings(address), tmp_path)
        if variables:  # no later job could succeed
            assert other.process.wait(GUARD) == 1
            assert f"error: {KEY} is not that of the run" in other.log.read_text()
        other.end()


def test_a_machine_that_does_not_join_is_asked_for(
    toy_model: Path, tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "START", 1.0)
    with pytest.raises(CompoundError) as caught:
        open_learner(declared(toy_model, ("x",)), settings(address), tmp_path)
    assert "learner.machines is 2, but only 1 joined within 1 s" in caught.value.message
    assert f"{node.COMMAND} {address}" in caught.value.hint


def test_a_machine_without_a_place_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"machines": 2, "processes": 1, "folder": str(tmp_path / "memory")}
    channel: Any = SimpleNamespace(has=lambda _: False, receive=lambda _: asked, count=lambda *_: 2)
    spare = node.LearnerMachine(("127.0.0.1", 1), "key")
    spare._take_part(channel, 1)
    monkeypatch.setattr(node, "is_finished", lambda folder: folder == tmp_path / "memory")
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    spare.serve()
    assert f"the run in {tmp_path} has finished" in capsys.readouterr().out


KILLED = "Trainer.step = lambda *_, **__: os.kill(os.getpid(), 9)"
STUCK = "import time; Trainer.step = lambda *_, **__: print('in the step', flush=True) or time.sleep(600)"
HURRY = "import datetime; from compound.optimizers.weights.distributed import worker\n"
HURRY += "worker.PATIENCE = datetime.timedelta(seconds=40)\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        (KILLED, 0, "was killed by SIGKILL, during: step", "optimizer.micro_tokens"),
        (STUCK, signal.SIGKILL, "ended, as its launcher did", "the same command resumes"),
        (STUCK, signal.SIGINT, "was ended by its launcher", "the logs are in /tmp"),
        (STUCK, signal.SIGSTOP, "gave no sign of life for 3 s", "check the network"),
        (HURRY + STUCK, 0, "did not take part in a collective", "GLOO_SOCKET_IFNAME"),
    ],
    ids=["process", "launcher", "Ctrl-C", "machine", "stuck"],
)
def test_a_lost_process_is_named_with_its_machine_and_the_remedy(
    case: tuple[str, int, str, str],
    toy_model: Path,
    tmp_path: Path,
    address: str,
    machine: Callable[..., Machine],
    booting: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, ending, told, hint = case
    monkeypatch.setattr(processes, "LOST", 3.0)
    booting(HURRY if code.startswith(HURRY) else "")
    trainer = "from compound.optimizers.weights.learner.trainer import Trainer"
    boot = node.BOOT.replace("main(", f"import os; {trainer}\n{code}\nmain(")
    other = machine(f"node.BOOT = {boot!r}")
    learner = open_learner(declared(toy_model, ("x",)), settings(address), tmp_path)

    def end() -> None:
        time.sleep(2)
        other.process.send_signal(ending)

    if ending:
        threading.Thread(target=end, daemon=True).start()
    with pytest.raises(CompoundError) as caught:
        learner.step(drawn(("x",)), 0)
    who = f"learner process 1 of 2 (counted from 0) on {socket.gethostname()} "
    assert who + told in caught.value.message or told in caught.value.message.partition(who)[2]
    assert hint in caught.value.hint
    learner.close()


RUN = """
import sys
from pathlib import Path
from compound import CompoundError
from trainings.jobs import train_toy

model, folder, address = sys.argv[1:]
learner = {"processes": 2, "machines": 2, "address": address} if address else {}
given = {"steps": 3, "examples": 4, "runs": 4, "micro_tokens": 64}
try:
    train_toy(Path(model), Path(folder), learner=learner, **given)
except CompoundError as error:
    sys.exit(f"error: {error}")
"""
# the last process waits in the second and in the third step, once each
WAITING = """
import pathlib, sys, time
from compound.optimizers.weights.learner.trainer import Trainer
step = Trainer.step
def waiting(self, samples, number):
    marker = pathlib.Path({folder!r}, f"step {{number}}")
    if place["rank"] == 3 and number and not marker.exists():
        marker.touch()
        time.sleep(600)
    return step(self, samples, number)
Trainer.step = waiting
"""


@pytest.mark.slow
def test_a_killed_launcher_and_a_killed_run_lose_no_step_and_pay_nothing_twice(
    toy_model: Path, tmp_path: Path, address: str, machine: Callable[..., Machine]
) -> None:
    """Four processes in two launchers: each is killed during a step, and the same command resumes."""

    def run(folder: Path, at: str = address) -> subprocess.Popen[str]:
        path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support")))
        return subprocess.Popen(
            [sys.executable, "-c", RUN, str(toy_model), str(folder), at],
            env={**os.environ, "PYTHONPATH": path},
            text=True,
            stderr=subprocess.PIPE,
        )

    def wait(step: int) -> None:
        deadline = time.monotonic() + GUARD
        while not (tmp_path / f"step {step}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    boot = node.BOOT.replace("main(", WAITING.format(folder=str(tmp_path)) + "main(")
    code, killed, whole = f"node.BOOT = {boot!r}", tmp_path / "killed", tmp_path / "whole"
    first = machine(code)
    with run(killed) as driver:
        wait(1)
        first.end()
        assert driver.wait(GUARD) == 1
        assert driver.stderr
        told = driver.stderr.read()
    assert f"of 4 (counted from 0) on {socket.gethostname()} ended, as its launcher did" in told
    assert "the same command resumes the run from its last step" in told
    second = machine(code)
    with run(killed) as driver:
        wait(2)
        driver.kill()
    second.said("waiting for it")
    with run(killed) as driver:
        assert driver.wait(GUARD) == 0
    assert second.process.wait(GUARD) == 0
    assert f"the run in {killed} has finished" in second.log.read_text()
    machine()
    with run(whole) as driver:
        assert driver.wait(GUARD) == 0
    with run(tmp_path / "alone", "") as driver:
        assert driver.wait(GUARD) == 0

    def found(folder: Path) -> tuple[list[Any], dict[str, Any]]:
        training, events = training_records(folder), [*read_records(folder / "events.jsonl")]
        spent = {name: value for name, value in events[-1]["spent"].items() if name != "seconds"}
        return [(r["step"], r["reward"], r["norms"], r["sampled"]) for r in training], spent

    resumed, expected, alone = (found(f) for f in (killed, whole, tmp_path / "alone"))
    assert resumed == expected  # in every bit
    assert resumed[1] == alone[1]
    for (*facts, norms, _), (*others, other, _) in zip(resumed[0], alone[0], strict=True):
        assert facts == others
        assert norms == pytest.approx(other, rel=EQUAL)
    stored = [sorted(p.name for p in (f / "memory").iterdir()) for f in (killed, whole)]
    assert [n for n in stored[0] if n != node.TOKEN] == [n for n in stored[1] if n != node.TOKEN]
