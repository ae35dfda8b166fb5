"""Tools from OpenAPI documents, against a local server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import compound as cp
from compound.components.tools.openapi_document import OpenAPIDocument
from compound.core.errors import CompoundError, DeclarationError, TransientError
from compound.core.loops import Sessions
from compound.core.security.sanitize import registered_secrets
from compound.execution.executor import Executor
from compound.testing import ScriptedLM
from recording_server import RecordingServer
from served import until

DOCUMENT: dict[str, Any] = yaml.safe_load("""
openapi: 3.0.3
paths:
  /items/{id}:
    parameters: [{$ref: "#/components/parameters/Id"}]
    get:
      operationId: getItem
      summary: Return an item.
      parameters:
      - {name: fields, in: query, schema: {type: array, items: {type: string}}}
      - {name: X-Trace, in: header, schema: {type: string, nullable: true}}
      - {name: page, in: query, schema: {type: integer, nullable: true}}
  /items:
    post:
      operationId: addItem
      requestBody:
        required: true
        content: {application/json: {schema: {$ref: "#/components/schemas/Item"}}}
  /upload: {post: {operationId: up, requestBody: {content: {text/plain: {}}}}}
components:
  parameters:
    Id: {name: id, in: path, required: true, description: its id, schema: {type: string}}
  schemas:
    Item:
      type: object
      required: [name]
      properties:
        name: {type: string}
        note: {type: string, nullable: true}
        parts: {type: array, items: {$ref: "#/components/schemas/Item"}}
