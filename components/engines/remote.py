"""What engines behind an API share: how long a prompt can be, and which of their errors may pass."""

from __future__ import annotations

import contextlib
import email.utils
import time
from collections.abc import Mapping
from typing import Any

from compound.contracts import Request
from compound.errors import CallError, TransientError

HEAD, TURN = 128, 16  # tokens that a provider's chat format adds to a prompt, and to each message
OWNED = {  # what a request says, or its component; not the settings of an engine
    "model",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "temperature",
    "stop",
    "seed",
    "stream",
}
MAY_PASS = {408, 409, 425, 429}  # and every status from 500 on


def longest_prompt(request: Request) -> int:
    """Return how many tokens a request's prompt can have, in any tokenizer: a token holds at least a byte.

    >>> from compound.contracts import Message
    >>> longest_prompt(Request((Message("user", "Hi"),)))
    146
    """
    return HEAD + sum(len(message.content.encode()) + TURN for message in request.cued)


def sort_error(
    said: str,
    status: object,
    *,
    model: str,
    keys: str = "",
    names: str = "",
    too_long: bool = False,
    retry_after: float | None = None,
) -> CallError:
    """Return the error that says what to do about an answer that is none.

    Args:
        said: the message, whole.
        status: the HTTP status, if there was an answer.
        model: what was called.
        keys: the environment variables that hold its key.
        names: how models are named there, for one that is not found.
        too_long: the prompt and the answer exceed the model's context.
        retry_after: the seconds that the server asks to wait.

    >>> type(sort_error("overloaded", 503, model="m")).__name__
    'TransientError'
    >>> str(sort_error("no such key", 401, model="m", keys="M_KEY"))
    'no such key; set M_KEY to a key that may use m'
    """
    first = first_line(said)
    if too_long:
        return CallError(first, hint="shorten the prompt or its demonstrations, or lower max_tokens")
    if "insufficient_quota" in said:
        return CallError(first, hint="the account has no credit left")
    if status in {401, 403}:
        return CallError(first, hint=f"set {keys} to a key that may use {model}")
    if isinstance(status, int) and (status in MAY_PASS or status >= 500):
        return TransientError(first, retry_after=retry_after)
    return CallError(first, hint=names if status == 404 else "")


def first_line(said: str) -> str:
    """Return the first line of a message, cut where it gets long."""
    return (said.strip() or "no message").splitlines()[0][:300]


def wanted_wait(headers: Mapping[str, Any] | None) -> float | None:
    """Return the seconds that a server asks to wait, given as a number or as a date.

    >>> wanted_wait({"retry-after": "7"})
    7.0
    """
    value = (headers or {}).get("retry-after")
    if value is None:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return None
