"""Servers of tools: which ones a file or a document may choose, and what their answers may do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.core.errors import CompoundError, DeclarationError, SpecError
from compound.core.loops import Sessions
from compound.engines.openai import StreamedAnswer
from compound.yaml import load
from recording_server import RecordingServer

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


def document(
    path: str = "/items", *, server: str = "https://api.example.com/v1", **entry: Any
) -> dict[str, Any]:
    return {
        "openapi": "3.0.3",
        "servers": [{"url": server}],
        "paths": {path: {"get": {"operationId": "getItem", **entry}}},
    }


def written(folder: Path, tool: str, api: dict[str, Any]) -> Path:
    (folder / "api.json").write_text(json.dumps(api))
    path = folder / "shop.yaml"
    path.write_text(FILE % tool)
    return path


def call(tool: cp.Tool, **arguments: Any) -> str:
    return asyncio.run(tool.answer(json.dumps(arguments), Sessions()))


@pytest.fixture
def server() -> Iterator[RecordingServer]:
    with RecordingServer.running() as found:
        yield found


class TestConsent:
    @pytest.mark.parametrize(
        ("url", "entry"),
        [
            (
                "http://127.0.0.1:2375",
                "http://127.0.0.1:2375",
            ),  # services on this machine may execute code
            ("http://localhost:8888/api", "http://localhost:8888"),
            ("https://api.openai.com/v1", "api.openai.com"),  # would bypass the budget
        ],
    )
    def test_a_tool_of_a_file_calls_no_server_without_consent(
        self, tmp_path: Path, url: str, entry: str
    ) -> None:
        path = written(tmp_path, "{openapi: api.json, operation: getItem}", document(server=url))
        with pytest.raises(SpecError, match=r"sends requests .* you have not trusted") as error:
            load(path)
        assert f"--trust {entry}" in str(error.value)
        assert load(path, trust=[entry]).system.name == "shop"
        assert load(path, trust=[entry], allow_import=False).system.name == "shop"

    def test_a_tool_of_a_file_receives_no_key_of_a_provider_without_consent(
        self, tmp_path: Path
    ) -> None:
        tool = "{openapi: api.json, operation: getItem, auth_env: OPENAI_API_KEY}"
        path = written(tmp_path, tool, document(server="https://api.openai.com/v1"))
        with pytest.raises(SpecError, match="--trust OPENAI_API_KEY@api.openai.com"):
            load(path, trust=["api.openai.com"])
        assert load(path, trust=["OPENAI_API_KEY@api.openai.com"]).system.name == "shop"

    def test_local_mcp_servers_need_consent(self, tmp_path: Path, server: RecordingServer) -> None:
        path = written(tmp_path, f"{{mcp: {{url: '{server.url}/mcp', timeout: 5}}}}", {})
        with pytest.raises(SpecError, match="which you have not trusted"):
            load(path)
        assert not server.received


class TestDocuments:
    @pytest.mark.parametrize(
        "path",
        ["@evil.example/x", ".evil.example/x", ":8443/x", "evil.example", "\\@evil.example", ""],
    )
    def test_the_path_of_an_operation_leads_to_no_other_server(
        self, tmp_path: Path, path: str
    ) -> None:
        api = document(path, server="https://api.example.com")
        with pytest.raises(DeclarationError, match="must begin with /"):
            cp.Tool.from_openapi(api, "getItem", hosts=["api.example.com"])
        file = written(tmp_path, "{openapi: api.json, operation: getItem}", api)
        with pytest.raises(SpecError, match="must begin with /"):
            load(file, trust=["api.example.com"])

    @pytest.mark.parametrize("url", ["http://api.example.com", "https://api.example.com:8443"])
    def test_a_named_host_allows_neither_plain_http_nor_another_port(self, url: str) -> None:
        api = document(server=url)
        with pytest.raises(DeclarationError, match="is not allowed") as error:
            cp.Tool.from_openapi(api, "getItem", hosts=["api.example.com"])
        shown = url.removeprefix("https://")
        assert error.value.hint == f"if you trust it, set hosts=[{shown!r}]"
        assert cp.Tool.from_openapi(api, "getItem", hosts=[shown]).name == "getItem"

    def test_a_document_sets_no_header_of_the_connection_or_the_key(
        self, server: RecordingServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SHOP_KEY", "key-of-the-shop-of-this-test")
        names = [
            "Host",
            "authorization",
            "Content-Length",
            "Transfer-Encoding",
            "Cookie",
            "X-KEY",
            "X-Other",
        ]
        given = [{"name": name, "in": "header", "schema": {"type": "string"}} for name in names]
        tool = cp.Tool.from_openapi(
            document(server=server.url, parameters=given),
            "getItem",
            auth_env="SHOP_KEY",
            auth_header="X-Key",
        )
        assert list(tool.parameters["properties"]) == ["X-Other"]
        for name in names[:-1]:
            assert "chosen" not in call(tool, **{name: "chosen", "X-Other": "chosen"})
        assert not server.received
        call(tool, **{"X-Other": "chosen"})
        received = server.received[0].headers
        assert [item for item in received if item[1] == "chosen"] == [("x-other", "chosen")]
        assert ("x-key", "key-of-the-shop-of-this-test") in received

    def test_a_document_whose_aliases_multiply_is_refused(self, tmp_path: Path) -> None:
        lines = [
            "openapi: 3.0.3",
            "servers: [{url: 'http://127.0.0.1:9'}]",
            "x0: &a0 {type: string}",
        ]
        for i in range(1, 8):
            parts = ", ".join(f"p{k}: *a{i - 1}" for k in range(6))
            lines.append(f"x{i}: &a{i} {{type: object, properties: {{{parts}}}}}")
        lines.append(
            "paths: {/x: {post: {operationId: getItem, requestBody: "
            "{content: {application/json: {schema: *a7}}}}}}"
        )
        (tmp_path / "api.yaml").write_text("\n".join(lines))
        with pytest.raises(DeclarationError, match="schema of its arguments has more than"):
            cp.Tool.from_openapi(tmp_path / "api.yaml", "getItem")

    def test_a_document_that_contains_itself_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "api.yaml").write_text(
            "openapi: 3.0.3\nservers: [{url: 'http://127.0.0.1:9'}]\n"
            "paths: {/x: {post: {operationId: getItem, requestBody: "
            "{content: {application/json: {schema: &a {type: object, properties: {x: *a}}}}}}}}\n"
        )
        with pytest.raises(DeclarationError, match="contains itself"):
            cp.Tool.from_openapi(tmp_path / "api.yaml", "getItem")

    @pytest.mark.parametrize(
        ("levels", "operation", "problem"),
        [
            ("x{i}: &a{i} [*a{j}, *a{j}]", "description: *a40", "when its aliases are written out"),
            (
                "x{i}: &a{i} [*a{j}, *a{j}]",
                "parameters: [{name: *a40}]",
                "when its aliases are written out",
            ),
            ("x{i}: &a{i} {{<<: [*a{j}, *a{j}]}}", "summary: s", "its merge keys add more than"),
        ],
    )
    def test_a_small_document_fills_no_memory(
        self, tmp_path: Path, levels: str, operation: str, problem: str
    ) -> None:
        lines = ["openapi: 3.0.3", "servers: [{url: 'http://127.0.0.1:9'}]", "x0: &a0 {a: b}"]
        lines += [levels.format(i=i, j=i - 1) for i in range(1, 41)]
        lines.append(f"paths: {{/x: {{get: {{operationId: getItem, {operation}}}}}}}")
        (tmp_path / "api.yaml").write_text("\n".join(lines))
        with pytest.raises(DeclarationError, match=problem):
            cp.Tool.from_openapi(tmp_path / "api.yaml", "getItem")

    def test_aliases_and_merge_keys_of_a_document_are_read(self, tmp_path: Path) -> None:
        (tmp_path / "api.yaml").write_text(
            "openapi: 3.0.3\nservers: [{url: 'http://127.0.0.1:9'}]\n"
            "x: &a {in: query, schema: &s {type: integer}}\n"
            "paths: {/x: {get: {operationId: getItem, "
            "parameters: [{<<: *a, name: low}, {<<: [*a], name: high, schema: *s}]}}}\n"
        )
        tool = cp.Tool.from_openapi(tmp_path / "api.yaml", "getItem")
        assert tool.parameters["properties"] == {
            "low": {"type": "integer"},
            "high": {"type": "integer"},
        }

    def test_variables_of_an_address_do_not_multiply(self) -> None:
        variables = {f"v{i}": {"default": f"{{v{i + 1}}}" * 2} for i in range(40)}
        api = {
            **document(),
            "servers": [{"url": "https://api.example.com/{v0}", "variables": variables}],
        }
        tool = cp.Tool.from_openapi(api, "getItem", hosts=["api.example.com"])
        assert vars(tool.source)["base_url"] == "https://api.example.com/{v1}{v1}"
        variables["v0"]["default"] = "x" * 3_000
        with pytest.raises(DeclarationError, match="more than 2,000 characters"):
            cp.Tool.from_openapi(api, "getItem", hosts=["api.example.com"])


class TestAnswers:
    def test_a_compressed_answer_is_unpacked_up_to_the_limit(self, server: RecordingServer) -> None:
        tool = cp.Tool.from_openapi(document(server=server.url), "getItem")
        server.body, server.headers = (
            zlib.compress(bytes(60_000_000)),
            {"content-encoding": "deflate"},
        )
        call(tool)  # imports
        tracemalloc.start()
        try:
            assert call(tool) == "error: the answer is larger than 1 MiB"
            assert tracemalloc.get_traced_memory()[1] < 16_000_000
        finally:
            tracemalloc.stop()
        server.headers = {"content-encoding": "zstd"}
        assert "which was not requested" in call(tool)


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
