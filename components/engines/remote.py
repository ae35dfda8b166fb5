"""Shared by engines behind an API: bounds on prompts and answers, and the meaning of their errors."""

from __future__ import annotations

import contextlib
import email.utils
import json
import math
import time
from collections.abc import Mapping

from compound.engine import NO_USAGE, Request, Usage
from compound.errors import CallError, CompoundError, QuotaExhausted, RateLimited, TransientError
from compound.security.sanitize import safe

HEAD, TURN = 128, 16  # tokens that a provider's chat format adds to a prompt, and to each message
BODY, PER_TOKEN = 2**20, 2**10  # bytes that an answer may have: fixed, and for each token of max_tokens
MAY_PASS = {408, 409, 425, 429}  # and every status from 500 on
UNPROCESSED = {503, 529}  # refusals of an overloaded server; other statuses from 500 on may hide an answer
QUOTA = {"insufficient_quota", "insufficient_user_quota"}


def longest_prompt(request: Request) -> int:
    """Return how many tokens a request's prompt can have, in any tokenizer: a token holds at least a byte.

    >>> from compound.engine import Message
    >>> longest_prompt(Request((Message("user", "Hi"),)))
    146
    """
    return HEAD + sum(len(message.content.encode()) + TURN for message in request.cued)


def largest_answer(request: Request) -> int:
    """Return how many bytes the answer to a request may have: a mebibyte, and a kibibyte for each token."""
    return BODY + PER_TOKEN * request.max_tokens


def charged_for(status: int) -> Usage | None:
    """Return what a request is charged that was answered with an error; ``None`` charges its worst case.

    A refusal costs nothing. Behind a gateway's timeout, or a server's defect, there may be an answer that was
    computed and billed.

    >>> charged_for(401), charged_for(504)
    (Usage(calls=0, prompt_tokens=0, completion_tokens=0, cost=0.0, unpriced=0), None)
    """
    refused = 300 <= status < 500 and status != 408
    return NO_USAGE if refused or status in UNPROCESSED else None


def sort_error(
    said: str,
    status: object,
    *,
    model: str,
    code: str = "",
    keys: str = "",
    names: str = "",
    too_long: bool = False,
    retry_after: float | None = None,
    charged: Usage | None = None,
) -> CompoundError:
    """Return the error that says what to do about an answer that is none.

    Args:
        said: the message, whole.
        status: the HTTP status, if there was an answer.
        model: what was called.
        code: the provider's code of the error.
        keys: the environment variables that hold its key.
        names: how models are named there, for one that is not found.
        too_long: the prompt and the answer exceed the model's context.
        retry_after: the seconds that the server asks to wait.
        charged: what the request is charged where the status does not say.

    >>> type(sort_error("overloaded", 503, model="m")).__name__
    'TransientError'
    >>> str(sort_error("no such key", 401, model="m", keys="M_KEY"))
    'no such key; set M_KEY to a key that may use m'
    """
    first = first_line(said)
    if isinstance(status, int):
        charged = charged_for(status)
    if status == 402 or code in QUOTA or "insufficient_quota" in said:
        return QuotaExhausted(
            first,
            hint=f"the account for {model} has no credit left; add some and run the same command again: "
            "it continues where it was",
        )
    if too_long:
        hint = "shorten the prompt or its demonstrations, or lower max_tokens"
        return CallError(first, hint=hint, charged=charged)
    if status in {401, 403}:
        return CallError(first, hint=f"set {keys} to a key that may use {model}", charged=charged)
    if status == 429 or (status in UNPROCESSED and retry_after is not None):
        return RateLimited(first, retry_after=retry_after, charged=NO_USAGE)
    if not isinstance(status, int) or status in MAY_PASS or status >= 500:
        return TransientError(first, retry_after=retry_after, charged=charged)
    return CallError(first, hint=names if status == 404 else "", charged=charged)


def error_code(body: str | bytes) -> str:
    """Return the code in an error's JSON body, if there is one.

    >>> error_code('{"error": {"message": "no credit", "code": "insufficient_quota"}}')
    'insufficient_quota'
    """
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        error = json.loads(body)["error"]
        return str(error.get("code") or error.get("type") or "") if isinstance(error, dict) else ""
    return ""


def text_of(
    message: Mapping[str, object], finish: object, request: Request, model: str, charged: Usage
) -> str:
    """Return the text of a chat message.

    Raises:
        CallError: there is none: the model refused, called a tool, or used its tokens up before it answered.
    """
    refusal, content = message.get("refusal"), message.get("content")
    if finish == "content_filter":
        said = f"{model}: the provider's content filter held back the answer"
        raise CallError(said, kind="refusal", charged=charged)
    if isinstance(refusal, str) and refusal and not content:
        raise CallError(f"{model} refused: {first_line(refusal)}", kind="refusal", charged=charged)
    if isinstance(content, str):
        return content
    if message.get("tool_calls"):
        said = f"{model} called a tool instead of answering"
        raise CallError(said, hint="components offer no tools", kind="empty", charged=charged)
    if finish == "length":
        said = f"{model} used all of max_tokens={request.max_tokens} before it began to answer"
        raise CallError(said, hint="raise max_tokens, or lower the reasoning", kind="empty", charged=charged)
    raise CallError(f"{model} answered without text", kind="empty", charged=charged)


def first_line(said: str) -> str:
    """Return the first line of a message, cut where it gets long.

    Keys are removed before that: the beginning of one is not recognized.
    """
    return safe((said.strip() or "no message").splitlines()[0])[:300]


def wanted_wait(headers: Mapping[str, str] | None) -> float | None:
    """Return the seconds that a server asks to wait, given as a number or as a date.

    >>> wanted_wait({"retry-after": "7"}), wanted_wait({"retry-after-ms": "250"})
    (7.0, 0.25)
    """
    headers = headers or {}
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        with contextlib.suppress(ValueError, TypeError):
            seconds = float(headers[name]) / unit if name in headers else math.nan
            if math.isfinite(seconds):
                return max(0.0, seconds)
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return (
            max(0.0, email.utils.parsedate_to_datetime(str(headers["retry-after"])).timestamp() - time.time())
            if "retry-after" in headers
            else None
        )
    return None
