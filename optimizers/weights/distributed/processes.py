"""Start, watch and end the processes of a learner, which form one group of ``torch.distributed``.

Every process has a socket to this one. A process that ends for any reason closes it, which is noticed at
once; and if this process ends, even by ``kill -9``, the others read the end of theirs and exit.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compound.errors import CompoundError, ConfigurationError, DeclarationError, RunDirectoryError
from compound.optimizers.weights.distributed.logs import LogFolder
from compound.optimizers.weights.distributed.messages import Message, encode, receive
from compound.optimizers.weights.learner.samples import SECTION
from compound.optimizers.weights.learner.trainer import StaleSamples

START = 600.0  # seconds in which all processes must have imported their libraries and formed a group
SETTLE = 3.0  # seconds to wait for the reports of other processes after the first failure
END = 10.0  # seconds between the end of the connection and SIGKILL
RESUME = "the same command resumes the run from its last step"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
KINDS = (ConfigurationError, DeclarationError, RunDirectoryError, StaleSamples)
ERRORS = {kind.__name__: kind for kind in KINDS}
# The import path of this process; `-P` keeps the working directory out of it.
BOOT = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from compound.optimizers.weights.distributed.process import main
main(sys.argv[2:])"""


class Processes:
    """Processes of one group, started by the constructor.

    Args:
        count: the number of processes.
        backend: the communication library, ``gloo`` or ``nccl``.
        section: the path of the training settings, for messages.
        command: the command that starts a process, without its arguments.

    Attributes:
        logs: the folder with the output of each process.

    Raises:
        CompoundError: a process does not start.
    """

    def __init__(
        self,
        count: int,
        backend: str = "gloo",
        *,
        section: str = SECTION,
        command: Sequence[str] = (sys.executable, "-P", "-c", BOOT),
    ) -> None:
        self.count, self.section = count, section
        self._log = LogFolder()
        self.logs = self._log.path
        self._events: queue.Queue[tuple[int, Message | None]] = queue.Queue()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[socket.socket] = []
        self._closed = False
        self._shared = Path(tempfile.mkdtemp(prefix="compound-learner-"))
        try:
            for rank in range(count):
                self._start(rank, backend, command)
            self._collect("starting", timeout=START)
        except BaseException:
            self.close()
            raise

    @property
    def ended(self) -> bool:
        """Whether no process runs any more."""
        return all(process.poll() is not None for process in self._processes)

    def call(self, action: str, **arguments: object) -> Any:  # noqa: ANN401 - JSON
        """Let all processes carry out an action, and return the result of the first one; see `call_all`."""
        return self.call_all(action, **arguments)[0]

    def call_all(self, action: str, **arguments: object) -> list[Any]:
        """Let all processes carry out an action, and return the result of each.

        Args:
            action: one of the actions of `compound.optimizers.weights.distributed.process`.
            arguments: its arguments, as JSON.

        Raises:
            CompoundError: a process failed or ended, now or before; all processes are ended then.
        """
        if self._closed:
            raise CompoundError(
                f"the learner processes have ended, so they cannot {action.replace('_', ' ')}", hint=RESUME
            )
        frame = encode({"action": action, "arguments": arguments})
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it has ended, which is read below
                connection.sendall(frame)
        try:
            return self._collect(action.replace("_", " "))
        except BaseException:
            self.close()  # results that are not awaited would be taken for those of the next action
            raise

    def interrupt(self) -> None:
        """Let all processes exit, without waiting; a call that another thread waits for raises."""
        self._closed = True
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all processes, and wait for them."""
        self.interrupt()
        deadline = time.monotonic() + END
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for connection in self._connections:
            connection.close()
        self._log.close()
        shutil.rmtree(self._shared, ignore_errors=True)

    def _start(self, rank: int, backend: str, command: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        self._connections.append(ours)
        arguments = [theirs.fileno(), rank, self.count, backend, self._shared]
        with theirs, (self.logs / f"{rank}.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, json.dumps(sys.path), *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C must not reach it: `close` ends it
                env=_environment(rank, self.count),
            )
        self._processes.append(process)
        threading.Thread(target=self._listen, args=(rank, ours), daemon=True).start()

    def _listen(self, rank: int, connection: socket.socket) -> None:
        """Queue the messages of a process, and last its end."""
        try:
            while (message := receive(connection)) is not None:
                self._events.put((rank, message))
        finally:
            self._events.put((rank, None))

    def _collect(self, action: str, timeout: float | None = None) -> list[Any]:
        """Wait for the reports of all processes, and return the result of each."""
        results: dict[int, Any] = {}
        while len(results) < self.count:
            try:
                rank, message = self._events.get(timeout=timeout)
            except queue.Empty:
                late = next(rank for rank in range(self.count) if rank not in results)
                raise self._failed({late: {"error": f"not ready after {timeout:.0f} s"}}, action) from None
            if message is None or "result" not in message:
                raise self._failed({rank: message, **self._further(rank)}, action)
            results[rank] = message["result"]
        return [results[rank] for rank in range(self.count)]

    def _further(self, first: int) -> dict[int, Message | None]:
        """Return the failures of other processes that follow the first one."""
        found: dict[int, Message | None] = {}
        deadline = time.monotonic() + SETTLE
        while len(found) < self.count - 1 and (left := deadline - time.monotonic()) > 0:
            try:
                rank, message = self._events.get(timeout=left)
            except queue.Empty:
                break
            if rank != first and rank not in found and (message is None or "result" not in message):
                found[rank] = message
        return found

    def _failed(self, failures: Mapping[int, Message | None], action: str) -> CompoundError:
        """End all processes, and return the error of the failure that caused the others."""
        rank = min(failures, key=lambda rank: (_is_consequence(failures[rank]), rank))
        failure, process = failures[rank], self._processes[rank]
        if failure is None:  # its socket is closed, so it is ending
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END)
        code = process.poll()
        self.close()
        who = f"learner process {rank} of {self.count} (counted from 0)"
        if failure is not None and "kind" in failure:
            kind = ERRORS.get(failure["kind"], CompoundError)
            return kind(f"{who}: {failure['message']}", hint=failure["hint"])
        what = _describe_exit(code) if failure is None else f"failed: {failure['error']}"
        return CompoundError(
            f"{who} {what}, during: {action}. The end of its log:\n{self._log.tail(rank)}\n",
            hint=self._hint(code if failure is None else None),
        )

    def _hint(self, code: int | None) -> str:
        if code == -signal.SIGKILL:
            return (
                "the system kills processes if memory runs out: lower "
                f"{self.section}.optimizer.micro_tokens or {self.section}.learner.processes; {RESUME}"
            )
        return f"the logs are in {self.logs}; {RESUME}"


def _is_consequence(failure: Message | None) -> bool:
    """Return whether a failure follows from that of another process."""
    return failure is not None and bool(failure.get("lost_peer"))


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "closed its connection"
    if code < 0:
        names = {each.value: each.name for each in signal.Signals}
        return f"was killed by signal {-code} ({names.get(-code, 'real-time')})"
    return f"exited with status {code}"


def _environment(rank: int, count: int) -> dict[str, str]:
    """Return the environment of a process; the group communicates on this machine only."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "OMP_NUM_THREADS": str(max(1, cores // count)),
        **os.environ,
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": LOOPBACK,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "PYTHONUNBUFFERED": "1",
    }
