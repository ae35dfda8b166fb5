"""Plan the memory of trainer, engines and reward backbone together, before a run starts.

Memory that is needed in any case (weights, adapters, optimizer states) must fit, or the run is
refused. Activations and caches depend on the lengths of prompts and answers; their upper bounds are
shown, with the settings that lower them. No model is loaded, and nothing is downloaded.

A vLLM server takes a share of a GPU's memory when it starts, and keeps it. Unless a setting
determines the share, the servers on the GPU of a trainer get what the other parts of the run leave,
in equal parts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from compound.core.engine import Engine
from compound.core.errors import CompoundError, DeclarationError, check_installed
from compound.core.formatting import format_bytes
from compound.engines import models
from compound.engines.fleet import FleetEngine
from compound.engines.local import devices, footprint, loading
from compound.engines.local.engine import TransformersEngine
from compound.engines.local.footprint import BYTES, OPTIMIZER_BYTES, SUM_BYTES, Footprint
from compound.engines.vllm import arguments
from compound.engines.vllm.arguments import gpu_name
from compound.engines.vllm.engine import VLLMEngine
from compound.execution.executor import Executor
from compound.graph.configuration import components_of
from compound.graph.space import Weights
from compound.graph.system import System
from compound.optimization.method import Method, Problem
from compound.optimization.preflight import open_engines
from compound.optimizers.optimas.methods import LocalTraining
from compound.optimizers.weights.bases import PlannedTraining
from compound.optimizers.weights.learner.adapters import check_same_tokens
from compound.optimizers.weights.learner.forward import CHUNK
from compound.optimizers.weights.learner.targets import check_targets, resolve
from compound.optimizers.weights.training import WeightTraining
from compound.rewards.backbone import BATCH_TOKENS
from compound.rewards.model import NONE
from compound.rewards.settings import RewardLearning

SMALL = "minilm"  # a backbone of 90 MB, which is not planned
# Copies of the keys and values of a token for tokens of several samples: on a CPU, at most 2 on
# average; elsewhere one for each sample, of which 8 are assumed.
COPIES, COPIES_ON_GPU = 2, 8
# Of a GPU, for contexts, fragmentation and other programs; vLLM's default leaves as much.
HEADROOM = 0.08
# Of a sleeping server, for context, CUDA graphs and buffers: an estimate, which was not measured.
ASLEEP = 2 * 2**30
LOGIT_COPIES = 3  # logits in float32, their exponentials, and their gradient


@dataclass(frozen=True)
class Demand:
    """Memory of one part of a run, in bytes."""

    what: str
    device: str
    fixed: int  # weights, adapters and optimizer states; for a server, all its memory
    working: int  # upper bound of activations, logits and caches
    lower: str  # settings that lower the working memory
    smaller: str  # settings that lower the fixed memory

    @property
    def most(self) -> int:
        """Upper bound of the memory: fixed and working."""
        return self.fixed + self.working


class _Unknown(Exception):
    """The memory of a part is unknown; the message says why."""


@dataclass
class MemoryPlan:
    """Memory that a run needs, and the free memory of its devices."""

    demands: list[Demand] = field(default_factory=list)  # the parts of the run
    free: Mapping[str, int] = field(default_factory=dict)  # the free bytes by device, where known
    # the share of memory that each vLLM server of the run may use, by GPU
    gpu_shares: dict[str, float] = field(default_factory=dict)
    # lines about these servers, and about parts whose memory is unknown
    notes: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raise if weights, adapters and optimizer states do not fit into the free memory of a device.

        Raises:
            CompoundError: they do not; the message lists the parts, the hint names the settings.
        """
        for device, free in self.free.items():
            own = self._on(device)
            needed = sum(demand.fixed for demand in own)
            if needed > free:
                parts = "; ".join(f"{d.what} {format_bytes(d.fixed)}" for d in own)
                settings = dict.fromkeys(d.smaller for d in sorted(own, key=lambda d: -d.fixed))
                raise CompoundError(
                    f"the run needs at least {format_bytes(needed)} of memory on {device}, of which "
                    f"{format_bytes(free)} are free: {parts}",
                    hint="; ".join([*settings, "or free memory on the device"]),
                )

    def lines(self) -> list[str]:
        """Return the plan as lines of text: a line per device, then its parts."""
        found = []
        for device in dict.fromkeys(demand.device for demand in self.demands):
            own, free = self._on(device), self.free.get(device)
            fixed, most = sum(d.fixed for d in own), sum(d.most for d in own)
            found.append(
                f"memory on {device}: {format_bytes(fixed)} for weights and optimizer states, at most "
                f"{format_bytes(most)} with activations and caches, "
                + ("free memory unknown" if free is None else f"{format_bytes(free)} free")
            )
            found += [
                f"  {d.what}: {format_bytes(d.fixed)}, at most {format_bytes(d.most)}" for d in own
            ]
            if free is not None and most > free:
                settings = dict.fromkeys(d.lower for d in sorted(own, key=lambda d: -d.working))
                found.append(f"  long prompts and answers may not fit: {'; '.join(settings)}")
        return [*found, *dict.fromkeys(self.notes)]

    def _on(self, device: str) -> list[Demand]:
        return [demand for demand in self.demands if demand.device == device]


