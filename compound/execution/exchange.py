"""Verbatim messages of model calls, as recorded in traces and caches.

Long texts are truncated to keep traces readable. ``COMPOUND_RECORD_MESSAGES=0`` disables the recording:
prompts and answers are then not stored in addition to the inputs and outputs of components.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypedDict

from compound.engine import Completion, Message, Request, Role

MAX_CHARACTERS = 20_000  # maximum characters per text
SWITCH = "COMPOUND_RECORD_MESSAGES"


class MessageDocument(TypedDict):
    """A message as JSON types."""

    role: Role
    content: str


class ExchangeDocument(TypedDict):
    """An `Exchange` as JSON types."""

    model: str
    messages: list[MessageDocument]
    completion: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request to a model, and its answer.

    Attributes:
        model: name of the model in the configuration.
        messages: messages as sent; a requested start of the answer ends the last message.
        completion: the raw answer, before parsing.
        finish_reason: ``stop``, or ``length`` if the answer was cut at ``max_tokens``.
    """

    model: str
    messages: tuple[Message, ...]
    completion: str
    finish_reason: str

    def to_json(self) -> ExchangeDocument:
        """Return the exchange as JSON types."""
        return {
            "model": self.model,
            "messages": [{"role": m.role, "content": m.content} for m in self.messages],
            "completion": self.completion,
            "finish_reason": self.finish_reason,
        }

    @staticmethod
    def from_json(data: ExchangeDocument) -> Exchange:
        """Parse the output of `to_json`."""
        messages = tuple(Message(m["role"], m["content"]) for m in data["messages"])
        return Exchange(data["model"], messages, data["completion"], data["finish_reason"])

    def __str__(self) -> str:
        sent = "\n".join(f"[{message.role}]\n{message.content}" for message in self.messages)
        return f"{sent}\n[{self.model}: {self.finish_reason}]\n{self.completion}"


def record_exchange(model: str, request: Request, completion: Completion) -> tuple[Exchange, ...]:
    """Return the exchange to record; empty if recording is disabled."""
    if os.environ.get(SWITCH, "1") == "0":
        return ()
    messages = tuple(Message(message.role, _truncated(message.content)) for message in request.cued)
    return (Exchange(model, messages, _truncated(completion.text), completion.finish_reason),)


def _truncated(text: str) -> str:
    """Return an encodable text, with the middle omitted if it is too long."""
    whole = text.encode(errors="replace").decode()
    if len(whole) <= MAX_CHARACTERS:
        return whole
    half = MAX_CHARACTERS // 2
    return f"{whole[:half]}\n… {len(whole) - 2 * half} characters omitted …\n{whole[-half:]}"
