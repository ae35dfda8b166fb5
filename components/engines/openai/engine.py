"""Engine that sends requests to any server with OpenAI's API, also requests of other programs.

Unlike the litellm engine, which speaks many providers' interfaces, it changes nothing but the model's name
and the fields of streams: tools, images and unknown fields of a forwarded request reach the server untouched.
"""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from compound.components.engines.chat_format import plain_message, tokens_reported
from compound.components.engines.credentials import NO_KEY, Connection, isolated_client
from compound.components.engines.openai.stream_events import StreamedAnswer, error_message
from compound.components.engines.options import Count, Price, Seconds, Wait, check_settings
from compound.components.engines.remote import (
    answer_text,
    classify_error,
    cut_at_stop,
    error_code,
    first_line,
    max_answer_bytes,
    max_prompt_tokens,
)
from compound.components.engines.unsupported import Field, Unsupported
from compound.engine import (
    MAX_IMAGE_TOKENS,
    NO_USAGE,
    Completion,
    FinishReason,
    Forward,
    OnText,
    Request,
    Usage,
)
from compound.errors import CallError, CompoundError, TransientError
from compound.execution.budget import clip_usage
from compound.narrowing import report_wrong_arguments

if TYPE_CHECKING:
    import httpx

    from compound.components.engines.wire import Exchange

MILLION = 1_000_000
CHAT = "chat/completions"
ROUTES = (CHAT, "responses")
OWN_ADDRESS = "https://api.openai.com/v1"
OWN_KEY = "OPENAI_API_KEY"
IMAGES = ("image_url", "input_image")  # types of the parts of messages that are images
PER_ALTERNATIVE = 256  # bytes of an answer for each log-probability of another token
MOST_ALTERNATIVES = 20  # of a token, in the APIs of OpenAI and vLLM


