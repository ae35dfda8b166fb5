"""Utilities of engines behind an API: bounds of prompts and answers, and the classification of errors."""

from __future__ import annotations

import contextlib
import email.utils
import json
import math
import time
from collections.abc import Mapping

from compound.core.engine import NO_USAGE, Request, Usage, format_bytes
from compound.core.errors import (
    CallError,
    CompoundError,
    QuotaExhausted,
    RateLimited,
    TransientError,
)
from compound.core.security.sanitize import sanitize_text

# upper bounds of the tokens that a chat format or template adds to a prompt, and to each message
HEAD, TURN = 128, 16
BODY, PER_TOKEN = 2**20, 2**10  # bytes that an answer may have: fixed, and per token of max_tokens
TRANSIENT_STATUSES = {408, 409, 425, 429}  # in addition to all statuses from 500
# refusals of an overloaded server; after other statuses from 500 an answer may exist
UNPROCESSED_STATUSES = {503, 529}
QUOTA = {"insufficient_quota", "insufficient_user_quota"}
# of OpenAI and Anthropic
QUOTA_MESSAGES = ("insufficient_quota", "credit balance is too low to access the")
FILTERS = {"content_filter", "content_policy_violation"}


def max_prompt_tokens(request: Request) -> int:
    """Bound the number of prompt tokens of a request for any tokenizer; a token has at least one byte.

    >>> from compound.core.engine import Message
    >>> max_prompt_tokens(Request((Message("user", "Hi"),)))
    146
    """
    schema = format_bytes(request.format)  # a provider may show the schema to the model
    return HEAD + schema + request.size + TURN * len(request.cued)


def max_answer_bytes(request: Request) -> int:
    """Bound the bytes of the answer to a request: one mebibyte plus one kibibyte per token."""
    return BODY + PER_TOKEN * request.max_tokens


def charge_for_status(status: int) -> Usage | None:
    """Return the usage to charge for an error response; ``None`` charges the request's worst case.

    A refusal costs nothing. After a gateway timeout or a server error, an answer may have been
    computed and billed.

    >>> charge_for_status(401), charge_for_status(504)
    (Usage(calls=0, prompt_tokens=0, completion_tokens=0, cost=0.0, unpriced=0), None)
    """
    refused = 300 <= status < 500 and status != 408
    return NO_USAGE if refused or status in UNPROCESSED_STATUSES else None


def classify_error(
    message: str,
    status: object,
    *,
    model: str,
    code: str = "",
    keys: str = "",
    naming_hint: str = "",
    too_long: bool = False,
    retry_after: float | None = None,
    charged: Usage | None = None,
) -> CompoundError:
    """Convert a failed request to the error that states the remedy; ``charged`` counts without a status.

    >>> type(classify_error("overloaded", 503, model="m")).__name__
    'TransientError'
    >>> str(classify_error("no such key", 401, model="m", keys="M_KEY"))
    'no such key; set M_KEY to a key that may use m'
    """
    first = first_line(message)
    if isinstance(status, int):
        charged = charge_for_status(status)
    if status == 402 or code in QUOTA or any(text in message for text in QUOTA_MESSAGES):
        return QuotaExhausted(
            first,
            hint=f"the account for {model} has no credit left; add credit and run the same command again to "
            "resume the run",
        )
    if code in FILTERS and isinstance(status, int) and 400 <= status < 500:
        return CallError(first, kind="refusal", charged=charged)
    if too_long:
        hint = "shorten the prompt or its demonstrations, or lower max_tokens"
        return CallError(first, hint=hint, kind="too_long", charged=charged)
    if status in {401, 403}:
        return CallError(first, hint=f"set {keys} to a key that may use {model}", charged=charged)
    if status == 429 or (status in UNPROCESSED_STATUSES and retry_after is not None):
        return RateLimited(first, retry_after=retry_after, charged=NO_USAGE)
    if not isinstance(status, int) or status in TRANSIENT_STATUSES or status >= 500:
        return TransientError(first, retry_after=retry_after, charged=charged)
    return CallError(first, hint=naming_hint if status == 404 else "", charged=charged)


def error_code(body: str | bytes) -> str:
    """Return the error code in a JSON body, or ``""``.

    >>> error_code('{"error": {"message": "no credit", "code": "insufficient_quota"}}')
    'insufficient_quota'
    """
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        error = json.loads(body)["error"]
        return str(error.get("code") or error.get("type") or "") if isinstance(error, dict) else ""
    return ""


def answer_text(
    message: Mapping[str, object], finish: object, request: Request, model: str, charged: Usage
) -> str:
    """Return the text of a chat message.

    Raises:
        CallError: there is no text, because the model refused, called a tool, or ran out of tokens.
    """
    refusal, content = message.get("refusal"), message.get("content")
    if finish == "content_filter":
        problem = f"{model}: the provider's content filter blocked the answer"
        raise CallError(problem, kind="refusal", charged=charged)
    if isinstance(refusal, str) and refusal.strip():
        raise CallError(f"{model} refused: {first_line(refusal)}", kind="refusal", charged=charged)
    # an empty sample is a sample; otherwise "" means that all tokens were used for reasoning
    if isinstance(content, str) and (content.strip() or request.want_tokens):
        return content
    if message.get("tool_calls") and request.tools:
        return ""
    if message.get("tool_calls"):
        problem = f"{model} called a tool instead of answering"
        raise CallError(
            problem, hint="the request declared no tools", kind="empty", charged=charged
        )
    if finish == "length":
        problem = f"{model} used all of max_tokens={request.max_tokens} before it started to answer"
        hint = "raise max_tokens, or lower the reasoning effort"
        raise CallError(problem, hint=hint, kind="empty", charged=charged)
    raise CallError(f"{model} returned an answer without text", kind="empty", charged=charged)


def first_line(message: str) -> str:
    """Return the first line of a message, truncated to 300 characters.

    A line that ends with a colon is continued by the next one. Keys are removed before truncation,
    because a truncated key would not be recognized.

    >>> first_line("1 validation error:\\n  name: is missing\\nin request 3")
    '1 validation error: name: is missing'
    """
    lines = (line.strip() for line in (message.strip() or "no message").splitlines())
    first, *others = filter(None, lines)
    return sanitize_text(f"{first} {others[0]}" if first.endswith(":") and others else first)[:300]


def requested_wait(headers: Mapping[str, str] | None) -> float | None:
    """Return the seconds that a server asks to wait, given as a number or as a date.

    A date is compared with the ``Date`` of the answer, because the clocks of the two machines may
    differ.

    >>> requested_wait({"retry-after": "7"}), requested_wait({"retry-after-ms": "250"})
    (7.0, 0.25)
    >>> date = "Wed, 21 Oct 2026 07:28:00 GMT"
    >>> requested_wait({"retry-after": "Wed, 21 Oct 2026 07:28:30 GMT", "date": date})
    30.0
    """
    headers = headers or {}
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        with contextlib.suppress(ValueError, TypeError):
            seconds = float(headers[name]) / unit if name in headers else math.nan
            if math.isfinite(seconds):
                return max(0.0, seconds)
    until = _date(headers, "retry-after")
    if until is None:
        return None
    now = _date(headers, "date")
    return max(0.0, until - (time.time() if now is None else now))


def _date(headers: Mapping[str, str], name: str) -> float | None:
    """Return a date in a header in seconds since the epoch; ``None`` if it is missing or invalid."""
    with contextlib.suppress(ValueError, TypeError, OverflowError, KeyError):
        return email.utils.parsedate_to_datetime(str(headers[name])).timestamp()
    return None
