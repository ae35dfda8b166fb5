"""Traces: the calls of a run, which form a directed acyclic graph.

An address names a call: the node's path with loop and map indices, ``agent[1]/reader``. A failed
call keeps its error and the outputs produced before the failure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    TypeAdapter,
)
from typing_extensions import TypedDict  # pydantic requires it before Python 3.12

from compound.core import notebook
from compound.core.engine import (
    NO_USAGE,
    FinishReason,
    Role,
    TokenRecord,
    TokenRow,
    Usage,
)
from compound.core.errors import RateLimited, RunFailed, TransientError
from compound.core.formatting import format_names, format_repr, short_repr
from compound.core.security.sanitize import redact_secrets, redact_values, sanitize_text
from compound.core.storage.state import validated
from compound.execution.exchange import Exchange, ExchangeDocument
from compound.graph.configuration import readable, to_readable_json, to_readable_values

FailureRow = Sequence[str]  # kind and message


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of a call: a kind and a sanitized message.

    Kinds are ``parse`` and ``type`` (of an answer), ``empty`` and ``refusal`` (instead of one),
    ``too_long`` (for the model's context), ``transient``, ``rate_limit``, ``skipped`` and
    ``error``.
    """

    kind: str
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", sanitize_text(self.message))

    @property
    def is_transient(self) -> bool:
        """Whether a lost connection, a timeout or a rate limit caused it, so that it is no evidence."""
        return self.kind in (TransientError.kind, RateLimited.kind)

    @property
    def row(self) -> FailureRow:
        """Kind and message, as JSON types."""
        return [self.kind, self.message]


@dataclass(slots=True, repr=False)
class Call:
    """One execution of a node. Treat it as immutable; it is not frozen because it is created in hot code.

    Attributes:
        address: path of the node, with indices.
        node: name of the node inside its own graph.
        component: name of the component.
        invocation: number of earlier calls of this component in the trace.
        parents: addresses of the calls whose outputs it read or that its condition depends on.
        sample: sample index of its random stream.
        seconds: of the execution, also if it was an earlier one whose outputs were reused.
        reused: whether the outputs came from the cache or from the forked trace without execution.
        counted: whether the call counts toward the cost of a run (those of engines and indexes do).
        attempts: number of attempts.
        key: cache key of the result; ``""`` if it was never looked up.
        exchanges: verbatim messages sent to models, and their answers.
    """

    address: str
    node: str
    component: str
    parents: tuple[str, ...]
    inputs: Mapping[str, object]
    outputs: Mapping[str, object]
    failure: Failure | None = None
    usage: Usage = NO_USAGE
    seconds: float = 0.0
    sample: int = 0
    invocation: int = 0
    reused: bool = False
    counted: bool = False
    attempts: int = 1
    tokens: tuple[TokenRecord, ...] = ()
    key: str = ""
    exchanges: tuple[Exchange, ...] = ()

    def __repr__(self) -> str:
        return format_repr("Call", repr(self.address), **_outcome(self.failure, self.outputs))


@dataclass(slots=True)
class CallResult:
    """What a call came to: outputs or failure, usage, token records, seconds of its execution.

    Treat it as immutable once it is returned; it is not frozen because it is created in hot code.
    """

    outputs: Mapping[str, object]
    failure: Failure | None = None
    usage: Usage = NO_USAGE
    tokens: tuple[TokenRecord, ...] = ()
    attempts: int = 1
    reused: bool = False
    key: str = ""
    exchanges: tuple[Exchange, ...] = ()
    seconds: float = 0.0

    def as_cached(self) -> CallResult:
        """Return a copy marked as reused from an equal call."""
        return replace(self, reused=True)


