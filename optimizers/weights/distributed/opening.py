"""Open the learner that the settings of a training ask for."""

from __future__ import annotations

from dataclasses import replace

from compound.components.engines.local import devices, loading
from compound.optimizers.weights.distributed.learner import Learner, LearnerSpec, open_trainer
from compound.optimizers.weights.distributed.processes import Processes
from compound.optimizers.weights.distributed.settings import LearnerSettings
from compound.optimizers.weights.distributed.sharded import ShardedLearner


def open_learner(spec: LearnerSpec, settings: LearnerSettings) -> Learner:
    """Load the base model in this process, or in the processes that the settings ask for.

    Raises:
        DeclarationError: there are too few devices.
        CompoundError: a process does not start, or the model cannot be loaded.
    """
    if settings.processes == 1:
        return open_trainer(spec)
    settings.check(spec.placement, spec.section)
    # the processes must agree on what `auto` would choose for each by itself
    device = devices.resolve_device(spec.placement.device)
    placement = replace(spec.placement, device=device, dtype=loading.dtype_of(spec.placement))
    backend = settings.backend_on(devices.device_type(device))
    processes = Processes(settings.processes, backend, section=spec.section)
    try:
        return ShardedLearner(
            processes, spec.model_copy(update={"placement": placement}), sharding=settings.sharding
        )
    except BaseException:
        processes.close()
        raise
