"""Models and engines of a training job: its base model, its adapters, and their loading into engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from compound.core.engine import Adapter, AdapterEngine, Capabilities, Engine
from compound.core.errors import CompoundError, DeclarationError
from compound.core.narrowing import entry
from compound.core.storage.artifacts import Reference, is_reference, with_absolute_path
from compound.execution.schedule import setting_values
from compound.graph.space import Weights
from compound.graph.system import System


def base_model(system: System, trained: Sequence[str], engine_of: Callable[[str], Engine]) -> str:
    """Return the frozen base model that the adapters of all components are trained on."""
    found: dict[str, str] = {}
    for component, engine in _engines(system, trained, engine_of).items():
        space = system.parameters[f"{component}.weights"]
        assert isinstance(space, Weights)  # only components with weights are trained
        model, max_rank = Capabilities(engine).trainable, Capabilities(engine).max_lora_rank
        if max_rank is not None and space.rank > max_rank:
            raise DeclarationError(
                f"the adapter of {component!r} has rank {space.rank}, but {engine.name} takes at most "
                f"{max_rank}",
                hint=f"set max_lora_rank of the engine to {space.rank}, or lower weights.lora.rank of "
                f"{component!r} to {max_rank}",
            )
        if model is None:
            raise DeclarationError(
                f"the weights of {component!r} cannot be trained: {engine.name} does not serve adapters",
                hint="use a model that runs in this process, such as smollm2, or a vLLM engine",
            )
        found[component] = model
    return _shared_value(
        found, "base model", "set the same lm for all, or freeze some with weights: null"
    )


def teacher_model(name: str, engine_of: Callable[[str], Engine], section: str) -> str:
    """Return the model to load as a teacher."""
    model = Capabilities(engine_of(name)).trainable
    if model is None:
        raise DeclarationError(
            f"{section}.teacher is {name!r}, which only answers requests: the trainer needs its weights to "
            "score the answers of another model",
            hint="name a folder, a hub id, or a model that runs in this process, such as smollm2",
        )
    return model


def check_sampling_engine(
    system: System, trained: Sequence[str], engine_of: Callable[[str], Engine]
) -> None:
    """Raise if an engine samples from a different distribution than the trainer differentiates.

    The trainer computes the softmax at the rollout temperature. Top-p, top-k, penalties and
    grammars change the probability of a sampled token, so the probability ratio would compare
    different distributions, and would be undefined for tokens outside the support. Imitation losses
    use no ratio and need no check.
    """
    for component, engine in _engines(system, trained, engine_of).items():
        if fields := Capabilities(engine).distribution_options:
            raise DeclarationError(
                f"the weights of {component!r} cannot be trained: {engine.name} samples with "
                f"{', '.join(fields)}, so its log-probabilities differ from those that the trainer computes",
                hint="remove them from the extra of the engine; to change the sampling of rollouts, set "
                "optimize.<method>.rollouts.temperature",
            )


def common_setting(
    system: System,
    trained: Sequence[str],
    engine_of: Callable[[str], Engine],
    setting: Literal["dtype", "quantization"],
) -> str:
    """Return the value of a setting that all engines share; ``auto`` if none specifies it."""
    engines = _engines(system, trained, engine_of)
    found = {
        component: getattr(Capabilities(engine), setting) for component, engine in engines.items()
    }
    known = {component: value for component, value in found.items() if value != "auto"}
    if not known:
        return "auto"
    what = {"dtype": "number format"}.get(setting, setting)
    return _shared_value(known, what, f"set the same {setting} for their engines")


def _engines(
    system: System, trained: Sequence[str], engine_of: Callable[[str], Engine]
) -> dict[str, Engine]:
    found = {}
    for component in trained:
        lm = setting_values(system.components[component], system).get("lm")
        if not isinstance(lm, str):
            raise DeclarationError(
                f"{component!r} has weights, but no model",
                hint="set lm for the component or the system",
            )
        found[component] = engine_of(lm)
    return found


def _shared_value(values: Mapping[str, str], what: str, hint: str) -> str:
    """Return the value that all components share."""
    if len(set(values.values())) > 1:
        listed = ", ".join(f"{component}: {value}" for component, value in values.items())
        raise DeclarationError(
            f"components that are trained together need one {what}, but have {listed}", hint=hint
        )
    return next(iter(values.values()))


def spaces(system: System, groups: Mapping[str, Sequence[str]]) -> dict[str, Weights]:
    """Return the shape of each adapter."""
    found = {}
    for name, components in groups.items():
        declared = [system.parameters[f"{component}.weights"] for component in components]
        first = declared[0]
        if any(space.to_json() != first.to_json() for space in declared):
            raise DeclarationError(
                f"components that share the adapter {name!r} declare different shapes",
                hint=f"declare the same weights for {', '.join(components)}",
            )
        assert isinstance(first, Weights)  # a training job has keys of weights only
        found[name] = first
    return found


def starting_adapters(
    system: System, groups: Mapping[str, Sequence[str]], section: str
) -> dict[str, Reference | None]:
    """Return the adapter that each group starts from; ``None`` stands for the base model."""
    found = {}
    for name, components in groups.items():
        values = [system.configuration[f"{component}.weights"] for component in components]
        if any(value != values[0] for value in values):
            raise DeclarationError(
                f"the components that share the adapter {name!r} start from different adapters",
                hint=f"start {', '.join(components)} from the same adapter, or set {section}.adapters to "
                "each",
            )
        found[name] = values[0] if is_reference(values[0]) else None
    return found


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