""")


@pytest.fixture
def server() -> Iterator[RecordingServer]:
    with RecordingServer.running() as found:
        yield found


def call(tool: cp.Tool, **arguments: Any) -> str:
    return asyncio.run(tool.answer(json.dumps(arguments), Sessions()))


def test_parameters_are_sent_where_they_belong(server: RecordingServer) -> None:
    tool = cp.Tool.from_openapi(DOCUMENT, "getItem", base_url=server.url)
    assert tool.parameters["required"] == ["id"]
    assert tool.parameters["properties"]["id"] == {"type": "string", "description": "its id"}
    assert call(tool, id="a/../b c", fields=["x", "y"], **{"X-Trace": "t"}) == '{"ok": true}'
    method, path, headers, _ = server.received[0]
    assert (method, path) == ("GET", "/items/a%2F..%2Fb%20c?fields=x&fields=y")
    assert dict(headers)["x-trace"] == "t"


def operation(parameters: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    entry = {"operationId": "find", "parameters": parameters or [], **more}
    return {
        "openapi": "3.0.3",
        "paths": {"/found/{at}": {"post" if "requestBody" in more else "get": entry}},
    }


AT = {
    "name": "at",
    "in": "path",
    "required": True,
    "schema": {"type": "array", "items": {"type": "string"}},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("declared", "value", "query"),
    [
        ({}, ["a", "b"], "p=a&p=b"),
        ({"explode": False}, ["a", "b"], "p=a%2Cb"),
        ({"style": "pipeDelimited"}, ["a", "b"], "p=a%7Cb"),
        ({"style": "spaceDelimited"}, ["a", "b"], "p=a+b"),
        ({"explode": False}, [], ""),
        ({}, {"a": 1, "b": None}, "a=1"),
        ({"explode": False}, {"a": 1, "b": "x"}, "p=a%2C1%2Cb%2Cx"),
        (
            {"style": "deepObject"},
            {"a": {"min": 1}, "b": ["x", "y"]},
            "p%5Ba%5D%5Bmin%5D=1&p%5Bb%5D=x&p%5Bb%5D=y",
        ),
        (
            {"content": {"application/json": {"schema": {}}}},
            {"a": [1]},
            "p=%7B%22a%22%3A+%5B1%5D%7D",
        ),
    ],
)
def test_lists_and_objects_have_the_style_of_the_document(
    server: RecordingServer, declared: dict[str, Any], value: Any, query: str
) -> None:
    parameter = {
        "name": "p",
        "in": "query",
        **({} if "content" in declared else {"schema": {}}),
        **declared,
    }
    tool = cp.Tool.from_openapi(operation([AT, parameter]), "find", base_url=server.url)
    call(tool, at=["x", "y"], p=value)
    assert server.received[0][1] == "/found/x%2Cy" + (f"?{query}" if query else "")


def test_an_unknown_argument_is_reported_unless_the_body_takes_it(server: RecordingServer) -> None:
    tool = cp.Tool.from_openapi(DOCUMENT, "getItem", base_url=server.url)
    assert "('field' was unexpected)" in call(tool, id="1", field="x")
    assert not server.received
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for more in ({}, True, {"type": "string"}):
        body = {
            "content": {"application/json": {"schema": {**schema, "additionalProperties": more}}}
        }
        tool = cp.Tool.from_openapi(operation([AT], requestBody=body), "find", base_url=server.url)
        call(tool, at=["x"], a=1, b="y")
        assert json.loads(server.received[-1].body) == {"a": 1, "b": "y"}


def test_variables_of_the_server_have_their_defaults(server: RecordingServer) -> None:
    variables = {"stage": {"default": "v1"}}
    document = {
        **operation([AT]),
        "servers": [{"url": server.url + "/{stage}", "variables": variables}],
    }
    call(cp.Tool.from_openapi(document, "find"), at=["x"])
    assert server.received[0][1] == "/v1/found/x"


@pytest.mark.parametrize(
    ("kind", "data", "text"),
    [
        ("text/plain; charset=latin-1", b"\xe9", "é"),
        (
            "text/plain; charset=punycode",
            b"caf-dma",
            "caf-dma",
        ),  # not decoded: its time is quadratic
        ("image/png", b"\x89PNG", "[image/png, 4 bytes, omitted]"),
        ("text/plain", b"\xe9", "\ufffd"),
        ("application/json", b'"\xc3\xa9"', '"é"'),
    ],
)
def test_an_answer_is_read_by_its_type(
    server: RecordingServer, kind: str, data: bytes, text: str
) -> None:
    tool = cp.Tool.from_openapi(DOCUMENT, "getItem", base_url=server.url)
    server.headers, server.body = {"content-type": kind}, data
    assert call(tool, id="1") == text


@pytest.mark.parametrize("wrong", ["..", ".", ""])
def test_a_path_parameter_cannot_change_the_path(server: RecordingServer, wrong: str) -> None:
    tool = cp.Tool.from_openapi(DOCUMENT, "GET /items/{id}", base_url=server.url)
    assert call(tool, id=wrong) == f"error: id must not be {wrong!r}"
    assert not server.received


def test_a_header_cannot_contain_another(server: RecordingServer) -> None:
    tool = cp.Tool.from_openapi(DOCUMENT, "getItem", base_url=server.url)
    assert "printable" in call(tool, id="1", **{"X-Trace": "a\r\nX-Other: b"})
    assert not server.received


def test_members_of_the_body_are_arguments(server: RecordingServer) -> None:
    tool = cp.Tool.from_openapi(DOCUMENT, "addItem", base_url=server.url)
    assert "'name' is a required property" in call(tool, note=None)
    assert "parts.0" in call(tool, name="a", parts=[{"name": 3}])
    call(tool, name="a", note=None, parts=[{"name": "b"}])
    assert json.loads(server.received[0].body) == {
        "name": "a",
        "note": None,
        "parts": [{"name": "b"}],
    }


def test_errors_of_the_client_are_answered_and_others_retried(server: RecordingServer) -> None:
    tool = cp.Tool.from_openapi(DOCUMENT, "getItem", base_url=server.url)
    server.status, server.body = 404, b"no such item"
    assert call(tool, id="1") == "error: HTTP 404: no such item"
    for status in (429, 500, 503):
        server.status = status
        with pytest.raises(TransientError, match=f"HTTP {status}"):
            call(tool, id="1")
    server.close()
    with pytest.raises(TransientError):
        call(tool, id="1")


def asked(tool: cp.Tool, **arguments: Any) -> tuple[cp.Trace, list[Any]]:
    """Run an agent that calls the tool once; return the trace and the results of calls."""
    agent = cp.Agent("agent", [tool], max_turns=2, retries=2)
    system = cp.System("s", {"answer": agent(question=cp.Input("question"))}, lm="m")
    lm = ScriptedLM([json.dumps({"tool": tool.name, "arguments": arguments}), '{"answer": "done"}'])

    async def at_once(seconds: float) -> None:
        pass

    executor = Executor({"m": lm}, sleep=at_once)
    trace = asyncio.run(executor.run(system, {"question": "?"}))
    return trace, [
        call.outputs.get("result") for call in trace.calls if call.component == "agent_call"
    ]


@pytest.mark.parametrize(
    ("operation", "arguments", "status", "sent", "place"),
    [
        ("addItem", {"name": "tea"}, 429, 1, ""),
        ("addItem", {"name": "tea"}, 500, 1, ""),
        ("addItem", {"name": "tea"}, 503, 1, ""),
        ("getItem", {"id": "1"}, 503, 3, "{url}/items/{{id}}: "),
    ],
)
def test_an_error_status_is_reported_after_a_get_is_repeated(
    server: RecordingServer, operation: str, arguments: Any, status: int, sent: int, place: str
) -> None:
    tool = cp.Tool.from_openapi(DOCUMENT, operation, base_url=server.url)
    server.status, server.body = status, b"sold out"
    trace, results = asked(tool, **arguments)
    assert len(server.received) == sent
    assert trace.failure is None
    assert results == [f"error: {place.format(url=server.url)}HTTP {status}: sold out"]


class Silent(RecordingServer):
    """Does not answer until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        super().__init__()

    def respond(self) -> bytes:
        self.released.wait(60)
        return b""


