"""The text that declares a tool to a model: its name, its description and those of its arguments.

It is one text per tool, so that a prompt optimizer can rewrite it as a whole::

    search: Search Wikipedia.
    - query: what to search for
    - k: number of passages
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from compound.components.tools.tool import Tool
from compound.core.engine import ToolSpec

_FIRST = re.compile(r"\s*[*`]*(?P<name>[A-Za-z0-9_-]{1,64})[*`]*\s*:\s*(?P<text>.*)$")
_ARGUMENT = re.compile(r"\s*[-*]\s*[*`]*(?P<name>[\w-]+)[*`]*\s*:\s*(?P<text>.*)$")


def setting_name(tool: Tool) -> str:
    """Return the name of the setting with a tool's text.

    >>> from compound.components.tools.tool import tool
    >>> @tool(name="web-search")
    ... def search(query: str) -> str:
    ...     return query
    >>> setting_name(search)
    'tool_web_search'
    """
    return "tool_" + tool.name.replace("-", "_")


def tool_text(tool: Tool) -> str:
    """Return the text of a tool as it was declared."""
    lines = [f"{tool.name}: {' '.join(tool.description.split())}".rstrip()]
    for name, schema in tool.parameters.get("properties", {}).items():
        description = schema.get("description") if isinstance(schema, Mapping) else None
        if description:
            lines.append(f"- {name}: {' '.join(str(description).split())}")
    return "\n".join(lines)


def tool_spec(tool: Tool, text: str) -> ToolSpec:
    """Return the declaration of a tool with the texts of a rewritten one.

    Whatever the text is, the tool can be called: a line that is neither a name nor an argument
    belongs to the description, one about an argument that the tool does not have is ignored, a name
    that providers would reject is not used, and the schema keeps its types.
    """
    lines = text.strip().splitlines() or [""]
    first = _FIRST.match(lines[0])
    name = first["name"] if first else tool.name
    description = [first["text"] if first else lines[0]]
    properties = tool.parameters.get("properties", {})
    arguments: dict[str, list[str]] = {}
    current = description
    for line in lines[1:]:
        found = _ARGUMENT.match(line)
        if found and found["name"] in properties:
            current = arguments[found["name"]] = [found["text"]]
        elif found and current is not description:
            current = []  # an argument that the tool does not have, with the lines that continue it
        else:
            current.append(line.strip())
    described = {key: " ".join(filter(None, parts)) for key, parts in arguments.items()}
    schema = {
        **tool.parameters,
        "properties": {
            key: _described(part, described.get(key, "")) for key, part in properties.items()
        },
    }
    return ToolSpec(name, "\n".join(description).strip(), json.dumps(schema))


def _described(schema: Any, description: str) -> Any:  # noqa: ANN401 - JSON
    if not isinstance(schema, Mapping):
        return schema
    rest = {key: value for key, value in schema.items() if key != "description"}
    return {**rest, "description": description} if description else rest


def declarations(
    tools: Sequence[Tool], texts: Mapping[str, str]
) -> dict[str, tuple[ToolSpec, Tool]]:
    """Return the declaration of each tool by the name that the model is told.

    Args:
        tools: the tools.
        texts: rewritten texts by the name of the tool; others keep their own.

    Two tools that a rewriting gave one name keep their own names.
    """
    specs = [
        tool_spec(tool, texts[tool.name]) if tool.name in texts else tool.spec for tool in tools
    ]
    names = [spec.name for spec in specs]
    own = {tool.name for tool in tools}
    found: dict[str, tuple[ToolSpec, Tool]] = {}
    for spec, tool in zip(specs, tools, strict=True):
        taken = names.count(spec.name) > 1 or (spec.name != tool.name and spec.name in own)
        shown = ToolSpec(tool.name, spec.description, spec.parameters) if taken else spec
        found[shown.name] = (shown, tool)
    return found
