"""Messages between the driver and its workers: typed, as JSON, and never code or pickles.

A batch of messages travels as one JSON text. Each message of a job carries the job's number, and
each question of a worker an id, which the `Reply` repeats.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from typing import Annotated, Literal, Protocol, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    TypeAdapter,
    ValidationError,
)

from compound.core.errors import CompoundError

VERSION = 2
T = TypeVar("T")
Document = dict[str, object]
UsageFields = tuple[int, int, int, float, int]


def checked_usage_fields(fields: UsageFields) -> UsageFields:
    """Return the fields of a usage, which only ever adds to the spending of the driver.

    Raises:
        ValueError: a number is negative, infinite or NaN.
    """
    if not all(0 <= number < math.inf for number in fields):
        raise ValueError(
            f"usage must hold finite numbers that are not negative, but is {list(fields)}"
        )
    return fields


Numbers = Annotated[UsageFields, AfterValidator(checked_usage_fields)]  # the fields of a `Usage`


class ProtocolError(CompoundError):
    """A process sent something that is no message of this version."""


class WorkerMessage(BaseModel):
    """Base of all messages."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SystemFile(WorkerMessage):
    """The file of a system, from which a worker rebuilds it.

    Attributes:
        text: content of the file.
        path: its absolute path; code and data that it names are searched beside it.
        overrides: entries of the file that are replaced.
        allow_import: whether the file may name code.
        trust: servers and keys that the file may use.
    """

    text: str
    path: str
    overrides: tuple[tuple[str, str], ...] = ()
    allow_import: bool = True
    trust: tuple[str, ...] = ()


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

    type: Literal["hello"] = "hello"
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
        inputs: a value for each input.
        seed: seed of the random streams; a fork has that of its trace.
        bypass: whether cached results are ignored.
        caches: whether the driver has a cache.
        shares: whether the entries of that cache are read by other programs.
        settings: by component, settings that override its own.
        samples: by component, sample indices that override ``sample``.
        priced: whether the cost is limited, so that models without a price are rejected.
        fork: what to change in a recorded trace; None for a new run.
        alone: whether to run only the changed call of the fork.
        done: results of calls that a lost worker finished, by address.
    """

    type: Literal["start"] = "start"
    job: int
    configuration: Document
    inputs: Document
    example: str
    sample: int
    seed: int
    bypass: bool
    caches: bool
    shares: bool
    settings: dict[str, Document]
    samples: dict[str, int]
    priced: bool
    fork: ForkRequest | None = None
    alone: bool = False
    done: dict[str, Document] = {}


class Cancel(WorkerMessage):
    """Stop a job; nothing about it is sent any more."""

    type: Literal["cancel"] = "cancel"
    job: int


class Reply(WorkerMessage):
    """Answer to a question of a worker."""

    type: Literal["reply"] = "reply"
    id: int
    value: Document


# From a worker to the driver


class Ready(WorkerMessage):
    """The system is rebuilt."""

    type: Literal["ready"] = "ready"
    facts: Facts


class Refused(WorkerMessage):
    """The system cannot be rebuilt."""

    type: Literal["refused"] = "refused"
    message: str
    hint: str


class Claim(WorkerMessage):
    """Ask for the result of a cached call, or for the right to execute it."""

    type: Literal["claim"] = "claim"
    job: int
    id: int
    key: str
    component: str


class Finished(WorkerMessage):
    """A call was executed; ``id`` is that of its claim and ``key`` its cache key, 0 and "" without one."""

    type: Literal["finished"] = "finished"
    job: int
    id: int
    key: str
    address: str
    component: str
    result: Document


class Enter(WorkerMessage):
    """Ask for a turn and a reservation to send a request to a model's server; see `Throttle.admit`."""

    type: Literal["enter"] = "enter"
    job: int
    id: int
    lm: str
    seed: int
    patience: float
    worst: Numbers
    claim: Claim | None = None


class Leave(WorkerMessage):
    """End a turn and charge what was used; ``answered`` if the server answered."""

    type: Literal["leave"] = "leave"
    job: int
    turn: int
    answered: bool
    used: list[Numbers]


class Rejected(WorkerMessage):
    """The server rejected the request of a turn because of its rate limit; see `Throttle.refuse`."""

    type: Literal["rejected"] = "rejected"
    job: int
    id: int
    turn: int
    retry_after: float | None


