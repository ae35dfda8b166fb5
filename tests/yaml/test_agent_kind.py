"""The kind `agent`: its tools, what it may name, and its round trip."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import compound as cp
from compound.components.agents.agent import Agent
from compound.core.errors import SpecError
from compound.testing import ScriptedLM

HEAD = """
system: shop
lm: smollm2
inputs: {question: str}
components:
  clerk:
    agent:
"""
TAIL = """
    in: {question: $question}
outputs: {answer: $clerk}
"""
FUNCTIONS = '''
import compound as cp

def plain(x: int) -> int:
    """Return x."""
    return x

@cp.tool(name="made")
def decorated(y: str) -> str:
    """Return y."""
    return y

value = 3
'''


def written(folder: Path, *lines: str) -> Path:
    (folder / "shop_parts.py").write_text(FUNCTIONS)
    path = folder / "shop.yaml"
    path.write_text(HEAD + "".join(f"      {line}\n" for line in lines) + TAIL)
    return path


def agent_of(system: cp.System) -> Agent:
    found = system.components["clerk"]
    assert isinstance(found, Agent)
    return found


class TestTools:
    def test_every_kind_of_tool(self, tmp_path: Path) -> None:
        path = written(
            tmp_path,
            'prompt: {tune: "Answer."}',
            "tools:",
            '  - {function: "shop_parts:plain", name: identity}',
            '  - {function: "shop_parts:decorated"}',
            "  - {python: {wall: 5}}",
            "max_turns: {int: [2, 6], value: 3}",
            "tune_tools: true",
        )
        system = cp.load_system(path)
        agent = agent_of(system)
        assert [tool.name for tool in agent.tools] == ["identity", "made", "python"]
        assert [key for key in system.parameters if "tool_" in key] == [
            f"clerk_turn.tool_{name}" for name in ("identity", "made", "python")
        ]
        lm = ScriptedLM(['{"tool": "made", "arguments": {"y": "b"}}', '{"answer": "b"}'])
        assert cp.run(system, {"question": "?"}, engines={"smollm2": lm}).outputs == {"answer": "b"}

    def test_an_mcp_server(self, tmp_path: Path) -> None:
        pytest.importorskip("mcp")
        server = tmp_path / "small_server.py"
        server.write_text(
            "import sys\nsys.path[:0] = " + repr(sys.path) + "\n"
            "from mcp.server import MCPServer\nserver = MCPServer('s', log_level='ERROR')\n"
            "@server.tool()\ndef one() -> int:\n    'Return 1.'\n    return 1\n"
            "@server.tool()\ndef two() -> int:\n    'Return 2.'\n    return 2\nserver.run('stdio')\n"
        )
        command = json.dumps([sys.executable, str(server)])
        path = written(tmp_path, f"tools: [{{mcp: {{command: {command}, only: [two]}}}}]")
        system = cp.load_system(path)
        assert [tool.name for tool in agent_of(system).tools] == ["two"]
        with pytest.raises(SpecError, match=r"command: starts a program .* are not allowed"):
            cp.load_system(path, allow_import=False)

    @pytest.mark.parametrize(
        ("tool", "message"),
        [
            ("{function: 'shop_parts:none'}", "shop_parts has no 'none'"),
            ("{function: 'shop_parts:value'}", "is not a function"),
            ("{function: 'shop_parts:decorated', name: x}", "is a tool, which has its own name"),
            ("{mcp: {url: 'https://shop.example', auth_env: HOME}}", "variable 'HOME'"),
            ("{mcp: {url: 'http://tools.example/mcp'}}", "not trusted"),
            ("{mcp: {}}", "exactly one of command and url"),
            ("{shell: {}}", "unknown tool; possible: function, mcp, python"),
            (
                "{openapi: api.json, operation: getItem}",
                "unknown tool; make it an MCP server with FastMCP.from_openapi",
            ),
            ("{function: 'shop_parts:plain', timeout: 0}", "greater than 0|above 0|> 0"),
        ],
    )
    def test_mistakes_are_told_at_their_line(self, tmp_path: Path, tool: str, message: str) -> None:
        with pytest.raises(SpecError, match=message) as error:
            cp.load_system(written(tmp_path, "tools:", f"  - {tool}"))
        assert "shop.yaml:9:" in str(error.value)

    @pytest.mark.parametrize("tool", ["{function: 'shop_parts:plain'}", "{python: {}}"])
    def test_code_needs_imports(self, tmp_path: Path, tool: str) -> None:
        with pytest.raises(SpecError, match="imports are not allowed"):
            cp.load_system(written(tmp_path, "tools:", f"  - {tool}"), allow_import=False)

    def test_two_tools_with_one_name(self, tmp_path: Path) -> None:
        lines = ["tools:", *["  - {function: 'shop_parts:plain'}"] * 2]
        with pytest.raises(SpecError, match="several tools named 'plain'"):
            cp.load_system(written(tmp_path, *lines))


class TestTexts:
    def test_texts_without_tuning(self, tmp_path: Path) -> None:
        path = written(
            tmp_path,
            "tools: [{function: 'benchmarks.agents.arithmetic:calculate'}]",
            "texts: {calculate: 'sum: Add.'}",
        )
        system = cp.load_system(path)
        assert not any("tool" in key for key in system.parameters)
        lm = ScriptedLM(['{"tool": "sum", "arguments": {"expression": "1+1"}}', '{"answer": "2"}'])
        trace = cp.run(system, {"question": "?"}, engines={"smollm2": lm})
        assert trace.calls_of("clerk_call")[0].outputs == {"result": "2"}
