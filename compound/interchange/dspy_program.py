"""A DSPy program as a composite: its Python ``forward`` runs, and each predictor call is part of the trace.

The body holds every predictor as a node. A turn runs the one that ``forward`` calls next, so
predictors appear in the trace in execution order, whatever the control flow. Later calls may depend
on all earlier ones: a fork at one call runs ``forward`` again, with the results of the calls before
it reused.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

from compound.core.errors import CallError, CompoundError, ParseError, RateLimited, TransientError
from compound.core.threads import run_in_own_thread
from compound.execution.schedule import ABSENT, Mark
from compound.graph.component import Input, Source, Value, merge_addresses
from compound.graph.composite import Composite, RunBody
from compound.graph.configuration import digest
from compound.graph.fingerprint import code_digest
from compound.graph.registry.user_code import located
from compound.graph.system import System
from compound.graph.types import Port, as_declared
from compound.interchange.dspy_predictor import REMEDY, DSPyPredictor

RUN = "compound_run"  # setting of DSPy that holds the run which its predictors belong to
CHOSEN = "predictor"
SEPARATOR = "__"


class PredictorFailed(ValueError):
    """A predictor's call failed; the trace records the reason. Programs may catch it, like DSPy's errors."""


@functools.cache
def _failure(kind: str) -> type[PredictorFailed]:
    """Return the error of a failed call, which is also the one that DSPy raises for this kind of failure."""
    from dspy.utils import exceptions

    same = {
        ParseError.kind: exceptions.AdapterParseError,
        "too_long": exceptions.ContextWindowExceededError,
        RateLimited.kind: exceptions.LMRateLimitError,
        TransientError.kind: exceptions.LMServerError,
    }.get(kind, exceptions.LMProviderError)

    class Failed(PredictorFailed, same):  # type: ignore[misc, valid-type]
        def __init__(self, message: str) -> None:
            exceptions.DSPyError.__init__(self, message)
            self.adapter_name = self.lm_response = ""
            self.signature = self.parsed_result = None

    return Failed


class _Stopped(BaseException):
    """Raised inside ``forward`` when the run has ended; ``except Exception`` does not catch it."""


class DSPyProgram(Composite):
    """A DSPy program. Made by `compound.interchange.from_dspy`."""

    kind = "dspy_program"
    keeps_partial_outputs = True
    inputs: Mapping[str, Port] = MappingProxyType({})  # of each program its own
    outputs: Mapping[str, Port] = inputs

    def __init__(
        self,
        name: str,
        program: Any,  # noqa: ANN401 - a dspy.Module, which has no types
        predictors: Mapping[str, DSPyPredictor],
        *,
        inputs: Mapping[str, object],
        outputs: Mapping[str, object],
        max_calls: int,
    ) -> None:
        self.name = name
        self.program = program
        self.predictors = predictors
        self.max_calls = max_calls
        self.body = _body(name, predictors)
        self.inputs = {field: Port(kind) for field, kind in inputs.items()}
        self.outputs = {field: Port(kind) for field, kind in outputs.items()}

    @functools.cached_property
    def version(self) -> str:
        """Digest of the predictors and of the code of every module's ``forward``."""
        kinds = [type(module) for _, module in self.program.named_sub_modules()]
        codes = [[kind.__qualname__, *map(code_digest, _own_methods(kind))] for kind in kinds]
        return "dspy_program:" + digest(
            [self.body.signature, self.max_calls, sorted(map(str, codes))]
        )

    def most_turns(self, sizes: Mapping[str, float]) -> float:  # noqa: D102
        return self.max_calls

    async def drive(  # noqa: D102
        self, inputs: Mapping[str, Value], values: Mapping[str, object], body: RunBody
    ) -> Mapping[str, Value] | None:
        run = ProgramRun(self, body, merge_addresses(*(value.sources for value in inputs.values())))
        given = {name: value.data for name, value in inputs.items()}
        try:
            returned = await run_in_own_thread(
                lambda: self._forward(run, given), f"dspy {self.name}"
            )
        except PredictorFailed:
            return None
        except CompoundError:
            raise
        except Exception as error:
            if run.fatal is not None:
                raise run.fatal from None
            raise CallError(
                f"forward raised {located(error, type(self.program))}", hint=_hint(error)
            ) from error
        finally:
            run.close()
        if run.fatal is not None:
            raise run.fatal
        return {
            name: Value(
                as_declared(port.type, _field(returned, name)), merge_addresses(run.sources)
            )
            for name, port in self.outputs.items()
        }

    def _forward(self, run: ProgramRun, given: Mapping[str, object]) -> object:
        import dspy

        with dspy.context(
            **{RUN: run, "lm": None, "adapter": run.adapter, "trace": [], "disable_history": True}
        ):
            try:
                if hasattr(type(self.program), "forward"):
                    return self.program(**given)
                return asyncio.run(self.program.acall(**given))
            except _Stopped:
                return None