def plan_memory(problem: Problem) -> MemoryPlan:
    """Return the memory that a run needs in this process and in the vLLM servers that it starts.

    Raises:
        DeclarationError: settings of a training or its engines are invalid, such as a server that
            sleeps while samples are drawn during training.
        CompoundError: a GPU does not have enough memory for the trainer and a vLLM server.
    """
    engine_of, method = Executor(problem.engines).engine, problem.method
    engines = list({id(engine): engine for engine in open_engines(problem).values()}.values())
    plan = MemoryPlan()

    def known(parts: Iterable[Iterator[Demand]]) -> list[Demand]:
        found: list[Demand] = []
        for part in parts:
            try:
                found += part
            except _Unknown as reason:
                plan.notes.append(f"memory of {reason}")
        return found

    system = problem.system
    trained = [each for each, _ in _trainings(method, system, engine_of)]
    local = [engine for engine in engines if isinstance(engine, TransformersEngine)]
    held: set[object] = set()  # the bases of these engines, whose weights trainers share
    in_process = known(_engine(engine, system, held) for engine in local)
    # trainings run one after another, so only the largest on each device counts
    trainers = _largest(known(_trainers(training, held) for training in trained))
    plan.notes += [line for each in trained for line in _loaded_twice(each, local)]
    backbones = _largest(known([_backbone(method)]))
    servers = own_servers(engines)
    if plan.notes and servers and trained and not trainers:
        plan.notes.append(
            "the memory of the trainer is unknown, so that vLLM servers on its GPUs start with vLLM's "
            "default share; set gpu_memory of their engines"
        )
    check_sleep(plan, servers, trained)
    others = [*in_process, *backbones]
    plan.demands += in_process
    for number, trainer in enumerate(trainers):
        beside = sum(demand.most for demand in others if demand.device == trainer.device)
        trainers[number] = share_gpu(plan, trainer, servers, beside)
    plan.demands += [*trainers, *backbones]
    plan.free = {
        device: free
        for device in dict.fromkeys(demand.device for demand in plan.demands)
        if (free := footprint.free_memory(device)) is not None
    }
    return plan


def own_servers(engines: Sequence[Engine]) -> list[VLLMEngine]:
    """Return the engines of the vLLM servers that some engines start."""
    found: list[VLLMEngine] = []
    for engine in engines:
        if isinstance(engine, FleetEngine):
            found += engine.processes
        elif isinstance(engine, VLLMEngine) and engine.api_base is None:
            found.append(engine)
    return found


def check_sleep(
    plan: MemoryPlan, servers: Sequence[VLLMEngine], trained: Sequence[PlannedTraining]
) -> None:
    """Check that no server would sleep while samples are drawn; note those that will never sleep.

    Raises:
        DeclarationError: a server on a GPU of a trainer sleeps, but samples are drawn during
            training.
    """
    gpus = {gpu for each in trained for gpu in each.settings.learner.gpus(each.placement)}
    ahead = [each.section for each in trained if each.settings.rollouts.max_staleness]
    for server in servers:
        if server.settings.sleep and gpus.isdisjoint(server.gpus):
            plan.notes.append(
                f"sleep of the engine of {server.model!r} has no effect: no trainer computes on its GPU "
                f"({', '.join(server.gpus) or 'none is visible'})"
            )
        elif server.settings.sleep and ahead:
            raise DeclarationError(
                f"the engine of {server.model!r} has sleep: true and shares a GPU with the trainer, but "
                f"{ahead[0]} draws samples during training (rollouts.max_staleness)",
                hint=f"set {ahead[0]}.rollouts.max_staleness to 0, sleep to false, or let them use "
                "different GPUs",
            )


