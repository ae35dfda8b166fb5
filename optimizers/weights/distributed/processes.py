"""Learner whose updates several processes compute together, on one machine or on several.

The run serves a store of entries, starts the processes of its machine, and waits for those of other
machines (`compound.optimizers.weights.distributed.node`). If a process fails, the run ends all
others; if the run ends, even by ``kill -9``, so does its store, and the processes exit.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compound.core.errors import (
    CompoundError,
    ConfigurationError,
    DeclarationError,
    RunDirectoryError,
)
from compound.core.formatting import plural
from compound.core.storage.artifacts import Reference, copy_into
from compound.engines import model_folder, models
from compound.engines.local import devices, loading
from compound.optimizers.weights.distributed import learner, node, worker
from compound.optimizers.weights.distributed.learner import LearnerSettings, open_trainer
from compound.optimizers.weights.learner.samples import SECTION, Sample, samples_to_json
from compound.optimizers.weights.learner.trainer import LearnerSpec, Saved, StaleSamples, Trainer

if TYPE_CHECKING:
    from torch.distributed import TCPStore
    from transformers import PreTrainedTokenizerBase

_LOG = logging.getLogger("compound")
LOCAL = "127.0.0.1:0"  # a free port of this machine
START = 600.0  # seconds in which all processes must have started and formed a group
POLL = 0.01  # seconds between looks at the results
LOST = 30.0  # seconds without a sign of life, after which a machine is lost
RESUME = "the same command resumes the run from its last step"
KINDS = (ConfigurationError, DeclarationError, RunDirectoryError, StaleSamples)
ERRORS = {kind.__name__: kind for kind in KINDS}


@cache
def serve(address: str) -> TCPStore:
    """Return the store that this process serves at an address, for all its jobs."""
    from torch.distributed import TCPStore

    host, _, port = address.rpartition(":")
    server = socket.create_server((host, int(port)))
    given_host, given_port = server.getsockname()[:2]
    return TCPStore(
        given_host,
        given_port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=START),
        master_listen_fd=server.detach(),
    )


class Processes:
    """Processes of one group, started by the constructor.

    ``count`` is that of each machine. Other machines must have the same base model, and share the
    folder.
    """

    def __init__(
        self,
        count: int,
        backend: str = "gloo",
        *,
        machines: int = 1,
        address: str = LOCAL,
        section: str = SECTION,
        model: str = "",
        folder: Path = Path(),
    ) -> None:
        self.count, self.section = count * machines, section
        self._each, self._closed, self._requests = count, False, 0
        self._hosts = [socket.gethostname()]  # by machine
        self._beats: dict[int, tuple[int, float]] = {}  # the last sign of life of other machines
        self._cause: CompoundError | None = None
        try:
            store = serve(address)
        except OSError as error:
            raise CompoundError(
                f"{section}.learner.address: this machine cannot listen at {address}: {error.strerror}",
                hint="name an address of this machine, and a free port",
            ) from None
        key = os.environ[learner.KEY] if machines > 1 else secrets.token_hex()
        job, asked = int(store.add(worker.JOBS, 1)), {"processes": count, "machines": machines}
        self._channel = worker.Channel(store, key, job)
        self.launcher = node.LocalProcesses((store.host, store.port), job, key, asked, 0)
        try:
            if machines > 1:
                (folder / node.TOKEN).write_text(secrets.token_hex(), encoding="utf-8")
                self._meet({**asked, "model": model, "folder": str(folder.absolute())}, address)
            self.call_all("join", START, backend=backend, local=machines == 1)
        except BaseException:
            self.close()
            raise

    def _meet(self, job: Mapping[str, Any], address: str) -> None:
        self._channel.send(worker.JOB, job)
        own, machines = node.facts(job), job["machines"]
        _LOG.warning("waiting for %s at %s", plural(machines - 1, "other machine"), address)
        for machine in range(1, machines):
            late = CompoundError(
                f"{self.section}.learner.machines is {machines}, but only {machine} joined within "
                f"{START:g} s",
                hint=f"start on each other machine: {node.COMMAND} {address}; {RESUME}",
            )
            self._wait(name := f"{worker.MACHINES}/{machine}", "starting", START, late)
            try:
                found = self._channel.receive(name)
            except PermissionError:
                raise CompoundError(
                    f"a machine that joined at {address} has another {learner.KEY}",
                    hint=learner.SAME_KEY,
                ) from None
            self._hosts.append(host := found["host"])
            for name, value in own.items():
                if found["facts"].get(name) != value:
                    raise CompoundError(
                        f"the machine {host} has {name} {found['facts'].get(name)}, but this machine has "
                        f"{value}",
                        hint="all machines need the same versions, the same base model, and one run "
                        "directory, such as one on NFS, with the same path",
                    )

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
        try:
            self._channel.send(request, {"action": action, "arguments": arguments})
            for rank, name in enumerate(results):
                late = {"rank": rank, "message": "is not ready in time", "hint": worker.NETWORK}
                self._wait(name, told, timeout, self._error(late, told))
            found: list[Any] = [self._channel.receive(name) for name in results]
            for name in (request, *results):
                self._channel.delete(name)
        except BaseException:
            self.close()  # results that are not awaited would be taken for those of the next action
            raise
        return found

    def _wait(self, name: str, action: str, timeout: float | None, late: CompoundError) -> None:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        looked = -math.inf
        while not self._channel.has(name):
            now = time.monotonic()
            if now - looked > worker.BEAT:
                looked = now
                self.launcher.report(self._channel)
                self._look_for_machines(now)
            if self._closed:
                raise self._gone(action)
            if self._channel.has(worker.FAILURE):
                self._cause = self._error(self._channel.receive(worker.FAILURE), action)
            elif now > deadline:
                self._cause = late
            if self._cause is not None:
                self.close()
                raise self._cause
            time.sleep(POLL)

    def _look_for_machines(self, now: float) -> None:
        for machine in range(1, len(self._hosts)):
            count = self._channel.count(f"{worker.MACHINES}/{machine}/beat")
            before, since = self._beats.get(machine, (-1, now))
            self._beats[machine] = (count, now if count != before else since)
            if now - self._beats[machine][1] > LOST:
                lost = f"is lost: its machine gave no sign of life for {LOST:g} s"
                rank = machine * self._each
                self._channel.fail({"rank": rank, "message": lost, "hint": worker.NETWORK})

    def interrupt(self) -> None:
        """Let all processes exit, without waiting; a call that another thread waits for raises."""
        self._closed = True
        self._channel.mark(worker.END)

    def close(self) -> None:
        """End all processes, and wait for those of this machine."""
        self.interrupt()
        self.launcher.close(keep_logs=self._cause is not None)

    def _gone(self, action: str) -> CompoundError:
        message = f"the learner processes have ended, so they cannot {action}"
        return self._cause or CompoundError(message, hint=RESUME)

    def _error(self, failure: Mapping[str, Any], action: str) -> CompoundError:
        """Return the error of a failure, with the process, its machine, the cause and the remedy."""
        rank, where = failure["rank"], ""
        if 1 < len(self._hosts) > (machine := rank // self._each):
            where = f" on {self._hosts[machine]}"
        who = f"learner process {rank} of {self.count} (counted from 0){where}"
        if "kind" in failure:
            kind = ERRORS.get(failure["kind"], CompoundError)
            return kind(f"{who}: {failure['message']}", hint=failure["hint"])
        hint = failure.get("hint", "")
        if failure.get("killed"):
            hint = (
                "the system kills processes if memory runs out: lower "
                f"{self.section}.optimizer.micro_tokens or {self.section}.learner.processes"
            )
        elif "logs" in failure:
            hint = f"the logs are in {failure['logs']}{where}"
        log = f". The end of its log:\n{failure['log']}\n" if "log" in failure else ""
        message = f"{who} {failure['message']}, during: {action}{log}"
        return CompoundError(message, hint="; ".join(filter(None, [hint, RESUME])))


class ShardedLearner:
    """Learner that divides the samples of every update among processes, with the methods of `Trainer`.

    All processes receive all samples and take the same update. Weights and optimizer states are
    therefore equal in all of them, and only the first process writes files.
    """

    def __init__(self, processes: Processes, spec: LearnerSpec, *, sharding: str = "data") -> None:
        self.processes, self._model = processes, spec.model
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

    def _call(self, action: str, **arguments: object) -> Any:  # noqa: ANN401 - JSON
        return self.processes.call(action, **{name: _sent(v) for name, v in arguments.items()})

    def start(self, references: Mapping[str, Reference | None], folder: Path) -> None:
        """Start from stored adapters, which this process copies, so that the others only read."""
        own = {
            name: reference
            and copy_into({**reference, "path": str(folder / reference["path"])}, folder)
            for name, reference in references.items()
        }
        self._versions = self._call("start", references=own, folder=folder)

    def restore(self, saved: Saved, folder: Path) -> None:
        """Restore adapters and optimizer states."""
        self._versions = self._call("restore", saved=saved, folder=folder)

    def restore_optimizer(self, name: str, reference: Reference, folder: Path) -> None:
        """Restore the optimizer state of one adapter, or of the value head."""
        self._call("restore_optimizer", name=name, reference=dict(reference), folder=folder)

    def step(self, samples: Sequence[Sample], number: int) -> dict[str, Any]:
        """Update every adapter that has samples."""
        facts: dict[str, Any] = self._call(
            "step", samples=samples, number=number, versions=self._versions
        )
        return facts

    def values(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with the value head's estimates."""
        rows = self._call("values", samples=samples)
        return [replace(s, values=tuple(row)) for s, row in zip(samples, rows, strict=True)]

    def divergences(
        self, samples: Sequence[Sample], taught: Sequence[Sample] | None = None
    ) -> list[tuple[float, ...]]:
        """Return the log-ratios of the policy to the base model or to the teacher."""
        return [*map(tuple, self._call("divergences", samples=samples, taught=taught))]

    def save(self, folder: Path) -> Saved:
        """Store adapters and optimizer states."""
        saved = Saved.from_json(self._call("save", folder=folder))
        self._versions = {name: list(some) for name, some in saved.versions.items()}
        return saved

    def write_adapter(self, name: str, folder: Path) -> None:
        """Write the current weights of an adapter to a folder."""
        self._call("write_adapter", name=name, folder=folder)

    def release_cache(self) -> None:
        """Return the unused memory of all processes to their devices."""
        self._call("release_cache")

    def interrupt(self) -> None:
        """Let the processes exit, so that a call in another thread raises."""
        self.processes.interrupt()

    def close(self) -> None:
        """End the processes."""
        self.processes.close()


def _sent(value: object) -> object:
    """Return an argument as JSON, which `compound.optimizers.weights.distributed.worker.READ` reads."""
    if isinstance(value, Path):
        return str(value.absolute())
    if isinstance(value, Saved):
        return value.to_json()
    return samples_to_json(value) if isinstance(value, list | tuple) else value


Learner = Trainer | ShardedLearner  # of this process, or of several


def open_learner(spec: LearnerSpec, settings: LearnerSettings, folder: Path = Path()) -> Learner:
    """Load the base model in this process, or in the processes that the settings ask for.

    ``folder`` is the run's, which other machines must share.
    """
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
        address=settings.address or LOCAL,
        section=spec.section,
        model=spec.model,
        folder=folder,
    )
    try:
        given = spec.model_copy(update={"placement": placement})
        return ShardedLearner(processes, given, sharding=settings.sharding)
    except BaseException:
        processes.close()
        raise
