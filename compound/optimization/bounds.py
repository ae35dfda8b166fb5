"""Upper bounds of the model requests of a job, and of their cost.

Optimizers declare the requests of their jobs (`Bounded`). `compound.api.estimate` sums them, and the loop
enforces them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from compound.engine import Engine, Message, Request
from compound.example import Example
from compound.graph.bounds import CallBound, Extent, Use, scaled
from compound.graph.system import System
from compound.optimization.prices import Prices
from compound.optimization.savings import LocalSavings
from compound.registry.engine_checks import worst_case


@dataclass(frozen=True)
class JobBound:
    """Model requests of one job of an optimizer, in addition to its system runs.

    Attributes:
        requests: the proposal requests. The loop rejects requests beyond their total.
        growth: bytes by which all jobs together may lengthen a text, compared with the start, without a
            model.
        written: maximum tokens of a model-written replacement of a text.
        candidates: number of candidates that the job can compare; ``None`` if unknown in advance.
        savings: what the local reward of each component of the job may save; none if the optimizer uses none.
    """

    requests: Sequence[CallBound] = ()
    growth: float = 0
    written: int = 0
    candidates: int | None = None
    savings: Sequence[LocalSavings] = ()

    @property
    def calls(self) -> float:
        """Total number of requests."""
        return sum(request.calls for request in self.requests)


@dataclass(frozen=True)
class Outlook:
    """Facts from which an optimizer derives the bound of a job.

    Attributes:
        system: the system, bound to the initial configuration.
        keys: the parameters of the job.
        train: the train examples.
        minibatch, candidates: as in `compound.optimization.method.Task`.
        runs: system runs that the job may spend (infinity without a limit).
        uses: the calls of each component in one run.
        outputs: the longest outputs of the system.
        texts: the longest value of each text parameter of the system, by key.
        prices: expected fractions of a system run, by the components that change.
    """

    system: System
    keys: tuple[str, ...]
    train: Sequence[Example]
    minibatch: int
    candidates: int
    runs: float
    uses: Mapping[str, Use] = field(default_factory=dict)
    outputs: Mapping[str, Extent] = field(default_factory=dict)
    texts: Mapping[str, Extent] = field(default_factory=dict)
    prices: Prices = field(default_factory=Prices)


@runtime_checkable
class Bounded(Protocol):
    """An optimizer that declares the model requests of its jobs."""

    def bound(self, outlook: Outlook) -> JobBound:
        """Return upper bounds of one job's requests; must not decrease as ``outlook.runs`` increases."""
        ...


@dataclass(frozen=True)
class Amount:
    """Upper bounds of calls, tokens and cost; infinite for the reasons in ``why``.

    Attributes:
        cost: US dollars; ``None`` if the price of a model is unknown.
        why: reasons for infinite numbers.
    """

    calls: float = 0
    prompt_tokens: float = 0
    completion_tokens: float = 0
    cost: float | None = 0.0
    why: tuple[str, ...] = ()

    def __add__(self, other: Amount) -> Amount:
        cost = None if self.cost is None or other.cost is None else self.cost + other.cost
        return Amount(
            self.calls + other.calls,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            cost,
            tuple(dict.fromkeys((*self.why, *other.why))),
        )

    def times(self, n: float) -> Amount:
        """Return the amount multiplied by ``n``."""
        cost = None if self.cost is None else scaled(self.cost, n)
        return Amount(
            scaled(self.calls, n), scaled(self.prompt_tokens, n), scaled(self.completion_tokens, n),
            cost, self.why,
        )  # fmt: skip

    def maximum(self, other: Amount) -> Amount:
        """Return the component-wise maximum."""
        cost = None if self.cost is None or other.cost is None else max(self.cost, other.cost)
        return Amount(
            max(self.calls, other.calls),
            max(self.prompt_tokens, other.prompt_tokens),
            max(self.completion_tokens, other.completion_tokens),
            cost,
            tuple(dict.fromkeys((*self.why, *other.why))),
        )

    @property
    def tokens(self) -> float:
        """Total of prompt and completion tokens."""
        return self.prompt_tokens + self.completion_tokens


def unbounded(why: str) -> Amount:
    """Return an infinite amount."""
    return Amount(math.inf, math.inf, math.inf, math.inf, (why,))


def amount_of(engine: Engine, bound: CallBound) -> Amount:
    """Return the maximum cost of one request of a bound, by the engine's own worst case."""
    if not bound.prompt.finite or not math.isfinite(bound.max_tokens):
        why = bound.prompt.unbounded_reason or "the maximum answer length is set by a wire"
        cost = math.inf if engine.priced else None
        return Amount(1, math.inf, bound.max_tokens, cost, (why,))
    worst = worst_case(engine, _longest(bound, int(bound.prompt.bytes)))
    one_more = worst_case(engine, _longest(bound, int(bound.prompt.bytes) + 1000))
    step = max(1, one_more.prompt_tokens - worst.prompt_tokens)
    price = (one_more.cost - worst.cost) / step  # price per additional prompt token
    prompt = worst.prompt_tokens + bound.prompt.tokens
    cost = worst.cost + price * bound.prompt.tokens if engine.priced else None
    return Amount(1, prompt, worst.completion_tokens, cost)


def _longest(bound: CallBound, size: int) -> Request:
    """Return a request of ``size`` bytes, made of text with the maximum number of tokens."""
    text = ("x " * (size // 2 + 1))[:size]
    empty = (Message("system", ""),) * (bound.messages - 1)
    return Request((*empty, Message("user", text)), max_tokens=int(bound.max_tokens))
