"""Messages between the driver and its workers: typed, as JSON, and never code or pickles.

A batch of messages travels as one JSON text. Each message of a job carries the job's number.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Protocol, cast, get_args

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


class JobMessage(WorkerMessage):
    """Message about a job."""

    job: int


class Facts(WorkerMessage):
    """Facts that must be equal on the driver and on every worker.

    Attributes:
        protocol: version of these messages.
        compound: version of the package.
        source: digest of the package's source files.
        python: version of Python, major and minor.
        system: identity of the rebuilt system.
        components: version of each component, which covers its code and data.
        modules: digest of each module imported from the folder of the file.
    """

    protocol: int
    compound: str
    source: str
    python: str
    system: str
    components: dict[str, str]
    modules: dict[str, str]


# From the driver to a worker


class Hello(WorkerMessage):
    """First message to a worker."""

    program: SystemFile


class Run(JobMessage):
    """Execute a call.

    Attributes:
        component: the name of the component.
        address: the address of the call in its trace.
        seed: seed of the call's random stream.
        values: the values of the component's settings.
        inputs: a value for each input.
    """

    component: str
    address: str
    seed: int
    values: Document
    inputs: Document


class Generate(JobMessage):
    """Send a request to a model in the process of the worker."""

    lm: str
    request: Document


class Cancel(JobMessage):
    """Stop a job; nothing about it is sent any more."""


# From a worker to the driver


class Ready(WorkerMessage):
    """The system is rebuilt."""

    facts: Facts


class Refused(WorkerMessage):
    """The system cannot be rebuilt."""

    message: str
    hint: str


class Done(JobMessage):
    """A job is finished: the result of its call, or the answer of its model."""

    result: Document


class Declined(JobMessage):
    """The call needs what only the driver has, such as a model behind a server, or its budget."""


class JobFailed(JobMessage):
    """A job ended with an error; ``error`` is its class, "" for one of another library."""

    error: str
    message: str
    hint: str
    kind: str = ""
    retry_after: float | None = None
    charged: StoredUsage | None = None


ToWorker = Hello | Run | Generate | Cancel
ToDriver = Ready | Refused | Done | Declined | JobFailed


def name_of(message: type[WorkerMessage]) -> str:
    """Return the name of a kind of messages in texts."""
    return message.__name__.lower()


def encode(messages: Sequence[WorkerMessage]) -> str:
    """Return messages as one text."""
    # the standard library writes NaN and lone surrogates in a form that it reads back
    named = [{"type": name_of(type(message)), **dict(message)} for message in messages]
    return json.dumps(named, default=_plain)


def _plain(part: Usage | WorkerMessage) -> object:
    return part.to_json() if isinstance(part, Usage) else dict(part)


def for_worker(text: str) -> list[ToWorker]:
    """Parse messages to a worker.

    Raises:
        ProtocolError: the text holds anything else.
    """
    return cast("list[ToWorker]", _parse(get_args(ToWorker), text))


def for_driver(text: str) -> list[ToDriver]:
    """Parse messages to the driver.

    Raises:
        ProtocolError: the text holds anything else.

    >>> for_driver(encode([Declined(job=1)]))
    [Declined(job=1)]
    """
    return cast("list[ToDriver]", _parse(get_args(ToDriver), text))


def _parse(kinds: Sequence[type[WorkerMessage]], text: str) -> list[WorkerMessage]:
    known = {name_of(kind): kind for kind in kinds}
    try:
        return [known[data.pop("type")].model_validate(data) for data in json.loads(text)]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).splitlines()
        raise ProtocolError(
            f"a message that cannot be read: {' '.join(reason[:3])[:300]}"
        ) from None


class WorkerLost(Exception):
    """The other end of a connection is gone: the worker died, or its machine cannot be reached."""


class WorkerConnection(Protocol):
    """One end of a connection. Texts arrive once and in order, or the connection is lost."""

    async def send(self, text: str) -> None:
        """Send a text, or raise `WorkerLost`."""
        ...

    async def receive(self) -> str:
        """Wait for the next text, or raise `WorkerLost`."""
        ...

    async def aclose(self) -> None:
        """Close the connection; at the driver's end, end the worker."""
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


class Outbox:
    """Sends messages in order, those that wait together as one text."""

    def __init__(self, connection: WorkerConnection) -> None:
        self._connection = connection
        self._waiting: list[WorkerMessage] = []
        self._some = asyncio.Event()

    def post(self, message: WorkerMessage) -> None:
        """Queue a message."""
        self._waiting.append(message)
        self._some.set()

    async def run(self) -> None:
        """Send queued messages.

        Raises:
            WorkerLost: the other end is gone.
        """
        while True:
            await self._some.wait()
            batch, self._waiting = self._waiting, []
            self._some.clear()
            await self._connection.send(encode(batch))
