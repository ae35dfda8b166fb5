"""Messages between the driver and its workers: typed, as JSON, and never code or pickles.

A batch of messages travels as one JSON text. Each message of a job carries the job's number, and
each question of a worker an id, which the `Reply` repeats.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Protocol, cast, get_args

from pydantic import BaseModel, ConfigDict, NonNegativeInt

from compound.core.engine import Usage
from compound.core.errors import CompoundError
from compound.execution.budget import StoredUsage
from compound.yaml.program import SystemFile

VERSION = 5
Document = dict[str, object]


class ProtocolError(CompoundError):
    """A process sent something that is no message of this version."""


class WorkerMessage(BaseModel):
    """Base of all messages."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class JobMessage(WorkerMessage):
    """Message about a job."""

    job: int


class JobQuestion(JobMessage):
    """Message of a worker about a job, mostly with a `Reply`, which repeats the id."""

    id: int


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
    seed: int
    folder: str | None = None


class ForkRequest(WorkerMessage):
    """Changes of a job to a recorded trace; see `Executor.fork`."""

    calls: list[Document]
    address: str
    outputs: Document | None = None
    resample: int = 0
    settings: Document = {}


class Start(WorkerMessage):
    """Run an example.

    Attributes:
        configuration: the values that the system is bound to.
        seed: seed of the random streams; a fork has that of its trace.
        caches: whether the driver has a cache.
        shares: whether the entries of that cache are read by other programs.
        priced: whether the cost is limited, so that models without a price are rejected.
        inputs: a value for each input.
        bypass: whether cached results are ignored.
        settings: by component, settings that override its own.
        samples: by component, sample indices that override ``sample``.
        fork: what to change in a recorded trace; None for a new run.
        done: results of calls that a lost worker finished, by address.
    """

    job: int
    configuration: Document
    example: str
    sample: int
    seed: int
    caches: bool
    shares: bool
    priced: bool
    inputs: Document = {}
    bypass: bool = False
    settings: dict[str, Document] = {}
    samples: dict[str, int] = {}
    fork: ForkRequest | None = None
    done: dict[str, Document] = {}


class Cancel(JobMessage):
    """Stop a job; nothing about it is sent any more."""


class Reply(WorkerMessage):
    """Answer to a question of a worker."""

    id: int
    value: Document


# From a worker to the driver


class Ready(WorkerMessage):
    """The system is rebuilt."""

    facts: Facts


class Refused(WorkerMessage):
    """The system cannot be rebuilt."""

    message: str
    hint: str


class Claim(JobQuestion):
    """Ask for the result of a cached call, or for the right to execute it."""

    key: str
    component: str


class Finished(JobQuestion):
    """A call was executed; ``id`` is that of its claim and ``key`` its cache key, 0 and "" without one."""

    key: str
    address: str
    component: str
    result: Document


class Enter(JobQuestion):
    """Ask for a turn and a reservation to send a request to a model's server; see `Throttle.admit`.

    Without a model, it reserves the worst case of a request that is not sent to a server.
    """

    worst: StoredUsage
    lm: str = ""
    seed: int = 0
    patience: float = 0.0


class Leave(JobMessage):
    """End a request and charge what was used; ``turn`` is the id of its question."""

    turn: int
    answered: bool
    used: list[StoredUsage]


class Rejected(JobQuestion):
    """The server rejected the request of a turn because of its rate limit; see `Throttle.refuse`."""

    turn: int
    retry_after: float | None


class Withdraw(JobQuestion):
    """Take back a question, or the right to execute a call, because its asker was cancelled."""


class Done(JobMessage):
    """A job is finished: the trace of its run."""

    result: Document
    incidents: dict[str, NonNegativeInt]


class JobFailed(JobMessage):
    """A job ended with an error that ends the evaluation, such as a missing library."""

    error: str
    message: str
    hint: str


class Notice(WorkerMessage):
    """One line for the user."""

    text: str


ToWorker = Hello | Start | Cancel | Reply
ToDriver = (
    Ready
    | Refused
    | Claim
    | Finished
    | Enter
    | Leave
    | Rejected
    | Withdraw
    | Done
    | JobFailed
    | Notice
)


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

    >>> for_driver(encode([Withdraw(job=1, id=2)]))
    [Withdraw(job=1, id=2)]
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
