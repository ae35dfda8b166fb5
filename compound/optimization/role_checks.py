"""Run optimizers and schedulers, which may be user code, and validate their results."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from compound.errors import CompoundError, nearest
from compound.formatting import short
from compound.graph.system import System
from compound.optimization.method import Job, JobRecord, Method, Optimizer, Progress, Proposal, Task
from compound.registry.user_code import UserCodeError, check_signature, definition, reported
from compound.storage.state import StateError

__all__ = ["Proposing", "choose_job"]


@dataclass(frozen=True)
class Proposing:
    """An optimizer in execution.

    Attributes:
        name: name of the optimizer in the method.
        optimizer: the optimizer.
    """

    name: str
    optimizer: Optimizer

    @property
    def _role(self) -> str:
        return f"optimizer {self.name!r} at {definition(self.optimizer)}"

    async def events(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Yield the events of the optimizer, validated.

        Raises:
            UserCodeError: the optimizer raised an error, is not an async generator, or yielded another type.
        """
        propose = getattr(self.optimizer, "propose", None)
        if not callable(propose):
            raise UserCodeError(f"{self._role} has no method propose", hint=_ASYNC_GENERATOR)
        check_signature(propose, f"propose of optimizer {self.name!r}", "task")
        with reported(f"optimizer {self.name!r}", self.optimizer):
            events = propose(task)
        if not hasattr(events, "__aiter__"):
            if inspect.iscoroutine(events):
                events.close()
            raise UserCodeError(
                f"{self._role}: propose returned {type(events).__name__}, which is not an async generator",
                hint=_ASYNC_GENERATOR,
            )
        with reported(f"optimizer {self.name!r}", self.optimizer):
            async for event in events:
                if not isinstance(event, Progress | Proposal):
                    raise UserCodeError(f"{self._role} yielded {short(event)}", hint=_ASYNC_GENERATOR)
                yield event

    @contextmanager
    def storage_errors(self, progress: Progress) -> Iterator[None]:
        """Report the optimizer if its progress is not JSON; other errors pass unchanged.

        Raises:
            UserCodeError: the state or the facts are not JSON.
        """
        try:
            yield
        except (StateError, TypeError, ValueError) as error:
            if _is_json([dict(progress.state), dict(progress.facts)]):
                raise
            raise UserCodeError(
                f"{self._role}: the state and the facts of Progress must be JSON: {error}",
                hint="store numbers, texts, lists and dictionaries, "
                "as compound.storage.state.State.to_json does",
            ) from error

    def validate(self, proposal: Proposal | None, working: System) -> Proposal:
        """Return the proposal if the system can be bound to it.

        Args:
            proposal: the last one yielded by the optimizer.
            working: the system that it changes.

        Raises:
            UserCodeError: there is no proposal, or it has an unknown parameter or an invalid value.
        """
        if proposal is None:
            raise UserCodeError(
                f"{self._role} ended without a Proposal",
                hint="yield Proposal({}) if nothing better was found",
            )
        for key in proposal.values:
            if key not in working.parameters:
                raise UserCodeError(
                    f"{self._role} proposed {key!r}, which is not a parameter of the system",
                    hint=nearest(str(key), working.parameters),
                )
        try:
            working.bind({**working.configuration, **proposal.values})
        except CompoundError as error:
            raise UserCodeError(f"{self._role}: {error.message}", hint=error.hint) from error
        return proposal


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def choose_job(method: Method, history: Sequence[JobRecord], seed: int) -> Job:
    """Return the job chosen by the scheduler of a method.

    Args:
        method: the method.
        history: the finished jobs.
        seed: seed of the scheduler's random streams.

    Raises:
        UserCodeError: the scheduler raised an error, or did not return one of the jobs.
    """
    with reported(f"scheduler of method {method.name!r}", method.scheduler):
        job = method.scheduler.choose(method.jobs, history, seed)
    known = [(each.optimizer, each.keys) for each in method.jobs]
    if not isinstance(job, Job) or (job.optimizer, job.keys) not in known:
        raise UserCodeError(
            f"the scheduler at {definition(method.scheduler)} chose {short(job)}",
            hint="choose must return one of the given jobs",
        )
    return job


_ASYNC_GENERATOR = (
    "propose must be an async generator: async def propose(self, task), which yields Progress any number of "
    "times and one Proposal at the end"
)
