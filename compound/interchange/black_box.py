"""Programs of other libraries as single components whose own model requests are charged to the budget."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compound.core.engine import NO_USAGE, Usage
from compound.core.errors import DeclarationError
from compound.engines.litellm import listed_cost
from compound.graph.component import CallContext, Operation, check_name
from compound.graph.configuration import digest
from compound.graph.types import Port, accepts, as_declared

LEAST = Usage(calls=1, prompt_tokens=1)  # reserved if the user states no upper bound
Price = tuple[float, float]  # dollars per million prompt and completion tokens


@dataclass(frozen=True)
class Report:
    """Usage that a library reports for the requests to one model."""

    model: str
    calls: int
    prompt_tokens: int
    completion_tokens: int


class BlackBox(Operation):
    """A program of another library. Its requests bypass engines, so their usage is charged as reported.

    Args:
        name: the component's name.
        inputs: input ports by name.
        outputs: output ports by name.
        version: description of the program, part of cache keys.
        settings: values or spaces that the program takes in each run.
        price: dollars per million prompt and completion tokens; default: litellm's price of the
            model.
        worst: upper bound of the usage of one run, which is reserved before it.
        cache: whether results are cached and the calls are counted in the cost of a run.
        timeout: time limit of one run in seconds.
    """

    kind = "black_box"

    def __init__(
        self,
        name: str,
        *,
        inputs: Mapping[str, Port],
        outputs: Mapping[str, object],
        version: str,
        settings: Mapping[str, object],
        price: Price | None,
        worst: Usage | None,
        cache: bool,
        timeout: float | None,
    ) -> None:
        check_name(type(self).__name__, name)
        self.name = name
        self.timeout = timeout
        vars(self)["cacheable"] = cache  # a class variable of other kinds
        self._inputs = {field: port for field, port in inputs.items() if field not in settings}
        self._outputs = {field: Port(kind) for field, kind in outputs.items()}
        self._settings = dict(settings)
        self._version = version
        self._price, self._worst = price, worst or LEAST

    @property
    def inputs(self) -> Mapping[str, Port]:  # noqa: D102
        return self._inputs

    @property
    def outputs(self) -> Mapping[str, Port]:  # noqa: D102
        return self._outputs

    @property
    def settings(self) -> Mapping[str, object]:  # noqa: D102
        return self._settings

    @property
    def version(self) -> str:  # noqa: D102
        return f"{self.kind}:{digest([self._version, sorted(self._inputs), sorted(self._outputs)])}"

    def deterministic(self, values: Mapping[str, object]) -> bool:  # noqa: D102
        return False  # its models may sample

    @abstractmethod
    async def invoke(
        self, arguments: Mapping[str, object], reports: list[Report]
    ) -> Mapping[str, object]:
        """Run the program, and append the usage of its requests to ``reports``."""

    async def run(  # noqa: D102
        self, inputs: Mapping[str, object], values: Mapping[str, object], call: CallContext
    ) -> Mapping[str, object]:
        given = {name: value for name, value in inputs.items() if value is not None}
        reports: list[Report] = []
        async with call.reserve(self._worst) as used:
            try:
                found = await self.invoke({**given, **values}, reports)
            finally:
                if reports:
                    used.append(sum((self._usage(report) for report in reports), NO_USAGE))
            if not reports:
                used.append(NO_USAGE)  # it made no requests
        return {name: as_declared(port.type, found[name]) for name, port in self._outputs.items()}

    def _usage(self, report: Report) -> Usage:
        cost = _cost(report, self._price)
        known = 0.0 if cost is None else cost
        unpriced = report.calls if cost is None else 0
        return Usage(report.calls, report.prompt_tokens, report.completion_tokens, known, unpriced)


def _cost(report: Report, price: Price | None) -> float | None:
    """Return the dollars of a report; ``None`` if the price is unknown."""
    if price is not None:
        return (report.prompt_tokens * price[0] + report.completion_tokens * price[1]) / 1e6
    return (
        listed_cost(report.model, report.prompt_tokens, report.completion_tokens)
        if report.model
        else None
    )


def counted(value: object) -> int:
    """Return a number of tokens that a library reports, or 0 for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def as_text(value: Any) -> Any:  # noqa: ANN401 - a message of a library, or anything else
    """Return the text of a chat message; other values as they are."""
    text = getattr(value, "text", None)
    if isinstance(text, str) and (hasattr(value, "content") or hasattr(value, "role")):
        return str(text)
    return value


def as_port_type(kind: object) -> object:
    """Return a type that ports can check; ``Any`` for others."""
    try:
        accepts(kind, None)
    except DeclarationError:
        return Any
    return kind
