"""Determine the base model that trained components share, and the shapes of their adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from compound.engine import Engine
from compound.errors import DeclarationError
from compound.execution.schedule import values_of
from compound.graph.space import Weights
from compound.graph.system import System


def base_model(system: System, trained: Sequence[str], engine_of: Callable[[str], Engine]) -> str:
    """Return the model whose weights are trained: one base, frozen, for all of the components.

    Raises:
        DeclarationError: components have different models, one that is behind an API, or one whose engine
            does not take adapters of their rank.
    """
    found: dict[str, str] = {}
    for component, engine in _engines(system, trained, engine_of).items():
        _check_rank(system, component, engine)
        model = getattr(engine, "trainable", None)
        if model is None:
            raise DeclarationError(
                f"the weights of {component!r} cannot be trained: {engine.name} does not serve adapters",
                hint="use a model in this process, such as smollm2, or a vLLM engine",
            )
        found[component] = model
    return _one(found, "base model", "give them one lm, or freeze some with weights: null")


def _check_rank(system: System, component: str, engine: Engine) -> None:
    """Raise where an engine says that an adapter is too large for it."""
    space, most = system.parameters[f"{component}.weights"], getattr(engine, "max_lora_rank", None)
    assert isinstance(space, Weights)  # it is trained
    if most is not None and space.rank > most:
        raise DeclarationError(
            f"the adapter of {component!r} has rank {space.rank}, but {engine.name} takes at most {most}",
            hint=f"set max_lora_rank of the engine to {space.rank}, or lower weights.lora.rank",
        )


def check_sampling_engine(system: System, trained: Sequence[str], engine_of: Callable[[str], Engine]) -> None:
    """Raise where tokens are sampled from another distribution than the one whose gradient is taken.

    The trainer computes the softmax at the temperature of rollouts. Under top-p, top-k, penalties or a
    grammar a sampled token's probability is another one: the ratio of the two policies would compare
    different distributions, and tokens outside the support would have none. Imitation takes no ratios.

    Raises:
        DeclarationError: an engine's extra fields of requests do so.
    """
    for component, engine in _engines(system, trained, engine_of).items():
        if fields := getattr(engine, "reshapes", ()):
            raise DeclarationError(
                f"the weights of {component!r} cannot be trained: {engine.name} samples with "
                f"{', '.join(fields)}, so that its log-probabilities are not those that the trainer computes",
                hint="leave these out of the engine's extra; rollouts.temperature shapes rollouts",
            )


def base_format(system: System, trained: Sequence[str], engine_of: Callable[[str], Engine]) -> str:
    """Return the number format that the components sample in, ``auto`` where their engines do not say.

    Raises:
        DeclarationError: they sample in different ones.
    """
    engines = _engines(system, trained, engine_of)
    found = {component: getattr(engine, "dtype", "auto") for component, engine in engines.items()}
    known = {component: dtype for component, dtype in found.items() if dtype != "auto"}
    return _one(known, "number format", "give their engines one dtype") if known else "auto"


def _engines(system: System, trained: Sequence[str], engine_of: Callable[[str], Engine]) -> dict[str, Engine]:
    found = {}
    for component in trained:
        lm = values_of(system.components[component], system).get("lm")
        if not isinstance(lm, str):
            raise DeclarationError(
                f"{component!r} has weights, but no model", hint="give it or the system lm"
            )
        found[component] = engine_of(lm)
    return found


def _one(found: Mapping[str, str], what: str, hint: str) -> str:
    """Return what all components have."""
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{component}: {value}" for component, value in found.items())
        raise DeclarationError(
            f"components that are trained together need one {what}, but have {listed}", hint=hint
        )
    return next(iter(found.values()))


def spaces(system: System, groups: Mapping[str, Sequence[str]]) -> dict[str, Weights]:
    """Return each adapter's shape.

    Raises:
        DeclarationError: components that share one declare different shapes.
    """
    found = {}
    for name, components in groups.items():
        declared = [system.parameters[f"{component}.weights"] for component in components]
        first = declared[0]
        if any(space.to_json() != first.to_json() for space in declared):
            raise DeclarationError(f"components that share the adapter {name!r} declare different shapes")
        assert isinstance(first, Weights)  # the keys of a job of weights
        found[name] = first
    return found
