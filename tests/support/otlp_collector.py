"""A stand-in for an OpenTelemetry collector: receives OTLP over HTTP on loopback and keeps the spans."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """What arrived: paths, headers, and export requests, in order."""

    def __init__(self) -> None:
        self.url = ""
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.requests: list[ExportTraceServiceRequest] = []

    @property
    def spans(self) -> list[Any]:
        scopes = [s for r in self.requests for re in r.resource_spans for s in re.scope_spans]
        return [span for scope in scopes for span in scope.spans]

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.spans]

    @property
    def service(self) -> str:
        attributes = self.requests[0].resource_spans[0].resource.attributes
        return str(next(a.value.string_value for a in attributes if a.key == "service.name"))


@contextmanager
def collector() -> Iterator[Collector]:
    """Run a collector on an ephemeral port."""
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            found.paths.append(self.path)
            found.headers.append(dict(self.headers.items()))
            found.requests.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=120)
