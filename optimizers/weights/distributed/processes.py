"""Learner whose updates several processes compute together, on one machine or on several.

PyTorch's elastic agent, which ``torchrun`` runs, too, starts the processes of this machine and
watches them. If one of them fails, the agent ends the others; if the run ends, even by ``kill -9``,
so does its store, and the processes exit.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compound.core.errors import (
    CompoundError,
    ConfigurationError,
    DeclarationError,
    RunDirectoryError,
)
from compound.core.security.sanitize import sanitize_text
from compound.core.storage.artifacts import Reference, copy_into
from compound.engines import model_folder, models
from compound.engines.local import devices, loading
from compound.optimizers.weights.distributed.learner import KEY, LearnerSettings, open_trainer
from compound.optimizers.weights.distributed.worker import END, FAILURE, Channel, find_versions
from compound.optimizers.weights.learner.samples import SECTION, Sample, samples_to_json
from compound.optimizers.weights.learner.trainer import LearnerSpec, Saved, StaleSamples, Trainer

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult
    from transformers import PreTrainedTokenizerBase

START = 600.0  # seconds in which all processes must have started and formed a group
STOP = 10  # seconds between the request to end and SIGKILL
POLL = 0.01  # seconds between looks at the results
SHOWN = 20  # lines of a log in an error message
RUN_ID = "none"  # of the group; the default of torchrun
RESUME = "the same command resumes the run from its last step"
KINDS = (ConfigurationError, DeclarationError, RunDirectoryError, StaleSamples)
ERRORS = {kind.__name__: kind for kind in KINDS}
# With the import path of this process; `-P` keeps the working directory out of it.
BOOT = """import json, os, sys
sys.path[:] = json.loads(sys.argv[1])
os.environ["COMPOUND_LEARNER_KEY"] = open(f"{sys.argv[2]}/key").read()
log = open(f"{sys.argv[2]}/{os.environ['LOCAL_RANK']}.log", "ab", 0)
os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
from compound.optimizers.weights.distributed.worker import main
main()"""


class Processes:
    """Processes of one group, started by the constructor."""

    def __init__(
        self,
        count: int,
        backend: str = "gloo",
        *,
        machines: int = 1,
        address: str = "127.0.0.1:0",
        section: str = SECTION,
    ) -> None:
        self.count, self.section = count * machines, section
        self._closed, self._requests, self._has_failed = False, 0, False
        self._ended: RunResult | Exception | None = None
        host, _, port = address.rpartition(":")
        try:
            server = socket.create_server((host, int(port)))
        except OSError as error:
            raise CompoundError(
                f"{section}.learner.address: this machine cannot listen at {address}: {error.strerror}",
                hint="name an address of this machine, and a free port",
            ) from None
        self.logs = Path(tempfile.mkdtemp(prefix="compound-learner-"))
        self._key = os.environ.get(KEY) or secrets.token_hex()
        (self.logs / "key").write_text(self._key)  # in a folder that only this user can read
        self._launch(count, machines, server)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        try:
            check_versions(self.call_all("find_versions", START))
            self.call_all("join", START, backend=backend, local=machines == 1)
        except BaseException:
            self.close()
            raise

    def _launch(self, count: int, machines: int, server: socket.socket) -> None:
        """Serve the store of the group, and prepare the agent."""
        from torch.distributed import TCPStore
        from torch.distributed.elastic.agent.server import WorkerSpec
        from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

        for name in ("multiprocessing.api", "agent.server.api"):  # failures are reported below
            logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
        host, port = server.getsockname()[:2]
        store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,  # the agent uses the same store
            timeout=timedelta(seconds=START),
            master_listen_fd=server.detach(),
        )
        self._channel = Channel(store, self._key)
        spec = WorkerSpec(
            role="learner",
            local_world_size=count,
            entrypoint=sys.executable,
            args=("-P", "-c", BOOT, json.dumps(sys.path), str(self.logs)),
            rdzv_handler=StaticTCPRendezvous(host, port, 0, machines, RUN_ID, int(START)),
            max_restarts=0,
            monitor_interval=0.1,
            master_addr=host,
            master_port=port,
        )
        logs = DefaultLogsSpecs(log_dir=str(self.logs))
        self._agent = LocalElasticAgent(
            spec, logs, exit_barrier_timeout=STOP, shutdown_timeout=STOP
        )

    def _run(self) -> None:
        """Start the processes of this machine, and wait for their end."""
        try:
            self._ended = self._agent.run()
        except Exception as error:  # noqa: BLE001 - raised by the call that waits
            self._ended = error

    @property
    def pids(self) -> list[int]:
        """The processes of this machine, by rank."""
        workers = self._agent.get_worker_group().workers
        started = [worker for worker in workers if worker.id is not None]
        return [worker.id for worker in sorted(started, key=lambda each: each.local_rank)]

    def call(self, action: str, **arguments: object) -> Any:  # noqa: ANN401 - JSON
        """Let all processes carry out an action, and return the result of the first one."""
        return self.call_all(action, None, **arguments)[0]

    def call_all(self, action: str, timeout: float | None = None, **arguments: object) -> list[Any]:
        """Let all processes carry out an action, and return the result of each."""
        told = action.replace("_", " ") if self._requests else "starting"
        if self._closed:
            raise self._gone(told)
        request = f"request/{self._requests}"
        results = [f"result/{self._requests}/{rank}" for rank in range(self.count)]
        self._requests += 1
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        try:
            self._channel.send(request, {"action": action, "arguments": arguments})
            for name in results:
                self._wait(name, told, deadline)
            found: list[Any] = [self._channel.receive(name) for name in results]
            for name in (request, *results):
                self._channel.delete(name)
        except BaseException:
            self.close()  # results that are not awaited would be taken for those of the next action
            raise
        return found

    def _wait(self, name: str, action: str, deadline: float) -> None:
        """Wait for the result of a process."""
        while not self._channel.has(name):
            if self._channel.has(FAILURE) or not self._thread.is_alive():
                raise self._failed(action)
            if time.monotonic() > deadline:
                late = {"rank": name.rpartition("/")[2], "error": "it is not ready in time"}
                raise self._failed(action, late)
            self._thread.join(POLL)

    def interrupt(self) -> None:
        """Let all processes exit, without waiting; a call that another thread waits for raises."""
        self._closed = True
        self._channel.mark(END)

    def close(self) -> None:
        """End all processes, and wait for them."""
        self.interrupt()
        self._thread.join(STOP)
        if self._thread.is_alive():
            for pid in self.pids:
                with contextlib.suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
            self._thread.join(STOP)
        if not self._has_failed:
            shutil.rmtree(self.logs, ignore_errors=True)

    @property
    def ended(self) -> bool:
        """Whether no process of this machine runs any more."""
        return not self._thread.is_alive()

    def _gone(self, action: str) -> CompoundError:
        message = f"the learner processes have ended, so they cannot {action}"
        return CompoundError(message, hint=RESUME)

    def _failed(self, action: str, failure: Mapping[str, Any] | None = None) -> CompoundError:
        """End all processes, and return the error of the failure that caused the others."""
        if failure is None and self._closed:
            return self._gone(action)
        if failure is None and self._channel.has(FAILURE):
            failure = self._channel.receive(FAILURE)
        self._has_failed = True  # keeps the logs
        self.close()
        if failure is None:
            failure = self._exit()
        who = f"learner process {failure['rank']} of {self.count} (counted from 0)"
        if "kind" in failure:
            kind = ERRORS.get(failure["kind"], CompoundError)
            return kind(f"{who}: {failure['message']}", hint=failure["hint"])
        what = failure.get("exit") or f"failed: {failure['error']}"
        tail = self._tail(int(failure["rank"]))
        return CompoundError(
            f"{who} {what}, during: {action}. The end of its log:\n{tail}\n",
            hint=failure.get("hint", f"the logs are in {self.logs}; {RESUME}"),
        )

    def _exit(self) -> dict[str, Any]:
        """Return which process of this machine ended first, and how."""
        if self._ended is None or isinstance(self._ended, Exception):
            return {"rank": 0, "exit": f"did not start: {self._ended}"}
        failures = self._ended.failures.items()
        # the agent ends the others by SIGTERM
        order = [(f.exitcode == -signal.SIGTERM, f.timestamp, rank) for rank, f in failures]
        if not order:
            return {"rank": 0, "exit": "ended"}
        rank = min(order)[2]
        code = self._ended.failures[rank].exitcode
        if code >= 0:
            return {"rank": rank, "exit": f"exited with status {code}"}
        names = {each.value: each.name for each in signal.Signals}
        found = {"rank": rank, "exit": f"was killed by signal {-code} ({names.get(-code, '')})"}
        if code == -signal.SIGKILL:
            found["hint"] = (
                "the system kills processes if memory runs out: lower "
                f"{self.section}.optimizer.micro_tokens or {self.section}.learner.processes; {RESUME}"
            )
        return found

    def _tail(self, rank: int) -> str:
        """Return the last lines of a process's log, indented."""
        try:
            text = (self.logs / f"{rank}.log").read_text("utf-8", "replace")
        except OSError as error:  # of another machine, or of a process that did not start
            return f"    (the log cannot be read: {error.strerror})"
        shown = (f"    {sanitize_text(line)[:300]}" for line in text.splitlines()[-SHOWN:])
        return "\n".join(shown) or "    (no output)"


