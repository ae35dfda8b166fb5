"""A chat-completions server for the loopback interface that injects faults and records what it bills.

It speaks OpenAI's protocol, answers deterministically from the request, and misbehaves at a given
rate in the ways that `Fault` lists. Whether a request gets a fault depends on the seed, the request
and how many equal requests came before it, never on the order of arrival. Standard library only::

    with FaultyServer(rate=0.2, kinds=TRANSIENT, seed=0) as server:
        ...  # server.url; server.requests; server.billed
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import re
import socket
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

KEYWORD = "only the number"  # a prompt that contains it is always answered correctly
HEAD, TURN = 3, 4  # tokens billed for the chat format: of a request, and of each message
HUGE_BYTES = 20_000_000
BOMB_BYTES = 200_000_000  # after decompression; about 200 kB on the wire
STALL_SECONDS = 30.0
MOST_REQUESTS = 100_000  # every other one is refused, so that no test runs on forever


class Fault(StrEnum):
    RATE_LIMIT = "rate_limit"  # 429 with Retry-After
    RATE_LIMIT_SILENT = "rate_limit_silent"  # 429 without Retry-After
    SERVER_ERROR = "server_error"  # 500
    BAD_GATEWAY = "bad_gateway"  # 502, with an HTML page
    UNAVAILABLE = "unavailable"  # 503
    OVERLOADED = "overloaded"  # 529
    RESET = "reset"  # the connection is reset after the answer was computed and billed
    RESET_AFTER_HEADERS = "reset_after_headers"
    TRUNCATED = "truncated"  # the connection closes in the middle of the body
    DRIP = "drip"  # the body arrives in small pieces with pauses
    STALL = "stall"  # no answer arrives
    NO_CHOICES = "no_choices"
    NULL_CONTENT = "null_content"
    REFUSAL = "refusal"  # null content with `refusal`
    TOOL_CALLS = "tool_calls"  # a tool call instead of content
    SURROGATE = "surrogate"  # a lone surrogate in the answer, escaped in the JSON
    CONTROL = "control"  # NUL and terminal escape sequences in the answer
    CONTROL_IN_ERROR = "control_in_error"  # the same in the message of an error 400
    INVALID_JSON = "invalid_json"
    HUGE_ANSWER = "huge_answer"  # 20 MB of text
    BOMB = "bomb"  # a small gzip body that decompresses to 200 MB
    WRONG_TYPE = "wrong_type"  # an HTML page with status 200
    NEGATIVE_USAGE = "negative_usage"
    HUGE_USAGE = "huge_usage"
    FRACTIONAL_USAGE = "fractional_usage"
    NO_USAGE = "no_usage"
    KEY_IN_ANSWER = "key_in_answer"  # the authorization header's key inside the answer
    KEY_IN_ERROR = "key_in_error"  # the same in the message of an error 400
    ODD_FINISH = "odd_finish"  # a finish reason that does not exist
    NO_FINISH = "no_finish"  # a finish reason of null
    CONTENT_FILTER = "content_filter"
    QUOTA = "quota"  # 429 with the code insufficient_quota
    UNAUTHORIZED = "unauthorized"  # 401
    FORBIDDEN = "forbidden"  # 403
    NOT_FOUND = "not_found"  # 404


LIMITED = (Fault.RATE_LIMIT, Fault.RATE_LIMIT_SILENT)
BROKEN = (Fault.SERVER_ERROR, Fault.BAD_GATEWAY, Fault.UNAVAILABLE, Fault.OVERLOADED)
LOST = (Fault.RESET, Fault.RESET_AFTER_HEADERS, Fault.TRUNCATED)
SLOW = (Fault.DRIP, Fault.STALL)
TRANSIENT = (*LIMITED, *BROKEN, *LOST)  # the same request succeeds afterwards
EMPTY = (
    Fault.NO_CHOICES,
    Fault.NULL_CONTENT,
    Fault.REFUSAL,
    Fault.TOOL_CALLS,
    Fault.CONTENT_FILTER,
)
OVERSIZED = (Fault.HUGE_ANSWER, Fault.BOMB)
MISCOUNTED = (Fault.NEGATIVE_USAGE, Fault.HUGE_USAGE, Fault.FRACTIONAL_USAGE, Fault.NO_USAGE)
# status, message and code; such requests are not billed
_STATUS: Mapping[Fault, tuple[int, str, str]] = {
    Fault.RATE_LIMIT: (429, "Rate limit reached for requests", "rate_limit_exceeded"),
    Fault.RATE_LIMIT_SILENT: (429, "Too many requests", "rate_limit_exceeded"),
    Fault.SERVER_ERROR: (500, "The server had an error", "server_error"),
    Fault.UNAVAILABLE: (503, "The engine is currently overloaded", "unavailable"),
    Fault.OVERLOADED: (529, "Overloaded", "overloaded_error"),
    Fault.CONTROL_IN_ERROR: (400, "bad\x1b]0;owned\x07 request\x1b[2J\r\x1b[31m", "invalid"),
    Fault.QUOTA: (429, "You exceeded your current quota", "insufficient_quota"),
    Fault.UNAUTHORIZED: (401, "Incorrect API key provided", "invalid_api_key"),
    Fault.FORBIDDEN: (403, "Your key may not use this model", "forbidden"),
    Fault.NOT_FOUND: (404, "The model does not exist", "model_not_found"),
}

Answering = Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True, slots=True)
class Bill:
    """Usage that the server charges.

    >>> Bill(1, 10, 2, 0.5) + Bill(1, 5, 1, 0.25)
    Bill(calls=2, prompt_tokens=15, completion_tokens=3, cost=0.75)
    """

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: Bill) -> Bill:
        return Bill(
            self.calls + other.calls,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cost + other.cost,
        )


@dataclass(frozen=True, slots=True)
class Served:
    """One request and its answer.

    Attributes:
        body: the parsed request.
        key: the bearer token it came with.
        fault: the injected fault, or the rate limiter's; None for a correct answer.
        bill: what it is charged; nothing for a request that was refused before it was processed.
    """

    body: Mapping[str, Any]
    key: str
    fault: Fault | None
    bill: Bill


@dataclass
class Limiter:
    """Token bucket with a capacity of one second's requests."""

    per_second: float
    clock: Callable[[], float] = time.monotonic
    _tokens: float = field(init=False)
    _filled: float = field(init=False)

    def __post_init__(self) -> None:
        self._tokens, self._filled = max(1.0, self.per_second), self.clock()

    def admits(self) -> bool:
        """Take a token if available; return whether one was."""
        now = self.clock()
        self._tokens = min(
            max(1.0, self.per_second), self._tokens + (now - self._filled) * self.per_second
        )
        self._filled = now
        admitted = self._tokens >= 1
        self._tokens -= admitted
        return admitted


