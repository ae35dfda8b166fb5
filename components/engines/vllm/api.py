"""Client of a vLLM server's HTTP API, which extends OpenAI's; classifies errors and bounds waits.

It uses plain HTTP instead of a client library, because token ids, prompt log-probabilities and adapters are
fields and routes of vLLM that such libraries drop or do not support.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, cast

from compound.components.engines.remote import classify_error, error_code, first_line, requested_wait
from compound.engine import NO_USAGE
from compound.errors import CallError, CompoundError, MissingExtra, TransientError

if TYPE_CHECKING:
    import httpx

MAX_ANSWER_BYTES = 2**26  # of an answer whose request sets no limit
FOR_ADAPTERS = 4  # requests in flight beside all samples, which load and unload adapters


@dataclass(frozen=True, slots=True)
class Answer:
    """Response of a server: a status, and text that is JSON on success."""

    status: int
    text: str
    wait: float | None = None

    @property
    def message(self) -> str:
        """Error message of the server."""
        try:
            message = json.loads(self.text)["error"]["message"]
        except (ValueError, KeyError, TypeError, RecursionError):
            message = self.text
        return str(message)


class TextLogprobs(TypedDict):
    """Log-probabilities of sampled tokens in vLLM's completion format."""

    token_logprobs: list[float]


class TextChoice(TypedDict):
    """One completion of vLLM, with the prompt's tokens and their log-probabilities by token id."""

    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[str, Mapping[str, float]]]
    logprobs: TextLogprobs


class TextAnswer(TypedDict):
    """Fields that are read of vLLM's answer to a completion request; reading an incomplete answer raises."""

    choices: list[TextChoice]


