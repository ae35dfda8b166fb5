"""Systems for DSPy: the state of an imported program, or a program made of signatures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from compound.components.imports.dspy_import import to_dspy
from compound.components.imports.dspy_predictor import flat
from compound.components.imports.dspy_program import DSPyProgram
from compound.components.llm import LLM
from compound.errors import ExportError
from compound.execution.schedule import setting_values
from compound.exports.program import (
    Data,
    describe_program,
    describe_type,
    model_settings,
    sent_by,
    without_secrets,
)
from compound.extras import explain_missing
from compound.graph.component import Node
from compound.graph.space import as_demos
from compound.graph.system import System


def imported_program(system: System) -> DSPyProgram | None:
    """Return the DSPy program that a system was imported from, if it is one."""
    components = [node.component for node in system.nodes.values()]
    if len(components) == 1 and isinstance(components[0], DSPyProgram):
        return components[0]
    return None


@explain_missing("the export to DSPy")
def dspy_state(system: System, program: DSPyProgram) -> str:
    """Return the state of an imported program as a file that ``program.load`` reads."""
    from dspy.utils.saving import get_dependency_versions

    values = {key: value for key, value in system.configuration.items() if value is not None}
    state = to_dspy(program.program, values).dump_state()
    state["metadata"] = {"dependency_versions": get_dependency_versions()}
    return json.dumps(without_secrets(state), indent=2, ensure_ascii=False)


def describe_for_dspy(system: System) -> Data:
    """Return a system as JSON types for `compound.exports.dspy_runtime`."""
    signatures: dict[str, Data] = {}
    for node in system.all_nodes():
        if isinstance(node.component, LLM):
            found = _signature(node, node.component, system)
            other = signatures.setdefault(node.component.name, found)
            if other["inputs"] != found["inputs"]:
                raise ExportError(
                    f"{node.component.name!r} has other inputs at node {node.name!r}, but a DSPy signature "
                    "has one set of fields",
                    hint="export with --to python",
                )
    return {**_as_predictions(describe_program(system), system), "signatures": signatures}


def _signature(node: Node, component: LLM, system: System) -> Data:
    values = setting_values(component, system)
    wired = [name for name in node.wires if name in component.settings]
    if wired:
        raise ExportError(
            f"the setting {wired[0]!r} of {node.name!r} comes from another component, unlike in DSPy",
            hint="export with --to python",
        )
    inputs = {name: describe_type(node.inputs[name].type) for name in node.wires}
    both = sorted(set(inputs) & set(component.outputs))
    if both:
        raise ExportError(f"{component.name!r} has an input and an output named {both[0]!r}, unlike in DSPy")
    instructions = "\n\n".join(filter(None, (component.system, str(values["prompt"] or ""))))
    settings = model_settings(component, node, values, system)
    return {
        "instructions": instructions,
        "inputs": inputs,
        "outputs": {name: describe_type(port.type) for name, port in component.outputs.items()},
        "demos": [flat(demo) for demo in as_demos(values["demos"] or ())],
        "lm": settings["lm"],
        "config": {
            "temperature": settings["temperature"],
            "max_tokens": settings["max_tokens"],
            **sent_by(system, values["lm"]).with_stop(component),
        },
    }


def _as_predictions(graph: Mapping[str, Any], system: System) -> Data:
    """Replace LLM nodes of a described graph by calls of predictors."""
    names = {node.name: node.component.name for node in system.all_nodes()}
    nodes = []
    for node in graph["nodes"]:
        own = dict(node)
        if node["kind"] == "llm":
            kept = ("name", "wires", "when", "optional", "outputs")
            own = {"kind": "predict", "component": names[node["name"]], **{key: node[key] for key in kept}}
        elif "body" in node:
            own["body"] = _as_predictions(node["body"], system)
        nodes.append(own)
    return {**graph, "nodes": nodes}
