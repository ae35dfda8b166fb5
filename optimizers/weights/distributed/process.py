"""Process of a learner: carries out the actions that it is sent, together with the others of its group."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from compound.errors import CompoundError
from compound.optimizers.weights.distributed.fully_sharded import load_divided
from compound.optimizers.weights.distributed.learner import LearnerSpec, open_trainer
from compound.optimizers.weights.distributed.messages import (
    Message,
    encode,
    receive,
    samples_from_json,
)
from compound.optimizers.weights.distributed.settings import place
from compound.optimizers.weights.learner.saved import Saved
from compound.optimizers.weights.learner.trainer import Trainer

# For the slowest process of a collective; the end of a process is noticed at once.
PATIENCE = timedelta(hours=2)


def main(arguments: Sequence[str]) -> None:
    """Serve a connection until it ends.

    Args:
        arguments: the number of the socket, the rank, the number of processes, the backend, and a folder that
            the processes of the group share.
    """
    descriptor, rank, count, backend, shared = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection, inbox = socket.socket(fileno=int(descriptor)), queue.Queue[Message]()
    threading.Thread(target=_listen, args=(connection, inbox, Path(shared)), daemon=True).start()
    worker = Worker(int(rank), Path(shared))
    try:
        _join(int(rank), int(count), backend, Path(shared))
        connection.sendall(encode({"result": None}))
        while True:
            message = inbox.get()
            result = worker.carry_out(message["action"], message["arguments"])
            connection.sendall(encode({"result": result}))
    except BaseException as error:  # noqa: BLE001 - reported to the run, which ends this process
        traceback.print_exc()
        with contextlib.suppress(OSError):
            connection.sendall(encode(_describe(error)))
    sys.stderr.flush()
    os._exit(1)  # a group whose other processes wait for this one cannot be left in order


def _listen(connection: socket.socket, inbox: queue.Queue[Message], shared: Path) -> None:
    """Receive messages, and exit when the run has ended or closes the connection."""
    try:
        while (message := receive(connection)) is not None:
            inbox.put(message)
        shutil.rmtree(shared, ignore_errors=True)
        os._exit(0)
    finally:  # without this thread, the process would outlive the run
        os._exit(1)


def _join(rank: int, count: int, backend: str, shared: Path) -> None:
    """Form the group, by a file instead of a port."""
    import torch

    if torch.cuda.device_count() > rank:
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        backend, init_method=f"file://{shared / 'store'}", rank=rank, world_size=count, timeout=PATIENCE
    )


def _describe(error: BaseException) -> Message:
    """Return an error as JSON."""
    if isinstance(error, CompoundError):
        return {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
    from torch import distributed

    lost = isinstance(error, distributed.DistError) or "gloo" in str(error)
    return {"error": f"{type(error).__name__}: {error}", "lost_peer": lost}


class Worker:
    """Carries out actions on the trainer of one process.

    Args:
        rank: the process. Only the first one writes to the run's folder.
        shared: a folder that is deleted at the end.
    """

    def __init__(self, rank: int, shared: Path) -> None:
        self.rank, self._scratch = rank, shared / str(rank)
        self._scratch.mkdir()
        self._trainer: Trainer | None = None

    @property
    def trainer(self) -> Trainer:
        """The trainer, once it is open."""
        assert self._trainer is not None  # the run opens it first
        return self._trainer

    def carry_out(self, action: str, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
        """Carry out an action, and return its result as JSON."""
        return getattr(self, f"do_{action}")(**arguments)

    def do_open(self, spec: Message, sharding: str) -> str:
        """Load the base model, instead of an earlier one; return why it cannot share prompts, if so."""
        if self._trainer is not None:
            self._trainer.close()
        given = LearnerSpec.model_validate(spec)
        placement = place(given.placement, self.rank)
        load = load_divided if sharding == "fsdp" else None
        self._trainer = open_trainer(given.model_copy(update={"placement": placement}), load=load)
        return self._trainer.adapters.unshared

    def do_start(self, references: Mapping[str, Mapping[str, str] | None], folder: str) -> None:
        """Start from stored adapters."""
        self.trainer.start(references, Path(folder))

    def do_restore(self, saved: Message, folder: str) -> None:
        """Restore a checkpoint."""
        self.trainer.restore(Saved.from_json(saved), Path(folder))

    def do_restore_optimizer(self, name: str, reference: Mapping[str, str], folder: str) -> None:
        """Restore the optimizer state of one adapter."""
        self.trainer.restore_optimizer(name, reference, Path(folder))

    def do_step(self, samples: Message, number: int, versions: Mapping[str, list[str]]) -> Message:
        """Update the adapters."""
        self.trainer.versions = {name: list(some) for name, some in versions.items()}
        return self.trainer.step(samples_from_json(samples), number)

    def do_values(self, samples: Message) -> list[tuple[float, ...]]:
        """Return the values of samples, by the first process only: all have the rows of all samples."""
        valued = self.trainer.values(samples_from_json(samples))
        return [sample.values for sample in valued] if self.rank == 0 else []

    def do_divergences(self, samples: Message, taught: Message | None = None) -> list[tuple[float, ...]]:
        """Return the log-ratios of samples, by the first process only."""
        others = samples_from_json(taught) if taught else None
        rows = self.trainer.divergences(samples_from_json(samples), others)
        return rows if self.rank == 0 else []

    def do_save(self, folder: str) -> dict[str, object]:
        """Store a checkpoint; forward passes of its probe need all processes."""
        with self._own(folder) as own:
            return self.trainer.save(own).to_json()

    def do_write_adapter(self, name: str, folder: str) -> None:
        """Write an adapter."""
        with self._own(folder) as own:
            self.trainer.write_adapter(name, own)

    def do_release_cache(self) -> None:
        """Return unused memory to the device."""
        self.trainer.release_cache()

    def do_versions(self) -> Mapping[str, list[str]]:
        """Return the versions of the adapters."""
        return self.trainer.versions

    @contextlib.contextmanager
    def _own(self, folder: str) -> Iterator[Path]:
        """Yield the folder to write to: that of the run, or one that is deleted afterwards."""
        if self.rank == 0:
            yield Path(folder)
        else:
            with tempfile.TemporaryDirectory(dir=self._scratch) as own:
                yield Path(own)
