"""Fields of requests that a server refuses, named by a setting or learned from its first refusal."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping
from typing import Any, Literal, cast, get_args

Field = Literal["max_tokens", "temperature", "seed", "stop", "response_format", "system"]
STATUSES = (400, 422)
CODES = {"unsupported_parameter", "unsupported_value", "unknown_parameter", "extra_forbidden"}
OTHER_CODES = {"context_length_exceeded", "content_filter", "model_not_found"}
REFUSAL = re.compile(
    r"unsupported|(?:not|n't|n’t|no)(?: longer)? (?:currently )?(?:be )?support"
    r"|(?:not|only) (?:both )?(?:be )?(?:permitted|allowed|accepted|set|used|specified|configurable|enabled)"
    r"|(?:not |un)available|unrecognized|unknown|unexpected|extra[_ ](?:forbidden|inputs|fields)|deprecated"
    r"|use ['`\"]?max_completion_tokens|replaced by|must be 1(?:\.0)?(?!\.?\d)|fixed at|must alternate"
    r"|roles are supported|only (?:the )?(?:default|\S+ is (?:allowed|supported))",
    re.IGNORECASE,
)
# the server takes the field, but not this value
RANGE = re.compile(
    r"\b(?:between|range|(?:less|greater) than|at (?:least|most)|maximum|minimum)\b|[<>≤≥]=?", re.I
)
SYSTEM = (
    r"(?:system|developer)['\"]? (?:role|message|prompt|instruction)|role.{0,60}\bsystem\b"
    r"|user and assistant roles|roles must alternate"
)
EFFECTS: Mapping[str, str] = {
    "temperature": "{value} is not sent, the server samples at its own, and tuning it has no effect",
    "seed": "seeds are not sent: equal requests may have different answers",
    "stop": "stop strings are not sent: answers are cut off after they arrive",
    "response_format": "the format of answers is only described in the prompt",
    "system": "system messages are sent as the start of the user's message",
}


class Unsupported:
    """The fields that a server does not take, and requests without them.

    Args:
        fields: those known in advance; others are added by `learn`, also from several threads.
        owner: the engine's name, for the log.

    >>> known = Unsupported(["max_tokens", "temperature"], "m")
    >>> known.adapt({"max_tokens": 5, "temperature": 0.7, "messages": []})
    {'messages': [], 'max_completion_tokens': 5}
    """

    def __init__(self, fields: Collection[str], owner: str) -> None:
        self.fields, self._owner = set(fields), owner

    def adapt(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return a request in the form that the server takes."""
        found = {name: value for name, value in document.items() if name not in self.fields}
        if "max_tokens" in document and "max_tokens" in self.fields:
            found["max_completion_tokens"] = document["max_tokens"]
        if "system" in self.fields:
            found["messages"] = _without_system(document["messages"])
        return found

    def learn(self, status: int, body: bytes, sent: Mapping[str, Any], kept: Collection[str] = ()) -> bool:
        """Return whether to send a refused request again, in the form that `adapt` then gives it.

        Each field is given up once, so that a request is repeated at most as often as it has fields.

        Args:
            status: the status of the answer.
            body: its body.
            sent: the request.
            kept: fields that the user has set explicitly, without which it must not be sent.
        """
        names = [name for name in get_args(Field) if name in sent and name not in kept]
        if any(message.get("role") == "system" for message in sent["messages"]):
            names.append("system")
        field = refused_field(status, body, names)
        if field and field not in self.fields:
            self.fields.add(field)
            if field in EFFECTS:
                effect = EFFECTS[field].format(value=sent.get(field))
                logging.getLogger("compound").warning("%s does not take %s: %s", self._owner, field, effect)
        return bool(field)


def refused_field(status: int, body: bytes, names: Collection[str]) -> str:
    """Return the field because of which a server refuses a request, or ``""``.

    >>> body = b'{"error": {"message": "wrong", "code": "unsupported_value", "param": "seed"}}'
    >>> refused_field(400, body, ["seed", "stop"])
    'seed'
    >>> refused_field(400, b"max_tokens exceeds the context", ["max_tokens"])
    ''
    """
    if status not in STATUSES:
        return ""
    text = body.decode(errors="replace")
    error = _error(text)
    code, parameter = str(error.get("code")), str(error.get("param"))
    is_refusal = code in CODES or (REFUSAL.search(text) and not RANGE.search(text))
    if code in OTHER_CODES or not is_refusal:
        return ""
    if re.fullmatch(r"messages\W.*role", parameter):
        parameter = "system"
    if parameter in names:
        return parameter
    patterns = {name: SYSTEM if name == "system" else rf"(?<![\w.]){name}(?!\w)" for name in names}
    found = {name: re.search(pattern, text, re.IGNORECASE) for name, pattern in patterns.items()}
    places = {name: place.start() for name, place in found.items() if place}
    return min(places, key=lambda name: places[name], default="")


def _error(text: str) -> Mapping[str, object]:
    """Return the error in the body of an answer."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    found = document.get("error", document) if isinstance(document, dict) else {}
    return found if isinstance(found, dict) else {}


def _without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which system messages are the start of the next one by the user.

    >>> _without_system([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    [{'role': 'user', 'content': 'Be brief.\\n\\nHi'}]
    """
    plain: list[dict[str, Any]] = []
    held: list[str] = []
    for message in messages:
        content = message["content"]
        if message["role"] == "system":
            held.append(cast("str", content))
        elif message["role"] == "user" and held:
            start = "\n\n".join(held)
            text = (
                f"{start}\n\n{content}"
                if isinstance(content, str)
                else [{"type": "text", "text": start}, *content]
            )
            plain.append({**message, "content": text})
            held = []
        else:
            plain.append(message)
    return [*plain, *([{"role": "user", "content": "\n\n".join(held)}] if held else [])]