@dataclass(frozen=True, slots=True, repr=False)
class Trace:
    """Record of one system run; the order of calls does not depend on timing.

    ``outputs`` is empty if the run failed. ``equivalents`` is the executed fraction of the run (a
    fork or a cached run costs less than one system run). ``system`` and ``configuration`` are
    digests of what ran. ``ends`` are the addresses of the calls that produced the outputs; ``None``
    if unknown, as in traces stored before it was recorded. ``metric_calls`` are the calls of a
    metric that asks a model.
    """

    example: str
    configuration: str
    seed: int
    sample: int
    inputs: Mapping[str, object]
    calls: tuple[Call, ...]
    outputs: Mapping[str, object] = field(default_factory=dict)
    failure: Failure | None = None
    score: float | None = None
    feedback: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    system: str = ""
    ends: tuple[str, ...] | None = None
    metric_calls: tuple[Call, ...] = ()

    @property
    def usage(self) -> Usage:
        """Usage of the executed calls of the system; reused calls cost nothing."""
        return _executed_usage(self.calls)

    @property
    def whole_usage(self) -> Usage:
        """Usage of a run whose calls are all executed: the usage of reused calls counts, too."""
        return sum((call.usage for call in self.calls), NO_USAGE)

    @property
    def has_lost_requests(self) -> bool:
        """Whether a request may have had no answer; it is charged at its maximum, not at its cost."""
        return any(
            call.attempts > 1 or (call.failure is not None and call.failure.is_transient)
            for call in self.calls
        )

    @property
    def seconds(self) -> float:
        """Seconds of a run whose calls are all executed: those of the longest chain of dependent calls."""
        return longest_chain((call.address, call.parents, call.seconds) for call in self.calls)

    @property
    def cached_calls(self) -> int:
        """Number of calls of models, also for the metric, whose results were reused."""
        return sum(call.usage.calls for call in (*self.calls, *self.metric_calls) if call.reused)

    @property
    def metric_usage(self) -> Usage:
        """Usage of the executed calls of the metric, such as those of a judge."""
        return _executed_usage(self.metric_calls)

    @property
    def equivalents(self) -> float:
        """Executed fraction of the run, over the calls that a cache could have answered."""
        counted = [call for call in self.calls if call.counted] or self.calls
        if not counted:
            return 1.0
        return sum(not call.reused for call in counted) / len(counted)

    def run_fraction(self, call: Call) -> float:
        """Return the fraction of a run that one executed call represents."""
        counted = sum(other.counted for other in self.calls)
        return call.counted / counted if counted else 1 / max(1, len(self.calls))

    def call(self, address: str) -> Call:
        """Return the call at an address.

        Raises:
            KeyError: the address is unknown; the message lists the addresses.
        """
        for call in self.calls:
            if call.address == address:
                return call
        raise KeyError(f"no call at {address!r}; calls: {', '.join(c.address for c in self.calls)}")

    def calls_of(self, component: str) -> tuple[Call, ...]:
        """Return the calls of a component, by invocation."""
        return tuple(call for call in self.calls if call.component == component)

    def check(self) -> Trace:
        """Return this trace, or raise if its run failed.

        Raises:
            RunFailed: the run failed; the message names the call and the reason.
        """
        if self.failure is None:
            return self
        where = next(
            (f" in {call.address!r}" for call in self.calls if call.failure is not None), ""
        )
        raise RunFailed(
            f"the run failed{where}: {self.failure.kind}: {self.failure.message}",
            trace=self,
            hint="the error's `trace` holds every call; pass check=False to return the trace instead",
        )

    def with_score(
        self, value: float, feedback: str = "", parts: Mapping[str, float] | None = None
    ) -> Trace:
        """Return a copy with a score."""
        return replace(self, score=value, feedback=feedback, parts=parts or {})

    def _repr_html_(self) -> str:
        """Return the outputs and a table of the calls, for notebooks."""
        facts = [
            ("example", self.example),
            ("score", "" if self.score is None else f"{self.score:g}"),
            ("tokens", self.usage.tokens or ""),
            ("failed:", f"{self.failure.kind}: {self.failure.message}" if self.failure else ""),
        ]
        outputs = notebook.table(["output", "value"], _readable_rows(self.outputs))
        calls = [*self.calls, *self.metric_calls]
        rows = (_row(call) for call in calls[: notebook.MAX_ROWS])
        headings = ["call", "inputs", "outputs", "seconds", "tokens"]
        shown = notebook.table(headings, rows, len(calls))
        return notebook.block("Trace", outputs if self.outputs else "", shown, facts=facts)

    def __repr__(self) -> str:
        return format_repr(
            "Trace",
            example=repr(self.example) if self.example else "",
            **_outcome(self.failure, self.outputs),
            score="" if self.score is None else f"{self.score:g}",
            calls=format_names(call.address for call in self.calls),
        )


