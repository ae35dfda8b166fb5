"""Who may call a server: addresses, names, origins, keys, and the size and speed of bodies."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import httpx
import pytest

from compound.api.serving.settings import ServerSettings
from compound.core.errors import DeclarationError
from compound.core.security.sanitize import redact_secrets
from compound.testing import ScriptedLM
from served import Running, client_of, qa, served

pytest.importorskip("fastapi")
KEY = "a-key-of-this-test-0123"
BODY = {"inputs": {"question": "?"}}


def serving(**settings: Any) -> Any:
    return served(qa(), ScriptedLM(lambda message: "yes"), **settings)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com"])
def test_other_addresses_than_loopback_require_a_key(host: str) -> None:
    with pytest.raises(DeclarationError, match=r"requires a key; set COMPOUND_SERVE_KEY"):
        ServerSettings(host=host)
    assert ServerSettings(host=host, key=KEY).host == host
    assert ServerSettings(host="127.0.0.9").key is None


def test_short_keys_are_refused_and_keys_are_not_shown() -> None:
    with pytest.raises(DeclarationError, match="at least 16") as refused:
        ServerSettings(key="short-secret")
    assert "short-secret" not in str(refused.value)
    assert KEY not in repr(ServerSettings(key=KEY))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("concurrency", 0),
        ("queue", -1),
        ("timeout", 0.0),
        ("timeout", float("nan")),
        ("drain", float("inf")),
        ("reload", float("nan")),
        ("max_body", 0),
        ("allow_origins", ("a.com",)),
        ("allow_origins", ("https://a.com/path",)),
    ],
)
def test_wrong_settings_are_refused(name: str, value: Any) -> None:
    with pytest.raises(DeclarationError):
        ServerSettings(**{name: value})


def test_a_foreign_host_name_is_refused_against_dns_rebinding() -> None:
    own = ("localhost", "127.0.0.1:99", "[::1]:8000", "LOCALHOST:1", "inside.example")
    foreign = ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8000", "")
    with serving(allow_hosts=("inside.example",)) as running, running.client() as client:
        for host in (*own, *foreign):
            expected, headers = 200 if host in own else 421, {"Host": host}
            for path in ("/health", "/openapi.json"):
                assert client.get(path, headers=headers).status_code == expected, host
            answer = client.post("/v1/run", json=BODY, headers=headers)
            assert answer.status_code == expected, host


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("https://evil.example", 403),
        ("null", 403),
        ("https://app.example", 200),
        ("http://localhost:1", 403),
    ],
)
def test_pages_of_foreign_origins_may_not_call(origin: str, status: int) -> None:
    lm = ScriptedLM(lambda message: "yes")
    with client_of(qa(), lm, allow_origins=("https://app.example",)) as client:
        answer = client.post("/v1/run", json=BODY, headers={"Origin": origin})
        assert answer.status_code == status
        assert len(lm.requests) == (status == 200)
        readable = answer.headers.get("access-control-allow-origin")
        assert readable == (origin if status == 200 else None)
        exposed = answer.headers.get("access-control-expose-headers", "")
        assert ("X-Run-Id" in exposed and "X-Run-Id" in answer.headers) is (status == 200)
        asked = client.options(
            "/v1/run", headers={"Origin": origin, "Access-Control-Request-Method": "POST"}
        )
        assert asked.status_code == (204 if status == 200 else 403)


def test_the_servers_own_origin_may_call() -> None:
    with serving() as running, running.client() as client:
        assert client.post("/v1/run", json=BODY, headers={"Origin": running.url}).status_code == 200


def test_bodies_that_a_form_could_send_are_refused() -> None:
    kinds = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "")
    with serving() as running, running.client() as client:
        for kind in kinds:
            sent = {"content": json.dumps(BODY), "headers": {"Content-Type": kind}}
            assert client.post("/v1/run", **sent).status_code == 415, kind


def test_a_key_protects_everything_but_the_probes() -> None:
    with serving(key=KEY) as running, running.client() as client:
        for path in ("/health", "/ready"):
            assert client.get(path).status_code == 200
        for given in (None, "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {KEY}x", "Bearer"):
            headers = {} if given is None else {"Authorization": given}
            assert client.post("/v1/run", json=BODY, headers=headers).status_code == 401
            assert client.get("/metrics", headers=headers).status_code == 401
            assert client.get("/openapi.json", headers=headers).status_code == 401
        headers = {"Authorization": f"Bearer {KEY}"}
        assert client.post("/v1/run", json=BODY, headers=headers).status_code == 200
        document = client.get("/openapi.json", headers=headers).json()
        assert document["security"] == [{"key": []}]
    assert KEY not in redact_secrets(f"the key {KEY}")


def test_large_bodies_are_refused_with_and_without_their_length() -> None:
    with serving(max_body=1000) as running, running.client() as client:
        large = json.dumps({"inputs": {"question": "x" * 2000}}).encode()

        def pieces() -> Any:
            for start in range(0, len(large), 100):
                yield large[start : start + 100]

        headers = {"Content-Type": "application/json"}
        assert client.post("/v1/run", content=large, headers=headers).status_code == 413
        assert client.post("/v1/run", content=pieces(), headers=headers).status_code == 413
        assert client.post("/v1/run", json=BODY).status_code == 200


def raw(running: Running, data: bytes, seconds: float = 10.0) -> bytes:
    """Send bytes and return the answer."""
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        connection.sendall(data)
        found = b""
        while b"\r\n\r\n" not in found and (piece := connection.recv(4096)):
            found += piece
        return found


def test_a_body_with_trailers_is_read() -> None:
    head = (
        b"POST /v1/run HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    body = json.dumps(BODY).encode()
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:9], body[9:]))
    with serving() as running:
        assert b" 200 " in raw(
            running, head + chunks + b"0\r\nContent-Type: text/plain\r\n\r\n", 120.0
        )


def test_a_body_that_does_not_arrive_does_not_occupy_a_place() -> None:
    with serving(body_timeout=0.2) as running:
        head = b"POST /v1/run HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        started = time.monotonic()
        assert b" 408 " in raw(running, head + b"Content-Length: 50\r\n\r\n{")
        assert running.built.service.running == 0
        assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"nothing", b'{"inputs": ' + b"[" * 5000 + b"]" * 5000 + b"}", b"\xff\xfe"],
)
def test_bodies_that_are_no_requests_are_explained(body: bytes) -> None:
    with serving() as running, running.client() as client:
        for path in (
            "/v1/run",
            "/v1/batch",
            "/v1/run/stream",
            "/v1/chat/completions",
            "/v1/feedback",
        ):
            answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code in (400, 422, 404)
            assert answer.json()["error"]["message"]


def test_unknown_paths_and_methods_are_explained() -> None:
    with serving() as running, running.client() as client:
        assert (
            client.get("/docs")
            .json()["error"]["message"]
            .endswith("/openapi.json describes this server")
        )
        assert client.get("/v1/run").status_code == 405
        assert client.put("/v1/run", json=BODY).status_code == 405


def preflight(names: str, origin: str = "https://app.example") -> httpx.Response:
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": names,
    }
    with client_of(qa(), ScriptedLM([]), allow_origins=("https://app.example",)) as client:
        return client.options("/v1/chat/completions", headers=asked)


def test_an_allowed_page_may_send_the_headers_of_its_library() -> None:
    names = (
        "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-package-version,"
        "x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout,traceparent"
    )
    answer = preflight(names)
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-headers"] == names
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert preflight(names, "https://evil.example").status_code == 403


@pytest.mark.parametrize("names", ["x y", "x/y", "a" * 65, ",".join("x" * 66), "a: b", ""])
def test_other_names_of_headers_are_not_echoed(names: str) -> None:
    given = preflight(names).headers["access-control-allow-headers"]
    assert given == "authorization, content-type"
