"""Requests and answers of vLLM's extensions of OpenAI's API: token ids, log-probabilities, constraints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from compound.core.engine import Completion, FinishReason, Request, TokenRecord, Usage, token_ids
from compound.core.errors import CallError, TransientError
from compound.engines.chat_format import (
    calls_from_json,
    finish_reason,
    messages_to_json,
    tokens_reported,
    tools_to_json,
)
from compound.engines.remote import answer_text
from compound.engines.server_api import ServerAPI

FOR_ADAPTERS = 4  # requests in flight beside all samples, which load and unload adapters
NOT_VLLM = "it must be vLLM, 0.10.2 or later"
MIN_LOGPROB = -9000.0  # vLLM writes -9999 for a missing log-probability
NEUTRAL = {  # sent explicitly, as defaults come from the model's generation_config.json otherwise
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}

# These do not change the distribution that tokens are sampled from, or change only the prompt.
PASSIVE = {
    *("add_special_tokens", "cache_salt", "chat_template", "chat_template_kwargs", "documents"),
    *("mm_processor_kwargs", "priority", "request_id", "skip_special_tokens"),
    *("spaces_between_special_tokens", "user"),
}


class VLLMAPI(ServerAPI):
    """Client of a vLLM server; for the arguments, see `ServerAPI`."""

    async def logprobs(
        self, name: str, prompt: str | Sequence[int], seconds: float, *, fresh: bool = False
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Return a prompt's n tokens and the n - 1 log-probabilities of each but the first.

        They belong to the distribution at temperature 1, independently of the server's
        ``--logprobs-mode``.
        """
        body = {
            "model": name,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
            "return_token_ids": True,
        }
        answer: Any = await self.ask("completions", body, seconds, fresh=fresh)
        try:
            choice = answer["choices"][0]
            tokens = tuple(int(token) for token in choice["prompt_token_ids"])
            entries = zip(tokens[1:], choice["prompt_logprobs"][1:], strict=True)
            return tokens, tuple(float(entry[str(token)]["logprob"]) for token, entry in entries)
        except (KeyError, IndexError, TypeError, ValueError):
            raise CallError(
                f"{self.model}: {self.address} does not return the log-probabilities of a prompt",
                hint=NOT_VLLM,
            ) from None

    async def logprobs_are_tempered(self, name: str, seconds: float) -> bool:
        """Return whether log-probabilities of sampled tokens are taken after temperature scaling.

        Near temperature 0, almost all probability is on the most likely token, so its
        log-probability is near 0 after scaling, and that of temperature 1 before scaling.
        """
        seen = []
        for temperature in (0.0, 0.01):
            body = {"model": name, "prompt": "The", "max_tokens": 1, "logprobs": 0, "seed": 0}
            answer: Any = await self.ask(
                "completions", {**body, "temperature": temperature}, seconds
            )
            try:
                seen.append(float(answer["choices"][0]["logprobs"]["token_logprobs"][0]))
            except (KeyError, IndexError, TypeError):
                problem = f"{self.model}: {self.address} does not return log-probabilities"
                raise CallError(problem) from None
        return seen[1] - seen[0] > 0.1


def distribution_options(extra: Mapping[str, object]) -> list[str]:
    """Return the request fields that change the sampling distribution, sorted.

    With such a field, log-probabilities are not those of the softmax at the request's temperature,
    which the trainer computes. Unknown fields are included.

    >>> distribution_options({"top_p": 0.9, "top_k": -1, "min_p": 0.0, "user": "me", "guided_regex": "a|b"})
    ['guided_regex', 'top_p']
    """
    neutral: dict[str, tuple[object, ...]] = {name: (value,) for name, value in NEUTRAL.items()}
    neutral["top_k"] = (0, -1)
    return sorted(
        name
        for name, value in extra.items()
        if name not in PASSIVE and value is not None and value not in neutral.get(name, ())
    )


