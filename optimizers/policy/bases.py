"""What a training is of: the one base that its components share, and the shape of each adapter on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from compound.contracts import Engine
from compound.errors import DeclarationError
from compound.plan import values_of
from compound.space import Weights
from compound.system import System


def base_model(system: System, trained: Sequence[str], engine_of: Callable[[str], Engine]) -> tuple[str, str]:
    """Return the model whose weights are trained, and its number format: one frozen base for all components.

    Raises:
        DeclarationError: components have different models, or one that is behind an API.
    """
    found: dict[str, tuple[str, str]] = {}
    for component in trained:
        lm = values_of(system.components[component], system).get("lm")
        if not isinstance(lm, str):
            raise DeclarationError(
                f"{component!r} has weights, but no model", hint="give it or the system lm"
            )
        engine = engine_of(lm)
        model = getattr(engine, "trainable", None)
        if model is None:
            raise DeclarationError(
                f"the weights of {component!r} cannot be trained: {engine.name} does not serve adapters",
                hint="use a model in this process, such as smollm2, or a vLLM engine",
            )
        found[component] = model, getattr(engine, "dtype", "auto")
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{component}: {' in '.join(base)}" for component, base in found.items())
        raise DeclarationError(
            f"components that are trained together need one base model, but have {listed}",
            hint="give them one lm, or freeze some with weights: null",
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