class API:
    """Client of one server.

    Args:
        address: the server's URL, including ``/v1``.
        model: the base model's name on the server, for messages.
        key: the API key, if the server requires one.
        key_name: the environment variable that holds the key, for messages.
        connections: maximum number of samples in flight; more requests may load adapters meanwhile.
        own: whether this process started the server; proxies are then ignored.
    """

    def __init__(
        self,
        address: str,
        model: str,
        *,
        key: str | None = None,
        key_name: str = "api_key_env",
        connections: int = 64,
        own: bool = False,
    ) -> None:
        self.address, self.model, self._key_name = address.rstrip("/"), model, key_name
        self._client = _client(key, own)
        self._fresh = _client(key, own, keep=0)
        # `httpx.Limits` would count a connection forever if its request is cancelled before it is sent
        self._slots = asyncio.Semaphore(connections + FOR_ADAPTERS)

    async def ask(
        self, path: str, body: Mapping[str, object] | None, seconds: float, *, fresh: bool = False
    ) -> dict[str, object]:
        """Send a request with `send`, and return the answer's JSON object as `read` does."""
        return self.read(await self.send(path, body, seconds, fresh=fresh))

    def read(self, answer: Answer) -> dict[str, object]:
        """Return an answer's JSON object.

        Raises:
            TransientError: the server is overloaded or has another transient error.
            CallError: the server rejects the request, or its answer is not JSON.
            QuotaExhausted: the account has no credit left.
        """
        if answer.status >= 300:
            raise self._error(answer)
        try:
            found = json.loads(answer.text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise CallError(f"{self.model}: {self.address} answered {first_line(answer.text)!r}")
        return found

    async def send(
        self,
        path: str,
        body: Mapping[str, object] | None,
        seconds: float,
        largest: int = MAX_ANSWER_BYTES,
        *,
        fresh: bool = False,
        root: bool = False,
    ) -> Answer:
        """Send a POST request, or GET without a body, and return the answer, errors included.

        Args:
            path: the path below the address.
            body: the JSON body to post.
            seconds: the limit of the total time, from waiting for a free place to the end of the answer.
            largest: maximum number of bytes of the answer.
            fresh: whether to use a new connection, which a load balancer may route to another server.
            root: whether the path is one of vLLM's own routes, outside of ``/v1``.

        Raises:
            TransientError: there is no answer, or it is incomplete. It is charged, unless no place was free
                in time or the connection failed.
        """
        import httpx

        from compound.components.engines import wire

        url = f"{self.address.removesuffix('/v1') if root else self.address}/{path}"
        method = "GET" if body is None else "POST"
        client, waiting = self._fresh if fresh else self._client, True
        try:
            async with asyncio.timeout(seconds), self._slots:
                waiting = False
                if client.is_closed:
                    raise TransientError(
                        f"{self.model}: the connections to {url} are closed", charged=NO_USAGE
                    )
                async with client.stream(method, url, json=body) as got:
                    pieces = [piece async for piece in wire.bounded(got.aiter_raw(), got.headers, largest)]
                text = b"".join(pieces).decode("utf-8", "replace")
                return Answer(got.status_code, text, requested_wait(got.headers))
        except TimeoutError:
            problem = "had no free place for a request" if waiting else "did not answer completely"
            raise TransientError(
                f"{self.model}: {url} {problem} within {seconds:g} s",
                charged=NO_USAGE if waiting else None,
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            unsent = isinstance(error, (*wire.UNSENT, httpx.InvalidURL))
            raise TransientError(
                f"{self.model}: {url}: {first_line(str(error) or type(error).__name__)}",
                charged=NO_USAGE if unsent else None,
            ) from error

    async def logprobs(
        self, name: str, prompt: str | Sequence[int], seconds: float, *, fresh: bool = False
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Return a prompt's n tokens and the n - 1 log-probabilities of each but the first.

        They belong to the distribution at temperature 1, independently of the server's ``--logprobs-mode``.
        """
        body = {
            "model": name,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
            "return_token_ids": True,
        }
        answer = cast("TextAnswer", await self.ask("completions", body, seconds, fresh=fresh))
        try:
            choice = answer["choices"][0]
            tokens = tuple(int(token) for token in choice["prompt_token_ids"])
            entries = zip(tokens[1:], choice["prompt_logprobs"][1:], strict=True)
            return tokens, tuple(float(entry[str(token)]["logprob"]) for token, entry in entries)
        except (KeyError, IndexError, TypeError, ValueError):
            raise CallError(
                f"{self.model}: {self.address} does not return the log-probabilities of a prompt",
                hint="it must be vLLM, 0.10.2 or later",
            ) from None

    async def logprobs_are_tempered(self, name: str, seconds: float) -> bool:
        """Return whether log-probabilities of sampled tokens are taken after temperature scaling.

        Near temperature 0, almost all probability is on the most likely token, so its log-probability is near
        0 after scaling, and that of temperature 1 before scaling.
        """
        seen = []
        for temperature in (0.0, 0.01):
            body = {
                "model": name,
                "prompt": "The",
                "max_tokens": 1,
                "temperature": temperature,
                "logprobs": 0,
                "seed": 0,
            }
            answer = cast("TextAnswer", await self.ask("completions", body, seconds))
            try:
                seen.append(float(answer["choices"][0]["logprobs"]["token_logprobs"][0]))
            except (KeyError, IndexError, TypeError):
                raise CallError(f"{self.model}: {self.address} does not return log-probabilities") from None
        return seen[1] - seen[0] > 0.1

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()
        await self._fresh.aclose()

    def _error(self, answer: Answer) -> CompoundError:
        message = answer.message
        return classify_error(
            f"{self.model}: {message}",
            answer.status,
            model=self.model,
            code=error_code(answer.text),
            keys=self._key_name,
            naming_hint=f"the server at {self.address} must serve it under this name",
            too_long="maximum context length" in message or "max_model_len" in message,
            retry_after=answer.wait,
        )


def _client(key: str | None, own: bool, keep: int | None = None) -> httpx.AsyncClient:
    try:
        import httpx
    except ImportError:
        raise MissingExtra("a vLLM server", "httpx", "vllm") from None
    from compound.components.engines.wire import KEEP_ALIVE, closable

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=keep, keepalive_expiry=KEEP_ALIVE)
    client = httpx.AsyncClient(  # nosec B113  # asyncio.timeout bounds the total time of each request
        headers={"Accept-Encoding": "identity", **({"Authorization": f"Bearer {key}"} if key else {})},
        limits=limits,
        timeout=None,
        trust_env=not own,
    )
    return closable(client)
