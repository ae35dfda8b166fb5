"""Connections of litellm to a server that is named: the given key or none goes there, and nothing else does.

litellm and the OpenAI client fill what a call leaves out from the environment: the provider's usual key, an
organization, a project, headers of the user's. That is right for the provider's own address, and wrong for
any other. A named server is therefore always given a key (``EMPTY`` where there is none), with a client that
drops what the environment adds and follows no redirect.
"""

from __future__ import annotations

import os
import re
import threading
from typing import TYPE_CHECKING, Protocol

from compound.errors import CompoundError, DeclarationError
from compound.security.sanitize import remember_secret
from compound.security.trust import Origin

if TYPE_CHECKING:
    import httpx

NO_KEY = "EMPTY"
BY_SDK = (
    "openai",
    "azure",
    "litellm_proxy",
    "lm_studio",
    "llamafile",
)  # called by the OpenAI client
BY_HTTP = ("hosted_vllm", "ollama", "ollama_chat", "anthropic")
SERVERS = (*BY_SDK, *BY_HTTP)
"""The providers to which `Connection` sends no more than it is given; a file may name their servers."""
ADDED = ("authorization", "api-key", "openai-organization", "openai-project")
"""Headers that the OpenAI client fills from the environment."""

_UNSAFE = re.compile(r"://|[\\?#\s\x00-\x1f\x7f]|(?:^|/)(?:-|\.\.(?:/|$))")


class Client(Protocol):
    """What is used of a client of litellm or openai."""

    async def close(self) -> None:
        """Close the connections."""
        ...


class Connection:
    """The address and key of an engine over litellm.

    Args:
        model: ``provider/name``.
        api_base: the address of a server; None for the provider's own.
        api_key_env: the environment variable that holds the key; None for the provider's usual one at its own
            address, and for no key at a server that is named.

    Raises:
        DeclarationError: the address or the model's name could lead elsewhere.
    """

    def __init__(self, model: str, api_base: str | None, api_key_env: str | None) -> None:
        if not is_model_name(model):
            raise DeclarationError(
                f"{model!r} is not the name of a model",
                hint="it reads provider/name; give the address of a server as api_base",
            )
        if api_base is not None:
            Origin.of(api_base)
        self.model, self.api_base, self.api_key_env = model, api_base, api_key_env
        self._client: Client | None = None
        self._making = threading.Lock()

    def arguments(self) -> dict[str, object]:
        """Return the arguments of litellm that say where a call goes, and with which key.

        Raises:
            CompoundError: the environment variable of the key is not set.
        """
        key = self._key() if self.api_key_env else None
        if self.api_base is None:
            return {} if key is None else {"api_key": key}
        given = {"api_base": self.api_base, "api_key": NO_KEY if key is None else key}
        with self._making:
            if self._client is None:
                self._client = _client(self.model.partition("/")[0], self.api_base, given["api_key"])
            client = self._client
        return {**given} if client is None else {**given, "client": client}

    async def aclose(self) -> None:
        """Close the connections; a later call opens others."""
        with self._making:
            client, self._client = self._client, None
        if client is not None:
            await client.close()

    def require_key(self) -> None:
        """Raise as `arguments` does where the key is not set."""
        if self.api_key_env:
            self._key()

    def _key(self) -> str:
        name = self.api_key_env or ""
        key = os.environ.get(name)
        if not key:
            raise CompoundError(f"the key of {self.model!r} is not set", hint=f"export {name}=…")
        remember_secret(key)
        return key


def is_model_name(name: str) -> bool:
    """Return whether a name is only a name: some providers read an address in it, or put it into one.

    >>> is_model_name("openai/gpt-4o-mini"), is_model_name("oobabooga/https://llm.example.com")
    (True, False)
    """
    return _UNSAFE.search(name) is None


def _client(provider: str, api_base: str, key: str) -> Client | None:
    """Return a client that adds nothing from the environment and follows no redirect, or None."""
    if provider in BY_HTTP:
        from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler

        handler: Client = AsyncHTTPHandler(follow_redirects=False)
        return handler
    if provider not in BY_SDK:
        return None
    import openai

    if provider != "azure":
        http = _clean_http("authorization", f"Bearer {key}")
        return openai.AsyncOpenAI(api_key=key, base_url=api_base, max_retries=0, http_client=http)
    import litellm

    return openai.AsyncAzureOpenAI(
        api_key=key,
        azure_endpoint=api_base,
        api_version=os.environ.get("AZURE_API_VERSION") or litellm.AZURE_DEFAULT_API_VERSION,
        max_retries=0,
        http_client=_clean_http("api-key", key),
    )


def _clean_http(header: str, value: str) -> httpx.AsyncClient:
    """Return a client whose requests carry this credential and none from the environment."""
    import httpx

    from compound.components.engines.wire import UNLIMITED, guarded

    async def clean(request: httpx.Request) -> None:
        for name in (*ADDED, *_headers_of_user()):
            request.headers.pop(name, None)
        request.headers[header] = value

    return guarded(
        httpx.AsyncClient(event_hooks={"request": [clean]}, follow_redirects=False, limits=UNLIMITED)
    )


def _headers_of_user() -> list[str]:
    """Return the names of the headers that the OpenAI client adds to every call."""
    lines = os.environ.get("OPENAI_CUSTOM_HEADERS", "").splitlines()
    return [line.partition(":")[0].strip() for line in lines if ":" in line]
