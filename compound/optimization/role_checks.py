"""Run optimizers and schedulers, which may be user code, and validate their results."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from compound.core.errors import CompoundError, suggest_name
from compound.core.formatting import short_repr
from compound.graph.registry.user_code import UserCodeError, check_signature, definition, reported
from compound.graph.system import System
from compound.optimization.method import Job, JobRecord, Method, Optimizer, Progress, Proposal, Task

__all__ = ["RunningOptimizer", "choose_job", "json_problem"]


@dataclass(frozen=True)
class RunningOptimizer:
    """An optimizer in execution."""

    name: str
    optimizer: Optimizer

    @property
    def _role(self) -> str:
        return f"optimizer {self.name!r} at {definition(self.optimizer)}"

    async def events(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Yield the events of the optimizer, validated.

        Raises:
            UserCodeError: the optimizer raised an error, is not an async generator, or yielded
                another type.
        """
        given: object = self.optimizer
        if inspect.isclass(given):
            name = given.__name__
            raise UserCodeError(
                f"{self._role} is the class {name}", hint=f"create an instance: {name}(…)"
            )
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
                yield self._check_event(event)

    def _check_event(self, event: object) -> Progress | Proposal:
        """Reject invalid events of an optimizer."""
        if isinstance(event, Progress):
            self._check_fields("Progress", event.note, step=event.step, of=event.of)
            for name, value in (("state", event.state), ("facts", event.facts)):
                self._check_json(f"the {name} of Progress", value)
        elif isinstance(event, Proposal):
            self._check_fields("Proposal", event.note, tried=event.tried)
            self._check_json("the facts of Proposal", event.facts)
            for name, score in (("before", event.before), ("after", event.after)):
                if not isinstance(score, int | float | None):
                    raise UserCodeError(
                        f"{self._role}: {name} of Proposal is {short_repr(score)}, which is not a number",
                        hint="give the mean score, such as evaluation.mean",
                    )
        else:
            raise UserCodeError(f"{self._role} yielded {short_repr(event)}", hint=_ASYNC_GENERATOR)
        return event

    def _check_fields(self, event: str, note: object, **counts: object) -> None:
        if not isinstance(note, str):
            raise UserCodeError(
                f"{self._role}: note of {event} is {short_repr(note)}, which is not a string",
                hint="give one line",
            )
        for name, count in counts.items():
            if not isinstance(count, int | None):
                raise UserCodeError(
                    f"{self._role}: {name} of {event} is {short_repr(count)}, which is not an integer",
                    hint=f"give a number of type int, or omit {name}",
                )

    def _check_json(self, what: str, value: object) -> None:
        if not isinstance(value, Mapping):
            raise UserCodeError(
                f"{self._role}: {what} must be a dictionary, but is {short_repr(value)}", hint=_JSON
            )
        if problem := json_problem(value):
            raise UserCodeError(f"{self._role}: {what} must be JSON, but {problem}", hint=_JSON)

    def validate(self, proposal: Proposal | None, working: System) -> Proposal:
        """Return the proposal if the system can be bound to it.

        Raises:
            UserCodeError: there is no proposal, or it has an unknown parameter or an invalid value.
        """
        if proposal is None:
            raise UserCodeError(
                f"{self._role} ended without a Proposal",
                hint="yield Proposal({}) if nothing better was found",
            )
        if not isinstance(proposal.values, Mapping):
            raise UserCodeError(
                f"{self._role} proposed {short_repr(proposal.values)}, which is not a dictionary of values",
                hint="yield Proposal({key: value}), or Proposal({}) if nothing better was found",
            )
        for key in proposal.values:
            if key not in working.parameters:
                raise UserCodeError(
                    f"{self._role} proposed {key!r}, which is not a parameter of the system",
                    hint=suggest_name(str(key), working.parameters),
                )
        try:
            working.bind({**working.configuration, **proposal.values})
        except CompoundError as error:
            raise UserCodeError(
                f"{self._role}: {error.message}",
                hint=error.hint or "propose a value of the parameter's space",
            ) from error
        return proposal


def json_problem(value: object, place: str = "") -> str:
    """Return what in a value is not JSON, or ``""``.

    >>> json_problem({"a": [1, None]}), json_problem({"a": [{2}]}), json_problem({"a": {1: 2}})
    ('', 'a.0 is {2}', 'a has the key 1, which is not a string')
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                return f"{place or 'it'} has the key {key!r}, which is not a string"
            if problem := json_problem(item, f"{place}.{key}".removeprefix(".")):
                return problem
        return ""
    if isinstance(value, list | tuple):
        problems = (
            json_problem(item, f"{place}.{i}".removeprefix(".")) for i, item in enumerate(value)
        )
        return next(filter(None, problems), "")
    if value is None or isinstance(value, str | int | float | bool):
        return ""
    return f"{place or 'it'} is {short_repr(value)}"


def choose_job(method: Method, history: Sequence[JobRecord], seed: int) -> Job:
    """Return the job chosen by the scheduler of a method.

    Raises:
        UserCodeError: the scheduler raised an error, or did not return one of the jobs.
    """
    with reported(f"scheduler of method {method.name!r}", method.scheduler):
        job = method.scheduler.choose(method.jobs, history, seed)
    known = [(each.optimizer, each.keys) for each in method.jobs]
    if not isinstance(job, Job) or (job.optimizer, job.keys) not in known:
        raise UserCodeError(
            f"the scheduler at {definition(method.scheduler)} chose {short_repr(job)}",
            hint="choose must return one of the given jobs",
        )
    return job


_ASYNC_GENERATOR = (
    "propose must be an async generator: async def propose(self, task), which yields Progress any number of "
    "times and one Proposal at the end"
)
_JSON = "store numbers, texts, lists and dictionaries, as cp.ext.State.to_json does"
