"""Messages between a run and the processes of its learner: frames of JSON on a socket, never pickles."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from compound.engine import TokenRecord
from compound.optimizers.weights.learner.samples import Sample
from compound.token_ids import token_ids

Message = dict[str, Any]
_LENGTH = struct.Struct(">Q")
_SAMPLE = tuple(field.name for field in fields(Sample) if field.name != "tokens")
_TOKENS = tuple(field.name for field in fields(TokenRecord) if field.name != "prompt")


def encode(message: Mapping[str, Any]) -> bytes:
    """Return a message as a frame: its length, and JSON in which every number is exact."""
    content = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(content)) + content


def receive(connection: socket.socket) -> Message | None:
    """Return the next message; ``None`` if the other process has ended."""
    header = _read(connection, _LENGTH.size)
    if header is None:
        return None
    content = _read(connection, _LENGTH.unpack(header)[0])
    if content is None:
        return None
    message: Message = json.loads(content)
    return message


def _read(connection: socket.socket, size: int) -> bytearray | None:
    """Return exactly ``size`` bytes; ``None`` if the connection ends before."""
    found = bytearray(size)
    view, done = memoryview(found), 0
    while done < size:
        try:
            count = connection.recv_into(view[done:])
        except OSError:  # reset, or closed by another thread
            return None
        if not count:
            return None
        done += count
    return found


def samples_to_json(samples: Sequence[Sample]) -> Message:
    """Return samples as JSON; a prompt that several samples share is stored once.

    >>> record = TokenRecord((1, 2), (3,), (-0.1,), "stop")
    >>> samples = [Sample("a", "e", "a", 0, record, 1.0, group=("e", 0))] * 2
    >>> found = samples_to_json(samples)
    >>> found["prompts"], samples_from_json(found) == samples
    ([[1, 2]], True)
    """
    prompts: dict[tuple[int, ...], int] = {}
    rows = [
        (
            [getattr(sample, name) for name in _SAMPLE],
            prompts.setdefault(sample.tokens.prompt, len(prompts)),
            [getattr(sample.tokens, name) for name in _TOKENS],
        )
        for sample in samples
    ]
    return {"prompts": [list(prompt) for prompt in prompts], "rows": rows}


def samples_from_json(found: Mapping[str, Any]) -> list[Sample]:
    """Return the samples that `samples_to_json` returned as JSON."""
    prompts = [token_ids(prompt) for prompt in found["prompts"]]
    samples = []
    for own, prompt, tokens in found["rows"]:
        record = TokenRecord(prompt=prompts[prompt], **_named(_TOKENS, tokens))
        samples.append(Sample(tokens=record, **_named(_SAMPLE, own)))
    return samples


def _named(names: Sequence[str], values: Sequence[Any]) -> Message:
    """Return fields by name; JSON has lists for tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in zip(names, values, strict=True)
    }
