"""Servers of small systems, on loopback and a free port."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

import compound as cp
from compound.api.serving.application import Built, build
from compound.api.serving.server import DrainingServer, uvicorn_config
from compound.api.serving.settings import ServerSettings

SECONDS = 120.0


def qa(prompt: str = "Answer.", **settings: Any) -> cp.System:
    """Return a system with one text input and one text output."""
    answerer = cp.LLM("answerer", prompt=cp.Text(prompt), retries=0, **settings)
    return cp.System("qa", {"answer": answerer(question=cp.Input("question"))}, lm="lm")


@dataclass
class Running:
    """A running server."""

    built: Built
    url: str
    server: DrainingServer

    def client(self, **settings: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=SECONDS, trust_env=False, **settings)


@contextmanager
def served(
    system: cp.System,
    lm: Any = None,
    *,
    config: Path | None = None,
    engines: Any = None,
    **settings: Any,
) -> Iterator[Running]:
    """Serve a system in a thread for the duration of the block."""
    engines = engines if lm is None else {"lm": lm}
    options = ServerSettings(**{"port": 0, "drain": 5.0, "reload": 0.05, **settings})
    built = build(system, config, engines, options)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(2048)
    server = DrainingServer(uvicorn_config(built.application, options.drain), built, system.name)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    try:
        # The socket is open: this waits for the start.
        httpx.get(f"{url}/health", timeout=SECONDS, trust_env=False)
        yield Running(built, url, server)
    finally:
        server.should_exit = True
        thread.join(SECONDS)
        listening.close()
        assert not thread.is_alive(), "the server did not stop"


@contextmanager
def client_of(system: cp.System, lm: Any = None, **settings: Any) -> Iterator[httpx.Client]:
    """Serve a system, and yield a client of it."""
    with served(system, lm, **settings) as running, running.client() as client:
        yield client


def until(holds: Any) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)