def echo_number(body: Mapping[str, Any]) -> str:
    """Answer with the last number of the user's last message.

    Unless the message holds `KEYWORD`, one answer in three is ``about N`` instead: something to
    optimize.

    >>> echo_number({"messages": [{"role": "user", "content": "only the number: what is 3 and 41?"}]})
    '41'
    """
    message = next(
        str(each["content"]) for each in body["messages"][::-1] if each.get("role") == "user"
    )
    numbers = re.findall(r"\d+", message)
    number = numbers[-1] if numbers else "none"
    vague = (
        KEYWORD not in message
        and hashlib.sha256(message.encode("utf-8", "replace")).digest()[0] % 3 == 0
    )
    return f"about {number}" if vague else number


class FaultyServer:
    """Server that runs in a separate thread; use it as a context manager.

    Args:
        rate: the share of requests that get a fault, from 0 to 1.
        kinds: the faults to choose from.
        seed: names the random choices.
        per_second: requests a second that are admitted; the others get 429 with Retry-After.
        answer: what to say to a request.
        prices: dollars for a million prompt tokens and a million completion tokens.
        retry_after: the value of Retry-After.
        drip: seconds between two pieces of a dripping body, and the number of pieces.
        stall: seconds before a stalled connection is closed.
        first: faults of the first requests, whatever the rate; ``None`` in it means a correct
            answer.

    Attributes:
        served: every chat request in order of arrival.
    """

    def __init__(
        self,
        rate: float = 0.0,
        kinds: Iterable[Fault] = TRANSIENT,
        seed: int = 0,
        *,
        per_second: float | None = None,
        answer: Answering = echo_number,
        prices: tuple[float, float] = (1.0, 2.0),
        retry_after: str = "1",
        drip: tuple[float, int] = (0.3, 200),
        stall: float = STALL_SECONDS,
        first: Sequence[Fault | None] = (),
    ) -> None:
        self.rate, self.kinds, self.seed = rate, tuple(kinds), seed
        self.answer, self.prices = answer, prices
        self.retry_after, self.drip, self.stall, self.first = retry_after, drip, stall, tuple(first)
        self.served: list[Served] = []
        self._limiter = Limiter(per_second) if per_second is not None else None
        self._seen: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._port = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._stopping: asyncio.Event | None = None
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="faulty-server", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    @property
    def requests(self) -> int:
        return len(self.served)

    @property
    def billed(self) -> Bill:
        with self._lock:
            return sum((served.bill for served in self.served), Bill())

    @property
    def faults(self) -> Counter[str]:
        """Number of requests by fault; those of the rate limiter count as ``rate_limit``."""
        with self._lock:
            return Counter(str(served.fault) for served in self.served if served.fault is not None)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self._thread.start()
        self._ready.wait(120)
        if self._failed is not None:
            raise RuntimeError("the server could not start") from self._failed

    def stop(self) -> None:
        if self._loop is not None and self._stopping is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(120)

    def _run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                self._loop = runner.get_loop()
                runner.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - `start` raises it in the caller's thread
            self._failed = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        connections: set[asyncio.Task[None]] = set()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            connections.add(task)
            try:
                await self._converse(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                pass
            finally:
                connections.discard(task)
                writer.close()

        server = await asyncio.start_server(
            connected, "127.0.0.1", self._port, limit=2**24, backlog=1024
        )
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stopping.wait()
        server.close()
        for task in list(connections):
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection until it is closed."""
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            line, *lines = head.split("\r\n")
            method, path, _ = line.split(" ", 2)
            headers = {
                name.lower(): value.strip()
                for name, _, value in (x.partition(":") for x in lines if x)
            }
            raw = await reader.readexactly(int(headers.get("content-length", "0")))
            if method == "GET" or not path.endswith("/chat/completions"):
                found = {"object": "list", "data": [{"id": "tiny", "object": "model"}]}
                known = path.endswith("/models")
                await _send(
                    writer, 200 if known else 404, json.dumps(found if known else {}).encode()
                )
                continue
            if not await self._chat(writer, raw, headers.get("authorization", "")):
                return

    async def _chat(self, writer: asyncio.StreamWriter, raw: bytes, authorization: str) -> bool:
        """Answer one chat request; return whether the connection can be used again."""
        body = json.loads(raw)
        key = authorization.removeprefix("Bearer ")
        digest = hashlib.sha256(raw).hexdigest()
        fault = self._choose(digest)
        text = self.answer(body)
        bill = Bill() if fault is not None and _is_refused(fault) else self._bill(body, text, fault)
        with self._lock:
            self.served.append(Served(body, key, fault, bill))
        return await self._misbehave(writer, fault, body, text, key, bill)

    def _choose(self, digest: str) -> Fault | None:
        """Return the fault of a request, determined by the seed, the request and its repetitions."""
        if len(self.served) >= MOST_REQUESTS:
            return Fault.UNAVAILABLE
        if self._limiter is not None and not self._limiter.admits():
            return Fault.RATE_LIMIT
        if len(self.served) < len(self.first):
            return self.first[len(self.served)]
        self._seen[digest] += 1
        stream = random.Random(f"{self.seed}:{digest}:{self._seen[digest]}")
        return stream.choice(self.kinds) if self.kinds and stream.random() < self.rate else None

    def _bill(self, body: Mapping[str, Any], text: str, fault: Fault | None) -> Bill:
        """Return the true charge: one token per four bytes of the prompt and per word of the answer."""
        most = int(body.get("max_completion_tokens") or body.get("max_tokens") or 256)
        sent = sum(
            len(str(m.get("content") or "").encode("utf-8", "replace")) for m in body["messages"]
        )
        prompt = HEAD + TURN * len(body["messages"]) + -(-sent // 4)
        completion = most if fault is Fault.HUGE_ANSWER else min(most, max(1, len(text.split())))
        cost = (prompt * self.prices[0] + completion * self.prices[1]) / 1e6
        return Bill(1, prompt, completion, cost)

    async def _misbehave(
        self,
        writer: asyncio.StreamWriter,
        fault: Fault | None,
        body: Mapping[str, Any],
        text: str,
        key: str,
        bill: Bill,
    ) -> bool:
        """Send the answer with its fault; return whether the connection can be used again."""
        if fault is not None and _is_refused(fault):
            await self._refuse(writer, fault, key)
            return True
        payload = _payload(fault, body, text, key, bill)
        if fault is Fault.STALL:
            await asyncio.sleep(self.stall)
            return False
        if fault is Fault.RESET:
            _reset(writer)
            return False
        if fault is Fault.BOMB:
            packed = await asyncio.to_thread(_bomb)
            await _send(writer, 200, packed, {"content-encoding": "gzip"})
            return True
        if fault is Fault.INVALID_JSON:
            payload = payload[:-7] + b"}, NaN["
        if fault is Fault.WRONG_TYPE:
            await _send(
                writer, 200, b"<html><body>It works!</body></html>", {"content-type": "text/html"}
            )
            return True
        if fault is Fault.RESET_AFTER_HEADERS:
            writer.write(_head(200, len(payload), {}))
            await writer.drain()
            _reset(writer)
            return False
        if fault is Fault.TRUNCATED:
            writer.write(_head(200, len(payload), {}) + payload[: len(payload) // 2])
            await writer.drain()
            return False
        if fault is Fault.DRIP:
            await self._drip(writer, payload)
            return True
        await _send(writer, 200, payload)
        return True

    async def _refuse(self, writer: asyncio.StreamWriter, fault: Fault, key: str) -> None:
        if fault is Fault.BAD_GATEWAY:
            await _send(
                writer, 502, b"<html><h1>502 Bad Gateway</h1></html>", {"content-type": "text/html"}
            )
            return
        if fault is Fault.KEY_IN_ERROR:
            status, message, code = (
                400,
                f"the key {key} may not ask for this",
                "invalid_request_error",
            )
        else:
            status, message, code = _STATUS[fault]
        headers = {"retry-after": self.retry_after} if fault is Fault.RATE_LIMIT else {}
        error = {"error": {"message": message, "type": code, "code": code}}
        await _send(writer, status, json.dumps(error).encode(), headers)

    async def _drip(self, writer: asyncio.StreamWriter, payload: bytes) -> None:
        pause, pieces = self.drip
        size = max(1, -(-len(payload) // pieces))
        writer.write(_head(200, len(payload), {}))
        for start in range(0, len(payload), size):
            writer.write(payload[start : start + size])
            await writer.drain()
            await asyncio.sleep(pause)


def _is_refused(fault: Fault) -> bool:
    """Return whether a request with this fault is refused before it is processed."""
    return fault in _STATUS or fault in {Fault.BAD_GATEWAY, Fault.KEY_IN_ERROR}


def _payload(
    fault: Fault | None, body: Mapping[str, Any], text: str, key: str, bill: Bill
) -> bytes:
    """Return the JSON of an answer, including faults in its content."""
    text, finished = _limited(body, text)
    text = {
        Fault.SURROGATE: f"{text} \ud83d",
        Fault.CONTROL: f"\x1b[31m{text}\x1b[0m\x00\x1b]0;owned\x07",
        Fault.KEY_IN_ANSWER: f"{text} {key}",
        Fault.HUGE_ANSWER: (text + " word") * (HUGE_BYTES // (len(text) + 5)),
    }.get(fault or Fault.STALL, text)
    finish = {
        Fault.ODD_FINISH: "meteor",
        Fault.CONTENT_FILTER: "content_filter",
        Fault.NO_FINISH: None,
        Fault.TOOL_CALLS: "tool_calls",
    }.get(fault or Fault.STALL, finished)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if fault in {Fault.NULL_CONTENT, Fault.REFUSAL, Fault.TOOL_CALLS, Fault.CONTENT_FILTER}:
        message["content"] = None
    if fault is Fault.REFUSAL:
        message["refusal"] = "I cannot help with that."
    if fault is Fault.TOOL_CALLS:
        called = {"name": "lookup", "arguments": "{}"}
        message["tool_calls"] = [{"id": "call_1", "type": "function", "function": called}]
    choices = [{"index": 0, "message": message, "finish_reason": finish}]
    answer: dict[str, Any] = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": str(body.get("model")),
        "choices": [] if fault is Fault.NO_CHOICES else choices,
        "usage": _usage(fault, bill),
    }
    if fault is Fault.NO_USAGE:
        del answer["usage"]
    return json.dumps(answer).encode()


def _limited(body: Mapping[str, Any], text: str) -> tuple[str, str]:
    """Truncate an answer to the limits of a request, and return its finish reason; a word is a token.

    >>> _limited({"max_tokens": 2}, "one two three"), _limited({"stop": ["w"]}, "one two three")
    (('one two', 'length'), ('one t', 'stop'))
    """
    at = [place for stop in body.get("stop") or () if (place := text.find(stop)) >= 0]
    text = text[: min(at, default=len(text))]
    words = re.findall(r"\s*\S+", text)
    most = int(body.get("max_completion_tokens") or body.get("max_tokens") or 256)
    return (text, "stop") if len(words) <= most else ("".join(words[:most]), "length")


def _usage(fault: Fault | None, bill: Bill) -> dict[str, Any]:
    prompt: float = bill.prompt_tokens
    completion: float = bill.completion_tokens
    if fault is Fault.NEGATIVE_USAGE:
        prompt, completion = -prompt, -completion
    elif fault is Fault.HUGE_USAGE:
        prompt, completion = prompt + 10**12, completion + 10**12
    elif fault is Fault.FRACTIONAL_USAGE:
        prompt, completion = prompt + 0.5, completion + 0.5
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _bomb() -> bytes:
    packer = zlib.compressobj(9, wbits=31)  # with gzip's header
    piece = b" " * 1_000_000
    return (
        b"".join(packer.compress(piece) for _ in range(BOMB_BYTES // len(piece))) + packer.flush()
    )


def _head(status: int, length: int, headers: Mapping[str, str]) -> bytes:
    everything = {"content-type": "application/json", **headers, "content-length": str(length)}
    lines = "".join(f"{name}: {value}\r\n" for name, value in everything.items())
    return f"HTTP/1.1 {status} {'OK' if status == 200 else 'Error'}\r\n{lines}\r\n".encode(
        "latin-1"
    )


async def _send(
    writer: asyncio.StreamWriter, status: int, body: bytes, headers: Mapping[str, str] | None = None
) -> None:
    writer.write(_head(status, len(body), headers or {}) + body)
    await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
