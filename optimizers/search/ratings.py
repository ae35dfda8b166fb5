"""Ratings of a component's outputs by a model that knows the expected result: a local reward without pairs.

A rating is one more relation of an output to the gold answers (`compound.rewards.gains`), which counts
as far as scores confirm it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from compound.core.engine import Message, Request
from compound.core.errors import CallError
from compound.core.example import Example
from compound.core.loops import gather
from compound.execution.rng import derive_seed
from compound.execution.trace import Call
from compound.graph.configuration import digest, to_readable_json
from compound.optimization.method import Task
from compound.optimizers.search.memory_part import MemoryPart
from compound.optimizers.search.proposers.proposing import fields, read_and_written
from compound.optimizers.search.proposers.reflect import purpose_of
from compound.rewards.gains import GOLD, answers_of

RATING = f"{GOLD}rating"  # name of the feature
MAX_TOKENS = 16
MOST_RATINGS = 16.0  # of outputs, per system run of a job
HIGHEST = 10
CUE = "Number:"
NUMBER = re.compile(rf"(?<![\d.−-])({HIGHEST}|\d(?:\.\d+)?)(?![\d.]*\d)")


def read_rating(reply: str) -> float | None:
    """Return the rating of a reply, from -1 to 1; ``None`` if it has not exactly one number in the range.

    >>> read_rating("10"), read_rating("Number: 2.5"), read_rating("7/10"), read_rating("12")
    (1.0, -0.5, 0.4, None)
    """
    found = NUMBER.findall(re.sub(rf"(/|\bout of\b)\s*{HIGHEST}\b", "", reply))
    return None if len(set(found)) != 1 else round(2 * float(found[0]) / HIGHEST - 1, 9)


class RatingMemory(MemoryPart):
    """Ratings of a run so far, by the digest of what was rated."""

    NAME = "ratings"
    known: dict[str, Annotated[float, Field(ge=-1, le=1)]] = Field(default_factory=dict)


@dataclass
class Ratings:
    """Ratings of the outputs of a job's components; equal calls on one example are rated once in a run."""

    task: Task
    lm: str
    _memory: RatingMemory = field(init=False)

    def __post_init__(self) -> None:
        self._memory = RatingMemory.of(self.task.context.memory)

    async def of(
        self, component: str, runs: Sequence[tuple[Sequence[Call], Example]]
    ) -> list[Mapping[str, float]]:
        """Return the mean rating of a component's calls in each run as a feature; 0 for one not rated."""
        new: dict[str, tuple[Call, Example]] = {}
        names = [[_name(component, call, example) for call in calls] for calls, example in runs]
        for own, (calls, example) in zip(names, runs, strict=True):
            pairs = zip(own, calls, strict=True) if answers_of(example) else ()
            new |= {name: (call, example) for name, call in pairs if name not in self._memory.known}
        ratings = await gather(
            self._ask(component, call, example) for call, example in new.values()
        )
        rated = zip(new, ratings, strict=True)
        self._memory.known |= {name: rating for name, rating in rated if rating is not None}
        self._memory.store(self.task.context.memory)
        found = [[self._memory.known.get(name, 0.0) for name in own] for own in names]
        return [
            {RATING: math.fsum(own) / len(own)} if own and answers_of(example) else {}
            for own, (_, example) in zip(found, runs, strict=True)
        ]

    async def _ask(self, component: str, call: Call, example: Example) -> float | None:
        system, scorer = self.task.system, self.task.scorer
        message = (
            "A system answers in several steps. One of them: "
            f"{purpose_of(system.components[component], system)}\n\n"
            f"Input of the system: {fields(example.inputs)}\n"
            f"Expected result of the system: {fields(answers_of(example))}\n\n"
            f"{read_and_written(call, system)}\n\n"
            "Does what this step wrote lead the following steps to the expected result? Reply with a number "
            f"from 0 (misleading or useless) to {HIGHEST} (all that this step can contribute), and nothing "
            f"else.\n{CUE}"
        )
        seed = derive_seed(self.task.pool_seed, "rating", component)
        request = Request(
            (Message("user", message),), max_tokens=MAX_TOKENS, temperature=0.0, seed=seed
        )
        try:
            reply = await scorer.generate(request, self.lm)
        except CallError:  # the scorer counts failed requests
            return None
        rating = read_rating(reply.text)
        reason = f"no single number from 0 to {HIGHEST} in {reply.text!r:.100}"
        if rating is None:
            scorer.record_outcome("unusable", self.lm, reason)
        else:
            scorer.record_outcome("proposed", self.lm)
        return rating


def _name(component: str, call: Call, example: Example) -> str:
    shown = to_readable_json([dict(call.inputs), dict(call.outputs)])
    return digest([component, example.id, shown])[:16]
