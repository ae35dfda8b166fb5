"""Penalties for single agents: what a call of one component costs by its form, whatever came of the run.

A penalty is a pure function of a call's inputs and outputs, 0 where nothing is wrong. In MHGPO it is added to
the agent's own reward and goes no further. A reply that could not be read at all pays ``malformed``, which is
as much. The rules and numbers are those of MMOA-RAG's three agents.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass

from compound.example import Values
from compound.narrowing import entry

Penalty = Callable[[Values, Values], float]

_NUMBER = re.compile(r"[0-9]{1,9}")
_ONE = rf"(?:\[{_NUMBER.pattern}\]|{_NUMBER.pattern})"
_LIST = rf"\[\s*{_NUMBER.pattern}(?:\s*,\s*{_NUMBER.pattern})*\s*\]"
_IDS = re.compile(rf"\s*(?:{_LIST}|{_ONE}(?:(?:\s*,\s*|\s+){_ONE})*)\s*\.?\s*")
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")  # so that joining words by signs does not make them one


@dataclass(frozen=True)
class TooMany:
    """For a list that is too long, such as the queries of a rewriter.

    Attributes:
        output: the output that holds the list.
        most: how many items cost nothing.
        penalty: what more of them cost.

    >>> [TooMany("queries")({}, {"queries": ["a query"] * n}) for n in (4, 5)]
    [0.0, -0.5]
    """

    output: str
    most: int = 4
    penalty: float = -0.5

    @property
    def malformed(self) -> float:
        """What a reply costs that could not be read."""
        return self.penalty

    def __call__(self, inputs: Values, outputs: Values) -> float:
        """Return the penalty, or 0."""
        return self.penalty if _size(outputs.get(self.output, ())) > self.most else 0.0


@dataclass(frozen=True)
class BadIds:
    """For ids that are malformed, unknown or repeated, such as the passages that a reranker names.

    Well-formed are numbers from 1 between commas or spaces, with or without brackets: ``2, 5``, ``[2] [5]``
    or ``[2, 5]``.

    Attributes:
        output: the output that holds the ids, a text or a list of numbers.
        among: the input that holds the numbered items.
        penalty: what an error costs, once.

    >>> wrong = BadIds("ids", "candidates")
    >>> shown = {"candidates": ["first", "second"]}
    >>> [wrong(shown, {"ids": text}) for text in ("2, 1", "[1]", "3", "1, 1", "passage 1", "")]
    [0.0, 0.0, -1.0, -1.0, -1.0, -1.0]
    """

    output: str
    among: str
    penalty: float = -1.0

    @property
    def malformed(self) -> float:
        """What a reply costs that could not be read."""
        return self.penalty

    def __call__(self, inputs: Values, outputs: Values) -> float:
        """Return the penalty, or 0."""
        ids = _ids(outputs.get(self.output, ""))
        known = range(1, _size(inputs[self.among]) + 1)
        right = bool(ids) and len(set(ids)) == len(ids) and all(i in known for i in ids)
        return 0.0 if right else self.penalty


@dataclass(frozen=True)
class TooLong:
    """For a text of too many words, such as an answer.

    Attributes:
        output: the output that holds the text.
        words: how many words cost nothing.
        penalty: what more of them cost.

    >>> [TooLong("answer", words=2)({}, {"answer": text}) for text in ("Lima, Peru", "it-is-Lima")]
    [0.0, -1.0]
    """

    output: str
    words: int = 30
    penalty: float = -1.0

    @property
    def malformed(self) -> float:
        """What a reply costs that could not be read."""
        return self.penalty

    def __call__(self, inputs: Values, outputs: Values) -> float:
        """Return the penalty, or 0."""
        text = entry(outputs, self.output, str) if self.output in outputs else ""
        return self.penalty if len(_WORD.findall(text)) > self.words else 0.0


def _size(value: object) -> int:
    if not isinstance(value, Sized):
        raise TypeError(f"{value!r:.80} has no length")
    return len(value)


def _ids(given: object) -> list[int]:
    """Return the ids of a well-formed text, or of a list; of any other, none."""
    if not isinstance(given, str):
        if not isinstance(given, Sequence):
            raise TypeError(f"ids must be a text or a list of numbers, but are {given!r:.80}")
        return list(given)
    return [int(number) for number in _NUMBER.findall(given)] if _IDS.fullmatch(given) else []
