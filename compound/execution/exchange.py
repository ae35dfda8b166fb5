"""Messages of model calls, as recorded in traces and caches.

Long texts are truncated to keep traces readable, and known keys are removed. ``COMPOUND_RECORD_MESSAGES``
limits the recording: with ``memory``, messages are in the traces that functions return, but not in files;
with ``0``, they are recorded nowhere. The inputs and outputs of components are always recorded.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypedDict

from compound.engine import Completion, Message, Request, Role
from compound.security.sanitize import redact_secrets

MAX_CHARACTERS = 20_000  # maximum characters per text
SWITCH = "COMPOUND_RECORD_MESSAGES"
NOWHERE, IN_MEMORY = "0", "memory"  # values of the variable; any other value records messages in files, too


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
    if os.environ.get(SWITCH) == NOWHERE:
        return ()
    messages = tuple(Message(message.role, truncate_text(message.content)) for message in request.cued)
    return (Exchange(model, messages, truncate_text(completion.text), completion.finish_reason),)


def is_stored() -> bool:
    """Return whether messages may be written to files."""
    return os.environ.get(SWITCH) not in (NOWHERE, IN_MEMORY)


def truncate_text(text: str) -> str:
    """Return an encodable text without known keys, with the middle omitted if it is too long."""
    whole = redact_secrets(text.encode(errors="replace").decode())
    if len(whole) <= MAX_CHARACTERS:
        return whole
    half = MAX_CHARACTERS // 2
    return f"{whole[:half]}\n… {len(whole) - 2 * half} characters omitted …\n{whole[-half:]}"
