"""Turns of trainer and samplers on the same GPUs: engines that can sleep do so while the trainer computes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Collection, Iterable

from compound.components.engines.local import devices
from compound.components.engines.local.devices import Placement
from compound.components.engines.vllm.gpus import gpu_name
from compound.concurrency.threads import compute
from compound.engine import Engine
from compound.optimizers.weights.distributed.learner import Learner
from compound.optimizers.weights.distributed.settings import LearnerSettings, place


def trainer_gpus(placement: Placement, settings: LearnerSettings) -> tuple[str, ...]:
    """Return the GPUs that a trainer computes on, by their names in CUDA_VISIBLE_DEVICES.

    Args:
        placement: where the base model is loaded.
        settings: the processes of the trainer.
    """
    device = devices.resolve_device(placement.device)
    if devices.device_type(device) != "cuda":
        return ()
    ranks = range(settings.processes) if settings.processes > 1 else ()
    placed = [place(Placement(device), rank).device for rank in ranks] or [devices.indexed_device(device)]
    named = (gpu_name(int(name.partition(":")[2])) for name in placed)
    return tuple(name for name in named if name is not None)


@contextlib.asynccontextmanager
async def trainer_turn(
    engines: Iterable[Engine], gpus: Collection[str], trainer: Learner
) -> AsyncIterator[None]:
    """Let engines that share GPUs with a trainer sleep while the block runs; see `SleepingEngine`.

    They have all the memory of the GPUs but that of the trainer's weights again when the block ends.

    Args:
        engines: the engines that may use the GPUs.
        gpus: the GPUs of the trainer.
        trainer: the trainer that computes in the block.
    """
    async with contextlib.AsyncExitStack() as stack:
        slept = False
        for engine in engines if gpus else ():
            if asleep := getattr(engine, "asleep", None):
                slept |= await stack.enter_async_context(asleep(gpus))
        yield
        if slept:
            await compute(trainer.release_cache)
