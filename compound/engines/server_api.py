"""Client of a server with OpenAI's API, under the engines `openai`, `vllm` and `fleet`.

It bounds answers and waits, says what a failed request is charged, and classifies errors. It uses
plain HTTP instead of a client library, because forwarded requests, token ids and adapters are
fields and routes that such libraries drop or do not support. Repeating requests is left to the
executor.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compound.core.engine import NO_USAGE
from compound.core.errors import CallError, CompoundError, TransientError
from compound.engines.remote import charge_for_status, classify_error, error_code, first_line

if TYPE_CHECKING:
    import httpx

MAX_ANSWER_BYTES = 2**26  # of an answer whose request sets no limit
TOO_LONG = ("maximum context length", "max_model_len")  # in the message of an error


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """Response of a server: a status, and text that is JSON on success."""

    status: int
    text: str
    wait: float | None = None

    @property
    def message(self) -> str:
        """Error message of the server.

        >>> ServerAnswer(404, '{"error": {"message": "no such model"}}').message
        'no such model'
        """
        try:
            error = json.loads(self.text)["error"]
            return str(error["message"] if isinstance(error, dict) else error)
        except (ValueError, KeyError, TypeError, RecursionError):
            return self.text.strip() or "an error without a message"


class ServerAPI:
    """Client of one server. Use it from one event loop only.

    The address includes ``/v1``. Messages begin with ``name``, or else with the model's, and name
    ``key_name`` as the variable of the key. Proxies are ignored for a server of this process's own.
    """

    def __init__(
        self,
        address: str,
        model: str,
        *,
        key: str | None = None,
        key_name: str = "api_key_env",
        connections: int | None = None,
        own: bool = False,
        name: str = "",
    ) -> None:
        self.address, self.model = address.rstrip("/"), model
        self._name, self._key_name, self._key, self._own = (name or model, key_name, key, own)
        self._kept, self._closed = _client(key, own), False
        self._fresh: httpx.AsyncClient | None = None
        # `httpx.Limits` would count a connection forever if its request is cancelled before it is
        # sent
        self._slots = (
            contextlib.nullcontext() if connections is None else asyncio.Semaphore(connections)
        )

    async def send(
        self,
        path: str,
        body: Mapping[str, object] | None,
        seconds: float,
        largest: int = MAX_ANSWER_BYTES,
        *,
        fresh: bool = False,
        root: bool = False,
        on_piece: Callable[[bytes], None] | None = None,
    ) -> ServerAnswer:
        """Send a POST request, or GET without a body, and return the answer, errors included.

        ``seconds`` limit the total time, from waiting for a free place on, and ``largest`` the bytes
        of the answer. A ``fresh`` connection may lead to another server of a load balancer. A path
        at the ``root`` is one of vLLM's own routes, outside of ``/v1``. ``on_piece`` takes the
        pieces of a successful answer as they arrive; its text is then empty.

        Raises:
            TransientError: there is no answer, or it is incomplete. It is charged, unless no place
                was free in time or the request was not sent.
        """
        import httpx

        from compound.engines import wire

        url = f"{self.address.removesuffix('/v1') if root else self.address}/{path}"
        waiting = True
        with wire.record_exchange(largest) as noted:
            try:
                async with asyncio.timeout(seconds), self._slots:
                    waiting = False
                    client = self._client(fresh=fresh)
                    method, text = "GET" if body is None else "POST", b""
                    async with client.stream(method, url, json=body) as got:
                        if on_piece is None or got.status_code >= 300:
                            text = await got.aread()
                        else:
                            async for piece in got.aiter_bytes():
                                on_piece(piece)
                    return ServerAnswer(got.status_code, text.decode(errors="replace"), noted.wait)
            except TimeoutError:
                problem = f"{url} did not answer completely within {seconds:g} s"
                if waiting:
                    problem = f"{url} had no free place for a request within {seconds:g} s"
                unsent = waiting or bool(noted.to and not noted.sent)
                charged = NO_USAGE if unsent else None
                raise TransientError(f"{self._name}: {problem}", charged=charged) from None
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                problem = first_line(noted.problem or str(error) or type(error).__name__)
                charged = charge_for_status(noted.status or 500) if noted.sent else NO_USAGE
                raise TransientError(f"{self._name}: {url}: {problem}", charged=charged) from error

    async def ask(
        self, path: str, body: Mapping[str, object] | None, seconds: float, *, fresh: bool = False
    ) -> dict[str, object]:
        """Send a request with `send`, and return the answer's JSON object as `read` does."""
        return self.read(await self.send(path, body, seconds, fresh=fresh))

    def read(self, answer: ServerAnswer) -> dict[str, object]:
        """Return an answer's JSON object.

        Raises:
            TransientError: the server is overloaded or has another transient error.
            CallError: the server rejects the request, or its answer is not JSON.
            QuotaExhausted: the account has no credit left.
        """
        if answer.status >= 300:
            raise self.error(answer)
        try:
            found = json.loads(answer.text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise CallError(f"{self._name}: {self.address} answered {first_line(answer.text)!r}")
        return found

    def error(self, answer: ServerAnswer) -> CompoundError:
        """Return the error for an answer whose status is no success."""
        message = answer.message
        return classify_error(
            f"{self._name}: {message}",
            answer.status,
            model=self.model,
            code=error_code(answer.text),
            keys=self._key_name,
            naming_hint=f"the server at {self.address} must serve it under this name",
            too_long=any(text in message for text in TOO_LONG),
            retry_after=answer.wait,
        )

    async def aclose(self) -> None:
        """Close the connections."""
        self._closed = True
        for client in (self._kept, self._fresh):
            if client is not None:
                await client.aclose()

    def _client(self, *, fresh: bool) -> httpx.AsyncClient:
        if self._closed:
            raise TransientError(
                f"{self._name}: the connections to {self.address} are closed", charged=NO_USAGE
            )
        if not fresh:
            return self._kept
        self._fresh = self._fresh or _client(self._key, self._own, keep=0)
        return self._fresh


def _client(key: str | None, own: bool, keep: int = 256) -> httpx.AsyncClient:
    import httpx

    from compound.engines.wire import KEEP_ALIVE, guarded

    client = httpx.AsyncClient(  # nosec B113  # asyncio.timeout bounds the total time of each request
        headers={"Authorization": f"Bearer {key}"} if key else {},
        limits=httpx.Limits(
            max_connections=None, max_keepalive_connections=keep, keepalive_expiry=KEEP_ALIVE
        ),
        timeout=None,
        trust_env=not own,
    )
    return guarded(client)


def model_entries(listing: Mapping[str, object]) -> Sequence[Mapping[str, object]]:
    """Return the entries of a server's answer to ``GET models``; others than objects are left out.

    >>> model_entries({"data": [{"id": "m"}, 7]}), model_entries({})
    ([{'id': 'm'}], [])
    """
    data = listing.get("data")
    return [each for each in (data if isinstance(data, list) else []) if isinstance(each, dict)]
