"""An MCP server with a calculator: ``python -m benchmarks.agents.calculator_server [--http]``."""

from __future__ import annotations

import sys

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from benchmarks.agents.arithmetic import evaluate

server = MCPServer("calculator", log_level="ERROR")


@server.tool()  # type: ignore[untyped-decorator]
def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression such as 3 * (12 + 5)."""
    try:
        return f"{evaluate(expression):g}"
    except ValueError as error:  # other errors are not shown to clients
        raise ToolError(str(error)) from None


if __name__ == "__main__":
    server.run("streamable-http" if "--http" in sys.argv else "stdio")