def test_requests_without_an_answer_are_repeated_only_if_idempotent() -> None:
    with Silent.running() as server:
        post = cp.Tool.from_openapi(DOCUMENT, "addItem", base_url=server.url, timeout=0.2)
        get = cp.Tool.from_openapi(DOCUMENT, "getItem", base_url=server.url, timeout=0.2)
        try:
            trace, (result,) = asked(post, name="tea")
            until(lambda: server.received)  # a busy server may read a request after its client left
            assert [request.method for request in server.received] == ["POST"]
            assert trace.failure is None
            assert result.startswith(f"error: POST {server.url}/items: no answer within 0.2 s")
            assert result.endswith("the call may have had an effect, so it was not repeated")
            trace, _ = asked(get, id="1")
            until(lambda: len(server.received) == 4)
            assert [request.method for request in server.received] == ["POST", "GET", "GET", "GET"]
            assert trace.failure is not None
            assert (trace.failure.kind, "no answer within 0.2 s" in trace.failure.message) == (
                "transient",
                True,
            )
        finally:
            server.released.set()


def test_a_post_that_was_never_sent_is_repeated() -> None:
    with socket.socket() as unused:  # bound and not listening: connections are refused
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(TransientError, match=f"POST {url}/items: "):
            call(cp.Tool.from_openapi(DOCUMENT, "addItem", base_url=url), name="tea")


def test_redirects_are_not_followed(server: RecordingServer) -> None:
    tool = cp.Tool.from_openapi(DOCUMENT, "getItem", base_url=server.url)
    server.status, server.headers = 302, {"location": "http://169.254.169.254/"}
    assert call(tool, id="1").startswith("error: HTTP 302")
    assert len(server.received) == 1