@report_wrong_arguments
class OpenAIEngine:
    """Engine that calls a server with OpenAI's API: OpenAI, vLLM, llama.cpp, Ollama, LiteLLM's proxy ….

    Agents (`compound.components.external_agent.ExternalAgent`) send their requests through it unchanged.

    Args:
        model: the model's name on the server; ``""`` keeps the name in a forwarded request.
        api_base: the address of the server, such as ``http://127.0.0.1:8000/v1``; default: OpenAI's own.
        api_key_env: the environment variable that holds the key. By default OpenAI's own address receives
            ``OPENAI_API_KEY``, and ``api_base`` none.
        concurrency: maximum number of concurrent calls; lowered while the server limits the rate.
        timeout: time limit of one attempt in seconds, from connecting to the end of the answer.
        max_wait: maximum total time in seconds that a call waits for a server that limits the rate.
        price: US dollars per million prompt tokens and per million completion tokens.
        unsupported: fields of requests that the server refuses, which are then sent otherwise or not at all:
            ``max_tokens`` (sent as ``max_completion_tokens``), ``temperature``, ``seed``, ``stop``,
            ``system`` (sent as a part of the user's message). By default learned from its refusals.

    Raises:
        DeclarationError: a setting is out of range, or the address is not a plain HTTP address.

    Example:
        >>> OpenAIEngine("gpt-4o-mini", price=(0.15, 0.60)).name
        'openai:https://api.openai.com/v1:gpt-4o-mini'
    """

    requires: ClassVar[tuple[str, ...]] = ("httpx",)

    forwards = True
    takes_format = False  # a request states its format in the prompt only
    stable_name = True

    def __init__(
        self,
        model: str = "",
        *,
        api_base: str | None = None,
        api_key_env: str | None = None,
        concurrency: Count = 16,
        timeout: Seconds = 120.0,
        max_wait: Wait = 600.0,
        price: tuple[Price, Price] | None = None,
        unsupported: Sequence[Field] = (),
    ) -> None:
        given = {
            "concurrency": concurrency, "timeout": timeout, "max_wait": max_wait, "price": price,
            "unsupported": unsupported,
        }  # fmt: skip
        check_settings(OpenAIEngine, given)
        self.model, self.timeout, self.max_wait, self.price = model, timeout, max_wait, price
        self.api_base = (api_base or OWN_ADDRESS).rstrip("/")
        self.api_key_env = api_key_env if api_base or api_key_env else OWN_KEY
        # checks the address and reads the key
        self._connection = Connection(f"openai/{model or 'any'}", self.api_base, self.api_key_env)
        self._concurrency = concurrency
        self._given_unsupported = ",".join(sorted(unsupported))
        self._unsupported = Unsupported(unsupported, self.name)
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def name(self) -> str:
        """Name used in cache keys."""
        unsupported = f":unsupported={self._given_unsupported}" if self._given_unsupported else ""
        return f"openai:{self.api_base}:{self.model}{unsupported}"

    @property
    def unsupported(self) -> frozenset[str]:
        """Fields that its requests do not have, as far as a setting or a refusal says so."""
        return frozenset(self._unsupported.fields)

    @property
    def concurrency(self) -> int:
        """Maximum number of requests in flight."""
        return self._concurrency

    @property
    def remote(self) -> bool:
        """True: an answer may never arrive."""
        return True

    @property
    def priced(self) -> bool:
        """Whether the price is known."""
        return self.price is not None

    def require_key(self) -> None:
        """Raise `CompoundError` if the environment variable of the key is not set."""
        self._connection.require_key()

    def worst_case(self, request: Request) -> Usage:
        """Return an upper bound of the request's usage: a token of a prompt has at least one byte."""
        size, answers = max_prompt_tokens(request), 1
        if request.forward is not None:
            document = json.loads(request.forward.body)
            answers = _answers(document)
            size = len(request.forward.body.encode()) + MAX_IMAGE_TOKENS * _images(document)
        most = answers * request.max_tokens
        return Usage(1, size, most, self._cost(size, most), int(not self.priced))

    async def generate(self, request: Request) -> Completion:
        """Answer one request."""
        return await self._answer(request, None)

    async def stream(self, request: Request, on_text: OnText) -> Completion:
        """Answer one request, and report its text, or the events of a forwarded stream, as they arrive."""
        return await self._answer(request, on_text)

    async def aclose(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.aclose()

    async def _answer(self, request: Request, on_text: OnText | None) -> Completion:
        from compound.components.engines.wire import record_exchange

        if request.adapter is not None:
            raise CallError(f"{self.name} does not serve adapters", charged=NO_USAGE)
        forward = request.forward or _as_forward(request, stream=on_text is not None)
        seconds = request.timeout or self.timeout
        with record_exchange(_max_bytes(request)) as noted:
            try:
                async with asyncio.timeout(seconds):
                    return await self._send(request, forward, on_text)
            except CompoundError:
                raise
            except TimeoutError:
                message = f"{self.name} did not answer completely within {seconds:g} s"
                unsent = noted.to and not noted.sent
                raise TransientError(message, charged=NO_USAGE if unsent else None) from None
            except Exception as error:
                raise self._classify(error, noted) from error

    async def _send(self, request: Request, forward: Forward, on_text: OnText | None) -> Completion:
        if forward.route not in ROUTES:
            raise CallError(f"{self.name} has no route {forward.route!r}", charged=NO_USAGE)
        document = json.loads(forward.body)
        while request.forward is None:
            sent = self._unsupported.adapt(document)
            try:
                return await self._post(request, forward, sent, on_text)
            except _Refused as refused:
                if not self._unsupported.learn(refused.status, refused.body, sent):
                    raise
        return await self._post(request, forward, document, on_text)

    async def _post(
        self, request: Request, forward: Forward, document: dict[str, Any], on_text: OnText | None
    ) -> Completion:
        if self.model:
            document["model"] = self.model
        if forward.stream:
            document["stream"] = True
            if forward.route == CHAT:  # without it, a stream reports no usage
                document["stream_options"] = {**document.get("stream_options", {}), "include_usage": True}
        client = self._connected()
        url = f"{self.api_base}/{forward.route}"
        # the total time is limited by the caller; a limit between bytes would be another, shorter one
        async with client.stream("POST", url, json=document, timeout=None) as response:
            if response.status_code >= 400:
                body = (await response.aread())[:4096]
                raise _Refused(response.status_code, body)
            if not forward.stream:
                return self._completion(request, forward, json.loads(await response.aread()))
            answer = StreamedAnswer(forward.route)
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            async for chunk in response.aiter_raw():
                piece = decoder.decode(chunk)
                text = answer.feed(piece)
                if on_text is not None and not self._cuts(request):
                    # a forwarded stream is reported as it is; else only its text
                    on_text(piece if request.forward is not None else text)
            self._check_stream(request, answer)
            completion = self._completion(request, forward, answer.document())
            if on_text is not None and self._cuts(request):
                on_text(completion.text)
            return completion

    def _cuts(self, request: Request) -> bool:
        """Return whether the text is cut off at a stop string after it has arrived."""
        return request.forward is None and bool(request.stop) and "stop" in self._unsupported.fields

    def _check_stream(self, request: Request, answer: StreamedAnswer) -> None:
        """Reject a stream that reported an error, or ended before the answer did."""
        if answer.error or not answer.complete:
            problem = first_line(answer.error or "the stream ended before the end of the answer")
            charged = self._usage(request, answer.document().get("usage"))
            raise TransientError(f"{self.name}: {problem}", charged=charged)

    def _connected(self) -> httpx.AsyncClient:
        """Return the client of the running event loop."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            key = self._connection.arguments()["api_key"] if self.api_key_env else NO_KEY
            self._client, self._loop = isolated_client("authorization", f"Bearer {key}"), loop
        return self._client

    def _completion(self, request: Request, forward: Forward, document: object) -> Completion:
        if not isinstance(document, Mapping):
            raise TransientError(f"{self.name} returned an answer that is not a JSON object")
        message, finish = _message(document)
        usage = self._usage(request, document.get("usage"), answered=bool(message.get("content")))
        if forward.route == CHAT and (problem := _missing_answer(document)):
            raise TransientError(f"{self.name}: {first_line(problem)}", charged=usage)
        if request.forward is None:
            text = answer_text(plain_message(message), finish, request, self.name, usage)
            text = cut_at_stop(text, request)
        else:
            text = cast("str", message.get("content")) if isinstance(message.get("content"), str) else ""
        reason: FinishReason = "length" if finish in ("length", "incomplete") else "stop"
        body = json.dumps(document, ensure_ascii=False) if request.forward is not None else ""
        return Completion(text, usage, reason, body=body)

    def _usage(self, request: Request, used: object, *, answered: bool = False) -> Usage:
        """Return the reported usage at this engine's price; see `tokens_reported`."""
        worst = self.worst_case(request)
        usage = Usage(1, *tokens_reported(used, worst, answered=answered))
        possible, _ = clip_usage(usage, worst)
        cost = self._cost(possible.prompt_tokens, possible.completion_tokens)
        return replace(usage, cost=cost, unpriced=worst.unpriced)

    def _cost(self, prompt: int, completion: int) -> float:
        if self.price is None:
            return 0.0
        return (prompt * self.price[0] + completion * self.price[1]) / MILLION

    def _classify(self, error: Exception, noted: Exchange) -> CompoundError:
        refused = error if isinstance(error, _Refused) else None
        status = refused.status if refused else None
        body = refused.body if refused else b""
        detail = _error_message(body) if refused else noted.problem or str(error) or type(error).__name__
        return classify_error(
            f"{self.name}: {detail}",
            status,
            model=self.model,
            code=error_code(body),
            keys=self.api_key_env or "the key of the server (api_key_env)",
            naming_hint="check the model's name on the server",
            retry_after=noted.wait,
            charged=NO_USAGE if noted.to and not noted.sent else None,
        )


class _Refused(Exception):
    """The server answered with an error."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"status {status}")
        self.status, self.body = status, body


def _error_message(body: bytes) -> str:
    """Return the message in the body of an error.

    >>> _error_message(b'{"error": {"message": "no such model"}}'), _error_message(b"Bad gateway")
    ('no such model', 'Bad gateway')
    """
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError, RecursionError):
        return body.decode(errors="replace").strip() or "an error without a message"


def _missing_answer(document: Mapping[str, object]) -> str:
    """Return why a chat completion with status 200 is no answer, or ``""``.

    >>> _missing_answer({"error": {"message": "overloaded", "code": 503}}), _missing_answer({"choices": []})
    ('overloaded', 'the answer has no choices')
    """
    choices = document.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    if isinstance(first, Mapping) and first.get("finish_reason") != "error":
        return ""
    for found in (first, document):
        if isinstance(found, Mapping) and found.get("error"):
            return error_message(found)
    return "the answer has no choices" if first is None else "the provider reports an error"


def _answers(document: Mapping[str, object]) -> int:
    """Return the number of answers that a request asks for, all of which are billed."""
    given = document.get("n")
    return max(1, given) if isinstance(given, int) else 1


def _images(value: object) -> int:
    """Return the number of images in the JSON of a request.

    >>> _images({"messages": [{"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]})
    1
    """
    if isinstance(value, Mapping):
        return (value.get("type") in IMAGES) + sum(map(_images, value.values()))
    return sum(map(_images, value)) if isinstance(value, list) else 0


def _max_bytes(request: Request) -> int:
    """Bound the bytes of the answer; a forwarded request may ask for several, with log-probabilities."""
    most = max_answer_bytes(request)
    if request.forward is None:
        return most
    document = json.loads(request.forward.body)
    alternatives = document.get("top_logprobs")
    listed = min(max(0, alternatives), MOST_ALTERNATIVES) if isinstance(alternatives, int) else 0
    return _answers(document) * (most + PER_ALTERNATIVE * listed * request.max_tokens)


def _as_forward(request: Request, *, stream: bool) -> Forward:
    """Return a plain request in OpenAI's format."""
    document: dict[str, object] = {
        "messages": [{"role": m.role, "content": m.content} for m in request.cued],
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "seed": request.seed % 2**31,
    }
    if request.stop:
        document["stop"] = list(request.stop)
    return Forward(CHAT, json.dumps(document), stream)


def _message(document: Mapping[str, object]) -> tuple[Mapping[str, object], object]:
    """Return the message of an answer and the reason for its end.

    >>> _message({"choices": [{"message": {"content": "Lima"}, "finish_reason": "stop"}]})
    ({'content': 'Lima'}, 'stop')
    >>> part = {"type": "output_text", "text": "Lima"}
    >>> _message({"status": "completed", "output": [{"type": "message", "content": [part]}]})
    ({'content': 'Lima'}, 'completed')
    """
    choices = document.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        message = choices[0].get("message")
        return (message if isinstance(message, Mapping) else {}), choices[0].get("finish_reason")
    texts = [
        str(part.get("text", ""))
        for item in cast("list[object]", document.get("output") or [])
        if isinstance(item, Mapping) and item.get("type") == "message"
        for part in item.get("content") or []
        if isinstance(part, Mapping) and part.get("type") == "output_text"
    ]
    return {"content": "".join(texts)}, document.get("status")
