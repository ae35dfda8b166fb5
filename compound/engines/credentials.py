"""Connections of litellm to a named server, which receives the configured key and no other credentials.

litellm and the OpenAI client fill missing arguments from the environment: the provider's usual key,
an organization, a project, the user's headers. That is right for the provider's own address, but
leaks credentials to any other. A named server therefore always receives an explicit key (``EMPTY``
if none is set), from a client that removes headers added from the environment and does not follow
redirects.
"""

from __future__ import annotations

import os
import re
import threading
from typing import TYPE_CHECKING, Any

from compound.core.errors import CompoundError, DeclarationError
from compound.core.security.sanitize import remember_secret
from compound.core.security.trust import Origin

if TYPE_CHECKING:
    import httpx

NO_KEY = "EMPTY"
# called by the OpenAI client
SDK_PROVIDERS = ("openai", "azure", "litellm_proxy", "lm_studio", "llamafile")
HTTP_PROVIDERS = ("hosted_vllm", "ollama", "ollama_chat", "anthropic")
CONFIGURABLE_PROVIDERS = (*SDK_PROVIDERS, *HTTP_PROVIDERS)
"""Providers for which `Connection` sends only what it is given; a YAML file may name their servers."""
ENVIRONMENT_HEADERS = ("authorization", "api-key", "openai-organization", "openai-project")
"""Headers that the OpenAI client sets from the environment."""

_UNSAFE = re.compile(r"://|[\\?#\s\x00-\x1f\x7f]|(?:^|/)(?:-|\.\.(?:/|$))")


class Connection:
    """Address and key of a litellm engine.

    Raises:
        DeclarationError: the address or the model's name could redirect requests to another server.
    """

    def __init__(self, model: str, api_base: str | None, api_key_env: str | None) -> None:
        if not is_model_name(model):
            raise DeclarationError(
                f"{model!r} is not a model name",
                hint="write provider/name, and give the address of a server as api_base",
            )
        if api_base is not None:
            Origin.of(api_base)
        self.model, self.api_base, self.api_key_env = model, api_base, api_key_env
        self._client: Any = None  # of litellm or openai
        self._making = threading.Lock()

    def arguments(self) -> dict[str, object]:
        """Return the arguments of a litellm call that set its address and key.

        Raises:
            CompoundError: the environment variable of the key is not set.
        """
        key = self._key()
        if self.api_base is None:
            return {} if key is None else {"api_key": key}
        given = {"api_base": self.api_base, "api_key": NO_KEY if key is None else key}
        provider = self.model.partition("/")[0]
        with self._making:
            self._client = self._client or _client(provider, self.api_base, given["api_key"])
            client = self._client
        return {**given} if client is None else {**given, "client": client}

    async def aclose(self) -> None:
        """Close the connections; a later call opens new ones."""
        with self._making:
            client, self._client = self._client, None
        if client is not None:
            await client.close()

    def require_key(self) -> None:
        """Check that the key is set; raises like `arguments`."""
        self._key()

    def _key(self) -> str | None:
        return read_key(self.model, self.api_key_env)


def read_key(model: str, variable: str | None) -> str | None:
    """Read the key of a model from an environment variable, if one is named.

    Raises:
        CompoundError: the variable is not set.
    """
    key = os.environ.get(variable) if variable else None
    if variable and not key:
        raise CompoundError(f"the key of {model!r} is not set", hint=f"export {variable}=…")
    remember_secret(key)
    return key


def is_model_name(name: str) -> bool:
    """Return whether a string is a plain model name; some providers parse an address in it, or build one.

    >>> is_model_name("openai/gpt-4o-mini"), is_model_name("oobabooga/https://llm.example.com")
    (True, False)
    """
    return _UNSAFE.search(name) is None


def _client(provider: str, api_base: str, key: str) -> Any:  # noqa: ANN401 - of two libraries
    """Return a client that ignores the environment and redirects; None for other providers."""
    if provider in HTTP_PROVIDERS:
        from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler

        return AsyncHTTPHandler(follow_redirects=False)
    if provider not in SDK_PROVIDERS:
        return None
    import openai

    if provider != "azure":
        http = isolated_client("authorization", f"Bearer {key}", plain=True)
        return openai.AsyncOpenAI(api_key=key, base_url=api_base, max_retries=0, http_client=http)
    import litellm

    return openai.AsyncAzureOpenAI(
        api_key=key,
        azure_endpoint=api_base,
        api_version=os.environ.get("AZURE_API_VERSION") or litellm.AZURE_DEFAULT_API_VERSION,
        max_retries=0,
        http_client=isolated_client("api-key", key, plain=True),
    )


def isolated_client(header: str, value: str, *, plain: bool = False) -> httpx.AsyncClient:
    """Return a client that sends the given credential and none from the environment; see `guarded`."""
    import httpx

    from compound.engines.wire import UNLIMITED, guarded

    async def replace_credentials(request: httpx.Request) -> None:
        # the OpenAI client adds these headers to every call
        lines = os.environ.get("OPENAI_CUSTOM_HEADERS", "").splitlines()
        added = [line.partition(":")[0].strip() for line in lines if ":" in line]
        for name in (*ENVIRONMENT_HEADERS, *added):
            request.headers.pop(name, None)
        request.headers[header] = value

    return guarded(
        httpx.AsyncClient(
            event_hooks={"request": [replace_credentials]}, follow_redirects=False, limits=UNLIMITED
        ),
        plain=plain,
    )
