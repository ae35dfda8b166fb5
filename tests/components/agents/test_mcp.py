"""Tools of real MCP servers, over stdin and stdout and over HTTP."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.components.tools.mcp_server import MCPSession
from compound.core.errors import CompoundError, DeclarationError, TransientError
from compound.core.loops import Sessions
from recording_server import ListingServer

pytest.importorskip("mcp")
ROOT = Path(__file__).parents[3]
CALCULATOR = (sys.executable, "-m", "benchmarks.agents.calculator_server")


PROGRAM = '''
import os, sys, time
from mcp.server import MCPServer
from mcp.types import CallToolResult, ToolAnnotations
from mcp.server.mcpserver.exceptions import ToolError
server = MCPServer("odd", log_level="ERROR")
print("ready", file=sys.stderr, flush=True)

@server.tool()
def pid() -> int:
    """Return the process."""
    return os.getpid()

@server.tool()
def end() -> str:
    """End the server."""
    os._exit(3)

@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def end_of_reading() -> str:
    """End the server while it reads."""
    os._exit(3)

@server.tool()
def hang() -> str:
    """Never answer."""
    time.sleep(60)

@server.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("not today")

@server.tool()
def secret() -> str:
    """Return two variables."""
    return f"{os.environ.get('MCP_TEST_ONE')} {os.environ.get('MCP_TEST_TWO')}"

@server.tool(name="files.read")
def read() -> str:
    """Read."""
    return "a file"

@server.tool(structured_output=False)
def only_structure() -> CallToolResult:
    """Return structured content only."""
    return CallToolResult(content=[], structured_content={"n": 1})

server.run("stdio")
'''


@pytest.fixture(scope="module", autouse=True)
def _import_path() -> Iterator[None]:
    """Let the servers import this package and mcp, wherever they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, sys.path)]))
        yield


