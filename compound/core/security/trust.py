"""User consent for the servers and keys named in a file.

A YAML file may come from someone else, so it must not decide where prompts and secrets are sent. An
engine in a file may use an address only if it is the model provider's own, a server on this machine
that gets no key, or one that the user trusts. A key is trusted for one address, never for all.

Consent is given outside the file: on the command line (``--trust``), in the environment
(``COMPOUND_TRUST``) or in the user's configuration file. Nothing next to the YAML file or in the
working directory is read.
"""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from compound.core.errors import ConfigurationError, DeclarationError, suggest_name

VARIABLE = "COMPOUND_TRUST"
_ADDRESS = re.compile(
    r"(?P<scheme>https?)://(?P<host>[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?|\[[0-9a-f:.]+\])"
    r"(?::(?P<port>[0-9]{1,5}))?(?P<path>/[!\"$->@-\[\]-~]*)?",
    re.IGNORECASE
    | re.ASCII,  # without ASCII, [a-z] matches four other letters, such as the Kelvin sign
)
_STORE = re.compile(
    r"s3://(?P<host>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?P<path>(?:/[^/?*\[\]\\\0-\x1f]+)*)/?"
)
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PORTS = {"https": 443, "http": 80, "s3": 0}


@dataclass(frozen=True, order=True)
class Origin:
    """A server identified like in browsers, by scheme, host and port.

    >>> print(Origin.of("https://llm.example.com/v1"), Origin.of("http://gpu:8000/v1"))
    llm.example.com http://gpu:8000
    """

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, address: str) -> Origin:
        """Return the origin of an address such as ``https://llm.example.com/v1``.

        Raises:
            DeclarationError: the address is not a plain HTTP address. User information, backslashes
                and international characters are rejected, because HTTP clients disagree on the host
                they denote.
        """
        found = _ADDRESS.fullmatch(address)
        port = int(found["port"] or 0) if found else 0
        if found is None or port > 65535 or (found["port"] and not port):
            raise DeclarationError(
                f"{address!r} is not the address of a server",
                hint="write https://HOST or http://HOST:PORT/v1, without a user name or password",
            )
        scheme = found["scheme"].lower()
        return cls(scheme, found["host"].lower(), port or _PORTS[scheme])

    @classmethod
    def of_store(cls, address: str) -> Origin:
        """Return the bucket of an address such as ``s3://bucket/folder/rows.parquet``.

        Raises:
            DeclarationError: it is another address, or a part of it has another meaning to clients.
        """
        found = _STORE.fullmatch(address)
        if found is None or {".", ".."} & {*found["path"].split("/")} or "::" in address:
            raise DeclarationError(
                f"{address!r} is not an address in a store",
                hint="write s3://BUCKET/PATH, without keys; copy files from elsewhere, and name the copy",
            )
        return cls("s3", found["host"], 0)

    @property
    def is_loopback(self) -> bool:
        """Whether the server runs on this machine."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{'' if self.scheme == 'https' else f'{self.scheme}://'}{self.host}{port}"


@dataclass(frozen=True)
class Provider:
    """A model provider: the address of its API, and the usual environment variables of its key."""

    origin: Origin
    keys: tuple[str, ...]


def _provider(host: str, *keys: str) -> Provider:
    return Provider(Origin.of(f"https://{host}"), keys)


PROVIDERS: Mapping[str, Provider] = {
    "anthropic": _provider("api.anthropic.com", "ANTHROPIC_API_KEY"),
    "cerebras": _provider("api.cerebras.ai", "CEREBRAS_API_KEY"),
    "deepseek": _provider("api.deepseek.com", "DEEPSEEK_API_KEY"),
    "fireworks_ai": _provider("api.fireworks.ai", "FIREWORKS_API_KEY", "FIREWORKS_AI_API_KEY"),
    "gemini": _provider("generativelanguage.googleapis.com", "GEMINI_API_KEY", "GOOGLE_API_KEY"),
    "groq": _provider("api.groq.com", "GROQ_API_KEY"),
    "mistral": _provider("api.mistral.ai", "MISTRAL_API_KEY"),
    "openai": _provider("api.openai.com", "OPENAI_API_KEY"),
    "openrouter": _provider("openrouter.ai", "OPENROUTER_API_KEY"),
    "perplexity": _provider("api.perplexity.ai", "PERPLEXITYAI_API_KEY", "PERPLEXITY_API_KEY"),
    "together_ai": _provider("api.together.xyz", "TOGETHERAI_API_KEY", "TOGETHER_API_KEY"),
    "xai": _provider("api.x.ai", "XAI_API_KEY"),
}
"""Providers whose key a file may name without consent, since it is sent only to that provider."""


@dataclass(frozen=True)
class Trust:
    """Servers that a user trusts, and the keys that may be sent to each.

    Attributes:
        hosts: servers that may receive prompts, and buckets that may be read.
        keys: (environment variable, server) pairs.
        strict: whether only these entries count, excluding the providers' own addresses and this
            machine.
    """

    hosts: frozenset[Origin] = frozenset()
    keys: frozenset[tuple[str, Origin]] = frozenset()
    strict: bool = False

    @classmethod
    def of(cls, entries: Iterable[str], *, strict: bool = False) -> Trust:
        """Parse entries such as ``gpu.example:8000`` and ``LLM_KEY@llm.example.com``.

        Raises:
            DeclarationError: an entry is malformed.

        >>> trust = Trust.of(["http://gpu:8000", "LLM_KEY@llm.example.com"])
        >>> [str(host) for host in sorted(trust.hosts)]
        ['http://gpu:8000', 'llm.example.com']
        >>> trust.allows_key("LLM_KEY", Origin.of("https://llm.example.com/v1"))
        True
        >>> trust.allows_key("GITHUB_TOKEN", Origin.of("https://llm.example.com/v1"))
        False
        """
        hosts, keys = set(), set()
        for entry in entries:
            name, separator, address = entry.strip().rpartition("@")
            if separator and not _VARIABLE_NAME.fullmatch(name):
                raise DeclarationError(
                    f"{entry!r} is not valid: {name!r} is not the name of an environment variable",
                    hint="write HOST, HOST:PORT, or http://HOST:PORT, optionally after NAME@",
                )
            if is_store(entry):
                hosts.add(Origin.of_store(entry))
                continue
            origin = Origin.of(address if "://" in address else f"https://{address}")
            hosts.add(origin)
            if separator:
                keys.add((name, origin))
        return cls(frozenset(hosts), frozenset(keys), strict)

    @classmethod
    def of_user(cls, entries: Iterable[str] = (), *, strict: bool = False) -> Trust:
        """Combine the given entries with those of the environment and the user's configuration file."""
        if strict:
            return cls.of(entries, strict=True)
        from_environment = re.split(r"[\s,]+", os.environ.get(VARIABLE, ""))
        return cls.of([*entries, *filter(None, from_environment), *_from_file(config_file())])

    def allows_host(self, origin: Origin) -> bool:
        """Return whether prompts may be sent to a server without a key."""
        if origin in self.hosts:
            return True
        own = any(provider.origin == origin for provider in PROVIDERS.values())
        return not self.strict and (own or origin.is_loopback)

    def allows_key(self, name: str, origin: Origin) -> bool:
        """Return whether the value of an environment variable may be sent to a server."""
        if (name, origin) in self.keys:
            return True
        own = any(
            provider.origin == origin and name in provider.keys for provider in PROVIDERS.values()
        )
        return not self.strict and own


