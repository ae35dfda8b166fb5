"""Messages between the driver and its workers: typed, as JSON, and never code or pickles."""

from __future__ import annotations

import json
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from compound.core.engine import Usage
from compound.core.errors import CompoundError
from compound.execution.budget import StoredUsage
from compound.yaml.program import SystemFile

VERSION = 6
Document = dict[str, object]


class ProtocolError(CompoundError):
    """A process sent something that is no message of this version."""


class WorkerMessage(BaseModel):
    """Base of all messages."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Facts(WorkerMessage):
    """Facts that must be equal on the driver and on every worker."""

    protocol: int  # version of these messages
    compound: str  # version of the package
    source: str  # digest of its source files
    python: str  # version, major and minor
    system: str  # identity of the rebuilt system
    components: dict[str, str]  # their versions, which cover code and data
    modules: dict[str, str]  # digests of those imported from the folder of the file


# From the driver to a worker


class Hello(WorkerMessage):
    """First message to a worker."""

    program: SystemFile


class MakeCall(WorkerMessage):
    """Execute a call; ``values`` are those of the component's settings."""

    component: str
    address: str
    seed: int
    values: Document
    inputs: Document


class Generate(WorkerMessage):
    """Send a request to a model in the process of the worker."""

    lm: str
    request: Document


# From a worker to the driver


class Ready(WorkerMessage):
    """The system is rebuilt."""

    facts: Facts


class Refused(WorkerMessage):
    """The system cannot be rebuilt."""

    message: str
    hint: str


class Done(WorkerMessage):
    """The result of a call, or the answer of a model."""

    result: Document


class Declined(WorkerMessage):
    """The call needs what only the driver has, such as a model behind a server, or its budget."""


class JobFailed(WorkerMessage):
    """It ended with an error; ``error`` is its class, "" for one of another library."""

    error: str
    message: str
    hint: str
    kind: str = ""
    retry_after: float | None = None
    charged: StoredUsage | None = None


ToWorker = (Hello, MakeCall, Generate)
ToDriver = (Ready, Refused, Done, Declined, JobFailed)


def encode(message: WorkerMessage) -> str:
    """Return a message as text."""
    # the standard library writes NaN and lone surrogates in a form that it reads back
    return json.dumps({"type": type(message).__name__, **dict(message)}, default=_plain)


def _plain(part: Usage | WorkerMessage) -> object:
    return part.to_json() if isinstance(part, Usage) else dict(part)


def decode(text: str, *kinds: type[WorkerMessage]) -> WorkerMessage:
    """Parse a message of one of some kinds.

    Raises:
        ProtocolError: the text is anything else.

    >>> decode(encode(Declined()), *ToDriver)
    Declined()
    """
    known = {kind.__name__: kind for kind in kinds}
    try:
        data = json.loads(text)
        return known[data.pop("type")].model_validate(data)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).splitlines()
        raise ProtocolError(
            f"a message that cannot be read: {' '.join(reason[:3])[:300]}"
        ) from None


class WorkerLost(Exception):
    """The other end of a connection is gone: the worker died, or its machine cannot be reached."""


class WorkerConnection(Protocol):
    """The driver's end of a connection to a worker."""

    async def call(self, text: str) -> str:
        """Send a text and return the answer of `CallWorker.call`, or raise `WorkerLost`."""
        ...

    async def aclose(self) -> None:
        """End the worker."""
        ...


class Transport(Protocol):
    """Starts workers; raises `CompoundError` if it cannot."""

    async def machines(self) -> int:
        """Return the number of machines that can run workers, at least one."""
        ...

    async def connect(self, number: int) -> WorkerConnection:
        """Start a worker and return the driver's end of its connection."""
        ...

    async def aclose(self) -> None:
        """Release what was opened to start workers."""
        ...