def share_gpu(
    plan: MemoryPlan, trainer: Demand, servers: Sequence[VLLMEngine], beside: int
) -> Demand:
    """Add servers that start on the GPU of a trainer to a plan, and return the trainer beside them.

    Each server gets its share of the memory beside the trainer and ``beside`` bytes of other parts.
    A server that sleeps while the trainer computes shares the memory of activations with it, but not
    that of weights and optimizer states, which the trainer keeps on the GPU.

    Raises:
        CompoundError: the GPU has no memory left for a server; the hint names the settings.
    """
    kind, _, index = trainer.device.partition(":")
    gpu = gpu_name(int(index)) if kind == "cuda" and index else None  # None for other devices
    on_gpu = [server for server in servers if gpu in server.gpus]
    if gpu is None or not on_gpu:
        return trainer
    sleeping = all(server.settings.sleep for server in on_gpu)
    starting = {server: _given_share(server) for server in on_gpu if not server.started}
    total, free = footprint.total_memory(trainer.device), footprint.free_memory(trainer.device) or 0
    given = {server: share for server, share in starting.items() if share is not None}
    left = free - int(HEADROOM * total) - beside - (trainer.fixed if sleeping else trainer.most)
    left -= sum(int(share * total) for share in given.values())
    open_ = [
        s for s in starting if s.settings.gpu_memory is None and not arguments.sets_memory(s.args)
    ]
    if open_:
        share = math.floor(100 * left / len(open_) / total) / 100
        if share <= 0:
            model = open_[0].model
            remedies = [trainer.smaller, f"set gpu_memory of the engine of {model!r}"]
            if not sleeping:
                remedies[:0] = [f"set sleep: true of the engine of {model!r}", trainer.lower]
            raise CompoundError(
                f"the trainer leaves no memory of {trainer.device} for the vLLM server of {model!r}: of "
                f"{format_bytes(total)}, {format_bytes(free)} are free, and the {trainer.what} needs up to "
                f"{format_bytes(trainer.most)}",
                hint="; ".join(remedies),
            )
        plan.gpu_shares[gpu] = share
        given |= dict.fromkeys(open_, share)
        plan.notes += [
            f"the vLLM server of {server.model!r} gets {share:g} of the memory of {trainer.device} "
            "(--gpu-memory-utilization), which the trainer leaves"
            for server in open_
        ]
    for server, share in given.items():
        what = f"vLLM server of {server.model!r}, {share:g} of the device"
        setting = f"lower gpu_memory of the engine of {server.model!r}"
        plan.demands.append(Demand(what, trainer.device, int(share * total), 0, setting, setting))
    if not sleeping:
        return trainer
    plan.notes.append(f"the vLLM servers on {trainer.device} sleep while the trainer computes")
    released = sum(max(0, int(share * total) - ASLEEP) for share in given.values())
    what, working = f"{trainer.what}, beside sleeping servers", trainer.working - released
    return replace(trainer, what=what, working=max(0, working))


def _given_share(server: VLLMEngine) -> float | None:
    """Return the share of memory that settings give a server; None if they do not, or not as a share."""
    if server.settings.gpu_memory is not None:
        return server.settings.gpu_memory
    try:
        return float(arguments.value_of(server.args, "gpu-memory-utilization") or "")
    except ValueError:
        return None


def check_trainable(made: Method, system: System, engine_of: Callable[[str], Engine]) -> None:
    """Raise if a method trains weights of a model that cannot be trained; loads and starts nothing.

    Raises:
        DeclarationError: a model is behind an API, a job trains components of different models, an
            engine samples in a way that cannot be trained or does not support adapters of their
            rank, the base model lacks a target layer of an adapter, or a device of a trainer or a
            reward backbone does not exist, does not support its settings, or differs from that of
            the engine that samples.
        MissingExtra: a library is missing.
    """
    for learning in learnings(made):
        learning.backbone.placement.check(f"optimize.{made.name}.backbone")
    for training, imitates in _trainings(made, system, engine_of):
        check_installed("peft", "training")
        with contextlib.suppress(_Unknown):
            folder, _ = _sizes(training.base)
            for space in training.spaces.values():
                check_targets(footprint.empty_model(folder), space.targets)
        training.settings.learner.check(training.placement, training.section)
        if training.teacher:
            check_same_tokens(training.teacher, training.base, training.section)
        if not imitates:
            training.check_sampling()


def _sizes(model: str, what: str = "", *, causal: bool = True) -> tuple[Path, Footprint]:
    """Return the folder of a model and its sizes; downloads nothing."""
    if (folder := models.find_local(model)) is None:
        raise _Unknown(f"{what} is unknown: {model!r} is not on this machine yet")
    try:
        return folder, footprint.footprint(folder, causal=causal)
    except (OSError, ValueError, AttributeError, ImportError) as error:
        raise _Unknown(
            f"{what} is unknown: {model!r} has no configuration that can be read ({type(error).__name__})"
        ) from error


