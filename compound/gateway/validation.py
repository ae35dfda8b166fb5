"""Read the body of a request: JSON of bounded depth, with the numbers that budgets depend on in their ranges.

An agent passes on what it receives from others. A body may reach the record and the budget only if it cannot
damage them: a negative limit of tokens would add to the budget, and a deep body cannot be stored.

For engines that do not forward requests as they are, a field that changes the answer is either read or
rejected: an agent that asks for `top_p` must not be answered as if it had not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import cast

from compound.errors import CallError
from compound.gateway.documents import format_kind
from compound.gateway.exchange import Document, Route
from compound.security.sanitize import replace_surrogates
from compound.web.problems import Problem

MAX_DEPTH = 64  # of nested objects and lists
MAX_TOKENS = 10_000_000  # that a request may ask for
MAX_ANSWERS = 128
MAX_TEMPERATURE = 100
COUNTS = {
    "max_tokens": MAX_TOKENS,
    "max_completion_tokens": MAX_TOKENS,
    "max_output_tokens": MAX_TOKENS,
    "n": MAX_ANSWERS,
}
"""Fields that hold a positive whole number, and the largest one."""

UNSUPPORTED = "the engine {lm!r} cannot answer the request of the agent, which has {what}"
HINT = "use an engine of kind openai for such requests: it forwards them as they are"

READ = frozenset(
    {
        "model", "messages", "input", "instructions", "previous_response_id", "conversation", "temperature",
        "max_tokens", "max_completion_tokens", "max_output_tokens", "stop", "tools", "tool_choice",
        "functions", "parallel_tool_calls", "response_format", "text",
    }
)  # fmt: skip
"""Fields that a request of an engine is made of, or that are rejected where they are read."""
IGNORED = frozenset(
    {
        "seed", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "prediction", "max_tool_calls", "stream", "stream_options",
    }
)  # fmt: skip
"""Fields that do not change the answer; the seed is that of the run."""
DEFAULTS: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "top_p": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "truncation": ("disabled",),
    "background": (False,),
    "include": ([], ["reasoning.encrypted_content"]),
}
"""Further fields, with the values that ask for nothing else than their absence does."""
FORMATS = ("text", "json_object", "json_schema")


def read_document(body: bytes) -> Document:
    """Return the body of a request.

    Raises:
        Problem: it is not a JSON object, nested too deeply, or a number is out of range.
    """
    try:
        found = json.loads(body, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Problem(400, "not_json", "the body must be a JSON object")
    if _is_deeper(found, MAX_DEPTH):
        raise _invalid(f"the body is nested more than {MAX_DEPTH} levels deep")
    for name, most in COUNTS.items():
        value = found.get(name)
        if value is not None and not (type(value) is int and 1 <= value <= most):
            raise _invalid(f"{name} must be a whole number from 1 to {most:,}, but is {value!r:.40}")
    heat = found.get("temperature")
    if heat is not None and not (type(heat) in (int, float) and 0 <= heat <= MAX_TEMPERATURE):
        raise _invalid(f"temperature must be a number from 0 to {MAX_TEMPERATURE}, but is {heat!r:.40}")
    return cast("Document", replace_surrogates(found))


def check_fields(route: Route, document: Document, lm: str) -> None:
    """Check that a request has no field which would be dropped although it changes the answer.

    Raises:
        CallError: it has one; the agent is answered with status 400.

    >>> check_fields("chat/completions", {"messages": [], "top_p": 1.0, "user": "u"}, "lm")
    """
    for name, value in document.items():
        if name not in READ | IGNORED and value is not None and value not in DEFAULTS.get(name, ()):
            raise unsupported(lm, f"the field {name}: {json.dumps(value):.80}")
    text = document.get("text")
    if isinstance(text, dict) and text.get("verbosity") not in (None, "medium"):
        raise unsupported(lm, f"the field text.verbosity: {json.dumps(text['verbosity']):.80}")
    kind = format_kind(route, document)
    if kind not in FORMATS:
        raise unsupported(lm, f"the format {kind!r:.80}; possible are {', '.join(FORMATS)}")


def unsupported(lm: str, what: str) -> CallError:
    """Return the error of a request that an engine cannot answer."""
    return CallError(UNSUPPORTED.format(lm=lm, what=what), hint=HINT, kind="unsupported")


def malformed(message: str) -> CallError:
    """Return the error of a request that is not one of OpenAI's interface."""
    return CallError(message, kind="invalid_request")


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is too large")
    return value


def _is_deeper(value: object, levels: int) -> bool:
    """Return whether objects and lists are nested more than ``levels`` deep."""
    if not isinstance(value, dict | list):
        return False
    items = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in items)


def _invalid(message: str) -> Problem:
    return Problem(400, "invalid_request", message)