class ProgramRun:
    """One run of a program: answers its predictors by running turns of the body."""

    def __init__(self, owner: DSPyProgram, body: RunBody, sources: tuple[str, ...]) -> None:
        self.sources = sources
        self.adapter = next(iter(owner.predictors.values())).adapter  # of all predictors
        self.fatal: BaseException | None = None
        self._owner = owner
        self._body = body
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._calls = 0
        self._closed = False
        self._pending: set[Future[dict[str, object]]] = set()

    def ask(self, predictor: str, given: Mapping[str, object]) -> Future[dict[str, object]]:
        """Start a predictor's call from any thread.

        Raises:
            _Stopped: the run has ended, or reached the maximum number of calls.
        """
        with self._lock:
            if self._closed or self.fatal is not None:
                raise _Stopped
            index, self._calls = self._calls, self._calls + 1
            if index >= self._owner.max_calls:
                self.fatal = CallError(
                    f"forward made more than {self._owner.max_calls} predictor calls",
                    hint="raise max_calls of from_dspy",
                )
                raise _Stopped
            future = asyncio.run_coroutine_threadsafe(
                self._turn(index, predictor, given), self._loop
            )
            self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future

    def result(self, future: Future[dict[str, object]]) -> dict[str, object]:
        """Return the fields of a finished call, or raise in the program's thread."""
        try:
            return future.result()
        except PredictorFailed:
            raise
        except BaseException as error:  # noqa: BLE001 - ends the run, past `except Exception` of the program
            self.fatal = self.fatal or (None if self._closed else error)
            raise _Stopped from None

    def close(self) -> None:
        """Cancel calls in flight; later calls of the program raise."""
        with self._lock:
            self._closed = True
            pending = list(self._pending)
        for future in pending:
            future.cancel()

    async def _turn(
        self, index: int, predictor: str, given: Mapping[str, object]
    ) -> dict[str, object]:
        before = self.sources  # every call that has finished may have influenced this one
        arguments: dict[str, object] = dict.fromkeys(self._owner.body.inputs, ABSENT)
        arguments |= {f"{predictor}{SEPARATOR}{field}": value for field, value in given.items()}
        arguments[CHOSEN] = predictor
        outputs = await self._body(
            index, {name: Value(data, before) for name, data in arguments.items()}
        )
        found = outputs or {}
        self.sources = merge_addresses(self.sources, *(value.sources for value in found.values()))
        fields = {name.partition(SEPARATOR)[2]: value.data for name, value in found.items()}
        failed = [value.failed for value in fields.values() if isinstance(value, Mark)]
        if not fields or failed:
            message = f"the predictor {predictor!r} failed; the trace records why"
            raise _failure(failed[0] if failed else "")(message)
        return fields


def _field(returned: object, name: str) -> object:
    """Return a field of what ``forward`` returned; a prediction has methods named ``items`` or ``get``."""
    import dspy

    try:
        if isinstance(returned, Mapping | dspy.Example):
            return returned[name]
        return getattr(returned, name)
    except (AttributeError, KeyError):
        keys = getattr(returned, "keys", None)
        found = ", ".join(map(str, keys())) if callable(keys) else type(returned).__name__
        raise CallError(
            f"forward returned no {name!r}, but {found}", hint="correct outputs= of from_dspy"
        ) from None


def bind_predictors(predictors: Mapping[str, Any]) -> None:
    """Make the predictors of a program, by name, call the current run instead of a model."""
    for name, predictor in predictors.items():
        bound = BoundPredictor(predictor, name)
        predictor.forward, predictor.aforward = bound.forward, bound.aforward