def _largest(demands: Sequence[Demand]) -> list[Demand]:
    """Return one demand for each device, with the maxima of those that are held one after another."""
    found = []
    for device in dict.fromkeys(demand.device for demand in demands):
        own = [demand for demand in demands if demand.device == device]
        fixed = max(own, key=lambda d: (d.fixed, d.most))
        most = max(own, key=lambda d: (d.most, d.fixed))
        what = " or ".join(dict.fromkeys([fixed.what, most.what]))
        found.append(replace(fixed, what=what, working=most.most - fixed.fixed, lower=most.lower))
    return found


def _adapter(folder: Path, sizes: Footprint, space: Weights) -> int:
    return sizes.adapter(space.rank, resolve(footprint.empty_model(folder), space.targets))


def _device(name: str) -> str:
    """Return the device of a name, under the only name that the plan uses for it."""
    return devices.indexed_device(devices.resolve_device(name))


def _trainings(
    made: Method, system: System, engine_of: Callable[[str], Engine]
) -> Iterator[tuple[PlannedTraining, bool]]:
    """Yield the trainings of a method, and whether each imitates samples.

    A tunable model is checked when it is trained, since another one may be chosen until then.
    """
    for job in filter(None, (*made.jobs, made.opening)):
        keys = [key for key in job.keys if isinstance(system.parameters[key], Weights)]
        fixed = tuple(c for c in components_of(keys) if f"{c}.lm" not in system.parameters)
        optimizer = made.optimizers[job.optimizer]
        if fixed and isinstance(optimizer, WeightTraining):
            yield optimizer.planned(system, fixed, engine_of), optimizer.recipe.likelihood
        elif fixed and isinstance(optimizer, LocalTraining):
            settings = optimizer.training.settings
            yield PlannedTraining(system, fixed, engine_of, settings, optimizer.section), False


def learnings(made: Method) -> list[RewardLearning]:
    """Return the settings of the local rewards of a method, which are the same for its optimizers."""
    found = [getattr(optimizer, "learning", None) for optimizer in made.optimizers.values()]
    return [each for each in found if isinstance(each, RewardLearning)][:1]


def _loaded_twice(
    training: PlannedTraining, engines: Sequence[TransformersEngine]
) -> Iterator[str]:
    """Yield why engines of the base model of a trainer in this process have weights of their own."""
    own = asdict(loading.resolved(training.placement))
    for engine in engines if training.settings.learner.world == 1 else ():
        other = asdict(loading.resolved(engine.placement))
        if engine.model == training.base and (own != other or own["quantization"] != "none"):
            pairs = ((name, own[name], value) for name, value in other.items())
            differing = [f"{name} is {a}, and {b} in the engine" for name, a, b in pairs if a != b]
            why = "; ".join(differing) or "quantized weights are not shared"
            yield f"{training.base!r} is loaded twice, for the trainer and its engine: {why}"


def _trainers(training: PlannedTraining, held: Collection[object]) -> Iterator[Demand]:
    """Yield the memory of the processes of a trainer on each device.

    ``held`` are the bases that engines of this process hold, whose weights it does not load again.
    """
    processes = training.settings.learner.processes
    found = _trainer(training, held if training.settings.learner.world == 1 else ())
    if processes == 1:
        yield found
    elif found.device == "cpu":
        what = f"{found.what}, {processes} processes"
        yield replace(
            found, what=what, fixed=processes * found.fixed, working=processes * found.working
        )
    else:  # a process on each device
        kind = devices.device_type(found.device)
        yield from (replace(found, device=_device(f"{kind}:{n}")) for n in range(processes))


