"""Penalties for the form of a single agent's outputs, independent of the result of the run.

A penalty is a pure function of a call's inputs and outputs, and 0 for a correct form. In MHGPO it
is added to the agent's own reward and is not propagated. A reply that cannot be parsed gets the
penalty ``malformed``, which is equal. The rules and numbers are those of MMOA-RAG's three agents.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass

from compound.core.example import Values
from compound.core.narrowing import entry

Penalty = Callable[[Values, Values], float]

_NUMBER = re.compile(r"[0-9]{1,9}")
_ONE = rf"(?:\[{_NUMBER.pattern}\]|{_NUMBER.pattern})"
_LIST = rf"\[\s*{_NUMBER.pattern}(?:\s*,\s*{_NUMBER.pattern})*\s*\]"
_IDS = re.compile(rf"\s*+(?:{_LIST}|{_ONE}(?:(?:\s*+,\s*+|\s++){_ONE})*)\s*+\.?\s*+")
_WORD = re.compile(
    r"[^\W_]+(?:['’][^\W_]+)*"
)  # splits at punctuation, so that joined words count separately


class FormPenalty:
    """Base class of penalties."""

    penalty: float

    @property
    def malformed(self) -> float:
        """Penalty of a reply that cannot be parsed."""
        return self.penalty


@dataclass(frozen=True)
class TooMany(FormPenalty):
    """Penalty for a list that is too long, such as the queries of a rewriter.

    >>> [TooMany("queries")({}, {"queries": ["a query"] * n}) for n in (4, 5)]
    [0.0, -0.5]
    """

    output: str
    max_items: int = 4  # without a penalty
    penalty: float = -0.5

    def __call__(self, inputs: Values, outputs: Values) -> float:
        """Return the penalty, or 0."""
        return self.penalty if _size(outputs.get(self.output, ())) > self.max_items else 0.0


@dataclass(frozen=True)
class BadIds(FormPenalty):
    """Penalty for ids that are malformed, unknown or repeated, such as the passages that a reranker selects.

    Well-formed ids are numbers from 1 on, separated by commas or spaces, with or without brackets:
    ``2, 5``, ``[2] [5]`` or ``[2, 5]``.

    >>> wrong = BadIds("ids", "candidates")
    >>> shown = {"candidates": ["first", "second"]}
    >>> [wrong(shown, {"ids": text}) for text in ("2, 1", "[1]", "3", "1, 1", "passage 1", "")]
    [0.0, 0.0, -1.0, -1.0, -1.0, -1.0]
    """

    output: str
    items: str  # the input with the numbered items
    penalty: float = -1.0

    def __call__(self, inputs: Values, outputs: Values) -> float:
        """Return the penalty, or 0."""
        ids = _ids(outputs.get(self.output, ""))
        known = range(1, _size(inputs[self.items]) + 1)
        right = bool(ids) and len(set(ids)) == len(ids) and all(i in known for i in ids)
        return 0.0 if right else self.penalty


@dataclass(frozen=True)
class TooLong(FormPenalty):
    """Penalty for a text with too many words, such as an answer.

    >>> [TooLong("answer", words=2)({}, {"answer": text}) for text in ("Lima, Peru", "it-is-Lima")]
    [0.0, -1.0]
    """

    output: str
    words: int = 30  # without a penalty
    penalty: float = -1.0

    def __call__(self, inputs: Values, outputs: Values) -> float:
        """Return the penalty, or 0."""
        text = entry(outputs, self.output, str) if self.output in outputs else ""
        return self.penalty if len(_WORD.findall(text)) > self.words else 0.0


def _size(value: object) -> int:
    if not isinstance(value, Sized):
        raise TypeError(f"{value!r:.80} has no length")
    return len(value)


def _ids(given: object) -> list[int]:
    """Return the ids of a well-formed text or of a list, and none for a malformed text."""
    if not isinstance(given, str):
        if not isinstance(given, Sequence):
            raise TypeError(f"ids must be a string or a list of numbers, but are {given!r:.80}")
        return list(given)
    return [int(number) for number in _NUMBER.findall(given)] if _IDS.fullmatch(given) else []
