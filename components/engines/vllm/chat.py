"""Requests to a vLLM server and its answers, in the format of OpenAI's chat API with vLLM's fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict, cast

from compound.components.engines.remote import text_of
from compound.engine import Completion, FinishReason, Request, TokenRecord, Usage
from compound.errors import CallError, TransientError

LEAST = -9000.0  # vLLM writes -9999 where it has no log-probability
NEUTRAL = {  # otherwise a server samples as the model's generation_config.json says
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}

# These leave the distribution that tokens are sampled from as it is, or change the prompt alone.
PASSIVE = {
    *("add_special_tokens", "cache_salt", "chat_template", "chat_template_kwargs", "documents"),
    *("mm_processor_kwargs", "priority", "request_id", "skip_special_tokens"),
    *("spaces_between_special_tokens", "user"),
}


class Logprob(TypedDict):
    """What vLLM says of one sampled token."""

    logprob: float


class Logprobs(TypedDict):
    """What vLLM says of sampled tokens, in their order."""

    content: list[Logprob]


class ChatChoice(TypedDict):
    """One answer of vLLM."""

    finish_reason: str
    message: Mapping[str, object]
    logprobs: Logprobs
    token_ids: list[int]


class ChatAnswer(TypedDict):
    """What is read of vLLM's answer to a request for a chat completion."""

    choices: list[ChatChoice]
    prompt_token_ids: list[int]


def reshaping(extra: Mapping[str, object]) -> list[str]:
    """Return the further fields of requests that change what tokens are sampled from.

    Log-probabilities are then those of another distribution than the softmax at the request's temperature,
    which is what a trainer computes. Fields that are not known count as such.

    >>> reshaping({"top_p": 0.9, "top_k": -1, "min_p": 0.0, "user": "me", "guided_regex": "a|b"})
    ['guided_regex', 'top_p']
    """
    neutral: dict[str, tuple[object, ...]] = {name: (value,) for name, value in NEUTRAL.items()}
    neutral["top_k"] = (0, -1)
    return sorted(
        name
        for name, value in extra.items()
        if name not in PASSIVE and value is not None and value not in neutral.get(name, ())
    )


def body(request: Request, model: str, extra: Mapping[str, object]) -> dict[str, object]:
    """Return what the server is sent; ``model`` is the name there of what to sample with.

    >>> from compound.engine import Message
    >>> body(Request((Message("user", "Hi"),), cue="answer:"), "m", {})["messages"][-1]
    {'role': 'assistant', 'content': 'answer:'}
    """
    messages = [{"role": m.role, "content": m.content} for m in request.messages]
    sent: dict[str, object] = {
        "model": model,
        "messages": messages,
        "max_completion_tokens": request.max_tokens,
        "temperature": request.temperature,
        "seed": request.seed % 2**63,  # a signed number there
        **NEUTRAL,
        **extra,
    }
    if request.stop:
        sent["stop"] = list(request.stop)
    if request.cue:
        messages.append({"role": "assistant", "content": request.cue})
        sent |= {"add_generation_prompt": False, "continue_final_message": True}
    if request.want_tokens:
        sent |= {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
    return sent


def completion(
    request: Request, said: Mapping[str, object], worst: Usage, model: str = "the model"
) -> tuple[Completion, int]:
    """Return an answer, and how many tokens of its prompt the server had in its prefix cache.

    Args:
        request: what was asked.
        said: the server's answer.
        worst: the worst case of the request, which counts where the server does not say what it used.
        model: its name, for messages.

    Raises:
        TransientError: the server broke the answer off.
        CallError: the answer lacks what vLLM's has, or holds no text.
    """
    usage, cached = _usage(said, worst)
    answer = cast("ChatAnswer", said)  # what it lacks, or has otherwise, raises below
    try:
        choice = answer["choices"][0]
        finish = choice["finish_reason"]
        if finish not in {"stop", "length", "tool_calls"}:
            raise TransientError(f"the server gave up the answer ({str(finish)[:40]})", charged=usage)
        text = text_of(choice["message"], finish, request, model, usage)
        reason: FinishReason = "length" if finish == "length" else "stop"
        record = _record(request, answer, reason) if request.want_tokens else None
        return Completion(text, usage, reason, record), cached
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise CallError(
            f"the server's answer is not vLLM's: {type(error).__name__}: {error}",
            hint="it must be vLLM, 0.10.2 or later",
            charged=usage,
        ) from error


def _usage(said: Mapping[str, object], worst: Usage) -> tuple[Usage, int]:
    """Return what a server says it used, as it says so, and the prompt tokens it had in its cache."""
    used = said.get("usage")
    if not isinstance(used, Mapping):
        return worst, 0
    prompt, completion = used.get("prompt_tokens"), used.get("completion_tokens")
    usage = Usage(
        1,
        worst.prompt_tokens if prompt is None else prompt,
        worst.completion_tokens if completion is None else completion,
    )
    details = used.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else 0
    if not isinstance(cached, int) or not isinstance(prompt, int):
        return usage, 0
    return usage, min(max(cached, 0), max(prompt, 0))


def _record(request: Request, said: ChatAnswer, reason: FinishReason) -> TokenRecord:
    choice = said["choices"][0]
    logprobs = tuple(float(entry["logprob"]) for entry in choice["logprobs"]["content"])
    sampled = tuple(int(token) for token in choice["token_ids"])
    if len(logprobs) != len(sampled) or not all(LEAST < logprob < 0.01 for logprob in logprobs):
        raise ValueError("not a log-probability for each sampled token")
    prompt = tuple(int(token) for token in said["prompt_token_ids"])
    adapter = request.adapter.sha256 if request.adapter is not None else ""
    return TokenRecord(prompt, sampled, logprobs, reason, adapter)
