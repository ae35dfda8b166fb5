"""Engine for hosted language models, through litellm, which supports many providers and knows their prices.

The executor retries, counts and cancels calls. litellm's own retries, fallbacks and caches are
therefore disabled, and its errors are classified as transient (`TransientError`, `RateLimited`) or
permanent.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import json
import logging
import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, cast

from compound.core.engine import NO_USAGE, AnswerFormat, Completion, OnText, Request, Usage
from compound.core.errors import (
    CallError,
    CompoundError,
    DeclarationError,
    MissingExtra,
    TransientError,
)
from compound.core.loops import in_background, run_in_background
from compound.core.narrowing import report_wrong_arguments
from compound.core.security.sanitize import remember_environment
from compound.engines.chat_format import (
    ReportedText,
    calls_from_json,
    cut_at_stop,
    finish_reason,
    request_to_json,
    response_format,
    tokens_reported,
    tools_to_json,
    unwrap,
)
from compound.engines.credentials import Connection
from compound.engines.options import (
    Count,
    Price,
    RefusedField,
    RemoteOptions,
    Seconds,
    Unsupported,
    Wait,
    takes_settings,
    validate_options,
)
from compound.engines.remote import (
    answer_text,
    classify_error,
    error_code,
    max_answer_bytes,
    max_prompt_tokens,
    requested_wait,
)
from compound.execution.budget import clip_usage

if TYPE_CHECKING:
    from compound.engines.wire import HTTPExchange

    Extra = RemoteOptions | Mapping[str, object]
else:
    Extra = RemoteOptions

MILLION = 1_000_000
PRICES = frozenset({"input_cost_per_token", "tiered_pricing"})  # fields of litellm's price list
STREAM_END = b"[DONE]"
_IMPORTING = threading.Lock()
PROVIDERS_WITH_KEY = {  # providers that require a key, each read from one environment variable
    *("openai", "anthropic", "gemini", "groq", "mistral"),
    *("openrouter", "deepseek", "together_ai", "cohere", "xai"),
}


@dataclass(frozen=True)
class LiteLLMSettings:
    """Settings of `LiteLLMEngine`, which describes them."""

    model: str
    _: KW_ONLY
    api_base: str | None = None
    api_key_env: str | None = None
    concurrency: Count = 16
    timeout: Seconds = 60.0
    max_wait: Wait = 600.0
    price: tuple[Price, Price] | None = None
    extra: Extra | None = None
    response_schema: bool | None = None
    native_tools: bool | None = None
    takes_images: bool | None = None
    unsupported: Sequence[RefusedField] = ()


@report_wrong_arguments
class LiteLLMEngine:
    """Engine that calls a provider's API.

    Token records are not available, because providers do not return token ids.

    Args:
        model: the model in litellm's notation, ``provider/model``.
        api_base: the address of your own server.
        api_key_env: the environment variable that holds the key. By default the provider's own
            address receives its usual key, and ``api_base`` none. Keys are read from the
            environment only.
        concurrency: maximum number of concurrent calls; lowered while the server limits the rate.
        timeout: time limit of one attempt in seconds, from connecting to the end of the answer; a
            request may override it.
        max_wait: maximum total time in seconds that a call waits for a server that limits the rate.
        price: US dollars per million prompt tokens and per million completion tokens; default:
            litellm's price list. Without a price (see `priced`) calls are counted with cost 0.
        extra: sampling and reasoning options to pass on (``top_p``, ``reasoning_effort`` …); see
            `RemoteOptions`.
        response_schema: whether to send the JSON schema of a declared output type as the response
            format; default: if litellm says that the model takes it
            (`litellm.supports_response_schema`). Set it for a server of your own.
        native_tools: whether to declare tools to the model, instead of describing them in the
            prompt; default: if litellm says that the model calls tools.
        takes_images: whether the model takes images; default: what litellm says.
        unsupported: fields of requests that the model refuses, which are then sent otherwise or not
            at all: ``max_tokens`` (sent as ``max_completion_tokens``), ``temperature``, ``seed``,
            ``stop``, ``response_format``, ``system`` (sent as a part of the user's message). By
            default litellm's list of models decides, and what it does not know is learned from the
            provider's refusals.

    Raises:
        DeclarationError: a setting is out of range, or an option is unknown.

    Example:
        >>> engine = LiteLLMEngine("openai/gpt-4o-mini", price=(0.15, 0.60))
        >>> engine.name, engine.priced
        ('litellm:openai/gpt-4o-mini', True)
    """

    requires: ClassVar[tuple[str, ...]] = ("litellm",)

    remote = True
    stable_name = True

    @takes_settings(LiteLLMSettings)
    def __init__(self, settings: LiteLLMSettings) -> None:
        self.settings, self.model = settings, settings.model
        self.api_base, self.price = settings.api_base, settings.price
        self.concurrency, self.max_wait = settings.concurrency, settings.max_wait
        self.extra = validate_options(RemoteOptions, settings.extra, self.model)
        check_ollama(self.model, self.extra)
        self._connection = Connection(self.model, self.api_base, settings.api_key_env)
        self._unsupported = Unsupported(settings.unsupported, self.model)

    @property
    def name(self) -> str:  # noqa: D102
        given = self.settings
        server = f"@{self.api_base}" if self.api_base else ""
        extra = ":" + json.dumps(self.extra, sort_keys=True) if self.extra else ""
        named = {
            "response_schema": given.response_schema,
            "native_tools": given.native_tools,
            "unsupported": ",".join(sorted(given.unsupported)) or None,
        }
        others = [f":{name}={value}" for name, value in named.items() if value is not None]
        return f"litellm:{self.model}{server}{extra}{''.join(others)}"

    @property
    def native_tools(self) -> bool:
        """Whether tools are declared to the model."""
        given = self.settings.native_tools
        return _supports(self.model, "function_calling") if given is None else given

    @property
    def takes_format(self) -> bool:
        """Whether the format of an answer is sent as the response format."""
        if "response_format" in self.extra:
            return False
        given = self.settings.response_schema
        return _supports(self.model, "response_schema") if given is None else given

    @property
    def takes_images(self) -> bool:
        """Whether the model takes images."""
        given = self.settings.takes_images
        return _supports(self.model, "vision") if given is None else given

    @property
    def unsupported(self) -> frozenset[str]:
        """Fields that its requests do not have, as far as litellm or a refusal says so."""
        return frozenset(self._unsupported.fields) | _unlisted(self.model)

    @property
    def priced(self) -> bool:
        """Whether the price of calls is known; otherwise their cost is counted as 0."""
        return self.price is not None or _listed(self.model) is not None

    async def warm_up(self) -> None:
        """Import litellm, which takes seconds, off the event loop and outside the time limits of calls."""
        await asyncio.to_thread(_litellm)

    def worst_case(self, request: Request) -> Usage:  # noqa: D102
        size = max_prompt_tokens(request)
        cost = self._max_cost(size, request.max_tokens)
        return Usage(1, size, request.max_tokens, cost, int(not self.priced))

    async def generate(self, request: Request) -> Completion:  # noqa: D102
        return await self._answer(request, None)

    async def stream(self, request: Request, on_text: OnText) -> Completion:
        """Answer one request, and report its text as the provider sends it."""
        return await self._answer(request, on_text)

    async def _answer(self, request: Request, on_text: OnText | None) -> Completion:
        if request.adapter:
            raise CallError(
                f"{self.name} does not support adapters, but got {request.adapter!r}",
                charged=NO_USAGE,
            )
        litellm = await asyncio.to_thread(_litellm)
        if not self.settings.api_key_env:
            remember_environment()  # litellm reads the provider's key from the environment at each call
        self.require_key()
        response = await run_in_background(
            self._call(litellm, request, request.timeout or self.settings.timeout, on_text)
        )
        return self._completion(request, response)

    async def _call(
        self, litellm: ModuleType, request: Request, seconds: float, on_text: OnText | None
    ) -> object:
        """Return litellm's response to a request; ``seconds`` limits the total time.

        With ``on_text``, the response is streamed, and assembled from its chunks.
        """
        from compound.engines.wire import record_exchange

        with record_exchange(max_answer_bytes(request)) as noted:
            try:
                async with asyncio.timeout(seconds):
                    while True:
                        arguments = self._arguments(request, seconds)
                        try:
                            if on_text is not None:
                                return await _streamed(litellm, arguments, request, on_text, noted)
                            response: object = await litellm.acompletion(**arguments)
                        except Exception:
                            if not self._unsupported.learn(
                                noted.status, noted.error, arguments, self.extra
                            ):
                                raise
                        else:
                            return response
            except CompoundError:
                raise
            except TimeoutError:
                message = f"{self.model} did not answer completely within {seconds:g} s"
                unsent = noted.to and not noted.sent
                raise TransientError(message, charged=NO_USAGE if unsent else None) from None
            except Exception as error:
                raise self._classify(litellm, error, noted) from error

    @in_background
    async def aclose(self) -> None:
        """Close the connections to a named server; litellm shares all other connections between engines."""
        await self._connection.aclose()

    def _arguments(self, request: Request, seconds: float) -> dict[str, object]:
        arguments: dict[str, object] = {
            "model": self.model,
            **request_to_json(request),
            "timeout": seconds,
            "num_retries": 0,
            "max_retries": 0,
            "drop_params": True,  # not every provider supports a seed
        }
        if (sent := self._sent_format(request)) is not None:
            arguments["response_format"] = response_format(sent)
        if request.tools:
            arguments |= {"tools": tools_to_json(request.tools), "tool_choice": request.tool_choice}
        adapted = self._unsupported.adapt(arguments)
        known = _litellm().get_supported_openai_params(self.model) or ()
        kept = [name for name in self.extra if name not in known]  # which litellm would drop
        if "max_completion_tokens" in adapted:
            kept.append("max_completion_tokens")
        adapted |= self.extra | self._connection.arguments()
        if "thinking" in kept and _speaks_openai(self.model):  # OpenAI's client does not have it
            kept.remove("thinking")
            adapted["extra_body"] = {"thinking": adapted.pop("thinking")}
        return {**adapted, "allowed_openai_params": kept} if kept else adapted

    def _sent_format(self, request: Request) -> AnswerFormat | None:
        """Return the format that is sent as the response format, or None if the model does not take it."""
        return request.format if request.format is not None and self.takes_format else None

    def _completion(self, request: Request, response: object) -> Completion:
        """Convert a response to a completion; raises an error that states what is wrong with it."""
        used = getattr(response, "usage", None)
        choices = getattr(response, "choices", None)
        message = choices[0].message if choices else None
        content = getattr(message, "content", None)
        usage = self._usage(request, used, bool(content))
        if not choices:
            raise TransientError(f"{self.model} returned an answer without choices", charged=usage)
        choice = choices[0]
        finish = choice.finish_reason
        fields = getattr(message, "provider_specific_fields", None)
        refusal = fields.get("refusal") if isinstance(fields, Mapping) else None
        tools = getattr(message, "tool_calls", None)
        calls = calls_from_json(tools) if request.tools else ()
        parts = {"content": content, "refusal": refusal, "tool_calls": tools}
        text = answer_text(parts, finish, request, self.model, usage)
        if len(text) > max_answer_bytes(request):
            raise CallError(
                f"{self.model}: the answer has {len(text):,} characters, more than max_tokens allows",
                charged=usage,
            )
        if (sent := self._sent_format(request)) is not None:
            text, wrapped = unwrap(text, sent), text
            finish = "stop" if text != wrapped else finish  # complete JSON
        text = cut_at_stop(text, request.stop)
        return Completion(text, usage, finish_reason(finish, calls), tool_calls=calls)

    def _usage(self, request: Request, used: object, answered: bool) -> Usage:
        """Return the usage that a response reports, with the worst case for missing values.

        Impossible values are corrected and reported later, where the request is charged.
        """
        worst = self.worst_case(request)
        prompt, completion = tokens_reported(used, worst, answered=answered)
        possible, _ = clip_usage(Usage(1, prompt, completion), worst)
        counted = (possible.prompt_tokens, possible.completion_tokens)
        reported = (getattr(used, "prompt_tokens", None), getattr(used, "completion_tokens", None))
        # litellm computes the price from what was reported, which may be less than what is counted
        cost = self._cost(*counted, used) if counted == reported else self._max_cost(*counted)
        return Usage(1, prompt, completion, min(cost, worst.cost), worst.unpriced)

    def _max_cost(self, prompt: int, completion: int) -> float:
        """Return the price in US dollars if all tokens of the answer are billed as reasoning tokens."""
        thinking = (_listed(self.model) or {}).get("output_cost_per_reasoning_token")
        thinking = thinking if isinstance(thinking, int | float) else 0.0
        surcharge = thinking * completion if self.price is None else 0.0
        return self._cost(prompt, completion) + surcharge

    def _cost(self, prompt: int, completion: int, used: object = None) -> float:
        """Return the price in US dollars; with ``used`` litellm applies the discount of prompt caching."""
        if self.price is not None:
            return (prompt * self.price[0] + completion * self.price[1]) / MILLION
        if _listed(self.model) is None:
            return 0.0
        readings = [None] if used is None else _readings(used, prompt, completion)
        cost = max(listed_cost(self.model, prompt, completion, usage) or 0.0 for usage in readings)
        return cost if cost >= 0 and math.isfinite(cost) else self._cost(prompt, completion)

    def _classify(
        self, litellm: ModuleType, error: Exception, noted: HTTPExchange
    ) -> CompoundError:
        """Convert an error of litellm to a `CompoundError` that states the remedy.

        What the transport recorded takes precedence: litellm reports lost answers as server errors.
        """
        message = f"{self.model}: {noted.problem or str(error).strip() or type(error).__name__}"
        status = noted.status or getattr(error, "status_code", None)
        charged = None
        if "Missing credentials" in message:
            status = 401  # litellm reports a missing key as a server error
        elif noted.to and not noted.sent:
            status, charged = None, NO_USAGE
        elif noted.to and noted.status < 300:
            status = None  # the answer was lost or is unreadable
        elif isinstance(error, litellm.NotFoundError) or "LLM Provider NOT provided" in message:
            status = 404
        elif not noted.to and isinstance(error, litellm.Timeout | litellm.APIConnectionError):
            status = None
        return classify_error(
            message,
            status,
            model=self.model,
            code=error_code(noted.error) or str(getattr(error, "code", None) or ""),
            keys=self._key_names() if status in {401, 403} else "",
            naming_hint="check the model's name; its form is provider/model",
            too_long=isinstance(error, litellm.ContextWindowExceededError),
            retry_after=noted.wait if noted.status else _retry_after(error),
            charged=charged,
        )

    def require_key(self) -> None:
        """Check that the key is set; without it no request could succeed.

        Raises:
            CompoundError: neither ``api_key_env`` nor a usual variable of the provider is set.
        """
        self._connection.require_key()
        provider = self.model.partition("/")[0]
        given = self.api_base or self.settings.api_key_env
        if provider not in PROVIDERS_WITH_KEY or given:
            return
        litellm = _litellm()
        if litellm.api_key or getattr(litellm, f"{provider}_key", None):
            return
        names = litellm.validate_environment(self.model)["missing_keys"]
        if names and not any(os.environ.get(name) for name in names):
            raise CompoundError(
                f"the key of {self.model!r} is not set", hint=f"export {' or '.join(names)}=…"
            )

    def _key_names(self) -> str:
        if self.settings.api_key_env:
            return self.settings.api_key_env
        provider = self.model.partition("/")[0]
        usual = f"{provider.upper()}_API_KEY"
        with contextlib.suppress(Exception):
            known = _litellm().validate_environment(self.model)
            return " and ".join(known["missing_keys"]) or usual
        return usual


async def _streamed(
    litellm: ModuleType,
    arguments: Mapping[str, object],
    request: Request,
    on_text: OnText,
    noted: HTTPExchange,
) -> object:
    """Return the response assembled from a stream, after reporting its text piece by piece.

    Raises:
        TransientError: the stream ended before the end of the answer.
    """
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks, text, reported = [], "", ReportedText(request.stop, on_text)
    stream = await litellm.acompletion(**arguments, **options)
    async for chunk in stream:
        chunks.append(chunk)
        delta = chunk.choices[0].delta if chunk.choices else None
        text += getattr(delta, "content", None) or ""
        reported.update(text)
    reported.update(text, complete=True)
    if not _has_ended(stream) and STREAM_END not in noted.end:
        raise TransientError(f"{arguments['model']}: the stream ended before the end of the answer")
    response = litellm.stream_chunk_builder(chunks, messages=arguments["messages"])
    if response is not None and not any(
        getattr(c, "usage", None) for c in getattr(stream, "chunks", chunks)
    ):
        response.usage = None  # litellm estimates a usage that the provider leaves out
    if response is not None and noted.refusal:  # litellm drops the chunks that hold it
        response.choices[0].message.provider_specific_fields = {"refusal": noted.refusal}
    return cast("object", response)


def _has_ended(stream: object) -> bool:
    """Return whether a stream of litellm had a finish reason; without one, litellm itself adds ``stop``."""
    names = ("received_finish_reason", "intermittent_finish_reason")
    return any(getattr(stream, name, "unknown") for name in names)


def check_ollama(model: str, extra: Mapping[str, object]) -> None:
    """Warn about a route of Ollama without chat templates, and reject its option for other providers.

    Raises:
        DeclarationError: only Ollama has ``num_ctx``.
    """
    provider, _, name = model.partition("/")
    if provider == "ollama":
        logging.getLogger("compound").warning(
            "%s sends prompts without the model's chat template; use ollama_chat/%s", model, name
        )
    if "num_ctx" in extra and provider not in ("ollama", "ollama_chat"):
        raise DeclarationError(
            f"engine {model!r}: extra.num_ctx is an option of Ollama",
            hint=f"write ollama_chat/{name}",
        )


def _readings(used: object, prompt: int, completion: int) -> list[object]:
    """Return readings of a usage report, of which the most expensive is charged.

    litellm bills the details of a report, which may not add up to its totals. The other readings
    are: the rest of the totals is text; and all of them are text, except what came from the prompt
    cache.
    """
    rest = copy.deepcopy(used)
    for details in ("prompt_tokens_details", "completion_tokens_details"):
        if getattr(getattr(rest, details, None), "text_tokens", None) is not None:
            getattr(rest, details).text_tokens = None
    cached = getattr(getattr(used, "prompt_tokens_details", None), "cached_tokens", None) or 0
    totals = _litellm().Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details={"cached_tokens": cached if 0 <= cached <= prompt else 0},
    )
    return [used, rest, totals]


def listed_cost(model: str, prompt: int, completion: int, used: object = None) -> float | None:
    """Return the dollars of a request at litellm's list price, or ``None`` if it is unknown.

    With ``used``, the usage report of litellm, the discount of prompt caching is applied.
    """
    try:
        if _listed(model) is None:
            return None
        counts = {"prompt_tokens": prompt, "completion_tokens": completion}
        parts = _litellm().cost_per_token(model=model, **counts, usage_object=used)
    except ImportError:
        return None
    return float(sum(parts)) + _search_fee(model)


def _litellm() -> ModuleType:
    """Import and configure litellm once; safe to call from several threads."""
    with _IMPORTING:
        return _imported()


@functools.cache
def _imported() -> ModuleType:
    """Import litellm without log output, without downloading its price list, and without a ``.env`` file.

    By default litellm loads a ``.env`` file from the working directory or above the packages.
    Another person may have written that file, and it could set a provider's address.
    """
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    os.environ.setdefault("LITELLM_MODE", "PRODUCTION")
    try:
        import litellm
    except ImportError:
        raise MissingExtra("a remote model", "litellm", "remote") from None
    from litellm.llms.custom_httpx import http_handler

    from compound.engines import wire

    wire.guard_litellm(http_handler)
    logging.getLogger("LiteLLM").setLevel(logging.ERROR)  # its warnings repeat server messages
    vars(litellm).update(telemetry=False, suppress_debug_info=True)
    module: ModuleType = litellm
    return module


@functools.cache
def _supports(model: str, capability: str) -> bool:
    """Return whether litellm says that a model supports a capability, such as ``vision``."""
    return bool(getattr(_litellm(), f"supports_{capability}")(model))


@functools.cache
def _speaks_openai(model: str) -> bool:
    """Return whether litellm sends the requests of a model by OpenAI's client."""
    try:
        return _litellm().get_llm_provider(model)[1] in ("openai", "azure")
    except Exception:  # noqa: BLE001 - the call itself reports an unknown provider
        return False


@functools.cache
def _unlisted(model: str) -> frozenset[str]:
    """Return the fields that litellm leaves out or renames in requests to a model behind OpenAI's client."""
    if not _speaks_openai(model):
        return frozenset()
    name, provider, *_ = _litellm().get_llm_provider(model)
    given = {"max_tokens": 1, "temperature": 0.0, "stop": ["x"]}
    sent = _litellm().get_optional_params(
        model=name, custom_llm_provider=provider, drop_params=True, **given
    )
    return frozenset(given.keys() - sent.keys())


@functools.cache
def _listed(model: str) -> Mapping[str, object] | None:
    """Return litellm's price entry of a model; None if it is unknown or has no price of tokens.

    litellm computes a cost of 0 for listed models without a price of tokens, of which there are
    many.
    """
    litellm = _litellm()
    try:
        entry: Mapping[str, object] = litellm.get_model_info(model)
    except Exception:  # noqa: BLE001 - its error for an unknown model differs between versions
        return None
    listed = litellm.model_cost.get(entry.get("key"))
    return None if listed is not None and PRICES.isdisjoint(listed) else entry


@functools.cache
def _search_fee(model: str) -> float:
    """Return the highest fee in US dollars of the web search in each request, if a model always searches.

    Other models with such a fee search only if a request asks for it, which the engine never does.
    """
    entry = _listed(model) or {}
    fees = entry.get("search_context_cost_per_query")
    searches = entry.get("litellm_provider") == "perplexity" or "search" in model
    if not searches or not isinstance(fees, Mapping):
        return 0.0
    return max((float(fee) for fee in fees.values() if isinstance(fee, int | float)), default=0.0)


def _retry_after(error: Exception) -> float | None:
    """Return the seconds that a server asks to wait; litellm stores the headers in several places."""
    places = (
        getattr(error, "headers", None),
        getattr(error, "litellm_response_headers", None),
        getattr(getattr(error, "response", None), "headers", None),
    )
    return next((wait for headers in places if (wait := requested_wait(headers)) is not None), None)
