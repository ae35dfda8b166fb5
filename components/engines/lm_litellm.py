"""Language models behind an API, through litellm: one door to every provider, with its prices.

Retrying, counting and stopping are the executor's: litellm's own retries, fallbacks and caches stay off,
and what goes wrong is sorted into what may pass (`TransientError`) and what will not (`CallError`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
from collections.abc import Mapping
from typing import Any

from compound.components.engines.background import in_background
from compound.components.engines.remote import OWNED, longest_prompt, sort_error, wanted_wait
from compound.contracts import Completion, Request, Usage
from compound.errors import CallError, CompoundError, DeclarationError, MissingExtra, TransientError

MILLION = 1_000_000


class LiteLLMEngine:
    """An engine over a provider's API.

    Token records are not available: providers do not return token ids.

    Args:
        model: as litellm spells it, ``provider/model``.
        api_base: the address of a server of your own.
        api_key_env: the environment variable that holds the key; without it, the provider's usual one.
            Keys are read from the environment only.
        concurrency: how many calls may be in flight.
        timeout: seconds for one try, unless the request says otherwise.
        price: US dollars for a million prompt tokens and a million completion tokens; without it, litellm's
            price list. `priced` says whether there is a price: where there is none, calls cost 0.
        extra: further arguments of the provider (``top_p``, ``reasoning_effort`` …); not those that
            components set.

    Example:
        >>> engine = LiteLLMEngine("openai/gpt-4o-mini", price=(0.15, 0.60))
        >>> engine.name, engine.priced
        ('litellm:openai/gpt-4o-mini', True)
    """

    def __init__(
        self,
        model: str,
        *,
        api_base: str | None = None,
        api_key_env: str | None = None,
        concurrency: int = 16,
        timeout: float = 60.0,
        price: tuple[float, float] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.api_base, self.api_key_env = model, api_base, api_key_env
        self.timeout, self.price, self.extra = timeout, price, dict(extra or {})
        self._concurrency = concurrency
        if owned := sorted(OWNED & set(self.extra)):
            raise DeclarationError(
                f"engine {model!r}: extra must not set {', '.join(owned)}",
                hint="components set these, and budgets are reserved by them",
            )

    @property
    def name(self) -> str:  # noqa: D102
        server = f"@{self.api_base}" if self.api_base else ""
        extra = ":" + json.dumps(self.extra, sort_keys=True) if self.extra else ""
        return f"litellm:{self.model}{server}{extra}"

    @property
    def concurrency(self) -> int:  # noqa: D102
        return self._concurrency

    @property
    def remote(self) -> bool:  # noqa: D102
        return True

    @property
    def priced(self) -> bool:
        """Whether calls have a known price; if not, their cost is counted as 0."""
        return self.price is not None or _listed(self.model) is not None

    def worst_case(self, request: Request) -> Usage:  # noqa: D102
        size = longest_prompt(request)
        return Usage(1, size, request.max_tokens, self._cost(size, request.max_tokens))

    async def generate(self, request: Request) -> Completion:  # noqa: D102
        if request.adapter:
            raise CallError(f"{self.name} cannot sample with the adapter {request.adapter!r}")
        litellm = await asyncio.to_thread(_litellm)
        try:
            response = await in_background(litellm.acompletion(**self._arguments(request)))
        except CompoundError:
            raise
        except Exception as error:
            raise self._sorted(litellm, error) from error
        return self._completion(request, response)

    async def aclose(self) -> None:
        """Leave the connections to litellm: all engines share them, and it closes those that are idle."""

    def _arguments(self, request: Request) -> dict[str, Any]:
        """Return what litellm is called with."""
        arguments: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": m.role, "content": m.content} for m in request.cued],
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed % 2**31,
            "timeout": request.timeout or self.timeout,
            "num_retries": 0,
            "max_retries": 0,
            "drop_params": True,  # not every provider knows a seed
        }
        if request.stop:
            arguments["stop"] = list(request.stop)
        if self.api_base:
            arguments["api_base"] = self.api_base
        if self.api_key_env:
            key = os.environ.get(self.api_key_env)
            if not key:
                raise CompoundError(
                    f"the key of {self.model!r} is not set", hint=f"export {self.api_key_env}=…"
                )
            arguments["api_key"] = key
        return arguments | self.extra

    def _completion(self, request: Request, response: Any) -> Completion:
        """Read a response, or say what is wrong with it."""
        if not getattr(response, "choices", None):
            raise TransientError(f"{self.model} answered without a choice")
        choice = response.choices[0]
        if choice.finish_reason == "content_filter":
            raise CallError(f"{self.model}: the provider's content filter held back the answer")
        text = choice.message.content or ""
        # Not every provider takes stop strings, or as many.
        text = text[: min((at for stop in request.stop if (at := text.find(stop)) >= 0), default=len(text))]
        used = getattr(response, "usage", None)
        worst = self.worst_case(request)  # what counts where the provider does not say
        prompt = getattr(used, "prompt_tokens", None) or worst.prompt_tokens
        completion = getattr(used, "completion_tokens", None)
        completion = worst.completion_tokens if completion is None else completion
        usage = Usage(1, prompt, completion, self._cost(prompt, completion, used))
        return Completion(text, usage, "length" if choice.finish_reason == "length" else "stop")

    def _cost(self, prompt: int, completion: int, used: Any = None) -> float:
        """Return the price in dollars; ``used`` lets litellm count what was cheaper (a provider's cache)."""
        if self.price is not None:
            return (prompt * self.price[0] + completion * self.price[1]) / MILLION
        if _listed(self.model) is None:
            return 0.0
        parts = _litellm().cost_per_token(
            model=self.model, prompt_tokens=prompt, completion_tokens=completion, usage_object=used
        )
        return float(sum(parts))

    def _sorted(self, litellm: Any, error: Exception) -> CallError:
        """Return the error of ours that says what to do about one of litellm's."""
        said = f"{self.model}: {str(error).strip() or type(error).__name__}"
        status = getattr(error, "status_code", None)
        if "Missing credentials" in said:
            status = 401  # a key that is not set at all arrives as a server error
        elif isinstance(error, litellm.Timeout | litellm.APIConnectionError):
            status = 503
        elif isinstance(error, litellm.NotFoundError) or "LLM Provider NOT provided" in said:
            status = 404
        return sort_error(
            said,
            status,
            model=self.model,
            keys=self._key_names() if status in {401, 403} else "",
            names="check the model's name: it reads provider/model",
            too_long=isinstance(error, litellm.ContextWindowExceededError),
            retry_after=_retry_after(error),
        )

    def _key_names(self) -> str:
        """Return the environment variables that hold this model's key."""
        if self.api_key_env:
            return self.api_key_env
        provider = self.model.partition("/")[0]
        usual = f"{provider.upper()}_API_KEY"
        with contextlib.suppress(Exception):
            known = _litellm().validate_environment(self.model)
            return " and ".join(known["missing_keys"]) or usual
        return usual


@functools.cache
def _litellm() -> Any:
    """Import litellm, quiet and without a download of its price list."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    try:
        import litellm
    except ImportError:
        raise MissingExtra("a remote model", "litellm", "remote") from None
    litellm.telemetry = False
    litellm.suppress_debug_info = True
    return litellm


@functools.cache
def _listed(model: str) -> Mapping[str, Any] | None:
    """Return litellm's entry of a model's prices, if it has one."""
    try:
        entry: Mapping[str, Any] = _litellm().get_model_info(model)
    except Exception:  # noqa: BLE001 - its error for an unknown model differs between versions
        return None
    return entry


def _retry_after(error: Exception) -> float | None:
    """Return the seconds that a server asks to wait, wherever litellm put its headers.

    >>> class Error(Exception):
    ...     litellm_response_headers = {"retry-after": "7"}
    >>> _retry_after(Error())
    7.0
    """
    places = (
        getattr(error, "headers", None),
        getattr(error, "litellm_response_headers", None),
        getattr(getattr(error, "response", None), "headers", None),
    )
    return next((wait for headers in places if (wait := wanted_wait(headers)) is not None), None)
