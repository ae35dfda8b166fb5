"""Tools that call an operation of an HTTP interface, described by an OpenAPI 3 document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compound.components.tools.openapi_arguments import (
    Place,
    SchemaConverter,
    as_header,
    as_path_part,
)
from compound.components.tools.openapi_document import OpenAPIDocument, part_of
from compound.components.tools.source import PassingError, ToolParts, unanswered, usable_name
from compound.core.errors import (
    CallError,
    DeclarationError,
    MissingExtra,
    TransientError,
    suggest_name,
)
from compound.core.loops import Sessions
from compound.core.security.trust import Origin, Trust
from compound.engines.credentials import read_key
from compound.graph.configuration import digest

if TYPE_CHECKING:
    import httpx

IDEMPOTENT = frozenset(
    {"GET", "PUT", "DELETE"}
)  # methods whose requests may be repeated (RFC 9110)
MAX_ANSWER = 2**20  # bytes of an answer that are read
MAX_ERROR = 2_000  # characters of an error that the model is shown
BODY = (
    "body"  # the argument with the JSON body, if that is no object or has the name of a parameter
)
JSON = "application/json"
COMBINED = frozenset(
    {
        "$ref",
        "allOf",
        "anyOf",
        "dependentRequired",
        "dependentSchemas",
        "if",
        "maxProperties",
        "minProperties",
        "not",
        "nullable",
        "oneOf",
        "patternProperties",
        "propertyNames",
    }
)
"""Keywords of a body that concern it as a whole, so that its members are not arguments of their own."""
CHARSETS = (
    "utf",
    "iso",
    "windows",
    "cp",
    "latin",
    "us-ascii",
    "ascii",
    "koi8",
    "gb",
    "big5",
    "shift",
    "euc",
)
"""Starts of the names of usual encodings; others that Python knows, such as punycode, take quadratic time."""
CONNECTION_HEADERS = frozenset(
    {
        "accept",
        "accept-encoding",
        "authorization",
        "connection",
        "content-length",
        "content-type",
        "cookie",
        "expect",
        "host",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers of the connection, of the body and of credentials, which a document cannot make arguments."""


@dataclass(frozen=True, eq=False)
class OpenAPISource:
    """An operation of an HTTP interface.

    Attributes:
        method: HTTP method.
        url: address of the operation, with ``{name}`` for parameters in the path.
        places: where each argument is sent.
        auth_env: environment variable with the key, if any.
        auth_header: header of the key.
        timeout: time limit of one call in seconds.
        open_body: whether arguments without a place are members of the body.
        document, operation, base_url: what it was made of; the document is ``""`` if it is no file.
    """

    method: str
    url: str
    places: Mapping[str, Place]
    auth_env: str | None
    auth_header: str
    timeout: float
    open_body: bool = False
    document: str = ""
    operation: str = ""
    base_url: str = ""
    reproducible = False
    sandboxed = False

    @property
    def version(self) -> str:
        """Digest of the operation."""
        places = {name: place.identity for name, place in self.places.items()}
        return f"openapi:{digest([self.method, self.url, places])}"

    async def call(self, arguments: Mapping[str, Any], sessions: Sessions) -> str:
        """Send the request; an error status is a result, since the model may correct its call.

        Raises:
            TransientError: the server cannot be reached, or did not answer an idempotent request.
            PassingError: the server answered an idempotent request with a status of overload or
                failure.
            CallError: the server answered with another error or did not answer, an argument cannot
                be part of a path, or the answer is too large.
        """
        from compound.engines.remote import requested_wait

        httpx = _httpx()
        url, query, headers, body = self._parts(arguments)
        headers["Accept-Encoding"] = "identity"
        if self.auth_env:
            key = read_key(self.url, self.auth_env) or ""
            headers[self.auth_header] = (
                f"Bearer {key}" if self.auth_header.lower() == "authorization" else key
            )
        content = {} if body is None else {"json": body}
        try:
            async with httpx.AsyncClient(
                timeout=self.timeout, trust_env=False, follow_redirects=False
            ) as client:
                sending = client.stream(self.method, url, params=query, headers=headers, **content)
                async with sending as response:
                    text = await _read(response)
        except httpx.TransportError as error:
            raise self._lost(error) from error
        status = response.status_code
        if (status >= 500 or status in (408, 429)) and self.method in IDEMPOTENT:
            raise PassingError(
                f"{self.url}: HTTP {status}: {text[:MAX_ERROR]}",
                retry_after=requested_wait(response.headers),
            )
        if status >= 300:
            raise CallError(f"HTTP {status}: {text[:MAX_ERROR]}")
        return text

    def _lost(self, error: httpx.TransportError) -> CallError:
        """Return the error of a request without a complete answer."""
        from compound.engines.wire import UNSENT

        if isinstance(error, _httpx().TimeoutException):
            reason = f"no answer within {self.timeout:g} s ({type(error).__name__})"
        else:
            reason = str(error) or type(error).__name__
        message = f"{self.method} {self.url}: {reason}"
        if self.method in IDEMPOTENT or isinstance(error, UNSENT):
            return TransientError(message)
        return CallError(unanswered(message))

    def _parts(
        self, arguments: Mapping[str, Any]
    ) -> tuple[str, list[tuple[str, str]], dict[str, str], object]:
        """Return the address, the query, the headers and the body of a request."""
        url, query, headers, body = self.url, [], {}, None
        for name, value in arguments.items():
            place = self.places.get(name) or Place(name, "body" if self.open_body else "")
            if value is None and place.where in ("query", "header"):
                continue  # there is no null in them: the server's default applies
            if place.where == "path":
                url = url.replace(f"{{{place.name}}}", as_path_part(name, value))
            elif place.where == "query":
                query += place.query(value)
            elif place.where == "header":
                headers[place.name] = as_header(name, value)
            elif place.where == "whole":
                body = value
            elif place.where == "body":
                body = {**(body if isinstance(body, dict) else {}), place.name: value}
        return url, query, headers, body


