"""Process of a learner: carries out the requests of a run, together with the others of its group.

Requests and results are entries of a store that the run serves. They are JSON, never pickles, and
signed with a key that the launcher passes on in the environment.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import platform
import shutil
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compound.core.errors import DISTRIBUTION, CompoundError
from compound.core.security.sanitize import sanitize_text
from compound.engines import model_folder
from compound.engines.local import loading
from compound.engines.local.devices import Placement
from compound.graph.registry.code import package_digest
from compound.optimization.runs.directory import report_full_disk
from compound.optimizers.weights.distributed.learner import KEY, open_trainer, placed
from compound.optimizers.weights.learner.samples import samples_from_json
from compound.optimizers.weights.learner.trainer import LearnerSpec, Saved, Trainer

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import Store
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# For the slowest process of a collective; the end of a process is noticed at once.
PATIENCE = timedelta(minutes=30)
FOREVER = timedelta(days=365)
BEAT = 0.5  # seconds between the signs of life of a machine, and looks at the launcher
SETTLE = 3.0  # seconds in which the failure that caused a lost connection is reported
NETWORK = "check the network; GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names the one to use"
SHOWN = 20  # lines of a log in a report
PART = 4 * 2**20  # bytes of an entry; the store takes at most 8 MiB
JOBS = "jobs"  # entry of a run: the number of its jobs so far
JOB, MACHINES, FAILURE, END = "job", "machines", "failure", "end"  # entries of a job
READ: Mapping[str, Callable[[Any], Any]] = {
    "samples": samples_from_json,
    "taught": lambda rows: rows and samples_from_json(rows),
    "folder": Path,
    "saved": Saved.from_json,
}


class Channel:
    """Signed JSON messages of one job, as entries of the store of a run."""

    def __init__(self, store: Store, key: str, job: int = 0) -> None:
        from torch.distributed import PrefixStore

        self.store, self._key = PrefixStore(f"{JOB} {job}", store), key.encode()

    def has(self, name: str) -> bool:
        """Return whether an entry exists, without waiting for it."""
        return bool(self.store.check([name]))

    def mark(self, name: str) -> None:
        """Add an entry without a message."""
        self.store.set(name, "")

    def count(self, name: str, more: int = 0) -> int:
        """Add to a number, and return it."""
        return int(self.store.add(name, more))

    def send(self, name: str, message: object) -> None:
        """Add a message, in which every number is exact."""
        content = json.dumps(message, separators=(",", ":")).encode()
        parts = range(0, len(content), PART)
        for number, start in enumerate(parts):
            self.store.set(f"{name}|{number}", content[start : start + PART].decode())
        self.store.set(name, f"{len(parts)} {self._sign(name, content)}")

    def receive(self, name: str) -> Any:  # noqa: ANN401 - JSON
        """Wait for a message, and return it."""
        self.store.wait([name], FOREVER)
        count, signature = self.store.get(name).decode().split()
        parts = [self.store.get(f"{name}|{number}") for number in range(int(count))]
        content = b"".join(parts)
        if not hmac.compare_digest(signature, self._sign(name, content)):
            raise PermissionError(f"the signature of the message {name!r} is wrong")
        return json.loads(content)

    def delete(self, name: str) -> None:
        """Delete a message that all readers have received."""
        count = int(self.store.get(name).decode().split()[0])
        for key in (name, *(f"{name}|{number}" for number in range(count))):
            self.store.delete_key(key)

    def fail(self, failure: Mapping[str, Any]) -> None:
        """Report the failure that ends the job, unless another one was reported first."""
        if self.count(f"{FAILURE}|count", 1) == 1:
            self.send(FAILURE, failure)

    def _sign(self, name: str, content: bytes) -> str:
        return hmac.new(self._key, name.encode() + b"\n" + content, hashlib.sha256).hexdigest()


def find_versions() -> dict[str, str]:
    """Return the versions of what computes the steps in this process, by name."""
    names = (DISTRIBUTION, "torch", "transformers", "peft")
    found = {name: metadata.version(name) for name in names}
    return {"Python": platform.python_version(), **found, "source of compound": package_digest()}


def connect(host: str, port: int, timeout: timedelta = PATIENCE) -> Store:
    """Return a connection to the store of a run."""
    from torch.distributed import TCPStore

    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def tail(log: Path) -> str:
    """Return the last lines of a log, indented."""
    lines = log.read_text("utf-8", "replace").splitlines()[-SHOWN:]
    return "\n".join(f"    {sanitize_text(line)[:300]}" for line in lines) or "    (no output)"


def main(place: Mapping[str, Any]) -> None:
    """Serve the run until it ends, in a place that the launcher assigns."""
    worker, number = LearnerWorker(place), 0
    for watch in (worker.follow_launcher, worker.await_end):
        threading.Thread(target=watch, daemon=True).start()
    channel = worker.connect()
    try:
        while True:
            request = channel.receive(f"request/{number}")
            result = worker.carry_out(request["action"], request["arguments"])
            channel.send(f"result/{number}/{worker.rank}", result)
            number += 1
    except BaseException as error:  # noqa: BLE001 - reported to the run, which ends all processes
        traceback.print_exc()
        sys.stderr.flush()
        with suppress(Exception):  # the run has ended
            worker.report(error, channel)
            time.sleep(FOREVER.total_seconds())
    worker.exit(1)


class LearnerWorker:
    """Carries out requests on the trainer of one process, whose place in the group is given."""

    trainer: Trainer | None = None

    def __init__(self, place: Mapping[str, Any]) -> None:
        self.rank: int = place["rank"]
        self._place, self._world = place, place["processes"] * place["machines"]
        self._scratch = Path(tempfile.mkdtemp(prefix="compound-learner-"))

    def connect(self) -> Channel:
        """Return a connection of its own: one that waits takes no other requests."""
        return Channel(connect(*self._place["address"]), os.environ[KEY], self._place["job"])

    def exit(self, status: int) -> None:
        """Exit at once: a group whose other processes wait for this one cannot be left in order."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        os._exit(status)

    def await_end(self) -> None:
        """Exit when the run asks for it, or has ended: its store ends with it, even by ``kill -9``."""
        with suppress(Exception):
            self.connect().store.wait([END], FOREVER)
        self.exit(0)

    def follow_launcher(self) -> None:
        """Exit, and say why, when the launcher has ended, even by ``kill -9``."""
        while os.getppid() == self._place["launcher"]:
            time.sleep(BEAT)
        with suppress(Exception):  # the run has ended
            socket.create_connection(
                tuple(self._place["address"]), 5
            ).close()  # a store is tried for long
            self.connect().fail({"rank": self.rank, "message": "ended, as its launcher did"})
        self.exit(1)

    def report(self, error: BaseException, channel: Channel) -> None:
        """Report an error to the run; if another process caused it, wait until that is reported."""
        from torch import distributed

        found: dict[str, Any] = {"rank": self.rank}
        if isinstance(error, CompoundError):
            found |= {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
        elif isinstance(error, distributed.DistError) or "gloo" in str(error):
            channel.mark(f"lost/{self.rank}")
            time.sleep(SETTLE)
            silent = [rank for rank in range(self._world) if not channel.has(f"lost/{rank}")]
            what = f"did not take part in a collective operation (limit {PATIENCE}): {error}"
            found = {"rank": (silent or [self.rank])[0], "message": what, "hint": NETWORK}
        else:
            log = Path(self._place["log"])
            found |= {"message": f"failed: {type(error).__name__}: {error}"}
            found |= {"log": tail(log), "logs": str(log.parent)}
        channel.fail(found)

    def carry_out(self, action: str, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
        """Carry out an action, and return its result as JSON."""
        if action in ("join", "open"):
            return getattr(self, action)(**arguments)
        given = {name: READ.get(name, lambda value: value)(v) for name, v in arguments.items()}
        assert self.trainer is not None  # the run opens it first
        if versions := given.pop("versions", None):
            self.trainer.versions = versions
        folder = given.get("folder", self._scratch)
        if action in ("save", "write_adapter") and self.rank:
            if not self.trainer.passes.in_step:  # else forward passes of a probe need all processes
                return None
            folder = given["folder"] = Path(tempfile.mkdtemp(dir=self._scratch))
            action = action.replace("save", "save_adapters")
        with report_full_disk(folder):
            result = getattr(self.trainer, action)(**given)
        if folder.parent == self._scratch:
            shutil.rmtree(folder)
            return None
        if action in ("values", "divergences"):  # every process has the rows of all samples
            rows = [sample.values for sample in result] if action == "values" else result
            return rows if self.rank == 0 else []
        if isinstance(result, Saved):
            return result.to_json()
        return self.trainer.versions if action in ("start", "restore") else result

    def join(self, backend: str, *, local: bool) -> None:
        """Form the group."""
        import torch

        if local:
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
        each = self._place["processes"]
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, torch.get_num_threads() // each))
        if backend == "nccl":
            if (count := torch.cuda.device_count()) < each:
                raise CompoundError(
                    f"this machine has {count} CUDA devices, and learner.processes is {each}",
                    hint="lower it, or set CUDA_VISIBLE_DEVICES of the machine",
                )
            torch.cuda.set_device(self._place["local"])
        store = self.connect().store
        group = {"store": store, "rank": self.rank, "world_size": self._world}
        torch.distributed.init_process_group(backend, timeout=PATIENCE, **group)

    def open(self, spec: Mapping[str, Any], sharding: str) -> str:
        """Load the base model, instead of an earlier one; return why samples are not packed."""
        if self.trainer is not None:
            self.trainer.close()
        given = LearnerSpec.model_validate(spec)
        placement = placed(given.placement, self._place["local"])
        load = load_divided if sharding == "fsdp" else None
        self.trainer = open_trainer(given.model_copy(update={"placement": placement}), load=load)
        return self.trainer.adapters.unshared


# -- layers divided among processes (FSDP2) ------------------------------------------------------
#
# Only the first process reads the weights; the others build the model without any and receive them
# layer by layer, so that this machine's memory holds the whole model once.


def load_divided(
    folder: Path, placement: Placement
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a frozen model whose layers are divided among the processes of the group, and its tokenizer.

    All processes must call it, and must then run the same forward and backward passes. Where a
    model built from its configuration has other weights than the loaded one, such as some in
    another number format, every process loads the model.
    """
    import torch

    on_host, first = replace(placement, device="cpu"), torch.distributed.get_rank() == 0
    if first:
        model, tokenizer = loading.load_base(folder, on_host)
    else:
        model, tokenizer = _empty(folder, placement), model_folder.load_tokenizer(folder)
    received = _is_same_everywhere(model, placement.device)
    if not received and not first:
        model, tokenizer = loading.load_base(folder, on_host)
    model.requires_grad_(False)
    _divide(model, placement.device, received=received)
    return model, tokenizer


def _empty(folder: Path, placement: Placement) -> PreTrainedModel:
    return model_folder.load_empty(
        folder, dtype=loading.dtype_of(placement), attention=placement.attn_implementation
    )


def _is_same_everywhere(model: PreTrainedModel, device: str) -> bool:
    """Return whether the weights and buffers have equal names, shapes and formats in all processes."""
    import torch

    tensors = [*model.named_parameters(), *model.named_buffers()]
    outline = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors]
    number = int.from_bytes(hashlib.sha256(repr(outline).encode()).digest()[:7])
    bounds = torch.tensor([number, -number], device=device)
    torch.distributed.all_reduce(bounds, torch.distributed.ReduceOp.MAX)
    return int(bounds[0]) == -int(bounds[1])


def _divide(model: PreTrainedModel, device: str, *, received: bool) -> None:
    """Divide the layers of a frozen model among the processes, and move the rest of it to a device.

    A layer's weights are gathered before it runs, and freed afterwards. Embeddings, norms outside
    of layers and the output layer are copied to every process. Adapters that are added later are
    not divided.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise CompoundError(
            f"{model.name_or_path!r} cannot be divided among processes: none of its layers is a "
            "GradientCheckpointingLayer of transformers",
            hint="set learner.sharding to data",
        )
    mesh = init_device_mesh(torch.device(device).type, (torch.distributed.get_world_size(),))
    inside = {part for layer in layers for part in layer.modules()}
    for layer in layers:
        if received:
            _receive(layer.modules(), device)
        # every layer is a root of its own, whose weights FSDP would keep by default
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    if received:
        _receive((part for part in model.modules() if part not in inside), device)
    model.to(device)


def _receive(modules: Iterable[torch.nn.Module], device: str) -> None:
    """Send the weights and buffers of modules from the first process to the others, which have empty ones."""
    import torch

    first = torch.distributed.get_rank() == 0
    known: dict[Tensor, Tensor] = {}  # a tensor hashes by identity; several modules may share one
    for module in modules:
        for name, tensor in [
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]:
            if tensor not in known:
                own = (
                    tensor.detach().to(device).contiguous()
                    if first
                    else torch.empty_like(tensor, device=device)
                )
                torch.distributed.broadcast(own, src=0)
                is_weight = isinstance(tensor, torch.nn.Parameter)
                known[tensor] = torch.nn.Parameter(own, requires_grad=False) if is_weight else own
            if not first:
                setattr(module, name, known[tensor])
