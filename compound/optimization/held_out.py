"""Expected answers of held-out examples, which no new prompt may contain.

A writer of prompts reads train examples only. A prompt that contains the answer of a validation or
test example nevertheless, since the splits overlap or the model knows the data set, would be scored
on what it was told. Labels and other answers that several examples share, or that train examples
have, are no leak.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from compound.core.example import Example
from compound.evaluation.metrics.text import normalize

__all__ = ["HeldOutAnswers"]

SHARED = 2  # held-out examples with an answer, above which it counts as a label
LEAST = 5  # characters of an answer; shorter ones occur in prompts by chance


class HeldOutAnswers:
    """Answers that only held-out examples have.

    >>> train, valid = (Example("e", {"q": "?"}, {"answer": name}) for name in ("Banjul", "Serekunda"))
    >>> answers = HeldOutAnswers([valid], [train])
    >>> answers.found_in("Name a city, such as Serekunda."), answers.found_in("Name a city, such as Banjul.")
    ('serekunda', '')
    """

    def __init__(self, held_out: Sequence[Example], train: Sequence[Example]) -> None:
        known = {answer for example in train for answer in _answers(example)}
        counts = Counter(answer for example in held_out for answer in set(_answers(example)))
        self._answers = sorted(
            answer for answer, n in counts.items() if n <= SHARED and answer not in known
        )

    def found_in(self, text: str, shown: str = "") -> str:
        """Return an answer that a text contains and the request for it did not show; ``""`` without one."""
        words, seen = f" {normalize(text)} ", f" {normalize(shown)} "
        return next((a for a in self._answers if f" {a} " in words and f" {a} " not in seen), "")


def _answers(example: Example) -> Iterator[str]:
    """Yield the texts of the expected results of an example, in a common form."""
    for text in _texts(example.gold):
        answer = normalize(text)
        if len(answer) >= LEAST and re.search(r"[^\W\d]", answer):
            yield answer


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)
