"""The component that executes a tool call of an agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compound.components.tools.source import PassingError
from compound.components.tools.tool import Tool
from compound.core.narrowing import entry
from compound.core.security.sanitize import sanitize_text
from compound.graph.component import CallContext, Operation
from compound.graph.configuration import digest
from compound.graph.types import Port

Record = dict[str, str]
"""A tool call: its ``id``, the ``name`` that was called, the ``arguments`` as JSON text, and the name of the
``tool``, or the names that are ``known`` if there is none."""
CUT = "\n[cut]"


@dataclass(frozen=True, eq=False, repr=False)
class ToolRunner(Operation):
    """Executes one call of a tool, and returns its result or an error as text."""

    name: str
    tools: Sequence[Tool]
    max_characters: int
    retries: int = 2

    kind = "tool"
    cacheable = True

    @property
    def inputs(self) -> Mapping[str, Port]:  # noqa: D102
        return {"call": Port(Record)}

    @property
    def outputs(self) -> Mapping[str, Port]:  # noqa: D102
        return {"result": Port(str)}

    @property
    def version(self) -> str:  # noqa: D102
        # texts may be tuned, and have no influence on results
        versions = {tool.name: [tool.schema, tool.source.version] for tool in self.tools}
        return f"tool:{digest([versions, self.max_characters])}"

    def deterministic(self, values: Mapping[str, object]) -> bool:  # noqa: D102
        return all(tool.source.reproducible for tool in self.tools)

    async def run(  # noqa: D102
        self, inputs: Mapping[str, object], values: Mapping[str, object], call: CallContext
    ) -> Mapping[str, object]:
        record = entry(inputs, "call", dict)
        tool = next((tool for tool in self.tools if tool.name == record.get("tool")), None)
        if tool is None:
            return {
                "result": f"error: there is no tool {record.get('name')!r}; tools: {record.get('known')}"
            }
        # servers may echo keys, and the text is recorded and sent to a model
        try:
            answer = await tool.answer(str(record.get("arguments", "")), call.sessions)
        except PassingError as error:
            if not call.last_attempt:
                raise
            answer = f"error: {error.message}"
        text = sanitize_text(answer)
        cut = len(text) > self.max_characters
        return {"result": text[: self.max_characters] + CUT if cut else text}
