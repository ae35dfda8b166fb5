"""What a vLLM server is sent for a request, and what its answer says: OpenAI's chat and vLLM's fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compound.components.engines import remote
from compound.contracts import Completion, FinishReason, Request, TokenRecord, Usage
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
OWNED = remote.OWNED | {
    "echo",
    "logprobs",
    "return_token_ids",
    "add_generation_prompt",
    "continue_final_message",
}


def body(request: Request, model: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the server is sent; ``model`` is the name there of what to sample with.

    >>> from compound.contracts import Message
    >>> body(Request((Message("user", "Hi"),), cue="answer:"), "m", {})["messages"][-1]
    {'role': 'assistant', 'content': 'answer:'}
    """
    messages = [{"role": m.role, "content": m.content} for m in request.messages]
    sent: dict[str, Any] = {
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


def completion(request: Request, said: Mapping[str, Any]) -> tuple[Completion, int]:
    """Return an answer, and how many tokens of its prompt the server had in its prefix cache.

    Raises:
        TransientError: the server broke the answer off.
        CallError: the answer lacks what vLLM's has.
    """
    try:
        choice, used = said["choices"][0], said["usage"]
        reason: FinishReason = choice["finish_reason"]
        if reason not in {"stop", "length"}:
            raise TransientError(f"the server gave up the answer ({reason})")
        usage = Usage(1, int(used["prompt_tokens"]), int(used["completion_tokens"]))
        cached = (used.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        record = _record(request, said, reason) if request.want_tokens else None
        return Completion(choice["message"]["content"] or "", usage, reason, record), int(cached)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CallError(
            f"the server's answer is not vLLM's: {type(error).__name__}: {error}",
            hint="it must be vLLM, 0.10.2 or later",
        ) from error


def _record(request: Request, said: Mapping[str, Any], reason: FinishReason) -> TokenRecord:
    choice = said["choices"][0]
    logprobs = tuple(float(entry["logprob"]) for entry in choice["logprobs"]["content"])
    sampled = tuple(int(token) for token in choice["token_ids"])
    if len(logprobs) != len(sampled) or not all(LEAST < logprob < 0.01 for logprob in logprobs):
        raise ValueError("not a log-probability for each sampled token")
    prompt = tuple(int(token) for token in said["prompt_token_ids"])
    adapter = request.adapter.sha256 if request.adapter is not None else ""
    return TokenRecord(prompt, sampled, logprobs, reason, adapter)
