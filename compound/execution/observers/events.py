"""Receive the progress of a single run: the start of each call, pieces of text, and finished calls."""

from __future__ import annotations

import threading
from asyncio import get_running_loop
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from compound.execution.trace import Call
from compound.security.redaction import StreamRedactor


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A piece of a model's text.

    Attributes:
        address: address of the call.
        component: name of its component.
        text: the piece.
        attempt: number of the attempt, starting at 1; a later attempt starts the text again.
        request: number of the request within the attempt, starting at 0.
    """

    address: str
    component: str
    text: str
    attempt: int = 1
    request: int = 0


class RunListener(Protocol):
    """Receives the progress of one run, on its event loop. Methods must not block."""

    def on_start(self, address: str, component: str) -> None:
        """Receive the start of a call."""
        ...

    def on_text(self, piece: TextPiece) -> None:
        """Receive a piece of text of a call, if the engine can stream."""
        ...

    def on_call(self, call: Call) -> None:
        """Receive a finished call."""
        ...


class TextRelay:
    """Relays the pieces of one request to the event loop, without registered keys.

    An engine may call the relay from any thread.

    Args:
        emit: receives each piece, on the event loop that created the relay.
    """

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._redactor = StreamRedactor()
        self._loop, self._thread = get_running_loop(), threading.get_ident()
        self._open = True

    def __call__(self, piece: str) -> None:
        """Relay a piece."""
        if threading.get_ident() == self._thread:
            self._pass_on(piece)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._pass_on, piece)

    def close(self, *, complete: bool) -> None:
        """Relay the text that was held back if the answer is complete, and drop later pieces."""
        rest = self._redactor.flush()
        if complete and self._open and rest:
            self._emit(rest)
        self._open = False

    def _pass_on(self, piece: str) -> None:
        text = self._redactor.feed(piece) if self._open else ""
        if text:
            self._emit(text)
