"""Plan the memory of vLLM servers that this process starts on the GPUs of a trainer.

A server takes a share of a GPU's memory when it starts, and keeps it. Unless a setting determines the share,
the servers of a GPU get what the other parts of the run leave, in equal parts. A server that sleeps while the
trainer computes shares the memory of activations with it, but not that of weights and optimizer states, which
the trainer keeps on the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from compound.components.engines.fleet.engine import FleetEngine
from compound.components.engines.local import footprint
from compound.components.engines.local.footprint import BYTES
from compound.components.engines.vllm import arguments
from compound.components.engines.vllm.engine import VLLMEngine
from compound.components.engines.vllm.gpus import gpu_name
from compound.engine import Engine
from compound.errors import CompoundError
from compound.formatting import format_bytes
from compound.optimizers.memory_demand import Demand, find_sizes

HEADROOM = 0.08  # of a GPU, for contexts, fragmentation and other programs; vLLM's default leaves as much
# Memory of a sleeping server: context, CUDA graphs and buffers. An estimate, which was not measured.
ASLEEP = 2 * 2**30
MIN_CACHE_TOKENS = 2048  # of a server whose --max-model-len is not given
FORMATS = {"float": "float32", "half": "float16"}  # further names of number formats in vLLM


@dataclass(frozen=True)
class ServerPlan:
    """Memory of servers on the GPUs of a trainer.

    Attributes:
        servers: the memory of servers that are not running yet.
        trainers: the memory of the trainer on each device, with what sleeping servers release to it.
        shares: the share of memory that each server may use, by GPU.
        notes: lines about the servers.
    """

    servers: tuple[Demand, ...] = ()
    trainers: tuple[Demand, ...] = ()
    shares: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def own_servers(engines: Sequence[Engine]) -> list[VLLMEngine]:
    """Return the engines of the vLLM servers that some engines start."""
    found: list[VLLMEngine] = []
    for engine in engines:
        if isinstance(engine, FleetEngine):
            found += engine.processes
        elif isinstance(engine, VLLMEngine) and engine.api_base is None:
            found.append(engine)
    return found


def plan_servers(
    servers: Sequence[VLLMEngine], trainers: Sequence[Demand], others: Sequence[Demand]
) -> ServerPlan:
    """Return the memory of servers on the GPUs of a trainer, and their shares.

    Args:
        servers: the engines of the servers.
        trainers: the memory of the trainer on each of its devices.
        others: the memory of other parts of the run.

    Raises:
        CompoundError: a GPU does not have enough memory for trainer and servers; the hint names the settings.
    """
    found, kept, shares, notes = list[Demand](), list[Demand](), dict[str, float](), list[str]()
    shared: set[int] = set()
    for trainer in trainers:
        gpu = gpu_of(trainer.device)
        on_gpu = [server for server in servers if gpu in server.gpus]
        if gpu is None or not on_gpu:
            kept.append(trainer)
            continue
        shared |= {id(server) for server in on_gpu}
        device = SharedDevice(trainer, [d for d in others if d.device == trainer.device], on_gpu)
        found += device.server_demands
        kept.append(device.trainer_demand)
        notes += device.notes
        if device.default_share is not None:
            shares[gpu] = device.default_share
    for server in servers:
        if server.sleep and id(server) not in shared:
            notes.append(
                f"sleep of the engine of {server.model!r} has no effect: no trainer computes on its GPU "
                f"({', '.join(server.gpus) or 'none is visible'})"
            )
    return ServerPlan(tuple(found), tuple(kept), shares, tuple(dict.fromkeys(notes)))


def gpu_of(device: str) -> str | None:
    """Return the name of a CUDA device in CUDA_VISIBLE_DEVICES; None for other devices.

    >>> gpu_of("cpu")
    """
    kind, _, index = device.partition(":")
    return gpu_name(int(index)) if kind == "cuda" and index else None


@dataclass(frozen=True)
class SharedDevice:
    """A GPU that vLLM servers share with a trainer.

    Attributes:
        trainer: the memory of the trainer on the device.
        others: the memory of other parts of the run on it.
        servers: the engines of the servers.
    """

    trainer: Demand
    others: Sequence[Demand]
    servers: Sequence[VLLMEngine]

    @property
    def name(self) -> str:
        """The device."""
        return self.trainer.device

    @cached_property
    def free(self) -> int:
        """The free bytes. They exclude the memory of servers that are running."""
        return footprint.free_memory(self.name) or 0

    @cached_property
    def total(self) -> int:
        """The bytes of the device, of which vLLM's shares are fractions."""
        return footprint.total_memory(self.name)

    @property
    def sleeping(self) -> bool:
        """Whether all servers sleep while the trainer computes."""
        return all(server.sleep for server in self.servers)

    @property
    def given_shares(self) -> list[tuple[VLLMEngine, float]]:
        """Servers to start whose settings determine the share, with it."""
        shares = ((server, _given_share(server)) for server in self.servers if not server.started)
        return [(server, share) for server, share in shares if share is not None]

    @property
    def open(self) -> list[VLLMEngine]:
        """Servers to start whose settings do not determine the memory."""
        return [server for server in self.servers if not (server.started or _is_determined(server))]

    @cached_property
    def default_share(self) -> float | None:
        """The share of each of the `open` servers, rounded down to 0.01; None if there are none.

        Raises:
            CompoundError: it is less than a server needs.
        """
        if not self.open:
            return None
        held = self.trainer.fixed if self.sleeping else self.trainer.most
        held += sum(demand.most for demand in self.others)
        held += sum(int(share * self.total) for _, share in self.given_shares)
        left = self.free - int(HEADROOM * self.total) - held
        share = math.floor(100 * left / len(self.open) / self.total) / 100
        for server in self.open:
            weights, cache = _needs(server)
            if share <= 0 or share * self.total < weights + cache:
                raise self._shortage(server, max(0.0, share), weights, cache)
        return share

    @property
    def server_demands(self) -> list[Demand]:
        """The memory of the servers to start."""
        default = [(server, share) for server in self.open if (share := self.default_share) is not None]
        return [self._demand(server, share) for server, share in (*self.given_shares, *default)]

    @property
    def trainer_demand(self) -> Demand:
        """The memory of the trainer, less what sleeping servers release while it computes."""
        if not self.sleeping:
            return self.trainer
        released = sum(max(0, server.fixed - ASLEEP) for server in self.server_demands)
        what = f"{self.trainer.what}, beside sleeping servers"
        return replace(self.trainer, what=what, working=max(0, self.trainer.working - released))

    @property
    def notes(self) -> list[str]:
        """Lines about the servers: their shares, and what they have room for."""
        share = self.default_share or 0.0
        found = [
            f"the vLLM server of {server.model!r} gets {share:g} of the memory of {self.name} "
            f"(--gpu-memory-utilization), which the trainer leaves{_contents(server, share * self.total)}"
            for server in self.open
        ]
        found += [note for server in self.open if (note := _context_note(server, share * self.total))]
        if self.sleeping:
            found.append(f"the vLLM servers on {self.name} sleep while the trainer computes")
        return found

    def _demand(self, server: VLLMEngine, share: float) -> Demand:
        setting = f"lower gpu_memory of the engine of {server.model!r}"
        what = f"vLLM server of {server.model!r}, {share:g} of the device"
        return Demand(what, self.name, int(share * self.total), 0, setting, setting)

    def _shortage(self, server: VLLMEngine, share: float, weights: int, cache: int) -> CompoundError:
        trainer, engine = self.trainer, f"the engine of {server.model!r}"
        working = "" if self.sleeping else f" and up to {format_bytes(trainer.working)} for activations"
        remedies = [] if self.sleeping else [f"set sleep: true of {engine}", trainer.lower]
        remedies += [trainer.smaller, f"set gpu_memory of {engine} to choose the share"]
        return CompoundError(
            f"the vLLM server of {server.model!r} would get {format_bytes(share * self.total)} of the memory "
            f"of {self.name}, but needs at least {format_bytes(weights + cache)}: weights "
            f"{format_bytes(weights)}, cache {format_bytes(cache)}. Of {format_bytes(self.total)}, "
            f"{format_bytes(self.free)} are free, {HEADROOM:.0%} are kept free, and the {trainer.what} needs "
            f"{format_bytes(trainer.fixed)}{working}",
            hint="; ".join(remedies),
        )


