"""Errors as HTTP answers, in the form that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic_core import ErrorDetails, to_json

from compound.core.security.sanitize import sanitize_text

if TYPE_CHECKING:
    from starlette.responses import Response

INTERNAL = "internal error; the server's log has the reason"


@dataclass
class HTTPProblem(Exception):
    """A request that cannot be served."""

    status: int
    kind: str
    message: str
    run: str = ""
    details: Sequence[Mapping[str, object]] = ()
    headers: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, object]:
        """Return the body as JSON types."""
        error: dict[str, object] = {
            "message": sanitize_text(self.message),
            "type": self.kind,
            "code": self.kind,
            "param": None,
        }
        if self.run:
            error["run_id"] = self.run
        if self.details:
            error["details"] = list(self.details)
        return {"error": error}

    def response(self) -> Response:
        """Return the answer."""
        return json_response(self.document(), self.status, self.headers)


def json_response(
    document: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a JSON answer."""
    # imported here because systems with external agents are loaded without it
    from starlette.responses import Response

    return Response(
        to_json(document, inf_nan_mode="null"), status, dict(headers or {}), "application/json"
    )


def invalid(errors: Sequence[ErrorDetails]) -> HTTPProblem:
    """Return the problem of a body that does not match its schema; it names every field."""
    details = [
        {"field": ".".join(map(str, error["loc"])), "problem": error["msg"]} for error in errors
    ]
    first = details[0]
    where = f"{first['field']}: " if first["field"] else ""
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    return HTTPProblem(422, "invalid_request", f"{where}{first['problem']}{more}", details=details)