def check_versions(found: Sequence[Mapping[str, str]]) -> None:
    """Reject processes, by rank, with other versions than this one: they would compute other steps.

    Raises:
        CompoundError: a process has another version.
    """
    own = find_versions()
    for rank, versions in enumerate(found):
        for name, version in own.items():
            if versions.get(name) != version:
                raise CompoundError(
                    f"learner process {rank} (counted from 0) has {name} {versions.get(name)}, but this "
                    f"process has {version}",
                    hint="install the same versions on all machines",
                )


class ShardedLearner:
    """Learner that divides the samples of every update among processes, with the methods of `Trainer`.

    All processes receive all samples and take the same update. Weights and optimizer states are
    therefore equal in all of them, and only the first process writes files.
    """

    def __init__(self, processes: Processes, spec: LearnerSpec, *, sharding: str = "data") -> None:
        self.processes, self._model, self._call = processes, spec.model, processes.call
        unshared = processes.call_all("open", spec=spec.model_dump(mode="json"), sharding=sharding)
        if len(set(map(bool, unshared))) > 1:  # they would divide samples differently
            raise CompoundError(
                f"the learner processes differ: only some can pack samples ({unshared})",
                hint=f"set {spec.section}.learner.processes to 1, or use equal devices",
            )
        self._versions: dict[str, list[str]] | None = None

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the base model."""
        return model_folder.load_tokenizer(models.resolve(self._model))

    def start(self, references: Mapping[str, Reference | None], folder: Path) -> None:
        """Start from stored adapters, which this process copies, so that the others only read."""
        own = {
            name: reference
            and copy_into({**reference, "path": str(folder / reference["path"])}, folder)
            for name, reference in references.items()
        }
        self._versions = self._call("start", references=own, folder=str(folder))

    def restore(self, saved: Saved, folder: Path) -> None:
        """Restore adapters and optimizer states."""
        self._versions = self._call("restore", saved=saved.to_json(), folder=str(folder))

    def restore_optimizer(self, name: str, reference: Reference, folder: Path) -> None:
        """Restore the optimizer state of one adapter, or of the value head."""
        stored, own = dict(reference), str(folder)
        self._call("restore_optimizer", name=name, reference=stored, folder=own)

    def step(self, samples: Sequence[Sample], number: int) -> dict[str, Any]:
        """Update every adapter that has samples."""
        sent, versions = samples_to_json(samples), self._versions
        facts: dict[str, Any] = self._call("step", samples=sent, number=number, versions=versions)
        return facts

    def values(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with the value head's estimates."""
        rows = self._call("values", samples=samples_to_json(samples))
        return [replace(s, values=tuple(row)) for s, row in zip(samples, rows, strict=True)]

    def divergences(
        self, samples: Sequence[Sample], taught: Sequence[Sample] | None = None
    ) -> list[tuple[float, ...]]:
        """Return the log-ratios of the policy to the base model or to the teacher."""
        others = None if taught is None else samples_to_json(taught)
        rows = self._call("divergences", samples=samples_to_json(samples), taught=others)
        return [tuple(row) for row in rows]

    def save(self, folder: Path) -> Saved:
        """Store adapters and optimizer states."""
        saved = Saved.from_json(self._call("save", folder=str(folder.absolute())))
        self._versions = {name: list(some) for name, some in saved.versions.items()}
        return saved

    def write_adapter(self, name: str, folder: Path) -> None:
        """Write the current weights of an adapter to a folder."""
        self._call("write_adapter", name=name, folder=str(folder.absolute()))

    def release_cache(self) -> None:
        """Return the unused memory of all processes to their devices."""
        self._call("release_cache")

    def interrupt(self) -> None:
        """Let the processes exit, so that a call in another thread raises."""
        self.processes.interrupt()

    def close(self) -> None:
        """End the processes."""
        self.processes.close()


Learner = Trainer | ShardedLearner  # of this process, or of several


def open_learner(spec: LearnerSpec, settings: LearnerSettings) -> Learner:
    """Load the base model in this process, or in the processes that the settings ask for."""
    if settings.world == 1:
        return open_trainer(spec)
    settings.check(spec.placement, spec.section)
    # the processes must agree on what `auto` would choose for each by itself
    device = devices.resolve_device(spec.placement.device)
    placement = replace(spec.placement, device=device, dtype=loading.dtype_of(spec.placement))
    processes = Processes(
        settings.processes,
        settings.backend_on(devices.device_type(device)),
        machines=settings.machines,
        address=settings.address or "127.0.0.1:0",
        section=spec.section,
    )
    try:
        given = spec.model_copy(update={"placement": placement})
        return ShardedLearner(processes, given, sharding=settings.sharding)
    except BaseException:
        processes.close()
        raise
