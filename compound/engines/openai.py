"""Engine that sends requests to any server with OpenAI's API, also requests of other programs.

Unlike the litellm engine, which speaks many providers' interfaces, it changes nothing but the
model's name and the fields of streams: tools, images and unknown fields of a forwarded request
reach the server untouched.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, cast

from compound.core.engine import (
    MAX_IMAGE_TOKENS,
    NO_USAGE,
    Completion,
    FinishReason,
    Forward,
    OnText,
    Request,
    Usage,
)
from compound.core.errors import CallError, CompoundError, TransientError
from compound.core.narrowing import report_wrong_arguments
from compound.engines.chat_format import (
    ReportedText,
    cut_at_stop,
    plain_message,
    request_to_json,
    tokens_reported,
)
from compound.engines.credentials import NO_KEY, Connection, read_key
from compound.engines.options import (
    Count,
    Price,
    RefusedField,
    Seconds,
    Unsupported,
    Wait,
    takes_settings,
)
from compound.engines.remote import answer_text, first_line, max_answer_bytes, max_prompt_tokens
from compound.engines.server_api import ServerAnswer, ServerAPI
from compound.execution.budget import clip_usage

MILLION = 1_000_000
CHAT = "chat/completions"
ROUTES = (CHAT, "responses")
OWN_ADDRESS = "https://api.openai.com/v1"
OWN_KEY = "OPENAI_API_KEY"
IMAGES = ("image_url", "input_image")  # types of the parts of messages that are images
PER_ALTERNATIVE = 256  # bytes of an answer for each log-probability of another token
MOST_ALTERNATIVES = 20  # of a token, in the APIs of OpenAI and vLLM


@dataclass(frozen=True)
class OpenAISettings:
    """Settings of `OpenAIEngine`, which describes them."""

    model: str = ""
    _: KW_ONLY
    api_base: str | None = None
    api_key_env: str | None = None
    concurrency: Count = 16
    timeout: Seconds = 120.0
    max_wait: Wait = 600.0
    price: tuple[Price, Price] | None = None
    unsupported: Sequence[RefusedField] = ()


@report_wrong_arguments
class OpenAIEngine:
    """Engine that calls a server with OpenAI's API: OpenAI, vLLM, llama.cpp, Ollama, LiteLLM's proxy ….

    Agents (`compound.components.external_agent.ExternalAgent`) send their requests through it
    unchanged.

    Args:
        model: the model's name on the server; ``""`` keeps the name in a forwarded request.
        api_base: the address of the server, such as ``http://127.0.0.1:8000/v1``; default: OpenAI's
            own.
        api_key_env: the environment variable that holds the key. By default OpenAI's own address
            receives ``OPENAI_API_KEY``, and ``api_base`` none.
        concurrency: maximum number of concurrent calls; lowered while the server limits the rate.
        timeout: time limit of one attempt in seconds, from connecting to the end of the answer.
        max_wait: maximum total time in seconds that a call waits for a server that limits the rate.
        price: US dollars per million prompt tokens and per million completion tokens.
        unsupported: fields of requests that the server refuses, which are then sent otherwise or
            not at all: ``max_tokens`` (sent as ``max_completion_tokens``), ``temperature``,
            ``seed``, ``stop``, ``system`` (sent as a part of the user's message). By default
            learned from its refusals.

    Raises:
        DeclarationError: a setting is out of range, or the address is not a plain HTTP address.

    Example:
        >>> OpenAIEngine("gpt-4o-mini", price=(0.15, 0.60)).name
        'openai:https://api.openai.com/v1:gpt-4o-mini'
    """

    requires: ClassVar[tuple[str, ...]] = ("httpx",)

    forwards = True
    remote = True
    takes_format = False  # a request states its format in the prompt only
    stable_name = True

    @takes_settings(OpenAISettings)
    def __init__(self, settings: OpenAISettings) -> None:
        self.settings, self.model, self.price = settings, settings.model, settings.price
        self.concurrency, self.max_wait = settings.concurrency, settings.max_wait
        self.priced = self.price is not None
        self.api_base = (settings.api_base or OWN_ADDRESS).rstrip("/")
        own_key = None if settings.api_base else OWN_KEY
        self.api_key_env = settings.api_key_env or own_key
        # checks the address and reads the key
        named = f"openai/{self.model or 'any'}"
        self._connection = Connection(named, self.api_base, self.api_key_env)
        self._unsupported = Unsupported(settings.unsupported, self.name)
        self._api: ServerAPI | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def name(self) -> str:
        """Name used in cache keys."""
        given = ",".join(sorted(self.settings.unsupported))
        unsupported = f":unsupported={given}" if given else ""
        return f"openai:{self.api_base}:{self.model}{unsupported}"

    @property
    def unsupported(self) -> frozenset[str]:
        """Fields that its requests do not have, as far as a setting or a refusal says so."""
        return frozenset(self._unsupported.fields)

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
        api, self._api = self._api, None
        if api is not None and self._loop is asyncio.get_running_loop():
            await api.aclose()

    async def _answer(self, request: Request, on_text: OnText | None) -> Completion:
        if request.adapter is not None:
            raise CallError(f"{self.name} does not serve adapters", charged=NO_USAGE)
        stream = on_text is not None
        forward = request.forward or Forward(CHAT, json.dumps(request_to_json(request)), stream)
        if forward.route not in ROUTES:
            raise CallError(f"{self.name} has no route {forward.route!r}", charged=NO_USAGE)
        document = json.loads(forward.body)
        seconds = request.timeout or self.settings.timeout
        until = time.monotonic() + seconds
        try:
            while True:
                sent = document if request.forward else self._unsupported.adapt(document)
                answer, streamed = await self._post(request, forward, sent, on_text, seconds)
                if answer.status < 300:
                    break
                refused = answer.text.encode()
                if request.forward or not self._unsupported.learn(answer.status, refused, sent):
                    raise self._connected().error(answer)  # noqa: TRY301 - passed on below
                seconds = until - time.monotonic()
            if streamed is None:
                return self._completion(request, forward, json.loads(answer.text))
            document = streamed.document()
            if streamed.error or not streamed.complete:
                problem = streamed.error or "the stream ended before the end of the answer"
                charged = self._usage(request, document.get("usage"))
                raise TransientError(f"{self.name}: {first_line(problem)}", charged=charged)  # noqa: TRY301
            return self._completion(request, forward, document)
        except CompoundError:
            raise
        except Exception as error:
            message = first_line(str(error) or type(error).__name__)
            raise TransientError(f"{self.name}: {message}") from error

    async def _post(
        self,
        request: Request,
        forward: Forward,
        document: dict[str, Any],
        on_text: OnText | None,
        seconds: float,
    ) -> tuple[ServerAnswer, StreamedAnswer | None]:
        if self.model:
            document["model"] = self.model
        streamed = StreamedAnswer(forward.route) if forward.stream else None
        if forward.stream:
            document["stream"] = True
            if forward.route == CHAT:  # without it, a stream reports no usage
                given = document.get("stream_options", {})
                document["stream_options"] = {**given, "include_usage": True}
        read = codecs.getincrementaldecoder("utf-8")("replace").decode
        reported = ReportedText(request.stop, on_text) if on_text is not None else None

        def report(piece: bytes) -> None:
            text = read(piece)
            assert streamed is not None
            streamed.feed(text)
            if request.forward is not None and on_text is not None:
                on_text(text)  # a forwarded stream is reported as it is
            elif reported is not None:
                reported.update(streamed.text, complete=streamed.complete)

        on_piece = report if forward.stream else None
        answer = await self._connected().send(
            forward.route, document, seconds, _max_bytes(request), on_piece=on_piece
        )
        return answer, streamed

    def _connected(self) -> ServerAPI:
        loop = asyncio.get_running_loop()
        if self._api is None or self._loop is not loop:
            self._api = ServerAPI(
                self.api_base,
                self.model,
                key=read_key(self.model, self.api_key_env) or NO_KEY,
                key_name=self.api_key_env or "the key of the server (api_key_env)",
                name=self.name,
            )
            self._loop = loop
        return self._api

    def _completion(self, request: Request, forward: Forward, document: object) -> Completion:
        if not isinstance(document, Mapping):
            raise TransientError(f"{self.name} returned an answer that is not a JSON object")
        message, finish = _message(document)
        usage = self._usage(request, document.get("usage"), answered=bool(message.get("content")))
        if forward.route == CHAT and (problem := _missing_answer(document)):
            raise TransientError(f"{self.name}: {first_line(problem)}", charged=usage)
        reason: FinishReason = "length" if finish in ("length", "incomplete") else "stop"
        if request.forward is None:
            text = answer_text(plain_message(message), finish, request, self.name, usage)
            return Completion(cut_at_stop(text, request.stop), usage, reason)
        content = message.get("content")
        text, body = (
            content if isinstance(content, str) else "",
            json.dumps(document, ensure_ascii=False),
        )
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


Document = dict[str, object]
MAX_CALLS = 128  # tool calls of one answer
# of the Responses API
LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed")


class StreamedAnswer:
    r"""Reads the events of a stream, and builds the answer that the same request would have without a stream.

    Args:
        route: ``chat/completions`` or ``responses``.

    Attributes:
        text: the text so far.
        complete: whether the end of the answer has arrived; a proxy may end a stream before it.
        error: the message of an error that the server reported within the stream, or ``""``.

    Example:
        >>> answer = StreamedAnswer("chat/completions")
        >>> piece = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "Li"}}]}
        >>> answer.feed(f"data: {json.dumps(piece)}\n\ndata: {{")
        >>> answer.document()["choices"]
        [{'index': 0, 'message': {'role': 'assistant', 'content': 'Li'}, 'finish_reason': None}]
    """

    def __init__(self, route: str) -> None:
        self.text, self.complete, self.error = "", False, ""
        self._chat = route != "responses"
        self._held = ""
        self._document: Document = {}
        self._choices: dict[int, Document] = {}

    def feed(self, piece: str) -> None:
        """Read another piece of the stream."""
        *lines, self._held = (self._held + piece).split("\n")
        for line in lines:
            self._line(line.rstrip("\r"))

    def document(self) -> Document:
        """Return the answer so far."""
        if not self._chat:
            return self._document
        choices = [self._choices[index] for index in sorted(self._choices)]
        return {**self._document, "object": "chat.completion", "choices": choices}

    def _line(self, line: str) -> None:
        name, _, data = line.partition(":")
        if name == "data" and data.strip() == "[DONE]":
            self.complete = True
        try:
            event = json.loads(data) if name == "data" else None
        except (ValueError, RecursionError):
            return
        if not isinstance(event, Mapping):
            return
        if event.get("error") or event.get("type") == "error":
            self.error = error_message(event)
        if self._chat:
            self._chunk(event)
            return
        # an event of the Responses API, of which the last one has the whole answer
        if isinstance(event.get("response"), Mapping):
            self._document = dict(cast("Document", event["response"]))
        self.complete = self.complete or event.get("type") in LAST_EVENTS
        if event.get("type") == "response.output_text.delta":
            self.text += str(event.get("delta", ""))

    def _chunk(self, chunk: Mapping[str, object]) -> None:
        own = {name: value for name, value in chunk.items() if name not in {"choices", "usage"}}
        self._document |= own
        if chunk.get("usage") is not None:
            self._document["usage"] = chunk["usage"]
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else []:
            index = choice.get("index", 0)
            empty = {"role": "assistant", "content": None}
            start: Document = {"index": index, "message": empty, "finish_reason": None}
            known = self._choices.setdefault(index, start)
            message = cast("Document", known["message"])
            delta = plain_message(choice.get("delta") or {})
            _extend(message, delta)
            if choice.get("finish_reason") is not None:
                known["finish_reason"] = choice["finish_reason"]
                self.complete = True
            if isinstance(choice.get("logprobs"), Mapping):
                logprobs = cast("Document", known.setdefault("logprobs", {}))
                for name, tokens in choice["logprobs"].items():  # lists by kind of token
                    earlier = logprobs.get(name)
                    if isinstance(earlier, list) and isinstance(tokens, list):
                        tokens = [*earlier, *tokens]  # noqa: PLW2901
                    logprobs[name] = tokens
            self.text += delta.get("content") or "" if index == 0 else ""


def _extend(message: Document, delta: Mapping[str, object]) -> None:
    """Add a delta to a message: texts are joined, tool calls are merged by their index."""
    for name, value in delta.items():
        if name == "tool_calls" and isinstance(value, list):
            calls = cast("list[Document]", message.setdefault("tool_calls", []))
            for part in value:
                _extend_tool(calls, part)
        elif isinstance(value, str) and isinstance(message.get(name), str) and name != "role":
            message[name] = f"{message[name]}{value}"
        elif value is not None:
            message[name] = value


def error_message(document: Mapping[str, object]) -> str:
    """Return the message of an error that a server reports in an answer with status 200.

    >>> error_message({"error": {"message": "overloaded", "code": 503}}), error_message({"error": "full"})
    ('overloaded', 'full')
    """
    error = document.get("error") or document
    message = error.get("message") if isinstance(error, Mapping) else error
    return str(message or "an error without a message")


def _extend_tool(calls: list[Document], part: Mapping[str, object]) -> None:
    index = part.get("index", len(calls))
    if type(index) is not int or not 0 <= index < MAX_CALLS:
        raise ValueError(f"a tool call of the stream has the index {index!r:.40}")
    while len(calls) <= index:
        calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call = calls[index]
    for name, value in part.items():
        if name == "function" and isinstance(value, Mapping):
            function = cast("Document", call["function"])
            for key, text in value.items():
                function[key] = f"{function.get(key) or ''}{text or ''}"
        elif name != "index" and value:
            call[name] = value
