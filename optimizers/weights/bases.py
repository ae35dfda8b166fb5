"""Determine the base model that the trained components share, and the shapes of their adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from compound.engine import Engine
from compound.errors import DeclarationError
from compound.execution.schedule import setting_values
from compound.graph.space import Weights
from compound.graph.system import System


def base_model(system: System, trained: Sequence[str], engine_of: Callable[[str], Engine]) -> str:
    """Return the frozen base model that the adapters of all components are trained on.

    Raises:
        DeclarationError: the components use different models, a model is behind an API, or an engine does
            not support adapters of their rank.
    """
    found: dict[str, str] = {}
    for component, engine in _engines(system, trained, engine_of).items():
        _check_rank(system, component, engine)
        model = getattr(engine, "trainable", None)
        if model is None:
            raise DeclarationError(
                f"the weights of {component!r} cannot be trained: {engine.name} does not serve adapters",
                hint="use a model that runs in this process, such as smollm2, or a vLLM engine",
            )
        found[component] = model
    return _shared_value(found, "base model", "set the same lm for all, or freeze some with weights: null")


def teacher_model(name: str, engine_of: Callable[[str], Engine], section: str) -> str:
    """Return the model to load as a teacher.

    Raises:
        DeclarationError: its weights are not available to the trainer.
    """
    model: str | None = getattr(engine_of(name), "trainable", None)
    if model is None:
        raise DeclarationError(
            f"{section}.teacher is {name!r}, which only answers requests: the trainer needs its weights to "
            "score the answers of another model",
            hint="name a folder, a hub id, or a model that runs in this process, such as smollm2",
        )
    return model


def _check_rank(system: System, component: str, engine: Engine) -> None:
    """Raise if the rank of an adapter exceeds the maximum of its engine."""
    space, max_rank = system.parameters[f"{component}.weights"], getattr(engine, "max_lora_rank", None)
    assert isinstance(space, Weights)  # only components with weights are trained
    if max_rank is not None and space.rank > max_rank:
        raise DeclarationError(
            f"the adapter of {component!r} has rank {space.rank}, but {engine.name} takes at most {max_rank}",
            hint=f"set max_lora_rank of the engine to {space.rank}, or lower weights.lora.rank of "
            f"{component!r} to {max_rank}",
        )


def check_sampling_engine(system: System, trained: Sequence[str], engine_of: Callable[[str], Engine]) -> None:
    """Raise if an engine samples from a different distribution than the trainer differentiates.

    The trainer computes the softmax at the rollout temperature. Top-p, top-k, penalties and grammars change
    the probability of a sampled token, so the probability ratio would compare different distributions, and
    would be undefined for tokens outside the support. Imitation losses use no ratio and need no check.

    Raises:
        DeclarationError: extra request fields of an engine change the distribution.
    """
    for component, engine in _engines(system, trained, engine_of).items():
        if fields := getattr(engine, "distribution_options", ()):
            raise DeclarationError(
                f"the weights of {component!r} cannot be trained: {engine.name} samples with "
                f"{', '.join(fields)}, so its log-probabilities differ from those that the trainer computes",
                hint="remove them from the extra of the engine; to change the sampling of rollouts, set "
                "optimize.<method>.rollouts.temperature",
            )


def base_format(system: System, trained: Sequence[str], engine_of: Callable[[str], Engine]) -> str:
    """Return the number format that the components sample in; ``auto`` if no engine specifies one.

    Raises:
        DeclarationError: they sample in different formats.
    """
    return _common_setting(system, trained, engine_of, "dtype", "number format")


def base_quantization(system: System, trained: Sequence[str], engine_of: Callable[[str], Engine]) -> str:
    """Return the quantization that the components sample with; ``auto`` if no engine specifies one.

    Raises:
        DeclarationError: they sample with different ones.
    """
    return _common_setting(system, trained, engine_of, "quantization", "quantization")


def _common_setting(
    system: System, trained: Sequence[str], engine_of: Callable[[str], Engine], setting: str, what: str
) -> str:
    """Return the value of a setting that all engines share; ``auto`` if none specifies it."""
    engines = _engines(system, trained, engine_of)
    found = {component: getattr(engine, setting, "auto") for component, engine in engines.items()}
    known = {component: value for component, value in found.items() if value != "auto"}
    if not known:
        return "auto"
    return _shared_value(known, what, f"set the same {setting} for their engines")


def _engines(system: System, trained: Sequence[str], engine_of: Callable[[str], Engine]) -> dict[str, Engine]:
    found = {}
    for component in trained:
        lm = setting_values(system.components[component], system).get("lm")
        if not isinstance(lm, str):
            raise DeclarationError(
                f"{component!r} has weights, but no model", hint="set lm for the component or the system"
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
    """Return the shape of each adapter.

    Raises:
        DeclarationError: components that share an adapter declare different shapes.
    """
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
