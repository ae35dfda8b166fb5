"""Models and engines of a training: its base model, its adapters, and their loading into engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from compound.core.engine import Adapter, AdapterEngine, Capabilities, Engine
from compound.core.errors import CompoundError, DeclarationError
from compound.core.narrowing import entry
from compound.core.storage.artifacts import Reference, is_reference, with_absolute_path
from compound.engines.local.devices import Placement
from compound.execution.schedule import setting_values
from compound.graph.space import Weights
from compound.graph.system import System
from compound.optimizers.weights.learner.adapters import partition
from compound.optimizers.weights.learner.samples import SECTION
from compound.optimizers.weights.recipes.recipe import Sharing, TrainingSettings


@dataclass(frozen=True)
class PlannedTraining:
    """A training of some components together: their base model, where it is loaded, and their adapters."""

    system: System
    trained: tuple[str, ...]
    engine_of: Callable[[str], Engine]
    settings: TrainingSettings = field(default_factory=TrainingSettings)
    section: str = SECTION  # the path of the settings, for messages
    sharing: Sharing = "each"
    teacher_name: str | None = None

    @cached_property
    def engines(self) -> dict[str, Engine]:
        """The engine of each component."""
        found = {}
        for component in self.trained:
            lm = setting_values(self.system.components[component], self.system).get("lm")
            if not isinstance(lm, str):
                raise DeclarationError(
                    f"{component!r} has weights, but no model",
                    hint="set lm for the component or the system",
                )
            found[component] = self.engine_of(lm)
        return found

    @property
    def base(self) -> str:
        """The frozen base model that the adapters of all components are trained on."""
        found: dict[str, str] = {}
        for component, engine in self.engines.items():
            space, capabilities = self._space(component), Capabilities(engine)
            max_rank = capabilities.max_lora_rank
            if max_rank is not None and space.rank > max_rank:
                raise DeclarationError(
                    f"the adapter of {component!r} has rank {space.rank}, but {engine.name} takes at most "
                    f"{max_rank}",
                    hint=f"set max_lora_rank of the engine to {space.rank}, or lower weights.lora.rank of "
                    f"{component!r} to {max_rank}",
                )
            if capabilities.trainable is None:
                raise DeclarationError(
                    f"the weights of {component!r} cannot be trained: {engine.name} does not serve adapters",
                    hint="use a model that runs in this process, such as smollm2, or a vLLM engine",
                )
            found[component] = capabilities.trainable
        return _shared_value(
            found, "base model", "set the same lm for all, or freeze some with weights: null"
        )

    @property
    def teacher(self) -> str | None:
        """The model to load as a teacher, if there is one."""
        if self.teacher_name is None:
            return None
        model = Capabilities(self.engine_of(self.teacher_name)).trainable
        if model is None:
            raise DeclarationError(
                f"{self.section}.teacher is {self.teacher_name!r}, which only answers requests: the trainer "
                "needs its weights to score the answers of another model",
                hint="name a folder, a hub id, or a model that runs in this process, such as smollm2",
            )
        return model

    def check_sampling(self) -> None:
        """Raise if an engine samples from a different distribution than the trainer differentiates.

        The trainer computes the softmax at the rollout temperature. Top-p, top-k, penalties and
        grammars change the probability of a sampled token, so the probability ratio would compare
        different distributions, and would be undefined for tokens outside the support. Imitation
        losses use no ratio and need no check.
        """
        for component, engine in self.engines.items():
            if fields := Capabilities(engine).distribution_options:
                raise DeclarationError(
                    f"the weights of {component!r} cannot be trained: {engine.name} samples with "
                    f"{', '.join(fields)}, so its log-probabilities differ from those that the trainer "
                    "computes",
                    hint="remove them from the extra of the engine; to change the sampling of rollouts, set "
                    "optimize.<method>.rollouts.temperature",
                )

    @property
    def placement(self) -> Placement:
        """The device, number format and quantization of the base model."""
        dtype = self._common("dtype", "number format")
        quantization = self._common("quantization", "quantization")
        return self.settings.base.placement(dtype, quantization, self.section)

    def _common(self, setting: Literal["dtype", "quantization"], what: str) -> str:
        found = {name: getattr(Capabilities(e), setting) for name, e in self.engines.items()}
        known = {name: value for name, value in found.items() if value != "auto"}
        if not known:
            return "auto"
        return _shared_value(known, what, f"set the same {setting} for their engines")

    @cached_property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """The components of each adapter."""
        return partition(self.trained, self.sharing, self.section)

    def _space(self, component: str) -> Weights:
        space = self.system.parameters[f"{component}.weights"]
        assert isinstance(space, Weights)  # only components with weights are trained
        return space

    @property
    def spaces(self) -> dict[str, Weights]:
        """The shape of each adapter."""
        found = {}
        for name, components in self.groups.items():
            first, *others = map(self._space, components)
            if any(space.to_json() != first.to_json() for space in others):
                raise DeclarationError(
                    f"components that share the adapter {name!r} declare different shapes",
                    hint=f"declare the same weights for {', '.join(components)}",
                )
            found[name] = first
        return found

    @property
    def starts(self) -> dict[str, Reference | None]:
        """The adapter that each group starts from; ``None`` stands for the base model."""
        found = {}
        for name, components in self.groups.items():
            first, *others = (self.system.configuration[f"{c}.weights"] for c in components)
            if any(value != first for value in others):
                raise DeclarationError(
                    f"the components that share the adapter {name!r} start from different adapters",
                    hint=f"start {', '.join(components)} from the same adapter, or set "
                    f"{self.section}.adapters to each",
                )
            found[name] = first if is_reference(first) else None
        return found


def _shared_value(values: Mapping[str, str], what: str, hint: str) -> str:
    if len(set(values.values())) > 1:
        listed = ", ".join(f"{component}: {value}" for component, value in values.items())
        raise DeclarationError(
            f"components that are trained together need one {what}, but have {listed}", hint=hint
        )
    return next(iter(values.values()))


async def load_adapters(
    system: System, components: Iterable[str], engine_of: Callable[[str], Engine], folder: Path
) -> None:
    """Load the adapters of some components into the engines that support it, all of one engine together.

    An engine that holds fewer adapters than the components have loads them at their first use. So
    does an engine that fails now; the call that needs the adapter then raises the error.
    """

    async def load(engine: AdapterEngine, adapter: Adapter) -> None:
        with contextlib.suppress(CompoundError):
            await engine.admit(adapter)

    wanted: dict[str, tuple[AdapterEngine, dict[str, Adapter]]] = {}
    for name in components:
        values = setting_values(system.components[name], system)
        lm, weights = entry(values, "lm", str), system.configuration[f"{name}.weights"]
        engine = engine_of(lm)
        if isinstance(engine, AdapterEngine) and is_reference(weights):
            adapter = Adapter(**with_absolute_path(weights, folder))
            wanted.setdefault(lm, (engine, {}))[1][adapter.sha256] = adapter
    await asyncio.gather(
        *(
            load(engine, adapter)
            for engine, adapters in wanted.values()
            for adapter in adapters.values()
            if len(adapters) <= engine.max_loras
        )
    )
