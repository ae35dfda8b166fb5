"""Compare a configuration with that of an existing run, named by the keys of the YAML file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from compound.core.errors import FRESH, RunDirectoryError
from compound.graph.component import Component
from compound.graph.configuration import canonical_json
from compound.graph.system import System
from compound.graph.types import identify_type
from compound.optimization.runs.directory import read_json

FORMAT = 3  # of config.json; until 2, `prompts`, `rewards` and `weights` held the settings of all methods
MAX_CHARACTERS = 80  # maximum characters of a displayed value
OWN = ("format", "stop", "system")  # declarations of a model component besides its outputs
_ABSENT = object()
_WHOLE = re.compile(r"(structure\.(?:parameters\.[^.]+\.[^.]+|(?:components|wires)\.[^.]+))\.")


def describe_structure(system: System) -> dict[str, Any]:
    """Return the content of a system's signature in readable form."""
    return {
        "inputs": {name: identify_type(kind) for name, kind in system.inputs.items()},
        "outputs": {name: source.label for name, source in system.outputs.items()},
        "components": {name: _declared(component) for name, component in system.components.items()},
        "wires": {
            node.name: {
                "in": {port: source.label for port, source in node.wires.items()},
                "when": [node.when.source.label, canonical_json(node.when.value)]
                if node.when
                else None,
            }
            for node in system.all_nodes()
        },
        "parameters": {key: space.to_json() for key, space in system.parameters.items()},
    }


def _declared(component: Component) -> dict[str, Any]:
    given = {name: getattr(component, name, None) for name in OWN}
    own = {name: value for name, value in given.items() if isinstance(value, str | tuple)}
    outputs = {name: identify_type(port.type) for name, port in component.outputs.items()}
    several = "{" + ", ".join(f"{name}: {kind}" for name, kind in outputs.items()) + "}"
    out = outputs["output"] if list(outputs) == ["output"] else several  # as declared in a file
    return {"kind": component.kind, "out": out, "version": component.version, **own}


def list_changes(path: Path, config: Mapping[str, Any], ignoring: tuple[str, ...]) -> list[str]:
    """Return the differences between a configuration and that of a run directory.

    Raises:
        RunDirectoryError: it is not a run directory, or was written by another version.
    """
    stored = read_json(path, "config.json")
    _check_format(path, stored)
    before, after = dict(_items(stored, "")), dict(_items(config, ""))
    metric = before.get("metric")
    if isinstance(metric, str):  # that of 0.3.0 contains a hint with the function's old name
        before["metric"] = metric.replace("'cp.custom(", "'cp.metrics.custom(")
    keys = [
        key
        for key in sorted(
            {*before, *after}, key=lambda key: (not key.startswith("structure."), key)
        )
        if before.get(key, _ABSENT) != after.get(key, _ABSENT)
        and not any(fnmatchcase(key, f"{start}*") for start in ignoring)
        and not _is_place(key, after)
        and not (key.startswith(("engines", "models")) and not (key in before and key in after))
    ]
    if any(key.startswith("structure.") for key in keys):  # which covers both in readable form
        keys = [key for key in keys if key != "signature" and not key.startswith("graph.")]
    lines: dict[str, str] = {}
    for key in keys:
        name, line = _describe_change(key, keys, before, after)
        if not any(name.startswith(f"{other}.") for other, said in lines.items() if said == other):
            lines.setdefault(name, line)
    return sorted(lines.values())


def _check_format(path: Path, stored: Mapping[str, Any]) -> None:
    found = stored.get("format", 1)
    if (
        isinstance(found, int) and found < FORMAT and "optimize" in stored
    ):  # else it is not a run directory
        raise RunDirectoryError(
            f"{path} was written by an earlier version of compound: its config.json has format {found}, this "
            f"version writes {FORMAT}. It can be read, but not resumed",
            hint=f"resume it with the version that started it, or {FRESH}",
        )
    if isinstance(found, int) and found > FORMAT:
        raise RunDirectoryError(
            f"{path}/config.json has format {found}, but this version reads formats up to {FORMAT}",
            hint="resume the run with the version of compound that started it",
        )


def _describe_change(
    key: str, keys: list[str], before: Mapping[str, Any], after: Mapping[str, Any]
) -> tuple[str, str]:
    section, _, rest = key.partition(".")
    if section == "data":
        role = rest.partition(".")[0]
        sizes = [side.get(f"data.{role}.n", 0) for side in (before, after)]
        many = f" ({sizes[0]} → {sizes[1]})" if sizes[0] != sizes[1] else ""
        return f"data.{role}", f"data.{role}: different examples{many}"
    if section in ("signature", "graph"):
        return (
            "signature",
            "signature (components, their outputs and code, or how they are connected)",
        )
    if section == "models":  # digests, which are not informative by themselves
        return key, f"the files of the model {rest!r} (restore them to resume the run)"
    name = _name(key)
    if section == "structure":
        whole = _WHOLE.match(key)
        if whole and (state := _appeared(whole[1], before, after)):
            name = _name(whole[1])
            return name, f"{name}: {state}"
        if key.endswith(".version"):  # a digest, which is not informative by itself
            start = key.removesuffix("version")
            wider = [other for other in keys if other.startswith(start) and other != key]
            if wider:
                return _name(wider[0]), _pair(wider[0], before, after)
            name = name.removesuffix(".version")
            return name, f"{name}: its code or settings"
    return name, _pair(key, before, after)


def _appeared(prefix: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return how everything below a key appeared or disappeared; ``""`` if it did neither."""
    was, is_ = (any(key.startswith(f"{prefix}.") for key in side) for side in (before, after))
    tuned = ".parameters." in prefix
    if was == is_:
        return ""
    return ("now tuned" if tuned else "new") if is_ else ("no longer tuned" if tuned else "removed")


def _pair(key: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    return f"{_name(key)}: {_shown(before.get(key, _ABSENT))} → {_shown(after.get(key, _ABSENT))}"


def _name(key: str) -> str:
    """Return a key as spelled in the YAML file.

    >>> _name("structure.components.judge.out"), _name("start.judge.prompt"), _name("defaults.lm")
    ('components.judge.out', 'judge.prompt', 'lm')
    """
    name = re.sub(r"^structure\.(parameters\.)?", "", key)
    name = re.sub(r"^wires\.", "components.", name) if name != key else name
    return re.sub(r"^(start|settings|defaults)\.", "", name)


def _shown(value: object) -> str:
    if value is _ABSENT or value is None:
        return "nothing"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = " ".join(text.split())
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 1]}…"


def _is_place(key: str, config: Mapping[str, Any]) -> bool:
    """Return whether a key is the path of a stored folder, which may differ: only its content matters."""
    holder, _, last = key.rpartition(".")
    return last == "path" and f"{holder}.sha256" in config


def _items(value: object, prefix: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _items(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, list(value) if isinstance(value, tuple) else value
