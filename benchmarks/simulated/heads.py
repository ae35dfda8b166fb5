"""Simulated system with a cheap tuned head before an expensive tail, with known expected scores.

The head splits a document into pieces, searches some of them, and shows a part of each; no step of
it calls a model. Three counted calls read what is shown. The four parameters of the head interact:
more pieces contain the answer more often, but also more words that distract the reader, unless
little of each piece is shown.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from benchmarks.simulated.relays import Questions, answer_of, symbol
from compound.components.function import Function
from compound.core.narrowing import entry
from compound.execution.rng import generator
from compound.graph.component import CallContext, Input, Operation, Output
from compound.graph.space import Choice
from compound.graph.system import System
from compound.graph.types import Port

Unit = Literal["paragraph", "sentence"]
Order = Literal["best_first", "best_last"]

SYMBOLS = 40  # words of documents; the answer is one of the first ten
PIECES = 8  # that a document is split into
SENTENCES = 3  # of a paragraph
WORDS = 4  # of a sentence
SKILL = 0.97  # of a reader that reads only the answer
ATTENTION = 0.97  # factor of the skill per further word
MISSED = "none"  # written by a reader that does not find the answer
RECENCY = 0.7  # factor if the answer is not in the last half of what is shown
EXPECTED = 400  # documents from which expected scores are computed

Options = Mapping[str, object]


def document(question: str, seed: int) -> list[list[list[str]]]:
    """Return the paragraphs of a question, most relevant first, each a list of sentences.

    The answer is in one sentence, most often in a relevant paragraph and seldom in its first
    sentence.
    """
    rng = generator(seed, "document", question)
    answer = answer_of(question, seed)
    words = [
        [
            [symbol(10 + int(w)) for w in rng.integers(SYMBOLS - 10, size=WORDS)]
            for _ in range(SENTENCES)
        ]
        for _ in range(PIECES)
    ]
    place = min(int(rng.geometric(0.45)) - 1, PIECES - 1)
    words[place][int(rng.choice(SENTENCES, p=(0.1, 0.6, 0.3)))][int(rng.integers(WORDS))] = answer
    return words


@dataclass(frozen=True)
class Head(Questions):
    """System with a tuned head, and its metric.

    Attributes:
        seed: the seed of documents and steps.

    Example:
        >>> world = Head()
        >>> best, value = world.optimum()
        >>> world.value({}) < value < 1
        True
    """

    seed: int = 0

    name = "head"

    def system(self) -> System:
        """Return the system with its initial values: whole paragraphs, all of them."""
        question = Input("question", str)
        pieces = Function("splitter", self._split, unit=Choice("paragraph", "sentence"))(
            question=question
        )
        found = Search("searcher")(pieces=pieces)
        shown = Function(
            "presenter",
            _present,
            words=Choice(2, 4, 12, value=12),
            order=Choice("best_first", "best_last"),
        )(pieces=found)
        answer = Reader("reader", self.seed)(question=question, shown=shown)
        for name in ("checker", "speaker"):
            answer = Reader(name, self.seed)(question=question, shown=answer)
        assert isinstance(answer, Output)
        return System("head", outputs={"answer": answer})

    def _split(self, question: str, unit: Unit) -> list[str]:
        """Split the document of a question into paragraphs or sentences, the most relevant ones first."""
        return _split(document(question, self.seed), unit)

    def value(self, options: Options) -> float:
        """Return the expected score of a configuration, by parameter without the component's name."""
        given = {"unit": "paragraph", "k": PIECES, "words": 12, "order": "best_first", **options}
        return self._values[tuple(given[name] for name in ("unit", "k", "words", "order"))]

    def optimum(self) -> tuple[dict[str, object], float]:
        """Return the best configuration and its expected score."""
        best = max(self._values, key=self._values.__getitem__)
        return dict(zip(("unit", "k", "words", "order"), best, strict=True)), self._values[best]

    @cached_property
    def _values(self) -> dict[tuple[object, ...], float]:
        """Expected score of each configuration over documents."""
        questions = [f"expected {i}" for i in range(EXPECTED)]
        known = [(document(q, self.seed), answer_of(q, self.seed)) for q in questions]
        units: tuple[Unit, ...] = ("paragraph", "sentence")
        orders: tuple[Order, ...] = ("best_first", "best_last")
        found: dict[tuple[object, ...], float] = {}
        for unit, k, words, order in itertools.product(units, (1, 2, 4, 8), (2, 4, 12), orders):
            shown = (
                (_present(_split(made, unit)[:k], words, order), answer) for made, answer in known
            )
            found[unit, k, words, order] = SKILL**2 * float(
                np.mean([_chance(*each) for each in shown])
            )
        return found


