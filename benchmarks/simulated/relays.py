"""Simulated systems with the price structure of real ones: a few tuned steps, and an expensive tail.

A relay is a chain of steps that look for the answer to a question. Each step writes a symbol. If
the symbol that it reads is the answer, it writes the answer with the probability of its option (its
skill), otherwise with a small probability. The score is 1 if the last symbol is the answer. Steps
after the tuned ones have one option; they make a global evaluation of an early step expensive.
Without the gold answer, nothing in a symbol tells whether it is right.

The expected score of a configuration has a closed form, so that the optimum is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from compound.core.example import Example, Score
from compound.core.narrowing import entry
from compound.execution.rng import generator
from compound.graph.component import CallContext, Input, Operation, Output
from compound.graph.space import Choice
from compound.graph.system import System
from compound.graph.types import Port

SYMBOLS = 10


@dataclass(frozen=True, eq=False)
class RelayStep(Operation):
    """Step of a relay; the first one reads the question only."""

    name: str
    first: bool
    skills: tuple[float, ...]
    recovery: float
    seed: int

    kind = "relay"
    cacheable = True

    @property
    def inputs(self) -> Mapping[str, Port]:  # noqa: D102
        return (
            {"question": Port(str)} if self.first else {"question": Port(str), "found": Port(str)}
        )

    @property
    def outputs(self) -> Mapping[str, Port]:  # noqa: D102
        return {"found": Port(str)}

    @property
    def settings(self) -> Mapping[str, object]:  # noqa: D102
        return {"option": Choice(*range(len(self.skills)))} if len(self.skills) > 1 else {}

    @property
    def version(self) -> str:  # noqa: D102
        return f"relay:{self.name}:{self.skills}:{self.recovery}:{self.seed}"

    def deterministic(self, values: Mapping[str, object]) -> bool:  # noqa: D102
        return True

    async def run(  # noqa: D102
        self, inputs: Mapping[str, object], values: Mapping[str, object], call: CallContext
    ) -> Mapping[str, object]:
        question, option = (
            entry(inputs, "question", str),
            entry({"option": 0, **values}, "option", int),
        )
        answer = answer_of(question, self.seed)
        read = inputs.get("found", answer)
        rng = generator(self.seed, "step", self.name, option, question, str(read))
        chance = self.skills[option] if read == answer else self.recovery
        if rng.random() < chance:
            return {"found": answer}
        return {"found": symbol(int(rng.integers(SYMBOLS)))}


def symbol(number: int) -> str:
    """Return a symbol by number."""
    return f"s{number}"


def answer_of(question: str, seed: int) -> str:
    """Return the answer to a question, which no component can know."""
    return symbol(int(generator(seed, "answer", question).integers(SYMBOLS)))


def _lucky(chance: float) -> float:
    """Return the probability of the answer: a step that misses it writes any symbol, the answer included."""
    return chance + (1 - chance) / SYMBOLS


class Questions:
    """Examples and metric of the systems that look for the answer to a question.

    Attributes:
        seed: the seed of the answers.
    """

    seed: int
    bounds = (0.0, 1.0)

    def examples(self, n: int, split: str = "train") -> list[Example]:
        """Return examples."""
        questions = [f"{split} {i}" for i in range(n)]
        return [
            Example(f"{split}-{i}", {"question": q}, {"answer": answer_of(q, self.seed)})
            for i, q in enumerate(questions)
        ]

    def score(self, outputs: Mapping[str, object], example: Example) -> Score:
        """Score the last symbol, which makes this object a metric."""
        return Score(float(outputs["answer"] == example.gold["answer"]))


@dataclass(frozen=True)
class Relay(Questions):
    """Relay and its metric.

    Attributes:
        length: number of steps.
        tuned: number of steps with several options, the first ones.
        options: number of options of each tuned step.
        skill: least and greatest skill of the options; that of the other steps is ``tail``.
        tail: skill of the steps that are not tuned.
        recovery: probability of the answer after a wrong symbol.
        seed: the seed of skills, answers and steps.

    Example:
        >>> world = Relay(4, 1)
        >>> best, value = world.optimum()
        >>> 0 < world.value({"a": 0}) <= value < 1
        True
    """

    length: int
    tuned: int
    options: int = 8
    skill: tuple[float, float] = (0.3, 0.9)
    tail: float = 0.9
    recovery: float = 0.05
    seed: int = 0

    name = "relay"

    @property
    def names(self) -> list[str]:
        """Names of the steps."""
        return [chr(ord("a") + i) for i in range(self.length)]

    @cached_property
    def skills(self) -> Mapping[str, tuple[float, ...]]:
        """Skills of the options of each step."""
        low, high = self.skill
        found: dict[str, tuple[float, ...]] = {}
        for i, name in enumerate(self.names):
            drawn = generator(self.seed, "skill", name).random(self.options)
            found[name] = (
                tuple((low + (high - low) * drawn).tolist()) if i < self.tuned else (self.tail,)
            )
        return found

    def system(self) -> System:
        """Return the system with each step at its first option."""
        question = Input("question", str)
        found: Output | None = None
        for name in self.names:
            step = RelayStep(name, found is None, self.skills[name], self.recovery, self.seed)
            node = (
                step(question=question) if found is None else step(question=question, found=found)
            )
            assert isinstance(node, Output)
            found = node
        assert found is not None
        return System(f"relay{self.length}", outputs={"answer": found})

    def value(self, options: Mapping[str, int]) -> float:
        """Return the expected score of a configuration."""
        right = 1.0
        for name in self.names:
            skill = self.skills[name][options.get(name, 0)]
            right = right * _lucky(skill) + (1 - right) * _lucky(self.recovery)
        return right

    def optimum(self) -> tuple[dict[str, int], float]:
        """Return the best configuration and its expected score: each step's best option."""
        best = {name: max(range(len(s)), key=s.__getitem__) for name, s in self.skills.items()}
        return best, self.value(best)
