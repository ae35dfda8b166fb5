"""Servers of tools: which ones a file or a document may choose, and what their answers may do."""

from __future__ import annotations

import contextlib
import json
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.core.errors import CompoundError, SpecError
from compound.engines.openai import StreamedAnswer
from compound.yaml import load
from recording_server import ListingServer, RecordingServer

pytest.importorskip("httpx")
FILE = """
system: shop
lm: smollm2
inputs: {question: str}
components:
  clerk:
    agent:
      tools: [%s]
    in: {question: $question}
outputs: {answer: $clerk}
"""


@pytest.fixture
def server() -> Iterator[RecordingServer]:
    with RecordingServer.running() as found:
        yield found


def written(folder: Path, server: str) -> Path:
    path = folder / "shop.yaml"
    path.write_text(FILE % f"{{mcp: {{{server}, timeout: 30}}}}")
    return path


class TestConsent:
    @pytest.mark.parametrize(
        ("url", "entry"),
        [
            # services on this machine may execute code
            ("http://127.0.0.1:2375", "http://127.0.0.1:2375"),
            ("http://localhost:8888/api", "http://localhost:8888"),
            ("https://api.openai.com/v1", "api.openai.com"),  # would bypass the budget
        ],
    )
    def test_a_tool_of_a_file_calls_no_server_without_consent(
        self, tmp_path: Path, url: str, entry: str
    ) -> None:
        with pytest.raises(SpecError, match=r"sends requests .* you have not trusted") as error:
            load(written(tmp_path, f"url: '{url}'"))
        assert f"--trust {entry}" in str(error.value)

    def test_a_server_with_consent_is_asked(self, tmp_path: Path) -> None:
        pytest.importorskip("mcp")
        with ListingServer.running() as server:
            server.tool = {"inputSchema": {"type": "object"}}
            path = written(tmp_path, f"url: '{server.url}/mcp'")
            with pytest.raises(SpecError, match="which you have not trusted"):
                load(path)
            assert not server.received
            for allow_import in (True, False):
                loaded = load(path, trust=[server.url], allow_import=allow_import)
                assert loaded.system.name == "shop"

    def test_a_tool_of_a_file_receives_no_key_of_a_provider_without_consent(
        self, tmp_path: Path
    ) -> None:
        path = written(tmp_path, "url: 'https://api.openai.com/v1', auth_env: OPENAI_API_KEY")
        with pytest.raises(SpecError, match="--trust OPENAI_API_KEY@api.openai.com"):
            load(path, trust=["api.openai.com"])


@pytest.mark.parametrize("index", [10**9, -3, "0", None])
def test_the_number_of_a_streamed_tool_call_fills_no_memory(index: Any) -> None:
    part = {"index": index, "id": "a", "function": {"name": "f", "arguments": "{}"}}
    answer = StreamedAnswer("chat/completions")
    tracemalloc.start()
    try:
        with contextlib.suppress(ValueError):
            answer.feed(
                f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'tool_calls': [part]}}]})}\n"
            )
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


ODD_SERVER = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    answer = {"jsonrpc": "2.0", "id": asked["id"]}
    if asked["method"] == "initialize":
        version = asked["params"]["protocolVersion"]
        info = {"name": "odd", "version": "1"}
        answer["result"] = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    elif asked["method"] == "tools/list" and sys.argv[1] == "silent":
        continue
    elif asked["method"] == "tools/list":
        answer["result"] = {"tools": [], "nextCursor": "again"}
    else:
        answer["error"] = {"code": -32601, "message": "unknown"}
    print(json.dumps(answer), flush=True)
"""


class TestMCP:
    @pytest.mark.slow
    @pytest.mark.parametrize("mode", ["silent", "endless"])
    def test_listing_the_tools_of_a_server_ends(self, tmp_path: Path, mode: str) -> None:
        pytest.importorskip("mcp")
        program = tmp_path / "odd_server.py"
        program.write_text(ODD_SERVER)
        with pytest.raises(CompoundError, match="did not list its tools within 3 s"):
            cp.Tool.from_mcp(command=[sys.executable, str(program), mode], timeout=3.0)

    def test_the_answer_of_a_server_is_bounded(self, server: RecordingServer) -> None:
        pytest.importorskip("mcp")
        with pytest.raises(CompoundError, match="cannot be used|did not start"):  # imports
            cp.Tool.from_mcp(url=server.url, timeout=5.0)
        server.body = b'"' + b"a" * 80_000_000 + b'"'
        server.headers = {"content-type": "application/json"}
        tracemalloc.start()
        try:
            with pytest.raises(CompoundError, match="cannot be used|did not start"):
                cp.Tool.from_mcp(url=server.url, timeout=5.0)
            assert tracemalloc.get_traced_memory()[1] < 60_000_000
        finally:
            tracemalloc.stop()
