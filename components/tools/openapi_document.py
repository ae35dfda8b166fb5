"""Read OpenAPI documents from mappings, files and addresses."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import yaml
from referencing import Registry, Specification
from referencing.exceptions import Unresolvable

from compound.core.errors import CompoundError, DeclarationError, MissingExtra
from compound.core.loops import run_blocking
from compound.core.security.trust import Origin, Trust

METHODS = ("get", "post", "put", "patch", "delete")
MAX_DOCUMENT = 10 * 2**20  # bytes
MAX_CHARACTERS = 4 * MAX_DOCUMENT  # of a document whose aliases are written out
MAX_MERGED = 100_000  # entries that the merge keys of a document add to mappings
MAX_REFERENCES = 20  # that follow each other
MAX_ADDRESS = 2_000  # characters of the address of a server
SECONDS = 30.0  # until a document has arrived from its address


@dataclass(frozen=True)
class OpenAPIDocument:
    """An OpenAPI document, with the file or the address that it was read from, if any."""

    content: Mapping[str, Any]
    file: str = ""
    url: str = ""

    def server(self, base_url: str | None, servers: Sequence[Any] = ()) -> str:
        """Return the address of the server: ``base_url``, or the first of ``servers`` or of the document.

        Raises:
            DeclarationError: there is none, or a document of another machine names this one.
        """
        if base_url:
            return base_url.rstrip("/")
        found = _first_server(servers or part_of(self.content, "servers", list), self.url)
        if self.url and not Origin.of(self.url).is_loopback and Origin.of(found).is_loopback:
            raise DeclarationError(
                f"the OpenAPI document {self.url} names a server of this machine: {found}",
                hint="if you trust it, set base_url=…",
            )
        return found.rstrip("/")

    def entries(self) -> Iterator[tuple[str, str, Mapping[str, Any], Mapping[str, Any]]]:
        """Yield method, path, entry and the item of the path of each operation, in the document's order."""
        for path, given in part_of(self.content, "paths", dict).items():
            item = self.resolved(given)
            for method in METHODS:
                if isinstance(entry := item.get(method), Mapping):
                    yield method, str(path), entry, item

    def operations(self) -> list[str]:
        """Return the operations in the order of the document: the ``operationId``, or method and path."""
        return [
            str(entry.get("operationId") or f"{method.upper()} {path}")
            for method, path, entry, _ in self.entries()
        ]

    def resolved(self, part: Any) -> Mapping[str, Any]:  # noqa: ANN401 - JSON
        """Return a part of the document, following a reference to another, which it may describe."""
        for _ in range(MAX_REFERENCES):
            if not isinstance(part, Mapping) or not isinstance(part.get("$ref"), str):
                return part if isinstance(part, Mapping) else {}
            own = {key: value for key, value in part.items() if key != "$ref"}
            if own.keys() - {"summary", "description"}:
                return part
            target = self.target(part["$ref"])
            part = {**target, **own} if isinstance(target, Mapping) else target
        raise DeclarationError(
            f"the OpenAPI document has more than {MAX_REFERENCES} references in a row"
        )

    def target(self, reference: str) -> Any:  # noqa: ANN401 - JSON
        """Return what a reference leads to.

        Raises:
            DeclarationError: it is no part of the document, such as one of another document.
        """
        try:
            return self._resolver.lookup(reference).contents
        except (Unresolvable, ValueError, TypeError):
            raise DeclarationError(
                f"the OpenAPI document refers to {reference!r}, which it does not contain",
                hint="write the documents that it refers to into one, as `redocly bundle` does",
            ) from None

    @functools.cached_property
    def _resolver(self) -> Any:  # noqa: ANN401 - a class that the library does not name
        """Resolver of references in this document, which reads no others."""
        return Registry[Any]().resolver_with_root(
            Specification.OPAQUE.create_resource(self.content)
        )


def part_of(parent: Mapping[str, Any], name: str, kind: type[list[Any] | dict[str, Any]]) -> Any:  # noqa: ANN401 - JSON
    """Return a part of a document that must be a list or an object; an empty one if there is none.

    >>> part_of({"tags": ["a"]}, "tags", list), part_of({}, "tags", list)
    (['a'], [])

    Raises:
        DeclarationError: it is anything else.
    """
    found = parent.get(name)
    if found is None:
        return kind()
    if not isinstance(found, Mapping if kind is dict else kind):
        wanted = "an object" if kind is dict else "a list"
        raise DeclarationError(
            f"the OpenAPI document is not valid: {name} must be {wanted}, but is {found!r:.100}"
        )
    return found


def _first_server(servers: Sequence[Any], base: str = "") -> str:
    """Return the address of the first server, with the defaults of its variables.

    Args:
        servers: entries of a document.
        base: the address of the document, which relative addresses start from.

    Raises:
        DeclarationError: there is none, or it is too long.

    >>> _first_server([{"url": "https://{host}/v1", "variables": {"host": {"default": "example.com"}}}])
    'https://example.com/v1'
    """
    first = servers[0] if servers and isinstance(servers[0], Mapping) else {}
    url, variables = first.get("url", "/"), part_of(first, "variables", dict)
    parts = re.split(r"\{([^{}]*)\}", url[: MAX_ADDRESS + 1] if isinstance(url, str) else "/")
    for index, name in enumerate(parts[1::2]):
        variable = variables.get(name)
        default = variable.get("default") if isinstance(variable, Mapping) else None
        parts[2 * index + 1] = f"{{{name}}}" if default is None else str(default)[: MAX_ADDRESS + 1]
    found = "".join(parts)
    if len(found) > MAX_ADDRESS:
        raise DeclarationError(f"the address of a server has more than {MAX_ADDRESS:,} characters")
    found = urljoin(base, found)
    if "://" not in found:
        raise DeclarationError("the OpenAPI document names no server", hint="set base_url=…")
    return found