def _readable_rows(values: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    return ((name, readable(value)) for name, value in redact_values(dict(values)).items())


def _shown(values: Mapping[str, object]) -> str:
    """Return values on one line, without registered keys, which a cut could divide."""
    return short_repr(redact_values(dict(values)))


def _row(call: Call) -> list[str]:
    """Return the cells of a call in a table."""
    told = (
        f"failed: {call.failure.kind}: {call.failure.message}"
        if call.failure
        else _shown(call.outputs)
    )
    seconds = "cached" if call.reused else f"{call.seconds:.2f}"
    return [call.address, _shown(call.inputs), told, seconds, str(call.usage.tokens or "")]


def _executed_usage(calls: Sequence[Call]) -> Usage:
    total = NO_USAGE
    for call in calls:
        if not call.reused:
            total += call.usage
    return total


def _outcome(failure: Failure | None, outputs: Mapping[str, object]) -> dict[str, str]:
    if failure is None:
        return {"outputs": _shown(outputs)}
    return {"failure": short_repr(f"{failure.kind}: {failure.message}")}


def longest_chain(calls: Iterable[tuple[str, Iterable[str], float]]) -> float:
    """Return the seconds of the longest chain of calls, given as address, parents and seconds.

    >>> longest_chain([("a", [], 1.0), ("b", [], 2.0), ("c", ["a", "b"], 0.5)])
    2.5
    """
    ends: dict[str, float] = {}
    for address, parents, seconds in calls:  # parents come before their children
        ends[address] = seconds + max((ends.get(p, 0.0) for p in parents), default=0.0)
    return max(ends.values(), default=0.0)


def whole_amounts(document: TraceDocument) -> tuple[Usage, float]:
    """Return `Trace.whole_usage` and `Trace.seconds` of a stored trace."""
    calls = document["calls"]
    usage = sum((Usage.from_json(call["usage"]) for call in calls), NO_USAGE)
    return usage, longest_chain((c["address"], c["parents"], c["seconds"]) for c in calls)


def without_messages(trace: Trace) -> Trace:
    """Return a copy of a trace without the messages of its calls."""
    return replace(trace, calls=tuple(replace(call, exchanges=()) for call in trace.calls))


def as_text(trace: Trace) -> str:
    """Format a trace as text: each call with its inputs, messages, outputs and usage."""
    return redact_secrets("\n\n".join(map(_call_as_text, (*trace.calls, *trace.metric_calls))))


def _call_as_text(call: Call) -> str:
    facts = [
        f"{call.seconds:.2f} s",
        *_usage_as_text(call.usage),
        *["from the cache"] * call.reused,
    ]
    facts += [f"{call.attempts} attempts"] if call.attempts > 1 else []
    lines = [f"== {call.address} ({', '.join(facts)})"]
    lines += [f"{name} <- {to_readable_json(value)}" for name, value in call.inputs.items()]
    lines += [str(exchange) for exchange in call.exchanges]
    lines += [f"{name} -> {to_readable_json(value)}" for name, value in call.outputs.items()]
    if call.failure is not None:
        lines.append(f"failed: {call.failure.kind}: {call.failure.message}")
    return "\n".join(lines)


def _usage_as_text(usage: Usage) -> list[str]:
    """Return the nonzero amounts with their names."""
    facts = [f"{usage.calls} requests"] if usage.calls > 1 else []
    if usage.tokens:
        facts.append(
            f"{usage.prompt_tokens} prompt and {usage.completion_tokens} completion tokens"
        )
    if usage.cost:
        facts.append(f"${usage.cost:.6f}")
    return facts + (["unknown cost"] if usage.unpriced else [])


# Forms of stored calls, as which the files of others are checked

if TYPE_CHECKING:
    StoredFailure = FailureRow
    StoredUsage = dict[str, Any]
    StoredTokens = TokenRow
    StoredExchange = ExchangeDocument
else:

    class _ToolCall(TypedDict):
        id: str
        name: str
        arguments: str

    class _Message(TypedDict):
        role: Role
        content: str
        tool_calls: NotRequired[list[_ToolCall]]
        tool_call_id: NotRequired[str]

    class StoredExchange(TypedDict):
        """An `Exchange`."""

        model: str
        messages: list[_Message]
        completion: str
        finish_reason: str
        tool_calls: NotRequired[list[_ToolCall]]
        tools: NotRequired[list[str]]

    class StoredUsage(TypedDict, total=False):
        """A `Usage`, whose numbers add to the spending of a run."""

        calls: NonNegativeInt
        prompt_tokens: NonNegativeInt
        completion_tokens: NonNegativeInt
        cost: Annotated[FiniteFloat, Field(ge=0)]
        unpriced: NonNegativeInt

    def _with_constraint(row: object) -> object:
        """Return a row of tokens with its last value, which most rows leave out."""
        return [*row, ""] if isinstance(row, list | tuple) and len(row) == 5 else row

    def _checked_tokens(row: TokenRow) -> TokenRow:
        if len(row[1]) != len(row[2]):
            raise ValueError("must hold a log-probability for each sampled token")
        return row

    _Ids = list[Annotated[int, Field(ge=0, lt=2**31)]]
    StoredTokens = Annotated[
        tuple[_Ids, _Ids, list[FiniteFloat], FinishReason, str, str],
        BeforeValidator(_with_constraint),
        AfterValidator(_checked_tokens),
    ]
    StoredFailure = tuple[str, str]


class OutcomeDocument(TypedDict):
    """Fields that a `Call` and a `CallResult` share, as JSON types, except for their outputs."""

    failure: StoredFailure | None
    usage: StoredUsage
    tokens: list[StoredTokens]
    attempts: NonNegativeInt
    seconds: NonNegativeFloat
    exchanges: NotRequired[list[StoredExchange]]


class CallDocument(OutcomeDocument):
    """A `Call` as JSON types."""

    address: str
    node: str
    component: str
    invocation: int
    parents: list[str]
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    sample: int
    reused: bool
    counted: bool


class TraceDocument(TypedDict):
    """A `Trace` as JSON types."""

    example: str
    system: str
    configuration: str
    seed: int
    sample: int
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    failure: StoredFailure | None
    score: float | None
    feedback: str
    parts: dict[str, float]
    ends: NotRequired[list[str] | None]
    calls: list[CallDocument]
    metric_calls: NotRequired[list[CallDocument]]


# fields that are stored as they are
_CALL_FIELDS = ("address", "node", "component", "invocation", "sample", "reused", "counted")
_TRACE_FIELDS = ("example", "system", "configuration", "seed", "sample", "score", "feedback")


def to_json(trace: Trace) -> TraceDocument:
    """Return a trace as JSON types, without registered keys; unsupported objects become text."""
    document: Any = {
        **{name: getattr(trace, name) for name in _TRACE_FIELDS},
        "inputs": to_readable_values(trace.inputs),
        "outputs": to_readable_values(trace.outputs),
        "failure": trace.failure.row if trace.failure else None,
        "parts": dict(trace.parts),
        "ends": list(trace.ends) if trace.ends is not None else None,
        "calls": [call_to_json(call) for call in trace.calls],
    }
    if trace.metric_calls:
        document["metric_calls"] = [call_to_json(call) for call in trace.metric_calls]
    return cast("TraceDocument", redact_values(document))


def call_to_json(call: Call) -> CallDocument:
    """Return a call as JSON types."""
    document: Any = {
        **{name: getattr(call, name) for name in _CALL_FIELDS},
        "parents": list(call.parents),
        "inputs": to_readable_values(call.inputs),
        "outputs": to_readable_values(call.outputs),
        **outcome_to_json(call),
    }
    return cast("CallDocument", document)


def outcome_to_json(made: Call | CallResult) -> OutcomeDocument:
    """Return what a call came to and used, as JSON types."""
    return {
        "failure": made.failure.row if made.failure else None,
        "usage": made.usage.to_json(),
        "tokens": [record.row for record in made.tokens],
        "attempts": made.attempts,
        "seconds": round(made.seconds, 6),
        "exchanges": [exchange.to_json() for exchange in made.exchanges],
    }


def read_outcome(data: OutcomeDocument) -> dict[str, Any]:
    """Return the output of `outcome_to_json` as arguments of a call or of its result."""
    return {
        "failure": Failure(*data["failure"]) if data["failure"] else None,
        "usage": Usage.from_json(data["usage"]),
        "tokens": tuple(map(TokenRecord.from_row, data["tokens"])),
        "attempts": data["attempts"],
        "seconds": data["seconds"],
        "exchanges": tuple(map(Exchange.from_json, data.get("exchanges", ()))),
    }


_TRACE = TypeAdapter(TraceDocument)


def from_json(document: Mapping[str, object]) -> Trace:
    """Parse the output of `to_json`.

    Raises:
        Damaged: it has another form.
    """
    data: Any = validated(_TRACE, document, "a trace")
    ends = data.get("ends")
    return Trace(
        **{name: data[name] for name in (*_TRACE_FIELDS, "inputs", "outputs", "parts")},
        failure=Failure(*data["failure"]) if data["failure"] else None,
        ends=tuple(ends) if ends is not None else None,
        calls=tuple(call_from_json(call) for call in data["calls"]),
        metric_calls=tuple(call_from_json(call) for call in data.get("metric_calls", ())),
    )


def call_from_json(data: CallDocument) -> Call:
    """Parse the output of `call_to_json`."""
    stored: Any = data
    plain = {name: stored[name] for name in (*_CALL_FIELDS, "inputs", "outputs")}
    return Call(parents=tuple(data["parents"]), **plain, **read_outcome(data))