class Withdraw(WorkerMessage):
    """Take back a question, or the right to execute a call, because its asker was cancelled."""

    type: Literal["withdraw"] = "withdraw"
    job: int
    id: int


class Reserve(WorkerMessage):
    """Reserve the worst case of a request that is not sent to a server; see `Meter.reserve`."""

    type: Literal["reserve"] = "reserve"
    job: int
    id: int
    worst: Numbers


class Settle(WorkerMessage):
    """Charge what was used of a reservation."""

    type: Literal["settle"] = "settle"
    job: int
    lease: int
    used: list[Numbers]


class Done(WorkerMessage):
    """A job is finished: the trace of a run, or the one call of a job that resamples a call."""

    type: Literal["done"] = "done"
    job: int
    result: Document
    incidents: dict[str, NonNegativeInt]


class JobFailed(WorkerMessage):
    """A job ended with an error that ends the evaluation, such as a missing library."""

    type: Literal["failed"] = "failed"
    job: int
    error: str
    message: str
    hint: str


class Notice(WorkerMessage):
    """One line for the user."""

    type: Literal["notice"] = "notice"
    text: str


ToWorker = Annotated[Hello | Start | Cancel | Reply, Field(discriminator="type")]
ToDriver = Annotated[
    Ready
    | Refused
    | Claim
    | Finished
    | Enter
    | Leave
    | Rejected
    | Withdraw
    | Reserve
    | Settle
    | Done
    | JobFailed
    | Notice,
    Field(discriminator="type"),
]
_TO_WORKER: TypeAdapter[list[ToWorker]] = TypeAdapter(list[ToWorker])
_TO_DRIVER: TypeAdapter[list[ToDriver]] = TypeAdapter(list[ToDriver])


def encode(messages: Sequence[WorkerMessage]) -> str:
    """Return messages as one text."""
    # the standard library writes NaN and lone surrogates in a form that it reads back
    return json.dumps([dict(message) for message in messages], default=dict)


def for_worker(text: str) -> list[ToWorker]:
    """Parse messages to a worker.

    Raises:
        ProtocolError: the text holds anything else.
    """
    return _parse(_TO_WORKER, text)


def for_driver(text: str) -> list[ToDriver]:
    """Parse messages to the driver.

    Raises:
        ProtocolError: the text holds anything else.

    >>> for_driver(encode([Withdraw(job=1, id=2)]))
    [Withdraw(type='withdraw', job=1, id=2)]
    """
    return _parse(_TO_DRIVER, text)


def _parse(adapter: TypeAdapter[list[T]], text: str) -> list[T]:
    try:
        return adapter.validate_python(json.loads(text))
    except (ValidationError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()
        raise ProtocolError(
            f"a message that cannot be read: {' '.join(reason[:3])[:300]}"
        ) from None


class WorkerLost(Exception):
    """The other end of a connection is gone: the worker died, or its machine cannot be reached."""


class WorkerConnection(Protocol):
    """One end of a connection. Texts arrive once and in order, or the connection is lost."""

    async def send(self, text: str) -> None:
        """Send a text.

        Raises:
            WorkerLost: the other end is gone.
        """
        ...

    async def receive(self) -> str:
        """Wait for the next text.

        Raises:
            WorkerLost: the other end is gone.
        """
        ...

    async def aclose(self) -> None:
        """Close the connection; at the driver's end, end the worker."""
        ...


class Transport(Protocol):
    """Starts workers."""

    async def machines(self) -> int:
        """Return the number of machines that can run workers.

        Raises:
            CompoundError: there is none.
        """
        ...

    async def connect(self, number: int) -> WorkerConnection:
        """Start a worker and return the driver's end of its connection.

        Raises:
            CompoundError: no worker can be started; the message says why.
        """
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


class Tasks(Protocol):
    """Runs tasks: a task receives a text and returns one."""

    async def check(self, text: str) -> dict[str, str]:
        """Run the check on every machine that can run tasks; return the answer of each by its name.

        Raises:
            CompoundError: there is no such machine, or one does not answer.
        """
        ...

    async def run(self, text: str) -> str:
        """Run a task on a machine with a free place and return its answer.

        Raises:
            WorkerLost: its process or its machine is gone.
        """
        ...

    async def aclose(self) -> None:
        """End the tasks that are running, and release what was opened."""
        ...