def test_large_answers_are_refused(server: RecordingServer) -> None:
    tool = cp.Tool.from_openapi(DOCUMENT, "getItem", base_url=server.url)
    server.body = bytes(2**20 + 1)
    assert call(tool, id="1") == "error: the answer is larger than 1 MiB"


def test_the_key_is_sent_and_never_recorded(
    server: RecordingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = cp.Tool.from_openapi(DOCUMENT, "getItem", base_url=server.url, auth_env="SHOP_KEY")
    with pytest.raises(CompoundError, match="is not set") as error:
        call(tool, id="1")
    assert error.value.hint == "export SHOP_KEY=…"
    monkeypatch.setenv("SHOP_KEY", "shop-key-of-this-test")
    server.body = b"denied for shop-key-of-this-test"
    agent = cp.Agent("agent", [tool], max_turns=2)
    system = cp.System("s", {"answer": agent(question=cp.Input("question"))}, lm="m")
    lm = ScriptedLM(['{"tool": "getItem", "arguments": {"id": "1"}}', '{"answer": "done"}'])
    trace = cp.run(system, {"question": "?"}, engines={"m": lm})
    assert dict(server.received[0].headers)["authorization"] == "Bearer shop-key-of-this-test"
    assert "shop-key-of-this-test" in registered_secrets()
    from compound.execution.trace import to_json

    assert "shop-key-of-this-test" not in json.dumps(to_json(trace))
    other = cp.Tool.from_openapi(
        DOCUMENT, "getItem", base_url=server.url, auth_env="SHOP_KEY", auth_header="X-Key"
    )
    call(other, id="1")
    assert dict(server.received[-1].headers)["x-key"] == "shop-key-of-this-test"


def test_other_servers_need_a_declaration() -> None:
    document = {**DOCUMENT, "servers": [{"url": "https://api.example.com/v1"}]}
    with pytest.raises(DeclarationError, match=r"api\.example\.com, which is not allowed") as error:
        cp.Tool.from_openapi(document, "getItem")
    assert error.value.hint == "if you trust it, set hosts=['api.example.com']"
    assert cp.Tool.from_openapi(document, "getItem", hosts=["api.example.com"]).name == "getItem"


@pytest.mark.parametrize(
    ("operation", "document", "message"),
    [
        ("getItems", DOCUMENT, "no operation 'getItems'; did you mean 'getItem'"),
        ("up", DOCUMENT, "not application/json"),
        ("getItem", {**DOCUMENT, "components": {}}, "refers to '#/components/parameters/Id'"),
        (
            "getItem",
            {"openapi": "3.0.3", "paths": {"/x/{id}": {"get": {"operationId": "getItem"}}}},
            "'id' is not declared",
        ),
    ],
)
def test_mistakes_in_documents(operation: str, document: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        cp.Tool.from_openapi(document, operation, base_url="http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("servers",), 5, "servers must be a list, but is 5"),
        (("servers", 0, "variables"), ["a"], "variables must be an object"),
        (("paths", "/a", "servers"), {"url": "https://x"}, "servers must be a list"),
        (("paths", "/a", "get", "servers"), "https://x", "servers must be a list"),
        (("paths", "/a", "parameters"), 1e308, "parameters must be a list"),
        (("paths", "/a", "get", "parameters"), {"name": "q"}, "parameters must be a list"),
        (("paths", 5), {"get": {}}, "the path '5' must begin with /"),
        (("body", "required"), True, "required must be a list, but is True"),
        (("body", "required"), "name", "required must be a list, but is 'name'"),
    ],
)
def test_parts_of_a_document_that_are_something_else_are_named(
    place: tuple[Any, ...], value: object, message: str
) -> None:
    """Regression test: they ended with an AttributeError, TypeError or KeyError."""
    schema: dict[str, Any] = {"type": "object", "properties": {"name": {}}}
    content = {"required": True, "content": {"application/json": {"schema": schema}}}
    document: dict[str, Any] = {
        "servers": [{"url": "http://127.0.0.1:1"}],
        "paths": {"/a": {"get": {"operationId": "a", "requestBody": content}}},
    }
    *above, last = place
    part: Any = document
    if above == ["body"]:
        part, above = schema, []
    for name in above:
        part = part[name]
    part[last] = value
    with pytest.raises(DeclarationError, match=message):
        cp.Tool.all_from_openapi(document)


def test_members_of_a_document_in_yaml_have_the_names_that_json_has(tmp_path: Path) -> None:
    """Regression test: PyYAML reads the names ``no`` and ``404`` as a truth value and a number."""
    text = """
    paths:
      /a:
        post:
          operationId: a
          responses: {200: {description: fine}}
          requestBody:
            content: {application/json: {schema: {properties: {no: {type: integer}, 404: {}}}}}
    """
    (tmp_path / "api.yaml").write_text(text)
    tool = cp.Tool.from_openapi(tmp_path / "api.yaml", "a", base_url="http://127.0.0.1:1")
    assert list(json.loads(tool.spec.parameters)["properties"]) == ["no", "404"]


def test_a_document_that_arrives_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part arrives in time, but the whole does not."""
    monkeypatch.setattr("compound.components.tools.openapi_document.SECONDS", 0.3)
    stopped = threading.Event()

    def trickle(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(2**16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n{")
            with contextlib.suppress(OSError):
                while not stopped.wait(0.02):
                    connection.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=trickle, args=(listening,))
        thread.start()
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/openapi.json"
        try:
            with pytest.raises(CompoundError, match=r"did not answer within 0\.3 s"):
                cp.Tool.all_from_openapi(address)
        finally:
            stopped.set()
            thread.join()


def test_documents_in_files(tmp_path: Path) -> None:
    (tmp_path / "api.json").write_text(json.dumps(DOCUMENT))
    assert (
        cp.Tool.from_openapi(tmp_path / "api.json", "getItem", base_url="http://127.0.0.1:1").name
        == "getItem"
    )
    (tmp_path / "api.yaml").write_text("openapi: [")
    for name in ("api.yaml", "none.json"):
        with pytest.raises(DeclarationError, match="is not an OpenAPI document"):
            cp.Tool.from_openapi(tmp_path / name, "getItem")
    with pytest.raises(DeclarationError, match="names no server"):
        cp.Tool.from_openapi(tmp_path / "api.json", "getItem")


def names(tools: list[cp.Tool]) -> list[str]:
    return [tool.name for tool in tools]


def test_all_operations_or_some_become_tools(server: RecordingServer, tmp_path: Path) -> None:
    (tmp_path / "api.json").write_text(json.dumps(DOCUMENT))
    items = ["getItem", "POST /items"]
    for document in (DOCUMENT, tmp_path / "api.json"):
        tools = cp.Tool.all_from_openapi(document, only=items, base_url=server.url)
        assert names(tools) == ["getItem", "addItem"]
    call(tools[1], name="spoon")
    assert (server.received[0].method, server.received[0].path) == ("POST", "/items")
    paths = {path: item for path, item in DOCUMENT["paths"].items() if path != "/upload"}
    found = cp.Tool.all_from_openapi({**DOCUMENT, "paths": paths}, base_url=server.url, timeout=3.0)
    assert (names(found), found[0].timeout) == (["getItem", "addItem"], 8.0)


def test_operations_that_cannot_be_tools_are_named() -> None:
    local: dict[str, Any] = {"base_url": "http://127.0.0.1:1"}
    with pytest.raises(
        DeclarationError, match=r"'up' has a body that is not .*leave it out: .*only=\[…\]"
    ):
        cp.Tool.all_from_openapi(DOCUMENT, **local)
    with pytest.raises(DeclarationError, match="no operation 'getItems'; did you mean 'getItem'"):
        cp.Tool.all_from_openapi(DOCUMENT, only=["getItems"], **local)
    twice = {"get": {"operationId": "same"}}
    with pytest.raises(DeclarationError, match="two operations would be tools named 'same'"):
        cp.Tool.all_from_openapi(
            {"paths": {"/a": twice, "/b": twice}}, only=["GET /a", "GET /b"], **local
        )
    with pytest.raises(DeclarationError, match="has no operations"):
        cp.Tool.all_from_openapi({"paths": {}}, **local)


@pytest.mark.parametrize("servers", [{}, {"servers": [{"url": "/"}]}, {"servers": [{"url": "."}]}])
def test_a_document_is_read_from_its_address_and_names_servers_relative_to_it(
    server: RecordingServer, servers: dict[str, Any]
) -> None:
    document = {"openapi": "3.1.0", "paths": {"/now": {"get": {"operationId": "now"}}}, **servers}
    server.body = json.dumps(document).encode()
    (tool,) = cp.Tool.all_from_openapi(f"{server.url}/openapi.json")
    call(tool)
    assert [item.path for item in server.received] == ["/openapi.json", "/now"]
    assert cp.Tool.from_openapi(f"{server.url}/openapi.json", "now").name == "now"


def test_the_address_of_a_document_needs_a_declaration() -> None:
    with pytest.raises(
        DeclarationError, match=r"would be read from api\.example\.com, which is not allowed"
    ):
        cp.Tool.all_from_openapi("https://api.example.com/openapi.json")


def test_a_document_of_another_machine_names_no_server_of_this_one() -> None:
    content = {"servers": [{"url": "http://127.0.0.1:9200"}], "paths": {}}
    document = OpenAPIDocument(content, url="https://api.example.com/openapi.json")
    with pytest.raises(DeclarationError, match="names a server of this machine"):
        document.server(None)
    assert document.server("http://127.0.0.1:9200/") == "http://127.0.0.1:9200"


@pytest.mark.parametrize(
    ("status", "headers", "body", "message"),
    [
        (404, {}, b"{}", "HTTP 404; download the document"),
        (302, {"location": "http://127.0.0.1:1/"}, b"", "HTTP 302"),
        (200, {"content-encoding": "gzip"}, b"x", "the answer is compressed"),
        (200, {}, b"<html>", "is not an OpenAPI document"),
        (200, {}, b"{" + b" " * (10 * 2**20), "is larger than 10 MiB"),
    ],
)
def test_what_is_no_document_at_an_address_is_named(
    server: RecordingServer, status: int, headers: dict[str, str], body: bytes, message: str
) -> None:
    server.status, server.headers, server.body = status, headers, body
    with pytest.raises(CompoundError, match=message):
        cp.Tool.all_from_openapi(f"{server.url}/openapi.json")
    assert len(server.received) == 1


def body(schema: Any, kind: str = "application/json", **more: Any) -> dict[str, Any]:
    content = {kind: {"schema": schema}}
    return {**operation([AT], requestBody={"required": True, "content": content}), **more}


KEYWORDS = [
    "example",
    "xml",
    "nullable",
    "discriminator",
    "externalDocs",
    "$ref",
    "x-id",
    "enum",
    "default",
    "type",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", KEYWORDS)
def test_arguments_may_have_the_names_of_keywords(server: RecordingServer, name: str) -> None:
    """In the query, among the members of the body, inside one of them, in a definition, and as its name."""
    inner = {"type": "object", "required": [name], "properties": {name: {"type": "integer"}}}
    schema = {
        "type": "object",
        "required": [name, "inner", "other"],
        "properties": {
            name: {"type": "string", "example": "an example", "xml": {"name": "x"}},
            "inner": inner,
            "other": {"$ref": f"#/components/schemas/{name}"},
        },
    }
    document = body(schema, components={"schemas": {name: inner}})
    tool = cp.Tool.from_openapi(document, "find", base_url=server.url)
    given = {name: "a", "inner": {name: 1}, "other": {name: 2}}
    call(tool, at=["x"], **given)
    assert json.loads(server.received[-1].body) == given
    assert "is not of type 'integer'" in call(tool, at=["x"], **{**given, "inner": {name: "no"}})
    assert "an example" not in tool.schema
    query = {"name": name, "in": "query", "required": True, "schema": {"type": "string"}}
    call(
        cp.Tool.from_openapi(operation([AT, query]), "find", base_url=server.url),
        at=["x"],
        **{name: "v"},
    )
    assert server.received[-1].path.endswith("=v")


A = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "accepted", "rejected"),
    [
        ({"type": "string", "enum": ["a", "b"], "nullable": True}, ["a", None], ["c"]),
        ({"enum": ["a"], "nullable": True}, ["a", None], ["c"]),
        ({"allOf": [{"$ref": "#/components/schemas/A"}], "nullable": True}, ["a", None], [1]),
        ({"oneOf": [A, {"type": "integer"}], "nullable": True}, ["a", 1, None], [[]]),
        ({"$ref": "#/components/schemas/A", "nullable": True}, ["a", None], [1]),
        ({"$ref": "#/components/schemas/A", "maxLength": 1}, ["a"], ["ab", None]),
        ({"type": ["string", "null"]}, ["a", None], [1]),
        (
            {"type": "object", "additionalProperties": {"type": "string", "nullable": True}},
            [{"k": None}],
            [{"k": 1}],
        ),
        ({"type": "number", "minimum": 0, "exclusiveMinimum": True}, [1], [0]),
        ({"type": "number", "maximum": 9, "exclusiveMaximum": False}, [9], [10]),
        (
            {"type": "object", "default": {"nullable": True}, "properties": {"a": A}},
            [{"a": "x"}],
            [{"a": 1}],
        ),
        ({"$ref": "#/components/schemas/a-b"}, ["a"], [1]),
        (
            {"anyOf": [{"$ref": "#/components/schemas/a-b"}, {"$ref": "#/components/schemas/a_b"}]},
            ["a", 1],
            [[]],
        ),
        ({"$ref": "#/components/schemas/with%20space~1slash"}, ["a"], [1]),
        ({"$ref": "#/components/schemas/List/anyOf/1"}, ["a"], [1]),
        ({"$ref": "#/components/schemas/Tree"}, [{"left": {"left": None}}], [{"left": 1}]),
    ],
)
def test_schemas_of_openapi_accept_what_they_mean(
    schema: Any, accepted: list[Any], rejected: list[Any]
) -> None:
    schemas = {
        "A": A,
        "a-b": A,
        "a_b": {"type": "integer"},
        "with space/slash": A,
        "List": {"anyOf": [{"type": "integer"}, A]},
        "Tree": {
            "type": "object",
            "nullable": True,
            "properties": {"left": {"$ref": "#/components/schemas/Tree"}},
        },
    }
    document = body(
        {"type": "object", "properties": {"v": schema}}, components={"schemas": schemas}
    )
    tool = cp.Tool.from_openapi(document, "find", base_url="http://127.0.0.1:1")
    problems = [
        tool._parsed(json.dumps({"at": [], "v": value}))[1] for value in [*accepted, *rejected]
    ]
    assert [bool(problem) for problem in problems] == [False] * len(accepted) + [True] * len(
        rejected
    ), problems


def test_a_body_that_combines_schemas_is_one_argument(server: RecordingServer) -> None:
    schema = {"properties": {"a": A}, "allOf": [{"properties": {"b": A}, "required": ["b"]}]}
    tool = cp.Tool.from_openapi(body(schema), "find", base_url=server.url)
    assert "'b' is a required property" in call(tool, at=["x"], body={"a": "1"})
    call(tool, at=["x"], body={"a": "1", "b": "2"})
    assert json.loads(server.received[0].body) == {"a": "1", "b": "2"}


def test_an_item_of_paths_may_be_a_reference() -> None:
    item = operation([AT])["paths"].popitem()[1]
    document = {"openapi": "3.1.0", "paths": {"/a/{at}": {"$ref": "#/components/pathItems/A"}}}
    document["components"] = {"pathItems": {"A": item}}
    assert names(cp.Tool.all_from_openapi(document, base_url="http://127.0.0.1:1")) == ["find"]
    document["paths"] = {"/a/{at}": {"$ref": "paths/a.yaml"}}
    with pytest.raises(DeclarationError, match=r"'paths/a.yaml', which it does not contain"):
        cp.Tool.all_from_openapi(document, base_url="http://127.0.0.1:1")


def test_references_may_be_described_and_lists_be_empty() -> None:
    document = operation([{"$ref": "#/components/parameters/P", "description": "own"}])
    (item,) = document["paths"].values()
    item["parameters"] = None
    (entry,) = (value for value in item.values() if value)
    entry["requestBody"] = {"$ref": "#/components/requestBodies/B", "description": "a body"}
    given = {"application/json": {"schema": {"properties": {"a": A}, "required": None}}}
    document["components"] = {
        "parameters": {"P": {"name": "at", "in": "path", "required": True, "schema": A}},
        "requestBodies": {"B": {"content": given, "required": True}},
    }
    tool = cp.Tool.from_openapi(document, "find", base_url="http://127.0.0.1:1")
    assert tool.parameters["properties"] == {"at": {**A, "description": "own"}, "a": A}


def parameter(where: str, name: str = "p", **more: Any) -> dict[str, Any]:
    return {"name": name, "in": where, "schema": A, **more}


LOOP = {
    "schemas": {"A": {"$ref": "#/components/schemas/B"}, "B": {"$ref": "#/components/schemas/A"}}
}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"swagger": "2.0", "paths": {}}, "version 2.0 of Swagger.*convert it"),
        ({"openapi": "2.0", "paths": {}}, "version 2.0 of OpenAPI"),
        (operation([AT, parameter("cookie", required=True)]), "'p' is sent in 'cookie'"),
        (operation([AT, parameter("body")]), "'p' is sent in 'body'"),
        (operation([AT, parameter("formData")]), "'p' is sent in 'formData'"),
        (
            operation([AT, {"name": "p", "in": "query", "content": {"text/csv": {}}}]),
            "'p' has content",
        ),
        (
            operation([AT, parameter("query", "at")]),
            "two parameters are named 'at', in path and query",
        ),
        (
            body({"$ref": "https://example.com/schema.json"}),
            "'https://example.com/schema.json', which it does",
        ),
        (body({"$ref": "other.yaml#/A"}), "'other.yaml#/A', which it does not contain"),
        (body({"$ref": "#/components/schemas/A"}, components=LOOP), "references in a row"),
        (
            body({"properties": {"a": {"$ref": "#/components/schemas/A"}}}, components=LOOP),
            "refers to itself",
        ),
        (body(A, "text/csv"), "not application/json"),
    ],
)
def test_what_would_be_sent_wrongly_is_refused(document: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        cp.Tool.from_openapi(document, "find", base_url="http://127.0.0.1:1")


def test_null_is_not_sent_as_text(server: RecordingServer) -> None:
    tool = cp.Tool.from_openapi(DOCUMENT, "getItem", base_url=server.url)
    call(tool, id="1", page=None, **{"X-Trace": None})
    _, path, headers, _ = server.received[0]
    assert path == "/items/1"
    assert "x-trace" not in dict(headers)


def test_the_server_of_an_operation_precedes_that_of_the_document(server: RecordingServer) -> None:
    document = {
        **operation([AT], servers=[{"url": server.url}]),
        "servers": [{"url": "http://127.0.0.1:1"}],
    }
    call(cp.Tool.from_openapi(document, "find"), at=["x"])
    assert len(server.received) == 1
