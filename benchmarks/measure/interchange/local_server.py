"""A model of this process behind an OpenAI-compatible server on loopback."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Self

import compound as cp
from benchmarks.measure.interchange.chat_server import ChatServer
from compound.core.engine import Message, Request

MAX_TOKENS = 24


class LocalServer:
    """Server of a local model that answers greedily. Use it as a context manager.

    Requests of several connections are answered together, in one event loop.
    """

    def __init__(self, model: str) -> None:
        self._engine = cp.engines.Transformers(model, deterministic=True)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server = ChatServer(self._answer, model=model)

    @property
    def url(self) -> str:
        """The address of the server."""
        return self._server.url

    def _answer(self, messages: Sequence[Mapping[str, str]]) -> str:
        sent = tuple(Message(each["role"], each["content"]) for each in messages)  # type: ignore[arg-type]
        request = Request(sent, max_tokens=MAX_TOKENS)
        return (
            asyncio.run_coroutine_threadsafe(self._engine.generate(request), self._loop)
            .result()
            .text
        )

    def __enter__(self) -> Self:
        self._thread.start()
        self._server.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.__exit__(*error)
        asyncio.run_coroutine_threadsafe(self._engine.aclose(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
