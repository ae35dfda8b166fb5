"""The tool that runs Python programs in a sandbox."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from compound.components.code import shared_sandbox
from compound.components.tools.source import ToolParts
from compound.core.loops import Sessions
from compound.core.security.sandbox.limits import SandboxLimits

MAX_ERROR = 2_000  # characters of an error's end that are shown
DESCRIPTION = "Run a Python program in a sandbox without network access, and return what it prints."
PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "description": "the program, which prints its result"}
    },
    "required": ["code"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class SandboxSource:
    """Programs in a sandbox."""

    limits: SandboxLimits
    reproducible = False
    sandboxed = True

    @property
    def version(self) -> str:
        """The version of Python, and the limits."""
        return f"python:{platform.python_version()}:{astuple(self.limits)}"

    async def call(self, arguments: Mapping[str, Any], sessions: Sessions) -> str:
        """Run the program; one that fails is a result with its error."""
        result = await shared_sandbox(self.limits).run(str(arguments["code"]))
        if result.ok:
            return result.stdout
        why = (
            f"the program reached the limit {result.limit!r}"
            if result.limit
            else "the program failed"
        )
        return "\n".join(filter(None, [result.stdout, f"error: {why}", result.stderr[-MAX_ERROR:]]))


def python_tool(limits: SandboxLimits, name: str) -> ToolParts:
    """Return its parts; see `Tool.python`."""
    # the sandbox has its own time limit, and programs may wait for their turn
    return ToolParts(name, DESCRIPTION, PARAMETERS, SandboxSource(limits), None, executes_code=True)