def served(*command: str, env: tuple[str, ...] = (), **settings: Any) -> list[cp.Tool]:
    return cp.Tool.from_mcp(command=command, env=("PYTHONPATH", *env), **settings)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return the command of a server."""
    program = tmp_path_factory.mktemp("mcp") / "odd.py"
    program.write_text(PROGRAM)
    return sys.executable, str(program)


@pytest.fixture(scope="module")
def tools(odd: tuple[str, str]) -> list[cp.Tool]:
    """Return the tools of the server, which it is started once to list."""
    return served(*odd, timeout=120.0)


def named(tools: list[cp.Tool], name: str) -> cp.Tool:
    return next(tool for tool in tools if tool.name == name)


def answers(*tools: cp.Tool, arguments: str = "{}") -> list[str]:
    """Return what tools answer one after the other in one session."""

    async def ask() -> list[str]:
        sessions = Sessions()
        try:
            return [await tool.answer(arguments, sessions) for tool in tools]
        finally:
            await sessions.aclose()

    return asyncio.run(ask())


class TestServers:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "schema",
        [
            {"$ref": "#"},
            True,
            None,
            {},
            [],
            {"type": "string"},
            {"type": ["object", "null"]},
            {"type": "object", "$ref": "#"},
            {"type": "object", "properties": {"a": {"$ref": "http://x/y"}}},
            {"type": "object", "required": "a"},
            {"type": "object", "properties": {"a": {"type": "odd"}}},
        ],
    )
    def test_a_tool_with_an_invalid_schema_is_refused(self, schema: Any) -> None:
        with ListingServer.running() as listing:
            listing.tool = {"inputSchema": schema}
            with pytest.raises(CompoundError, match=r"tools/list.*inputSchema|'go'.*schema"):
                cp.Tool.from_mcp(url=f"{listing.url}/mcp")

    def test_references_of_schemas_may_be_escaped(self) -> None:
        names = {"a/b c": {"type": "integer"}}
        schema = {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/a~1b%20c"}},
            "$defs": names,
        }
        with ListingServer.running() as listing:
            listing.tool = {"inputSchema": schema}
            (tool,) = cp.Tool.from_mcp(url=f"{listing.url}/mcp")
        assert "is not of type 'integer'" in answers(tool, arguments='{"a": "x"}')[0]

    def test_an_invalid_answer_of_a_tool_is_reported(self) -> None:
        with ListingServer.running() as listing:
            listing.tool = {"inputSchema": {"type": "object"}}
            (tool,) = cp.Tool.from_mcp(url=f"{listing.url}/mcp")
            assert "returned an invalid answer to 'go'" in answers(tool)[0]

    def test_a_name_is_made_usable_and_structured_content_is_shown(
        self, tools: list[cp.Tool]
    ) -> None:
        chosen = [named(tools, name) for name in ("files_read", "only_structure")]
        assert answers(*chosen) == ["a file", '{"n": 1}']

    def test_unknown_tools_and_settings(self) -> None:
        with pytest.raises(DeclarationError, match="no tool 'calculat'.*did you mean 'calculate'"):
            served(*CALCULATOR, only=["calculat"])
        with pytest.raises(DeclarationError, match="exactly one of command and url"):
            cp.Tool.from_mcp(command=["a"], url="http://127.0.0.1:1/mcp")

    def test_a_server_that_does_not_start(self, tmp_path: Path) -> None:
        with pytest.raises(CompoundError, match="cannot be used.*FileNotFoundError"):
            cp.Tool.from_mcp(command=[str(tmp_path / "none")])
        broken = tmp_path / "broken.py"
        broken.write_text("raise SystemExit('no licence')")
        with pytest.raises(CompoundError, match="no licence"):
            served(sys.executable, str(broken))


class TestSessions:
    def test_one_process_per_owner_that_ends_with_it(self, tools: list[cp.Tool]) -> None:
        pid = named(tools, "pid")

        async def ask() -> list[str]:
            sessions = Sessions()
            found = await asyncio.gather(*(pid.answer("{}", sessions) for _ in range(5)))
            await sessions.aclose()
            return found

        (one,), (other,) = (set(asyncio.run(ask())) for _ in range(2))
        assert one != other
        for process in (one, other):
            assert ends(int(process))

    def test_errors_of_tools_are_answered_and_a_server_that_ends_is_restarted(
        self, tools: list[cp.Tool]
    ) -> None:
        asked = (named(tools, name) for name in ("fail", "pid", "end", "pid"))
        failed, before, lost, after = answers(*asked)
        assert "not today" in failed
        assert "did not answer 'end'" in lost
        assert lost.endswith("the call may have had an effect, so it was not repeated")
        assert before != after

    def test_a_call_that_may_be_repeated_is_a_transient_failure(self, tools: list[cp.Tool]) -> None:
        with pytest.raises(TransientError, match="did not answer 'end_of_reading'"):
            answers(named(tools, "end_of_reading"))

    @pytest.mark.slow
    def test_a_server_that_hangs_is_left(
        self, tools: list[cp.Tool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hang: Any = named(tools, "hang")
        patient = hang.source.server
        source = replace(hang.source, server=replace(patient, timeout=0.2))
        impatient = replace(hang, source=source)
        start = MCPSession.start

        async def start_in_time(session: MCPSession) -> None:
            limited, session._server = session._server, patient
            await start(session)
            session._server = limited

        monkeypatch.setattr(MCPSession, "start", start_in_time)

        assert "did not answer 'hang'" in answers(impatient)[0]

    def test_only_named_variables_reach_the_program(
        self, odd: tuple[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MCP_TEST_ONE", "one")
        monkeypatch.setenv("MCP_TEST_TWO", "two")
        (tool,) = served(*odd, env=("MCP_TEST_ONE",), only=["secret"])
        assert answers(tool) == ["one None"]


def ends(pid: int) -> bool:
    for _ in range(2400):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def http_server(tmp_path: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = tmp_path / "double_server.py"
    program.write_text(
        "import sys\nfrom mcp.server import MCPServer\n"
        "server = MCPServer('h', log_level='ERROR')\n"
        "@server.tool()\ndef double(x: int) -> int:\n    'Double a number.'\n    return 2 * x\n"
        f"server.run('streamable-http', host='127.0.0.1', port={port})\n"
    )
    process = subprocess.Popen([sys.executable, str(program)], stderr=subprocess.DEVNULL)
    try:
        for _ in range(2400):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait(120)


def test_streamable_http(http_server: str) -> None:
    (double,) = cp.Tool.from_mcp(url=http_server)

    assert answers(double, arguments='{"x": 21}') == ["42"]


def test_an_address_without_a_server() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(CompoundError, match="cannot be used"):
        cp.Tool.from_mcp(url=f"http://127.0.0.1:{port}/mcp", timeout=10.0)