def body(
    request: Request, model: str, extra: Mapping[str, object], *, seeded: bool = False
) -> dict[str, object]:
    """Return the JSON body of a request.

    >>> from compound.core.engine import Message
    >>> body(Request((Message("user", "Hi"),), cue="answer:"), "m", {})["messages"][-1]
    {'role': 'assistant', 'content': 'answer:'}
    """
    messages = messages_to_json(request.messages)
    sent: dict[str, object] = {
        "model": model,
        "messages": messages,
        "max_completion_tokens": request.max_tokens,
        "temperature": request.temperature,
        **NEUTRAL,
        **_constraint(request),
        **extra,
    }
    if seeded and request.temperature > 0:
        sent["seed"] = request.seed % 2**63  # vLLM parses a signed 64-bit number
    if request.stop:
        sent["stop"] = list(request.stop)
    if request.cue:
        messages.append({"role": "assistant", "content": request.cue})
        sent |= {"add_generation_prompt": False, "continue_final_message": True}
    if request.tools:
        sent |= {"tools": tools_to_json(request.tools), "tool_choice": request.tool_choice}
    if request.want_tokens:
        sent |= {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
    return sent


def is_enforced(request: Request) -> bool:
    """Return whether the server restricts the answer to its format.

    It does not while the model may call tools, as the grammar would exclude calls. Nor does it
    while tokens are drawn that weights may be trained on: the server does not report which tokens
    its grammar allowed, so its log-probabilities could not be compared with those of a trainer.
    """
    trained = request.want_tokens and request.temperature > 0
    return request.format is not None and not request.may_call and not trained


def _constraint(request: Request) -> dict[str, object]:
    if request.format is None or not is_enforced(request):
        return {}
    if request.format.choices:
        return {"structured_outputs": {"choice": list(request.format.choices)}}
    return {"structured_outputs": {"json": json.loads(request.format.schema)}}


def completion(
    request: Request, data: Mapping[str, object], worst: Usage, model: str = "the model"
) -> tuple[Completion, int]:
    """Convert an answer to a completion; also return how many prompt tokens came from the prefix cache.

    Raises:
        TransientError: the server aborted the answer.
        CallError: the answer lacks a field of vLLM, or has no text.
    """
    usage, cached = _usage(data, worst)
    answer: Any = data  # missing or malformed fields raise below
    try:
        choice = answer["choices"][0]
        finish = choice["finish_reason"]
        if finish not in {"stop", "length", "tool_calls"}:
            raise TransientError(
                f"the server aborted the answer ({str(finish)[:40]})", charged=usage
            )
        text = answer_text(choice["message"], finish, request, model, usage)
        calls = calls_from_json(choice["message"].get("tool_calls")) if request.tools else ()
        reason: FinishReason = "length" if finish == "length" else "stop"
        record = _record(request, answer, reason) if request.want_tokens else None
        return Completion(text, usage, finish_reason(finish, calls), record, calls), cached
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise CallError(
            f"the server's answer lacks vLLM's fields: {type(error).__name__}: {error}",
            hint=NOT_VLLM,
            charged=usage,
        ) from error


def _usage(data: Mapping[str, object], worst: Usage) -> tuple[Usage, int]:
    """Return the reported usage without corrections, and the number of prompt tokens from the cache."""
    used: Any = data.get("usage")
    prompt, completion = tokens_reported(used, worst, answered=False)
    try:
        cached = min(max(int(used["prompt_tokens_details"]["cached_tokens"]), 0), max(prompt, 0))
    except (KeyError, TypeError, ValueError):
        cached = 0
    return Usage(1, prompt, completion), cached


def _record(request: Request, answer: Mapping[str, Any], reason: FinishReason) -> TokenRecord:
    choice = answer["choices"][0]
    logprobs = tuple(float(entry["logprob"]) for entry in choice["logprobs"]["content"])
    sampled = token_ids(map(int, choice["token_ids"]))
    if len(logprobs) != len(sampled) or not all(
        MIN_LOGPROB < logprob < 0.01 for logprob in logprobs
    ):
        raise ValueError("a sampled token has no log-probability")
    prompt = token_ids(map(int, answer["prompt_token_ids"]))
    adapter = request.adapter.sha256 if request.adapter is not None else ""
    return TokenRecord(prompt, sampled, logprobs, reason, adapter)