@dataclass(frozen=True)
class Access:
    """How an interface is called: settings of `Tool.from_openapi`."""

    base_url: str | None
    hosts: Sequence[str]
    auth_env: str | None
    auth_header: str
    timeout: float


def operation_tool(
    document: OpenAPIDocument, operation: str, access: Access, name: str | None = None
) -> ToolParts:
    """Return the parts of the tool of an operation; see `Tool.from_openapi`."""
    method, path, entry, item = _find(document, operation)
    servers = part_of(entry, "servers", list) or part_of(item, "servers", list)
    server = document.server(access.base_url, servers)
    origin = Origin.of(server)
    if not origin.is_loopback and origin not in Trust.of(access.hosts).hosts:
        raise DeclarationError(
            f"operation {operation!r} would send requests to {origin}, which is not allowed",
            hint=f"if you trust it, set hosts=[{str(origin)!r}]",
        )
    if not path.startswith("/"):  # it would continue the name of the server, as @evil.example
        raise DeclarationError(f"operation {operation!r}: the path {path!r:.100} must begin with /")
    try:
        shared = part_of(item, "parameters", list)
        schema, places = _arguments(document, entry, shared, access.auth_header)
    except RecursionError:
        raise DeclarationError(
            f"operation {operation!r}: the schema is nested too deeply"
        ) from None
    for part in path.split("{")[1:]:
        if Place(part.partition("}")[0], "path") not in places.values():
            raise DeclarationError(
                f"operation {operation!r}: the path parameter {part.partition('}')[0]!r} is not declared"
            )
    source = OpenAPISource(
        method.upper(),
        server + path,
        places,
        access.auth_env,
        access.auth_header,
        access.timeout,
        bool(schema["additionalProperties"]),
        document.file,
        operation,
        server,
    )
    shown = name or str(entry.get("operationId") or f"{method}_{path}")
    description = str(entry.get("description") or entry.get("summary") or "").strip()
    return ToolParts(usable_name(shown), description, schema, source, access.timeout + 5)


def operation_tools(
    document: OpenAPIDocument, only: Sequence[str], access: Access
) -> list[ToolParts]:
    """Return the parts of the tools of several operations; see `Tool.all_from_openapi`."""
    names = list(only) or document.operations()
    if not names:
        raise DeclarationError("the OpenAPI document has no operations")
    found: dict[str, ToolParts] = {}
    for operation in names:
        try:
            tool = operation_tool(document, operation, access)
        except DeclarationError as error:
            if only or error.hint:
                raise
            raise DeclarationError(
                error.message, hint="leave it out: name the others with only=[…]"
            ) from None
        if tool.name in found:
            raise DeclarationError(
                f"two operations would be tools named {tool.name!r}",
                hint="make one of them with Tool.from_openapi(…, name=…), and leave it out of only=[…]",
            )
        found[tool.name] = tool
    return list(found.values())


def _find(
    document: OpenAPIDocument, wanted: str
) -> tuple[str, str, Mapping[str, Any], Mapping[str, Any]]:
    """Return method, path, entry and the item of its path."""
    known = []
    for method, path, entry, item in document.entries():
        names = {str(entry.get("operationId", "")), f"{method.upper()} {path}"}
        if wanted in names:
            return method, path, entry, item
        known += sorted(filter(None, names))
    raise DeclarationError(
        f"the OpenAPI document has no operation {wanted!r}", hint=suggest_name(wanted, known)
    )


