"""Learner processes of one machine, and the command that provides them on a machine without a run.

    COMPOUND_LEARNER_KEY=… python -m compound.optimizers.weights.distributed.node HOST:PORT

The command waits for a run at its address, starts processes for each of its training jobs, and
waits again when the run is interrupted. It ends when the run has finished.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compound.core.errors import CompoundError
from compound.engines import models
from compound.optimization.runs.directory import load_checkpoint
from compound.optimizers.weights.distributed import worker
from compound.optimizers.weights.distributed.learner import KEY, SAME_KEY
from compound.optimizers.weights.distributed.worker import END, JOB, MACHINES, Channel

if TYPE_CHECKING:
    from torch.distributed import Store

COMMAND = "python -m compound.optimizers.weights.distributed.node"
TOKEN = ".learner"  # file in the run directory, by which a machine proves that it shares it
STOP = 10.0  # seconds between the request to end and SIGKILL
PAUSE = 0.5  # seconds between the looks of a waiting machine
CONNECT = timedelta(seconds=30)
# With the import path of this process; `-P` keeps the working directory out of it.
BOOT = """import json, sys
sys.path[:], place = map(json.loads, sys.argv[1:])
from compound.optimizers.weights.distributed.worker import main
main(place)"""


class LocalProcesses:
    """Learner processes of one machine for one job, started by the constructor."""

    def __init__(
        self, address: tuple[str, int], job: int, key: str, asked: Mapping[str, Any], machine: int
    ) -> None:
        self.logs = Path(tempfile.mkdtemp(prefix="compound-learner-"))
        self._first, self._processes = machine * asked["processes"], list[subprocess.Popen[bytes]]()
        given = {**asked, "address": address, "job": job, "launcher": os.getpid()}
        for local in range(asked["processes"]):
            log = self.logs / f"{local}.log"
            place = {**given, "rank": self._first + local, "local": local, "log": str(log)}
            command = [sys.executable, "-P", "-c", BOOT, json.dumps(sys.path), json.dumps(place)]
            with log.open("ab") as out:
                process = subprocess.Popen(
                    command,
                    env={**os.environ, KEY: key},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,  # Ctrl-C in a terminal ends the run first
                )
            self._processes.append(process)
        self.pids = [process.pid for process in self._processes]  # by rank

    def report(self, channel: Channel, ending: str = "") -> None:
        """Report the first process that ended by itself, or why all are ended."""
        codes = [(process.poll(), local) for local, process in enumerate(self._processes)]
        code, local = next((each for each in codes if each[0] is not None), (None, 0))
        if channel.has(END) or (code is None and not ending):
            return
        if code is not None:
            names = {-each.value: each.name for each in signal.Signals}
            ending = f"exited with status {code}"
            ending = f"was killed by {names[code]}" if code in names else ending
        log = self.logs / f"{local}.log"
        found = {"rank": self._first + local, "message": ending, "log": worker.tail(log)}
        channel.fail({**found, "logs": str(self.logs), "killed": code == -signal.SIGKILL})

    def close(self, *, keep_logs: bool = False) -> None:
        """Wait for the end of all processes, which was requested, and kill those that still run."""
        deadline = time.monotonic() + STOP
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(STOP)
        if not keep_logs:
            shutil.rmtree(self.logs, ignore_errors=True)


def facts(job: Mapping[str, Any]) -> dict[str, str]:
    """Return what must be equal on all machines of a job, by name."""
    found = worker.find_versions()
    try:
        found["base weights"] = models.folder_digest(models.resolve(job["model"]))
        found["run directory"] = Path(job["folder"], TOKEN).read_text(encoding="utf-8")
    except (CompoundError, OSError) as error:
        missing = "run directory" if "base weights" in found else "base weights"
        found[missing] = f"none: {error}"
    return found


class LearnerMachine:
    """A machine that provides processes for the jobs of a run."""

    def __init__(self, address: tuple[str, int], key: str) -> None:
        self.address, self._key = address, key
        self._folder: Path | None = None  # the run's, once a job has named it

    def serve(self) -> None:
        """Take part in all jobs of a run, until it has finished."""
        tell(f"waiting for a run at {self.address[0]}:{self.address[1]}")
        told = ""
        while True:
            try:
                socket.create_connection(self.address, 5).close()
                store = connect(self.address)
            except (OSError, RuntimeError) as error:  # no run, or another program
                if told != (told := str(error)):
                    tell(f"no run there ({told}); trying again until there is one")
                if self._folder and is_finished(self._folder):
                    tell(f"the run in {self._folder.parent} has finished")
                    return
                time.sleep(PAUSE)
                continue
            try:
                self._follow(store)
            except RuntimeError as error:  # of a connection
                tell(f"the run has ended or cannot be reached ({error}); waiting for it")

    def _follow(self, store: Store) -> None:
        done = 0
        while True:
            if (job := int(store.add(worker.JOBS, 0))) > done:
                self._take_part(Channel(store, self._key, job), job)
                done = job
            time.sleep(PAUSE)

    def _take_part(self, channel: Channel, job: int) -> None:
        """Provide the processes of one job, until it ends."""
        if channel.has(END):
            return
        try:
            asked = channel.receive(JOB)
        except PermissionError:
            channel.send(f"{MACHINES}/{channel.count(MACHINES, 1)}", {})
            raise CompoundError(f"{KEY} is not that of the run", hint=SAME_KEY) from None
        machine, self._folder = channel.count(MACHINES, 1), Path(asked["folder"])
        if machine >= asked["machines"]:
            tell(f"job {job} has all its machines already; waiting for the next one")
            return
        name = f"{MACHINES}/{machine}"
        channel.send(name, {"host": socket.gethostname(), "facts": facts(asked)})
        tell(f"job {job}: machine {machine} of {asked['machines']}, {asked['processes']} processes")
        launcher = LocalProcesses(self.address, job, self._key, asked, machine)
        try:
            while not channel.has(END):
                channel.count(f"{name}/beat", 1)
                launcher.report(channel)
                time.sleep(worker.BEAT)
        finally:
            failed = False
            with contextlib.suppress(RuntimeError):  # the run has ended
                launcher.report(channel, "was ended by its launcher")
                failed = channel.has(worker.FAILURE)
            launcher.close(keep_logs=failed)
        tell(f"job {job} has ended")


def connect(address: tuple[str, int]) -> Store:
    """Return a connection to the store of a run; raise if something else listens there.

    PyTorch's constructor waits for the answer of the other side without a limit, and cannot be
    interrupted, so that a thread calls it.
    """
    limit = CONNECT.total_seconds()
    try:
        return ThreadPoolExecutor(1).submit(worker.connect, *address, CONNECT).result(limit)
    except TimeoutError:
        raise CompoundError(
            f"the program that listens at {address[0]}:{address[1]} did not answer as a run within "
            f"{limit:g} s",
            hint="pass HOST:PORT of learner.address in the run's settings, with a port that no other "
            "program uses",
        ) from None


def is_finished(folder: Path) -> bool:
    """Return whether the run with a memory folder has finished."""
    try:
        found = load_checkpoint(folder.parent)
    except CompoundError:  # damaged
        return False
    return found is not None and found.state.done


def tell(text: str) -> None:
    """Print a line with the time and the name of this machine."""
    print(time.strftime("%H:%M:%S"), f"{socket.gethostname()}:", text, flush=True)


def read_address(text: str) -> tuple[str, int]:
    """Return the host and the port of an address."""
    host, _, port = text.rpartition(":")
    if not host or "/" in host or not (port.isdecimal() and 0 < int(port) < 2**16):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, such as trainer:29500")
    return host, int(port)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Train for a run on other machines.")
    parser.add_argument(
        "address", type=read_address, help="HOST:PORT of the run, as in learner.address"
    )
    given = parser.parse_args()
    if not os.environ.get(KEY):
        parser.error(f"set the environment variable {KEY}; {SAME_KEY}")
    try:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else each lost connection is traced
        LearnerMachine(given.address, os.environ[KEY]).serve()
    except CompoundError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # a thread may wait in PyTorch
    except KeyboardInterrupt:
        os._exit(130)


if __name__ == "__main__":
    main()
