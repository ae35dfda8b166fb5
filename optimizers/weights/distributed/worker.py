"""Process of a learner: carries out the requests of a run, together with the others of its group.

Requests and results are entries of the store of the group, which the run serves. They are JSON,
never pickles, and signed with a key that the run passes on in the environment.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import platform
import shutil
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
from compound.engines import model_folder
from compound.engines.local import loading
from compound.engines.local.devices import Placement
from compound.optimizers.weights.distributed.learner import KEY, open_trainer, place
from compound.optimizers.weights.learner.samples import samples_from_json
from compound.optimizers.weights.learner.trainer import LearnerSpec, Saved, Trainer

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import Store
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# For the slowest process of a collective; the end of a process is noticed at once.
PATIENCE = timedelta(hours=2)
FOREVER = timedelta(days=365)
SETTLE = 3.0  # seconds in which the failure that caused a lost connection is noticed
PART = 4 * 2**20  # bytes of an entry; the store takes at most 8 MiB
FAILURE, END = "failure", "end"  # entries
READ: Mapping[str, Callable[[Any], Any]] = {
    "samples": samples_from_json,
    "taught": lambda rows: rows and samples_from_json(rows),
    "folder": Path,
    "saved": Saved.from_json,
}


class Channel:
    """Signed JSON messages, as entries of a store."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key.encode()

    def has(self, name: str) -> bool:
        """Return whether an entry exists, without waiting for it."""
        return bool(self._store.check([name]))

    def mark(self, name: str) -> None:
        """Add an entry without a message."""
        self._store.set(name, "")

    def send(self, name: str, message: object) -> None:
        """Add a message, in which every number is exact."""
        content = json.dumps(message, separators=(",", ":")).encode()
        parts = range(0, len(content), PART)
        for number, start in enumerate(parts):
            self._store.set(f"{name}|{number}", content[start : start + PART].decode())
        self._store.set(name, f"{len(parts)} {self._sign(name, content)}")

    def receive(self, name: str) -> Any:  # noqa: ANN401 - JSON
        """Wait for a message, and return it."""
        self._store.wait([name], FOREVER)
        count, signature = self._store.get(name).decode().split()
        parts = [self._store.get(f"{name}|{number}") for number in range(int(count))]
        content = b"".join(parts)
        if not hmac.compare_digest(signature, self._sign(name, content)):
            raise PermissionError(f"the signature of the message {name!r} is wrong")
        return json.loads(content)

    def delete(self, name: str) -> None:
        """Delete a message that all readers have received."""
        count = int(self._store.get(name).decode().split()[0])
        for key in (name, *(f"{name}|{number}" for number in range(count))):
            self._store.delete_key(key)

    def send_first(self, name: str, message: object) -> bool:
        """Add a message unless another process adds one of this name; return whether it was added."""
        first = bool(self._store.add(f"{name}|count", 1) == 1)
        if first:
            self.send(name, message)
        return first

    def _sign(self, name: str, content: bytes) -> str:
        return hmac.new(self._key, name.encode() + b"\n" + content, hashlib.sha256).hexdigest()


def find_versions() -> dict[str, str]:
    """Return the versions of what computes the steps in this process, by name."""
    found = {name: metadata.version(name) for name in (DISTRIBUTION, "torch", "transformers")}
    return {"Python": platform.python_version(), **found}


def main() -> None:
    """Serve the run until it ends; ``torchrun`` and the run set the environment."""
    rank, number = int(os.environ["RANK"]), 0
    scratch = Path(tempfile.mkdtemp(prefix="compound-learner-"))
    threading.Thread(target=_watch, args=(scratch,), daemon=True).start()
    channel = Channel(_connect(), os.environ[KEY])
    worker = LearnerWorker(rank, scratch)
    try:
        while True:
            request = channel.receive(f"request/{number}")
            result = worker.carry_out(request["action"], request["arguments"])
            channel.send(f"result/{number}/{rank}", result)
            number += 1
    except BaseException as error:  # noqa: BLE001 - reported to the run, which ends this process
        traceback.print_exc()
        sys.stderr.flush()
        with suppress(Exception):  # the run has ended
            _report(error, channel, rank)
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(1)  # a group whose other processes wait for this one cannot be left in order


def _connect() -> Store:
    """Return the store of the group."""
    from torch.distributed import TCPStore

    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=PATIENCE,
    )


def _watch(scratch: Path) -> None:
    """Exit when the run asks for it, or has ended: its store ends with it, even by ``kill -9``."""
    status = 1
    with suppress(Exception):
        _connect().wait([END], FOREVER)
        status = 0
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(status)


def _report(error: BaseException, channel: Channel, rank: int) -> None:
    """Report an error to the run; if another process failed first, wait until that is reported."""
    from torch import distributed

    if isinstance(error, CompoundError):
        found = {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
    elif isinstance(error, distributed.DistError) or "gloo" in str(error):
        found = {}
    else:
        found = {"error": f"{type(error).__name__}: {error}"}
    if not found or not channel.send_first(FAILURE, {**found, "rank": rank}):
        time.sleep(SETTLE)  # the agent ends all others at the first exit


class LearnerWorker:
    """Carries out requests on the trainer of one process."""

    trainer: Trainer | None = None

    def __init__(self, rank: int, scratch: Path) -> None:
        self.rank, self._scratch = rank, scratch

    def carry_out(self, action: str, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
        """Carry out an action, and return its result as JSON."""
        if action == "find_versions":  # which must be equal in all processes
            return find_versions()
        if action in ("join", "open"):
            return getattr(self, action)(**arguments)
        given = {name: READ.get(name, lambda value: value)(v) for name, v in arguments.items()}
        assert self.trainer is not None  # the run opens it first
        if versions := given.pop("versions", None):
            self.trainer.versions = versions
        if action in ("save", "write_adapter") and self.rank:
            # forward passes of a probe need all processes
            with tempfile.TemporaryDirectory(dir=self._scratch) as own:
                getattr(self.trainer, action)(**{**given, "folder": Path(own)})
            return None
        result = getattr(self.trainer, action)(**given)
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
        processes = int(os.environ["LOCAL_WORLD_SIZE"])
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, torch.get_num_threads() // processes))
        if torch.cuda.device_count() > (device := int(os.environ["LOCAL_RANK"])):
            torch.cuda.set_device(device)
        torch.distributed.init_process_group(backend, timeout=PATIENCE)

    def open(self, spec: Mapping[str, Any], sharding: str) -> str:
        """Load the base model, instead of an earlier one; return why samples are not packed."""
        if self.trainer is not None:
            self.trainer.close()
        given = LearnerSpec.model_validate(spec)
        placement = place(given.placement, int(os.environ["LOCAL_RANK"]))
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
    """Return the model without weights."""
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


if __name__ == "__main__":
    main()