def _arguments(
    document: OpenAPIDocument, entry: Mapping[str, Any], shared: Sequence[Any], auth_header: str
) -> tuple[dict[str, Any], dict[str, Place]]:
    """Return the schema of the arguments, and where each is sent; ``auth_header`` is no argument."""
    properties: dict[str, Any] = {}
    required: list[str] = []
    places: dict[str, Place] = {}
    for each in (*shared, *part_of(entry, "parameters", list)):
        parameter = document.resolved(each)
        name, where = str(parameter.get("name")), str(parameter.get("in"))
        if where not in ("path", "query", "header"):
            if where == "cookie" and not parameter.get("required"):
                continue  # the server's default applies
            raise DeclarationError(
                f"the parameter {name!r} is sent in {where!r}, which is not supported",
                hint="tools send parameters in path, query and header",
            )
        if where == "header" and name.lower() in CONNECTION_HEADERS | {auth_header.lower()}:
            continue
        part, place = _parameter(document, name, where, parameter)
        if name in places and places[name].where != where:
            both = f"{places[name].where} and {where}"
            raise DeclarationError(f"two parameters are named {name!r}, in {both}")
        if parameter.get("description"):
            part["description"] = parameter["description"]
        properties[name], places[name] = part, place
        if (parameter.get("required") or where == "path") and name not in required:
            required.append(name)
    body, more = document.resolved(entry.get("requestBody", {})), False
    schema = _json_schema(body)
    if schema is not None:
        given = document.resolved(schema)
        _add_body(given, bool(body.get("required")), properties, required, places)
        if BODY not in places:
            more = given.get("additionalProperties", False)
            more = True if more == {} else more
    elif body:
        raise DeclarationError(
            f"operation {entry.get('operationId')!r} has a body that is not {JSON}"
        )
    whole = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": more,  # an unknown argument is reported to the model
    }
    return SchemaConverter(document).converted(whole), places


def _parameter(
    document: OpenAPIDocument, name: str, where: str, given: Mapping[str, Any]
) -> tuple[dict[str, Any], Place]:
    """Return the schema of a parameter, and where it is sent."""
    if "content" in given:
        schema = _json_schema(given)
        if schema is None:
            raise DeclarationError(f"the parameter {name!r} has content that is not {JSON}")
        return dict(document.resolved(schema)), Place(name, where, "json")
    part = dict(document.resolved(given.get("schema", {"type": "string"})))
    if where != "query":
        return part, Place(name, where)
    style = str(given.get("style") or "form")
    return part, Place(name, where, style, bool(given.get("explode", style == "form")))


def _add_body(
    schema: Mapping[str, Any],
    needed: bool,
    properties: dict[str, Any],
    required: list[str],
    places: dict[str, Place],
) -> None:
    members = schema.get("properties")
    whole = not isinstance(members, Mapping) or not COMBINED.isdisjoint(schema)
    if whole or not isinstance(members, Mapping) or members.keys() & properties.keys():
        if BODY in properties:
            raise DeclarationError(f"a parameter has the name of the body, {BODY!r}")
        properties[BODY], places[BODY] = dict(schema), Place(BODY, "whole")
        required += [BODY] * needed
        return
    for name, part in members.items():
        properties[str(name)], places[str(name)] = part, Place(str(name), "body")
    if needed:
        required += [name for name in part_of(schema, "required", list) if name not in required]


def _json_schema(part: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
    """Return the schema of JSON content, whose type may have parameters; None if there is none."""
    content = part.get("content")
    for kind, media in content.items() if isinstance(content, Mapping) else ():
        if str(kind).partition(";")[0].strip().lower() in (JSON, "application/*", "*/*"):
            return media.get("schema", {}) if isinstance(media, Mapping) else {}
    return None


async def _read(response: Any) -> str:  # noqa: ANN401 - an answer of the optional library
    from compound.engines.wire import AnswerTooLarge, IncompleteAnswer, bounded

    data = bytearray()
    try:
        async for chunk in bounded(response.aiter_raw(), response.headers, MAX_ANSWER):
            data += chunk
    except AnswerTooLarge:
        raise CallError(f"the answer is larger than {MAX_ANSWER // 2**20} MiB") from None
    except IncompleteAnswer as error:
        raise CallError(str(error)) from None
    return _decoded(
        bytes(data), response.headers.get("content-type", ""), response.charset_encoding
    )


def _decoded(data: bytes, kind: str, charset: str | None) -> str:
    """Return an answer as text; one that is none is only named."""
    known = charset if charset and charset.lower().startswith(CHARSETS) else None
    try:
        return data.decode(known or "utf-8")
    except (LookupError, UnicodeDecodeError):
        if charset is None and not kind.startswith(("text/", JSON)):
            return f"[{kind.partition(';')[0] or 'binary data'}, {len(data):,} bytes, omitted]"
        return data.decode(errors="replace")


def _httpx() -> Any:  # noqa: ANN401 - the optional library
    try:
        import httpx
    except ImportError:
        raise MissingExtra("a tool of an HTTP interface", "httpx", "remote") from None
    return httpx