def _trainer(training: PlannedTraining, held: Collection[object] = ()) -> Demand:
    """Return the memory of one process of a trainer, beside bases that the process holds."""
    section, settings, placement = training.section, training.settings, training.placement
    folder, sizes = _sizes(training.base, "the trainer")
    adapters = sum(_adapter(folder, sizes, space) for space in training.spaces.values())
    dtype = loading.dtype_of(placement)
    base = loading.base_key(folder, placement)
    weights = 0 if base in held else sizes.weights(dtype, placement.quantization)
    if settings.learner.sharding == "fsdp":
        # one layer is gathered; the rest, such as embeddings, is copied to every process
        layers = sizes.quantizable * BYTES[dtype]
        weights += layers // settings.learner.world + layers // sizes.layers - layers
    scored = 0
    if training.teacher:
        place, taught = _sizes(training.teacher, "the trainer")
        if loading.base_key(place, placement) not in {*held, base} - {None}:
            weights += taught.weights(dtype, placement.quantization)
        scored = taught.activations(dtype) // taught.layers  # per token, of one layer at a time
    tokens, checkpointing = settings.optimizer.micro_tokens, settings.base.gradient_checkpointing
    stored_each = sizes.activations(dtype, checkpointing=checkpointing)
    # A batch of several samples has at most `tokens`; a sample that is longer is processed by
    # itself.
    longest = settings.rollouts.max_length
    longest = min(longest, sizes.context or longest)
    copies = COPIES if devices.device_type(_device(placement.device)) == "cpu" else COPIES_ON_GPU
    copied = copies * sizes.cache(dtype) // (sizes.layers if checkpointing else 1)
    batch = tokens * (stored_each + copied)
    stored = max(batch, longest * stored_each, max(tokens, longest) * scored)
    logits = LOGIT_COPIES * 4 * min(CHUNK, max(tokens, longest) * sizes.vocabulary)
    return Demand(
        f"trainer of {training.base!r} in {dtype}"
        + ", with the weights of its engine" * (base in held)
        + (f", taught by {training.teacher_name!r}" if training.teacher_name else ""),
        _device(placement.device),
        weights + (OPTIMIZER_BYTES + SUM_BYTES) * adapters,
        stored + logits,
        f"lower {section}.optimizer.micro_tokens"
        + (f" and {section}.rollouts.max_length" if longest > tokens else "")
        + ("" if checkpointing else f" or set {section}.base.gradient_checkpointing"),
        f"set {section}.base.dtype to bfloat16 or {section}.base.quantization to 4bit, choose another "
        f"{section}.base.device, "
        + (f"lower {section}.learner.processes, " if settings.learner.processes > 1 else "")
        + "or use a smaller model",
    )


def _engine(engine: TransformersEngine, system: System, held: set[object]) -> Iterator[Demand]:
    """Yield the memory of an engine in this process, beside bases of others, and add its own to them."""
    folder, sizes = _sizes(engine.model, f"the engine of {engine.model!r}")
    dtype, device = engine.dtype, _device(engine.placement.device)
    base = loading.base_key(folder, engine.placement)
    weights = 0 if engine.loaded or base in held else sizes.weights(dtype, engine.quantization)
    if weights and device == "cpu":  # it rearranges the weights of the output layer for itself
        weights += sizes.vocabulary * sizes.hidden * BYTES[dtype]
    held |= {base} - {None}
    spaces_of_weights = (s for s in system.parameters.values() if isinstance(s, Weights))
    adapters = [_adapter(folder, sizes, space) for space in spaces_of_weights]
    # of the batch, and of shared prefixes
    cached = engine.settings.max_batch_tokens + engine.settings.max_batch_tokens // 4
    working = (
        cached * sizes.cache(dtype)
        + engine.settings.max_batch * sizes.vocabulary * 4 * LOGIT_COPIES
        + engine.settings.max_adapters * max(adapters, default=0) * BYTES[dtype]
    )
    yield Demand(
        f"engine of {engine.model!r} in {dtype}",
        device,
        weights,
        working,
        f"lower max_batch_tokens and max_batch of the engine of {engine.model!r}",
        f"set dtype: bfloat16, quantization: 4bit or another device of the engine of {engine.model!r}, or "
        "use a smaller model",
    )


def _backbone(made: Method) -> Iterator[Demand]:
    for learning in learnings(made):
        settings, lora = learning.backbone, learning.reward.lora
        if settings.model in (NONE, SMALL):
            continue
        _, sizes = _sizes(settings.model, "the reward backbone", causal=False)
        dtype = loading.dtype_of(settings.placement)
        widths = sum(inputs + outputs for _, inputs, outputs in sizes.linear)
        adapter = lora.rank * widths if lora else 0
        # inference keeps the states of one layer; training those of all layers for two texts per pair
        working = BATCH_TOKENS * sizes.activations(dtype) // sizes.layers
        if lora:
            stored = sizes.activations(dtype, checkpointing=lora.gradient_checkpointing)
            working = max(working, 2 * lora.batch * settings.max_length * stored)
        yield Demand(
            f"reward backbone {settings.model!r} in {dtype}",
            _device(settings.device),
            sizes.weights(dtype) + OPTIMIZER_BYTES * adapter,
            working,
            "lower backbone.max_length" + (" or reward.lora.batch" if lora else ""),
            "set backbone.dtype to bfloat16, or use a smaller backbone or another backbone.device",
        )
