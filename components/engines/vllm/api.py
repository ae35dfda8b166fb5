"""The HTTP interface of a vLLM server: OpenAI's, and what vLLM adds to it. Errors are sorted, waits bounded.

Plain HTTP rather than a client library: token ids, prompts' log-probabilities and adapters are vLLM's own
fields and routes, which such libraries drop or do not know.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, cast

from compound.components.engines.remote import error_code, first_line, sort_error, wanted_wait
from compound.engine import NO_USAGE
from compound.errors import CallError, CompoundError, MissingExtra, TransientError

if TYPE_CHECKING:
    import httpx

LARGEST = 2**26  # bytes of an answer, where no request says how long it may be


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said: a status, and text that is JSON if all is well."""

    status: int
    text: str
    wait: float | None = None

    @property
    def message(self) -> str:
        """The server's own words about an error."""
        try:
            said = json.loads(self.text)["error"]["message"]
        except (ValueError, KeyError, TypeError, RecursionError):
            said = self.text
        return str(said)


class TextLogprobs(TypedDict):
    """What vLLM says of sampled tokens, in their order."""

    token_logprobs: list[float]


class TextChoice(TypedDict):
    """One text of vLLM, and what it says of the prompt's tokens by their number."""

    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[str, Mapping[str, float]]]
    logprobs: TextLogprobs


class TextAnswer(TypedDict):
    """What is read of vLLM's answer to a request for a completion; other answers raise when they are read."""

    choices: list[TextChoice]


class API:
    """One server.

    Args:
        address: up to and with ``/v1``.
        model: the base model's name there, for messages.
        key: what the server wants to be shown, if anything.
        key_name: the environment variable it came from.
        connections: the most at once.
        own: whether the server is on this machine and ours: no proxy leads there.
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
        self._client = _client(key, connections, own)
        self._fresh = _client(key, connections, own, keep=0)

    async def ask(
        self, path: str, body: Mapping[str, object] | None, seconds: float, *, fresh: bool = False
    ) -> dict[str, object]:
        """Return what the server answers to what `send` sends, as `read` reads it."""
        return self.read(await self.send(path, body, seconds, fresh=fresh))

    def read(self, answer: Answer) -> dict[str, object]:
        """Return an answer's JSON object.

        Raises:
            TransientError: the server is overloaded, or says something else that may pass.
            CallError: it refuses, or its answer is not JSON.
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
        largest: int = LARGEST,
        *,
        fresh: bool = False,
    ) -> Answer:
        """Post a body, or get without one, and return whatever comes back.

        Args:
            path: below the address.
            body: what to post.
            seconds: the limit for everything together, from connecting to the end of the answer.
            largest: the most bytes of the answer.
            fresh: whether to use a new connection, which a load balancer may lead to another server.

        With ``fresh``, over a new connection, which a load balancer may lead to another server.

        Raises:
            TransientError: nothing comes back, or not all of it.
        """
        import httpx

        from compound.components.engines import wire

        url = f"{self.address}/{path}"
        method = "GET" if body is None else "POST"
        try:
            client = self._fresh if fresh else self._client
            async with asyncio.timeout(seconds), client.stream(method, url, json=body) as got:
                pieces = [piece async for piece in wire.bounded(got.aiter_raw(), got.headers, largest)]
                text = b"".join(pieces).decode("utf-8", "replace")
                return Answer(got.status_code, text, wanted_wait(got.headers))
        except TimeoutError:
            raise TransientError(f"{self.model}: {url} gave no whole answer in {seconds:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            unsent = isinstance(error, (*wire.UNSENT, httpx.InvalidURL))
            raise TransientError(
                f"{self.model}: {url}: {first_line(str(error) or type(error).__name__)}",
                charged=NO_USAGE if unsent else None,
            ) from error

    async def logprobs(
        self, name: str, prompt: str | Sequence[int], seconds: float, *, fresh: bool = False
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Return a prompt's n tokens and the n - 1 log-probabilities of each after those before it.

        They are those of the distribution at temperature 1, whatever the server's ``--logprobs-mode``.
        """
        body = {
            "model": name,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
            "return_token_ids": True,
        }
        said = cast("TextAnswer", await self.ask("completions", body, seconds, fresh=fresh))
        try:
            choice = said["choices"][0]
            tokens = tuple(int(token) for token in choice["prompt_token_ids"])
            each = zip(tokens[1:], choice["prompt_logprobs"][1:], strict=True)
            return tokens, tuple(float(entry[str(token)]["logprob"]) for token, entry in each)
        except (KeyError, IndexError, TypeError, ValueError):
            raise CallError(
                f"{self.model}: {self.address} does not return the log-probabilities of a prompt",
                hint="it must be vLLM, 0.10.2 or later",
            ) from None

    async def tempered(self, name: str, seconds: float) -> bool:
        """Return whether log-probabilities of sampled tokens are those after temperature.

        Next to temperature 0 nearly all probability is on the likeliest token: its log-probability is near 0
        after temperature, and that of temperature 1 before.
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
            said = cast("TextAnswer", await self.ask("completions", body, seconds))
            try:
                seen.append(float(said["choices"][0]["logprobs"]["token_logprobs"][0]))
            except (KeyError, IndexError, TypeError):
                raise CallError(f"{self.model}: {self.address} returns no log-probabilities") from None
        return seen[1] - seen[0] > 0.1

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()
        await self._fresh.aclose()

    def _error(self, answer: Answer) -> CompoundError:
        message = answer.message
        return sort_error(
            f"{self.model}: {message}",
            answer.status,
            model=self.model,
            code=error_code(answer.text),
            keys=self._key_name,
            names=f"the server at {self.address} must serve it under this name",
            too_long="maximum context length" in message or "max_model_len" in message,
            retry_after=answer.wait,
        )


def _client(key: str | None, connections: int, own: bool, keep: int | None = None) -> httpx.AsyncClient:
    try:
        import httpx
    except ImportError:
        raise MissingExtra("a vLLM server", "httpx", "vllm") from None
    return httpx.AsyncClient(  # nosec B113  # every wait is bounded as a whole, by asyncio.timeout
        headers={"Accept-Encoding": "identity", **({"Authorization": f"Bearer {key}"} if key else {})},
        limits=httpx.Limits(max_connections=connections + 4, max_keepalive_connections=keep),
        timeout=None,
        trust_env=not own,
    )