def _is_determined(server: VLLMEngine) -> bool:
    """Return whether settings determine the memory of a server."""
    return server.gpu_memory is not None or arguments.sets_memory(server.args)


def _given_share(server: VLLMEngine) -> float | None:
    """Return the share of memory that settings give a server; None if they do not, or not as a share."""
    if server.gpu_memory is not None:
        return server.gpu_memory
    try:
        return float(arguments.value_of(server.args, "gpu-memory-utilization") or "")
    except ValueError:
        return None


def _needs(server: VLLMEngine) -> tuple[int, int]:
    """Return the bytes of a server's weights and of its smallest cache on each GPU; 0 where unknown."""
    sizes = find_sizes(server.model)
    if isinstance(sizes, str) or arguments.value_of(server.args, "quantization", "q") is not None:
        return 0, 0
    folder, model = sizes
    dtype, shards = _dtype(server), arguments.shard_count(server.args)
    # the files of a model that is quantized are smaller than its parameters in the number format
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    weights = min(model.weights(dtype), stored or model.weights(dtype))
    return weights // shards, _cache_tokens(server) * model.cache(dtype) // shards


def _cache_tokens(server: VLLMEngine) -> int:
    """Return the least tokens of a server's cache: vLLM needs room for one request of this length."""
    length = arguments.value_of(server.args, "max-model-len") or ""
    return int(length) if length.isdecimal() else MIN_CACHE_TOKENS


def _dtype(server: VLLMEngine) -> str:
    named = arguments.value_of(server.args, "dtype") or "bfloat16"
    found = FORMATS.get(named, named)
    return found if found in BYTES else "bfloat16"


def _contents(server: VLLMEngine, memory: float) -> str:
    """Return what a server holds in its memory, as part of a note."""
    weights, cache = _needs(server)
    if not cache:
        return ""
    tokens = _cached_tokens(server, memory)
    return f": {format_bytes(weights)} of weights, and a cache of at most {tokens:,} tokens"


def _context_note(server: VLLMEngine, memory: float) -> str:
    """Return a note if the cache of a server is too small for its longest request; otherwise "".

    vLLM then refuses to start. This is no error here, as a model with sliding-window layers needs less cache.
    """
    if arguments.value_of(server.args, "max-model-len") is not None or not _needs(server)[1]:
        return ""
    sizes = find_sizes(server.model)
    context = 0 if isinstance(sizes, str) else sizes[1].context
    if context <= _cached_tokens(server, memory):
        return ""
    return (
        f"the vLLM server of {server.model!r} may refuse to start, because its cache is too small for the "
        f"model's longest request of {context:,} tokens; set --max-model-len in args of the engine to the "
        "longest prompt and answer"
    )


def _cached_tokens(server: VLLMEngine, memory: float) -> int:
    """Return the maximum number of tokens in the cache of a server, whose size is known."""
    weights, cache = _needs(server)
    return int((memory - weights) * _cache_tokens(server) / cache)