class BoundPredictor:
    """Answers the calls of a predictor by those of the current run."""

    def __init__(self, predictor: Any, name: str) -> None:  # noqa: ANN401
        self.predictor, self.name = predictor, name
        self._initial = self._state()

    def _state(self) -> dict[str, object]:
        """Return what DSPy reads from a predictor at each call."""
        own = self.predictor
        state = {"signature": own.signature, "demos": list(own.demos), "lm": own.lm}
        return {**state, "config": dict(own.config)}

    def forward(self, **given: object) -> object:
        """Return a prediction; the thread of the program waits for it."""
        run = self._run()
        return self._prediction(run.result(run.ask(self.name, self._fields(given, run.adapter))))

    async def aforward(self, **given: object) -> object:
        """Return a prediction; the event loop of the program continues meanwhile."""
        run = self._run()
        future = run.ask(self.name, self._fields(given, run.adapter))
        await asyncio.wait([asyncio.wrap_future(future)])
        return self._prediction(run.result(future))

    def _run(self) -> ProgramRun:
        import dspy

        run = dspy.settings.get(RUN)
        if not isinstance(run, ProgramRun):
            raise CallError(
                f"the predictor {self.name!r} was called outside of a run of its system",
                hint="use dspy.Parallel in place of threads of forward; elsewhere, call the original "
                "program",
            )
        return run

    def _fields(self, given: Mapping[str, Any], adapter: object) -> dict[str, object]:
        """Return the input fields of a call, with their defaults; reject what cannot be tuned then."""
        import dspy
        from pydantic_core import PydanticUndefined

        now, config = self._state(), given.get("config") or {}
        current = {"lm": None, "adapter": adapter}
        changed = [
            *(key for key in ("signature", "demos", "lm") if given.get(key) is not None),
            *(key for key in now if now[key] != self._initial[key]),  # assigned in forward
            *(f"{k} of dspy.context" for k, v in current.items() if dspy.settings.get(k) is not v),
            *(f"config[{key!r}]" for key in dict(config) if key != "rollout_id"),
        ]
        if changed:
            raise CallError(
                f"forward calls the predictor {self.name!r} with its own {', '.join(changed)}, which "
                "would replace the tuned values",
                hint=f"set it in the predictor's constructor; or {REMEDY}",
            )
        fields = self.predictor.signature.input_fields
        found = {k: f.default for k, f in fields.items() if f.default is not PydanticUndefined}
        # the program may change its lists later, but the trace keeps what the predictor received
        return found | {k: _snapshot(value) for k, value in given.items() if k in fields}

    def _prediction(self, fields: Mapping[str, object]) -> object:
        import dspy

        made: object = dspy.Prediction.from_completions(
            [dict(fields)], signature=self.predictor.signature
        )
        return made


def _snapshot(value: object) -> object:
    """Copy lists and dicts, also inside others."""
    if type(value) is dict:
        return {key: _snapshot(item) for key, item in value.items()}
    return [_snapshot(item) for item in value] if type(value) is list else value


def _body(name: str, predictors: Mapping[str, DSPyPredictor]) -> System:
    """Return the body: each predictor as a node that runs if it is the chosen one."""
    chosen = Input(CHOSEN, str)
    outputs: dict[str, Source] = {}
    for own, predictor in predictors.items():
        wires = {
            field: Input(f"{own}{SEPARATOR}{field}", port.type)
            for field, port in predictor.inputs.items()
        }
        node = predictor(name=own, when=chosen.equals(own), **wires)
        fields = predictor.outputs
        for field in fields:
            outputs[f"{own}{SEPARATOR}{field}"] = node if len(fields) == 1 else node[field]
    return System(name, outputs)


def _own_methods(kind: type) -> list[Callable[..., object]]:
    """Return the methods of a user's class, whose code is part of the program."""
    return [
        method
        for base in kind.__mro__
        if not base.__module__.startswith("dspy.") and base is not object
        for method in vars(base).values()
        if callable(method) and hasattr(method, "__code__")
    ]


def _hint(error: Exception) -> str:
    if "No LM is loaded" in str(error):
        return "only predictors that are attributes of the program become components: create them in __init__"
    if isinstance(error, AttributeError) and "'NoneType' object" in str(error):
        return f"if the program uses dspy.settings.lm itself, {REMEDY}"
    return ""
