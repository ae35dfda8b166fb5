"""Fields of a request that its cache key depends on."""

from __future__ import annotations

from dataclasses import asdict, replace

from compound.engine import Message, Request


def request_key(request: Request) -> dict[str, object]:
    """Return the fields of a request for its cache key.

    Fields that later versions added are left out at their defaults, so that earlier keys stay valid.
    """
    fields = asdict(replace(request, messages=()))
    fields["messages"] = [_message_as_key(message) for message in request.messages]
    for name, default in (("format", None), ("tools", ()), ("tool_choice", "auto"), ("forward", None)):
        if getattr(request, name) == default:
            del fields[name]
    return fields


def _message_as_key(message: Message) -> dict[str, object]:
    """Return the fields of a message, with digests of images."""
    parts = (message.content,) if isinstance(message.content, str) else message.content
    content = [part if isinstance(part, str) else {"image": part.sha256} for part in parts]
    found: dict[str, object] = {"role": message.role}
    found["content"] = content[0] if isinstance(message.content, str) else content
    if message.tool_calls:
        found["tool_calls"] = [asdict(call) for call in message.tool_calls]
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    return found