def _split(paragraphs: list[list[list[str]]], unit: Unit) -> list[str]:
    if unit == "paragraph":
        return [" ".join(itertools.chain(*sentences)) for sentences in paragraphs]
    return list(_best_sentences(paragraphs))


def _best_sentences(paragraphs: list[list[list[str]]]) -> Iterator[str]:
    """Yield sentences by relevance: second and third ones of a paragraph before its first one."""
    for sentences in paragraphs:
        yield from (" ".join(sentences[i]) for i in (1, 2, 0))


def _present(pieces: list[str], words: int, order: Order) -> str:
    """Show the first words of each piece, the most relevant piece first or last."""
    shown = [" ".join(piece.split()[:words]) for piece in pieces]
    return " / ".join(shown if order == "best_first" else reversed(shown))


def _chance(shown: str, answer: str) -> float:
    """Return the probability that a reader finds the answer in what it reads."""
    words = shown.replace("/", " ").split()
    if answer not in words:
        return 0.0
    late = words.index(answer) >= (len(words) - 1) / 2
    return SKILL * ATTENTION ** (len(words) - 1) * (1.0 if late else RECENCY)


@dataclass(frozen=True, eq=False)
class Search(Operation):
    """Search that returns the first pieces, as these are the most relevant ones; a counted call."""

    name: str

    kind = "retriever"
    cacheable = True

    @property
    def inputs(self) -> Mapping[str, Port]:  # noqa: D102
        return {"pieces": Port(list[str])}

    @property
    def outputs(self) -> Mapping[str, Port]:  # noqa: D102
        return {"found": Port(list[str])}

    @property
    def settings(self) -> Mapping[str, object]:  # noqa: D102
        return {"k": Choice(1, 2, 4, PIECES, value=PIECES)}

    @property
    def version(self) -> str:  # noqa: D102
        return "search of a simulated head"

    def deterministic(self, values: Mapping[str, object]) -> bool:  # noqa: D102
        return True

    async def run(  # noqa: D102
        self, inputs: Mapping[str, object], values: Mapping[str, object], call: CallContext
    ) -> Mapping[str, object]:
        return {"found": entry(inputs, "pieces", list)[: entry(values, "k", int)]}


@dataclass(frozen=True, eq=False)
class Reader(Operation):
    """Reader, which finds an answer among many words less often; a counted call.

    The readers after the first one read one word. They repeat the answer, or have nothing to
    repeat.
    """

    name: str
    seed: int

    kind = "reader"
    cacheable = True

    @property
    def inputs(self) -> Mapping[str, Port]:  # noqa: D102
        return {"question": Port(str), "shown": Port(str)}

    @property
    def outputs(self) -> Mapping[str, Port]:  # noqa: D102
        return {"found": Port(str)}

    @property
    def settings(self) -> Mapping[str, object]:  # noqa: D102
        return {}

    @property
    def version(self) -> str:  # noqa: D102
        return f"{self.name}:{self.seed}"

    def deterministic(self, values: Mapping[str, object]) -> bool:  # noqa: D102
        return True

    async def run(  # noqa: D102
        self, inputs: Mapping[str, object], values: Mapping[str, object], call: CallContext
    ) -> Mapping[str, object]:
        question, shown = entry(inputs, "question", str), entry(inputs, "shown", str)
        answer = answer_of(question, self.seed)
        rng = generator(self.seed, self.name, question, shown)
        return {"found": answer if rng.random() < _chance(shown, answer) else MISSED}
