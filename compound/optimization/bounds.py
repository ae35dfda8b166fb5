"""Upper bounds of what a job requests of models, and of what that costs.

Optimizers declare what their jobs request (`Bounded`). `compound.api.estimate` adds it up, and the loop holds
jobs to it.
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
from compound.registry.engine_checks import worst_case


@dataclass(frozen=True)
class JobBound:
    """What one job of an optimizer asks of models, besides running the system.

    Attributes:
        requests: the requests for proposals. The loop refuses more of them than their sum.
        growth: bytes by which jobs may make a text longer than at the start, all of them together, without a
            model.
        written: tokens of the longest text that a model writes in a text's place.
        candidates: how many candidates the job can compare; ``None`` when that is not known beforehand.
    """

    requests: Sequence[CallBound] = ()
    growth: float = 0
    written: int = 0
    candidates: int | None = None

    @property
    def calls(self) -> float:
        """All requests."""
        return sum(request.calls for request in self.requests)


@dataclass(frozen=True)
class Outlook:
    """What an optimizer may go by when it declares its bound for a job.

    Attributes:
        system: bound to the starting configuration.
        keys: the parameters of the job.
        train: the examples to learn from.
        minibatch, candidates: as in `compound.optimization.method.Task`.
        runs: system runs that the job may spend (infinity without a limit).
        uses: the calls of each component in one run.
        outputs: the longest outputs of the system.
        texts: by key, the longest text that each of the system's text parameters can hold.
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


@runtime_checkable
class Bounded(Protocol):
    """An optimizer that declares what its jobs ask of models."""

    def bound(self, outlook: Outlook) -> JobBound:
        """Return the most that one job asks for; it must not fall when ``outlook.runs`` rises."""
        ...


@dataclass(frozen=True)
class Amount:
    """Calls, tokens and dollars, at most; infinite where ``why`` says what is not bounded.

    Attributes:
        cost: in US dollars; ``None`` when the price of a model is not known.
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
        """Return the amount for ``n`` of it."""
        cost = None if self.cost is None else scaled(self.cost, n)
        return Amount(
            scaled(self.calls, n), scaled(self.prompt_tokens, n), scaled(self.completion_tokens, n),
            cost, self.why,
        )  # fmt: skip

    def joined(self, other: Amount) -> Amount:
        """Return the larger of each number."""
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
        """Prompt and completion tokens together."""
        return self.prompt_tokens + self.completion_tokens


def unbounded(why: str) -> Amount:
    """Return an amount without any bound."""
    return Amount(math.inf, math.inf, math.inf, math.inf, (why,))


def amount_of(engine: Engine, bound: CallBound) -> Amount:
    """Return what one request of a bound costs at most, by the engine's own worst case."""
    if not bound.prompt.finite or not math.isfinite(bound.max_tokens):
        why = bound.prompt.why or "the longest answer is set by a wire"
        cost = math.inf if engine.priced else None
        return Amount(1, math.inf, bound.max_tokens, cost, (why,))
    worst = worst_case(engine, _longest(bound, int(bound.prompt.bytes)))
    one_more = worst_case(engine, _longest(bound, int(bound.prompt.bytes) + 1000))
    step = max(1, one_more.prompt_tokens - worst.prompt_tokens)
    price = (one_more.cost - worst.cost) / step  # of one more token of the prompt
    prompt = worst.prompt_tokens + bound.prompt.tokens
    cost = worst.cost + price * bound.prompt.tokens if engine.priced else None
    return Amount(1, prompt, worst.completion_tokens, cost)


def _longest(bound: CallBound, size: int) -> Request:
    """Return a request of so many bytes, in the words that make the most tokens."""
    text = ("x " * (size // 2 + 1))[:size]
    empty = (Message("system", ""),) * (bound.messages - 1)
    return Request((*empty, Message("user", text)), max_tokens=int(bound.max_tokens))
