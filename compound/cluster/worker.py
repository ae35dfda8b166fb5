"""A worker: rebuilds a system from its file, and makes calls and requests that the driver sends."""

from __future__ import annotations

import asyncio
import traceback
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from compound.cluster import messages
from compound.cluster.handshake import facts_of, rebuild
from compound.cluster.messages import Document
from compound.cluster.wire import NotSendable, result_to_wire, values_from_wire
from compound.core import engine
from compound.core.engine import Engine, Request, Usage
from compound.core.errors import CallError, CompoundError
from compound.core.image import Image
from compound.core.security.sanitize import remember_environment
from compound.execution.budget import Meter
from compound.execution.caller import Caller, PendingCall
from compound.execution.sender import Sender, find_in
from compound.graph.component import Operation
from compound.graph.registry.engines import for_system

SHOWN = 20  # last lines of a traceback that the driver shows
REQUEST = TypeAdapter(Request)
REQUEST.rebuild(_types_namespace={**vars(engine), "Image": Image})  # a type of its messages


class NeedsDriver(BaseException):
    """A component uses a model or the budget; no error of components, so that few catch it."""


class _Driver(Meter):
    """Refuses a call what only the driver has, and notes that it was asked for."""

    asked = False

    def reserve(self, worst: Usage) -> Any:  # noqa: ANN401 - never returns
        self.find("")

    def find(self, lm: str) -> Engine:
        self.asked = True
        raise NeedsDriver


class CallWorker:
    """A worker, which has one system."""

    def __init__(self) -> None:
        remember_environment()  # so that no failure holds a key of this machine
        self._caller = Caller(None, None, Meter(), asyncio.sleep)
        self._engines: dict[str, Engine] = {}

    async def call(self, text: str) -> str:
        """Answer a message of the driver; several are answered at a time."""
        message = messages.decode(text, *messages.ToWorker)
        try:
            return messages.encode(await self._answer(message))
        except (NeedsDriver, NotSendable):
            return messages.encode(messages.Declined())
        except CompoundError as error:
            shown = ("kind", "retry_after", "charged")
            facts = {name: getattr(error, name) for name in shown if hasattr(error, name)}
            return _failure(type(error).__name__, error.message, error.hint, **facts)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # by the driver, which does not wait for a result
                raise
            return _failure("", "a component raised CancelledError", _end_of_traceback(error))
        except Exception as error:  # noqa: BLE001 - the driver reports it
            return _failure("", f"{type(error).__name__}: {error}", _end_of_traceback(error))

    async def _answer(self, message: messages.WorkerMessage) -> messages.WorkerMessage:
        match message:
            case messages.MakeCall():
                return messages.Done(result=await self._run(message))
            case messages.Generate():
                return messages.Done(result=await self._generate(message))
            case messages.Hello():
                return self._rebuild(message)
        raise AssertionError(message)

    def _rebuild(self, hello: messages.Hello) -> messages.WorkerMessage:
        try:
            program = rebuild(hello.program)
            self._components = program.system.components
            self._find = find_in(for_system(program.find_engine, program.system))
            return messages.Ready(facts=facts_of(program.system, program.folder))
        except CompoundError as error:
            return messages.Refused(message=error.message, hint=error.hint)
        except Exception as error:  # noqa: BLE001 - code that the file names may raise anything
            return messages.Refused(message=f"{type(error).__name__}: {error}", hint="")

    async def _run(self, run: messages.MakeCall) -> Document:
        component = self._components[run.component]
        assert isinstance(component, Operation)
        inputs = values_from_wire(run.inputs, component.inputs or {})
        pending = PendingCall(
            component, run.address, inputs, run.values, (), 0, component.outputs, _seed=run.seed
        )
        driver = _Driver()
        caller = self._caller.replace(meter=driver, _sender=Sender(driver.find))
        try:
            result = await caller.execute(pending, "")
        finally:
            if driver.asked:  # also if the component caught the error, or raised it in a group
                raise NeedsDriver
        return result_to_wire(result, component.outputs)

    async def _generate(self, message: messages.Generate) -> Document:
        if message.lm not in self._engines:
            self._engines[message.lm] = self._find(message.lm)
        request = REQUEST.validate_python(message.request)
        try:
            return asdict(await self._engines[message.lm].generate(request))
        except CompoundError:
            raise
        except Exception as error:  # a failed call, as in one process
            raise CallError(f"{type(error).__name__}: {error}") from error


def _failure(error: str, message: str, hint: str, **facts: object) -> str:
    found = {"error": error, "message": message, "hint": hint, **facts}
    return messages.encode(messages.JobFailed.model_validate(found))


def _end_of_traceback(error: BaseException) -> str:
    return "\n".join("".join(traceback.format_exception(error)).splitlines()[-SHOWN:])
