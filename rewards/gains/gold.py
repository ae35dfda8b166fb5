"""Relations between a component's output and an example's gold answer, as named features.

During training, candidates run on train examples, whose answers are known. A reward that reads them ranks
outputs of a component far from the answer, such as the passages of a retriever, much better than one that
reads only (x, y) (an asymmetric critic). The features only weigh outputs that a candidate produced; no answer
is given to a component. Such a reward never scores validation or test examples, and is never served.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from compound.components.fields import format_value
from compound.evaluation.metrics.text import normalize
from compound.example import Example

__all__ = ["GOLD", "answers_of", "gold_features"]

GOLD = "gold:"  # prefix of the names of these features


def answers_of(example: Example) -> dict[str, object]:
    """Return the gold fields of an example, without its inputs and its identifier.

    Rows of files have all of their columns as gold fields.

    >>> row = {"id": "r1", "question": "Who?", "answer": "Ann"}
    >>> answers_of(Example("r1", {"question": "Who?"}, row))
    {'answer': 'Ann'}
    """
    return {
        name: value
        for name, value in example.gold.items()
        if name not in example.inputs and value != example.id
    }


def gold_features(outputs: Mapping[str, object], gold: Mapping[str, object]) -> dict[str, float]:
    """Return the relations of each output to each gold field.

    For texts, and for lists of texts (the best item counts): ``holds`` (the answer occurs in it), ``equal``,
    ``covers`` (share of the answer's words that occur), ``f1`` (overlap of words); for lists, also ``rank``
    (1 / position of the first item with the answer) and ``share`` (of the items with the answer). For
    numbers: ``near``, minus the logarithm of one plus the distance. Gold fields with several answers count by
    the best one.

    Args:
        outputs: values by name.
        gold: gold fields by name; see `answers_of`.

    >>> found = gold_features({"passages": ["Rome is old.", "Lima is in Peru."]}, {"answer": "Lima"})
    >>> found["gold:passages.answer.holds"], found["gold:passages.answer.rank"]
    (1.0, 0.5)
    """
    found: dict[str, float] = {}
    for field, answer in gold.items():
        answers = _items(answer)
        for name, value in outputs.items():
            prefix = f"{GOLD}{name}.{field}"
            if _is_number(value) and len(answers) == 1 and _is_number(answers[0]):
                near = -math.log1p(abs(float(str(value)) - float(str(answers[0]))))
                found |= {f"{prefix}.near": near, f"{prefix}.equal": float(near == 0)}
            else:
                wanted = [text for text in (normalize(format_value(item)) for item in answers) if text]
                found |= _of_texts(prefix, value, wanted)
    return found


def _of_texts(prefix: str, value: object, answers: Sequence[str]) -> dict[str, float]:
    items = [normalize(format_value(item)) for item in _items(value)]
    holds = [any(f" {answer} " in f" {item} " for answer in answers) for item in items]
    overlaps = [_overlap(item, answer) for item in items for answer in answers]
    found = {
        "holds": float(any(holds)),
        "equal": float(any(item == answer for item in items for answer in answers)),
        "covers": max((recall for recall, _ in overlaps), default=0.0),
        "f1": max((f1 for _, f1 in overlaps), default=0.0),
    }
    if _is_list(value):
        found["rank"] = 1 / (1 + holds.index(True)) if any(holds) else 0.0
        found["share"] = sum(holds) / len(holds) if holds else 0.0
    return {f"{prefix}.{name}": number for name, number in found.items()}


def _overlap(text: str, answer: str) -> tuple[float, float]:
    """Return recall and F1 of the distinct words of an answer in a text."""
    words, wanted = set(text.split()), set(answer.split())
    common = len(words & wanted)
    if not common:
        return 0.0, 0.0
    recall, precision = common / len(wanted), common / len(words)
    return recall, 2 * recall * precision / (recall + precision)


def _items(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