def is_store(path: object) -> bool:
    """Return whether a path is the address of a store, also if `Path` has removed a slash.

    >>> is_store("s3://bucket/rows.jsonl"), is_store("rows.jsonl")
    (True, False)
    """
    return str(path).startswith("s3:/")


def config_file() -> Path:
    """Return the user's configuration file: ``$COMPOUND_CONFIG``, or ``~/.config/compound/config.toml``."""
    chosen = os.environ.get("COMPOUND_CONFIG")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "compound" / "config.toml"


def refusal(
    trust: Trust,
    model: str,
    address: str | None,
    key: str | None,
    *,
    sends: str = "prompts",
    only_listed: bool = False,
) -> tuple[str, str] | None:
    """Return why an engine or a tool of a file may not be used, and how to allow it; None if it may.

    The file names the model (``provider/name``), the server and the environment variable of the
    key. With ``only_listed``, the providers' own addresses and this machine need an entry, too:
    those of tools do, since the file chooses the operation, which would bypass the budget of a
    provider, or could execute code on this machine.

    Raises:
        DeclarationError: the address is not a plain HTTP address, or the key is not a variable
            name.
    """
    if key is not None and not _VARIABLE_NAME.fullmatch(key):  # it is printed as part of a command
        raise DeclarationError(f"{key!r} is not the name of an environment variable")
    if address is not None:
        origin = Origin.of(address)
    elif key is None:
        return None
    elif (provider := PROVIDERS.get(model.partition("/")[0])) is not None:
        origin = provider.origin
    else:
        return (
            f"the file sends the environment variable {key!r} to an unspecified server",
            "set api_base, or omit api_key_env to use the provider's usual variable",
        )
    listed = replace(trust, strict=trust.strict or only_listed)
    if key is not None and not listed.allows_key(key, origin):
        entry, what = f"{key}@{origin}", f"the environment variable {key!r} to {origin}"
    elif not listed.allows_host(origin):
        entry, what = str(origin), f"{sends} to {origin}"
    else:
        return None
    return _missing(trust, f"sends {what}", entry)


def store_refusal(trust: Trust, address: str) -> tuple[str, str] | None:
    """Return why a file may not name data in a store, and how to allow it; None if it may.

    They are read with the user's own keys, and become parts of prompts.

    Raises:
        DeclarationError: it is not an address in a store.
    """
    bucket = Origin.of_store(address)
    if bucket in trust.hosts:
        return None
    return _missing(trust, f"reads {bucket} with your keys", str(bucket))


def _missing(trust: Trust, what: str, entry: str) -> tuple[str, str]:
    if trust.strict:
        return (
            f"the file {what}, which --no-import does not allow",
            f"if you trust it, add --trust {entry}",
        )
    return (
        f"the file {what}, which you have not trusted",
        f"to allow it once, add --trust {entry}; in Python, pass trust=[{entry!r}]; "
        f"to allow it always, add trust = [{entry!r}] in {config_file()}",
    )


def _from_file(path: Path) -> Collection[str]:
    """Return the entries of the user's configuration file; empty if there is no file."""
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error}", hint="it must be a TOML file"
        ) from None
    for key in found:
        if key != "trust":
            raise ConfigurationError(
                f"{path}: unknown setting {key!r}", hint=suggest_name(key, ["trust"])
            )
    entries = found.get("trust", [])
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise ConfigurationError(
            f"{path}: trust must be a list of strings", hint='trust = ["LLM_KEY@llm.example.com"]'
        )
    return entries
