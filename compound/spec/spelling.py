"""Convert types, spaces and Python code to their form in the YAML file."""

from __future__ import annotations

from compound.errors import DeclarationError
from compound.graph.component import Component
from compound.graph.json_types import schema_of_annotation
from compound.graph.space import Choice, Demos, Float, Int, LoRA, Space, Text, Weights
from compound.graph.types import format_type, parse
from compound.registry.code import place_of
from compound.spec.yaml.text import Flow

Tree = dict[str, object]


def spell_type(kind: object, where: str) -> str | Tree:
    """Return the YAML form of a port type."""
    if (schema := schema_of_annotation(kind)) is not None:
        return Flow(json_schema=schema.document)
    text = format_type(kind)
    try:
        same = parse(text) == kind
    except DeclarationError:
        same = False
    if not same:
        raise DeclarationError(f"{where}: the type {text} cannot be written in YAML", hint="use a plain type")
    return text


def spell_ports(component: Component) -> dict[str, str | Tree]:
    """Return the YAML form of the types of a component's outputs."""
    return {
        name: spell_type(port.type, f"{component.name}.{name}") for name, port in component.outputs.items()
    }


def spell_space(space: Space, value: object) -> Tree:
    """Return the YAML form of a space with a given initial value."""
    if isinstance(space, Text):
        limit = {} if space.max_length == Text.max_length else {"max_length": space.max_length}
        return {"tune": value, **limit}
    if isinstance(space, Demos):
        return {"tune": space.max, **({"value": value} if value else {})}
    if isinstance(space, Choice):
        return Flow(choice=space.options, value=value)
    if isinstance(space, Int | Float):
        key = "int" if isinstance(space, Int) else "float"
        return Flow({key: [space.low, space.high], "value": value, **({"log": True} if space.log else {})})
    if isinstance(space, Weights):
        targets = {} if space.targets == LoRA().targets else {"targets": space.targets}
        shape = {"rank": space.rank, "alpha": space.alpha, **targets}
        return {"lora": Flow(shape), **({"value": value} if value else {})}
    raise DeclarationError(f"a {type(space).__name__} space cannot be written in YAML")


def spell_code(found: object, name: str) -> str:
    """Return the import string ``module:name`` of a function or class.

    Raises:
        DeclarationError: it cannot be imported by name.
    """
    place = place_of(found)
    if place is None:
        module, path = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
        raise DeclarationError(
            f"{name}: {path or found!r} of {module} cannot be named in a file",
            hint="define it at the top of a module",
        )
    return place