def open_document(
    document: str | Path | Mapping[str, Any], hosts: Sequence[str] = ()
) -> OpenAPIDocument:
    """Return a document, given its content, its file (JSON or YAML) or its address.

    Args:
        document: the document.
        hosts: servers that it may be read from, besides this machine.

    Raises:
        DeclarationError: it is no OpenAPI document, too large, or at a server not among ``hosts``.
        CompoundError: it cannot be read from its address.
    """
    if isinstance(document, Mapping):
        return OpenAPIDocument(_checked(document, "the document"))
    place = str(document)
    if isinstance(document, str) and place.startswith(("http://", "https://")):
        return OpenAPIDocument(_parsed(_fetched(place, hosts), place), url=place)
    try:
        with Path(document).open("rb") as file:
            data = file.read(MAX_DOCUMENT + 1)
    except OSError as error:
        raise DeclarationError(f"{place} is not an OpenAPI document: {error}") from None
    return OpenAPIDocument(_parsed(data, place), file=place)


def _parsed(data: bytes, place: str) -> Mapping[str, Any]:
    if len(data) > MAX_DOCUMENT:
        raise DeclarationError(f"{place} is larger than {MAX_DOCUMENT // 2**20} MiB")
    try:
        if data.lstrip().startswith(b"{"):
            found = json.loads(data)
        else:
            found = _Loader(data).get_single_data()
            _check_size(found)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise DeclarationError(f"{place} is not an OpenAPI document: {error}") from None
    return _checked(found, place)


def _checked(found: object, place: str) -> Mapping[str, Any]:
    """Reject what is no document of OpenAPI 3."""
    if isinstance(found, Mapping) and "swagger" in found:
        raise DeclarationError(
            f"{place} has version {found['swagger']!s:.10} of Swagger, but OpenAPI 3 is needed",
            hint="convert it, for example with https://converter.swagger.io or `npx swagger2openapi`",
        )
    if not isinstance(found, Mapping) or not isinstance(found.get("paths"), Mapping):
        raise DeclarationError(
            f"{place} is not an OpenAPI document", hint="it must have `openapi` and `paths`"
        )
    if not str(found.get("openapi", "3")).startswith("3"):
        raise DeclarationError(
            f"{place} has version {found['openapi']!s:.10} of OpenAPI, but 3 is needed"
        )
    return found


class _Loader(yaml.SafeLoader):
    """A safe loader whose keys are texts, and which limits what merge keys add: nested ones multiply."""

    _merged = 0

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Replace the merge keys of a mapping by the entries of others, which are flattened first."""
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                for part in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if isinstance(part, yaml.MappingNode):
                        self.flatten_mapping(part)
                        self._merged += len(part.value)
                    if self._merged > MAX_MERGED:
                        raise yaml.YAMLError(f"its merge keys add more than {MAX_MERGED:,} entries")
        super().flatten_mapping(node)
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):  # as in JSON: a member may be named `no` or `200`
                key.tag = "tag:yaml.org,2002:str"


def _check_size(document: object) -> None:
    """Reject a document that contains itself, or that is too large when its aliases are written out.

    Raises:
        ValueError: it is one.
    """
    known: dict[int, int] = {}  # the characters of values by identity; 0 while they are counted

    def count(value: object) -> int:
        if not isinstance(value, dict | list):
            return 1 + (len(value) if isinstance(value, str) else 0)
        found = known.get(id(value))
        if found is None:
            known[id(value)] = 0
            parts = [*value, *value.values()] if isinstance(value, dict) else value
            found = known[id(value)] = 1 + sum(map(count, parts))
        if not found:
            raise ValueError("it contains itself")
        return found

    if count(document) > MAX_CHARACTERS:
        raise ValueError(
            f"it has more than {MAX_CHARACTERS:,} characters when its aliases are written out"
        )


def _fetched(url: str, hosts: Sequence[str]) -> bytes:
    """Return the start of the document at an address, without keys, proxies and redirects."""
    origin = Origin.of(url)
    if not origin.is_loopback and origin not in Trust.of(hosts).hosts:
        raise DeclarationError(
            f"the OpenAPI document would be read from {origin}, which is not allowed",
            hint=f"if you trust it, set hosts=[{str(origin)!r}]",
        )
    try:
        import httpx
    except ImportError:
        raise MissingExtra("a tool of an HTTP interface", "httpx", "remote") from None
    try:
        return run_blocking(_read(url))
    except TimeoutError:
        raise CompoundError(f"{url} did not answer within {SECONDS:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CompoundError(f"{url} cannot be read: {error or type(error).__name__}") from None


async def _read(url: str) -> bytes:
    import httpx

    data = bytearray()
    async with (
        asyncio.timeout(SECONDS),  # in total: each part of an endless answer may arrive in time
        httpx.AsyncClient(timeout=SECONDS, trust_env=False, follow_redirects=False) as client,
        client.stream("GET", url, headers={"Accept-Encoding": "identity"}) as response,
    ):
        if response.status_code != 200:
            hint = "download the document, and pass its file" if response.status_code < 500 else ""
            raise CompoundError(f"{url}: HTTP {response.status_code}", hint=hint)
        if response.headers.get("content-encoding", "identity") != "identity":
            raise CompoundError(f"{url}: the answer is compressed", hint="download the document")
        async for chunk in response.aiter_raw():
            data += chunk
            if len(data) > MAX_DOCUMENT:
                break
    return bytes(data)
