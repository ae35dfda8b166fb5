"""Built-in metrics of texts, labels, lists and JSON documents."""

from __future__ import annotations

import json
import math
import numbers
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar

from compound.core.errors import CallError, DataError, DeclarationError
from compound.core.example import Example, Score
from compound.core.narrowing import report_wrong_arguments
from compound.evaluation.metrics.comparison import (
    Comparison,
    comparable,
    format_value,
    format_values,
    text_of,
    verdict,
)
from compound.evaluation.metrics.text import (
    equal_answers,
    find_label,
    is_number,
    normalize_both,
)
from compound.evaluation.rows import ClassName, is_finite

HIT_RANKS = (1, 5)  # of the parts of the reciprocal rank


@dataclass(frozen=True)
class ExactMatch(Comparison):
    """1 if the normalized texts are equal; a numeric gold value is compared as a number."""

    def compare(self, found: object, accepted: list[object], where: str) -> Score:
        """Return 1 or 0."""
        text_of(found, where)  # rejects other values
        return verdict(any(equal_answers(found, answer) for answer in accepted), accepted, found)


@dataclass(frozen=True)
class TokenF1(Comparison):
    """Harmonic mean of word precision and recall; a numeric gold value scores 0 or 1."""

    def compare(self, found: object, accepted: list[object], where: str) -> Score:
        """Return the best F1, with its precision and recall as parts."""
        text_of(found, where)  # rejects other values
        f1, precision, recall = max(_overlap(found, answer) for answer in accepted)
        parts = {"precision": precision, "recall": recall}
        return replace(verdict(f1 == 1.0, accepted, found), value=f1, parts=parts)


@dataclass(frozen=True)
class LabelAccuracy(Comparison):
    """1 if the values are equal or, given ``choices``, if the text decides on the gold label."""

    choices: tuple[str, ...] = ()

    def accepted(self, example: Example) -> list[object]:
        """Return the right answers of an example, which must be among the choices."""
        found = super().accepted(example)
        known = {choice.lower() for choice in self.choices}
        chosen = [answer for answer in found if str(answer).strip().lower() in known]
        if chosen and any(isinstance(answer, ClassName) for answer in found):
            return chosen  # by their names or by their numbers
        unknown = sorted(str(answer).strip().lower() for answer in found)
        unknown = [label for label in unknown if label not in known] if known else []
        if unknown:
            raise DataError(
                f"{self.name}, example {example.id!r}: gold label {format_value(unknown[0])} "
                "is not one of the choices",
                hint="choices: " + ", ".join(self.choices),
            )
        return found

    def compare(self, found: object, accepted: list[object], where: str) -> Score:
        """Return 1 or 0."""
        if not self.choices:
            return verdict(
                any(_equal_labels(found, answer) for answer in accepted), accepted, found
            )
        wanted = {str(answer).strip().lower() for answer in accepted}
        label = find_label(text_of(found, where), self.choices)
        score = verdict(label is not None and label.lower() in wanted, accepted, label)
        if label is not None:
            return score
        return replace(score, feedback=f"no single label in {format_value(found)}")


@dataclass(frozen=True)
class MRR(Comparison):
    """Reciprocal rank of the first right item of a list; 0 if there is none (mean reciprocal rank)."""

    listed: ClassVar[bool] = True

    key: str | None = None

    def compare(self, found: object, accepted: list[object], where: str) -> Score:
        """Return the reciprocal rank, with whether a right item is among the first 1 and 5 as parts."""
        items, wanted = _items(found, self.key, where), {_item(answer) for answer in accepted}
        rank = next((rank for rank, item in enumerate(items, 1) if item in wanted), math.inf)
        parts = {f"hit@{k}": float(rank <= k) for k in HIT_RANKS}
        if rank == math.inf:
            return Score(0.0, f"{format_values(accepted)} not among the {len(items)} items", parts)
        return Score(
            1 / rank, "correct" if rank == 1 else f"first right item at rank {rank}", parts
        )


@dataclass(frozen=True)
class RecallAtK(Comparison):
    """Share of the gold items among the first ``k`` items of a list."""

    listed: ClassVar[bool] = True

    k: int = 5
    key: str | None = None

    def compare(self, found: object, accepted: list[object], where: str) -> Score:
        """Return the share."""
        wanted = dict.fromkeys(_item(answer) for answer in accepted)
        missing = [item for item in wanted if item not in _items(found, self.key, where)[: self.k]]
        told = f"missing {format_values(missing)}" if missing else "correct"
        return Score(1 - len(missing) / len(wanted), told)


@report_wrong_arguments
def exact_match(output: str, gold: str | None = None) -> ExactMatch:
    """Score 1 if the output equals an acceptable answer, apart from its spelling, else 0.

    Case, Unicode variants, articles and punctuation at the borders of words are ignored; signs,
    operators and suffixes count, and numbers are compared as numbers: 3.50 is 3.5, but not 35.

    Args:
        output: The system output to read.
        gold: The field of `Example.gold` to compare with; default: the output's name.

    >>> capital = Example("e1", {}, {"answer": ["Paris", "City of Paris"]})
    >>> exact_match("answer").score({"answer": "the city of Paris."}, capital).value
    1.0
    >>> exact_match("answer").score({"answer": "Lyon"}, capital).feedback
    "expected 'Paris' or 'City of Paris', got 'Lyon'"
    """
    return ExactMatch("exact_match", output, gold or output)


@report_wrong_arguments
def token_f1(output: str, gold: str | None = None) -> TokenF1:
    """Score the word overlap with the best acceptable answer (SQuAD's F1), with words as in `exact_match`.

    Scripts without spaces, such as Chinese or Thai, are compared by characters.

    Args:
        output: The system output to read.
        gold: The field of `Example.gold` to compare with; default: the output's name.

    >>> score = token_f1("answer").score({"answer": "in Paris"}, Example("e1", {}, {"answer": "Paris"}))
    >>> round(score.value, 3), dict(score.parts)
    (0.667, {'precision': 0.5, 'recall': 1.0})
    """
    return TokenF1("token_f1", output, gold or output)


@report_wrong_arguments
def accuracy(output: str, gold: str | None = None, choices: Sequence[str] = ()) -> LabelAccuracy:
    """Score 1 if the output equals the gold value, else 0.

    Args:
        output: The system output to read.
        gold: The field of `Example.gold` to compare with; default: the output's name.
        choices: Labels to find in the output's text by `find_label`.

    >>> metric = accuracy("text", "label", choices=["yes", "no", "maybe"])
    >>> metric.score({"text": "It is not known. Answer: maybe"}, Example("e1", {}, {"label": "maybe"})).value
    1.0
    """
    for choice in choices:
        if not isinstance(choice, str) or not choice.strip():
            raise DeclarationError(
                f"accuracy: choices must be words, got {choice!r}",
                hint='in YAML write "yes" and "no" in quotes: unquoted, they are booleans',
            )
    if isinstance(choices, str) or len({choice.lower() for choice in choices}) < len(choices):
        raise DeclarationError(f"accuracy: choices must be different labels, got {choices!r}")
    return LabelAccuracy(
        "accuracy", output, gold or output, tuple(unicodedata.normalize("NFC", c) for c in choices)
    )


@report_wrong_arguments
def mrr(output: str, gold: str | None = None, key: str | None = None) -> MRR:
    """Score a ranked list by the reciprocal rank of its first right item.

    The parts ``hit@1`` and ``hit@5`` are 1 if a right item is among the first 1 or 5 items, else 0.

    Args:
        output: The system output to read, a list sorted best first.
        gold: The field of `Example.gold` with the right item or items; default: the output's name.
        key: For lists of objects such as passages: the entry to compare, for example ``"title"``.

    >>> mrr("ranked", "item").score({"ranked": ["x", "y"]}, Example("e1", {}, {"item": "y"}))
    Score(value=0.5, feedback='first right item at rank 2', parts={'hit@1': 0.0, 'hit@5': 1.0})
    """
    return MRR("mrr", output, gold or output, key)


@report_wrong_arguments
def recall_at_k(
    output: str, gold: str | None = None, k: int = 5, key: str | None = None
) -> RecallAtK:
    """Score a list by the share of the gold items among its first ``k``.

    Args:
        output: The system output to read, a list sorted best first.
        gold: The field of `Example.gold` with the right item or items; default: the output's name.
        k: Number of leading items that count.
        key: For lists of objects such as passages: the entry to compare, for example ``"title"``.

    >>> metric = recall_at_k("hits", "titles", k=2, key="title")
    >>> metric.score({"hits": [{"title": "A"}, {"title": "C"}]}, Example("e1", {}, {"titles": ["A", "B"]}))
    Score(value=0.5, feedback="missing 'B'", parts={})
    """
    if k < 1:
        raise DeclarationError(f"recall_at_k: k >= 1 must hold, got k={k}")
    return RecallAtK(f"recall_at_{k}", output, gold or output, k, key)


def _equal_labels(found: object, answer: object) -> bool:
    if is_number(found) and equal_answers(found, answer):
        return True  # also if the label is the text "1.0"
    return found == answer or _item(found) == _item(answer)


def _overlap(found: object, answer: object) -> tuple[float, float, float]:
    if isinstance(answer, numbers.Real) or is_number(found):
        return (float(equal_answers(found, answer)),) * 3
    words, gold = (text.split() for text in normalize_both(str(found), str(answer)))
    if not words or not gold:
        return (float(words == gold),) * 3
    common = (Counter(words) & Counter(gold)).total()
    # Equal to 2pr / (p + r), but without its rounding errors and never 0 / 0.
    return 2 * common / (len(words) + len(gold)), common / len(words), common / len(gold)


def _item(value: object) -> str:
    return str(value).strip()


def _items(found: object, key: str | None, where: str) -> list[str]:
    if not isinstance(found, list | tuple):
        raise CallError(f"{where}: the output must be a list, got {type(found).__name__}")
    for item in found:
        if isinstance(item, Mapping) and (key is None or key not in item):
            hint = f"choose one with key=: {', '.join(map(str, item))}"
            if key is None:
                raise DataError(f"{where}: its items are objects", hint=hint)
            raise CallError(f"{where}: an item has no entry {key!r}", hint=hint)
    return [_item(item[key] if isinstance(item, Mapping) else item) for item in found]


_FENCE = re.compile(r"```(?:json\b)?\s*")


@dataclass(frozen=True)
class JsonMatch(Comparison):
    """1 if the output equals the gold document as JSON; see `json_match`."""

    keys: tuple[str, ...] = ()
    subset: bool = False

    @property
    def answers(self) -> bool:
        """Whether gold values are outputs: the document of one example is no answer to another."""
        return False

    def accepted(self, example: Example) -> list[object]:
        """Return the gold document; a list is a JSON array, not a list of alternatives."""
        found = example.gold.get(self.gold)
        if found is None or not is_finite(found):
            super().accepted(example)  # reports the missing value
        document = comparable(found)
        with suppress(_NotJson):
            document = _parsed(document)
        if not is_finite(document):  # such as of the text {"a": NaN}
            raise DataError(
                f"{self.name}, example {example.id!r}: gold field {self.gold!r} is {format_value(document)}, "
                "but NaN and infinity equal nothing"
            )
        if self.keys and not (
            isinstance(document, Mapping) and all(key in document for key in self.keys)
        ):
            raise DataError(
                f"{self.name}, example {example.id!r}: gold field {self.gold!r} must be an object with the "
                f"keys {', '.join(self.keys)}, got {format_value(document)}"
            )
        return [self._kept(document)]

    def compare(self, found: object, accepted: list[object], where: str) -> Score:
        """Return 1 or 0, with the share of equal gold values as part ``fields``."""
        (gold,) = accepted
        try:
            document = _parsed(found)
            differences = list(self._differences(gold, self._kept(document), ""))
            total = _leaves(gold)
        except _NotJson as error:
            if found == gold:  # a label, or another text that is no JSON
                return Score(1.0, "correct", {"fields": 1.0})
            return Score(0.0, f"not JSON: {error}", {"fields": 0.0})
        except RecursionError:
            return Score(0.0, "the document is nested too deeply", {"fields": 0.0})
        wrong = sum(weight for weight, _ in differences)
        parts = {"fields": max(0.0, 1 - wrong / total)}
        if not differences:
            return Score(1.0, "correct", parts)
        more = f"; {len(differences) - 1} more differences" if len(differences) > 1 else ""
        return Score(0.0, f"{differences[0][1]}{more}", parts)

    def _kept(self, document: object) -> object:
        if not self.keys or not isinstance(document, Mapping):
            return document
        return {key: document[key] for key in self.keys if key in document}

    def _differences(self, gold: object, found: object, path: str) -> Iterator[tuple[int, str]]:
        """Yield the number of gold values that each difference affects, and the difference."""
        if isinstance(gold, Mapping) and isinstance(found, Mapping):
            for key, value in gold.items():
                if key in found:
                    yield from self._differences(value, found[key], f"{path}.{key}")
                else:
                    yield _leaves(value), f"{_shown(path, key)} is missing"
            further = [] if self.subset else [key for key in found if key not in gold]
            yield from ((0, f"{_shown(path, key)} is not expected") for key in further)
        elif (
            isinstance(gold, list | tuple)
            and isinstance(found, list | tuple)
            and len(gold) == len(found)
        ):
            for i, (value, other) in enumerate(zip(gold, found, strict=True)):
                yield from self._differences(value, other, f"{path}[{i}]")
        elif not _equal(gold, found):
            where = f"{_shown(path)}: " if path else ""
            yield _leaves(gold), f"{where}expected {format_value(gold)}, got {format_value(found)}"


class _NotJson(Exception):
    """A value is not a JSON document."""


def _parsed(value: object) -> object:
    """Return a value as a document; text is parsed, also from a fenced block."""
    if not isinstance(value, str):
        return value
    try:
        try:
            return json.loads(value)
        except ValueError:  # also of numbers with too many digits
            # A string of the document may hold a fence: the block ends after the document.
            if (fence := _FENCE.search(value)) is None:
                raise
            document, end = json.JSONDecoder().raw_decode(value, fence.end())
            if value[end:].lstrip().startswith("```"):
                return document
    except RecursionError:
        raise _NotJson("nested too deeply") from None
    except ValueError:
        pass
    raise _NotJson(format_value(value))


def _equal(gold: object, found: object) -> bool:
    return isinstance(gold, bool) == isinstance(found, bool) and gold == found


def _leaves(document: object) -> int:
    if isinstance(document, Mapping):
        return max(1, sum(_leaves(value) for value in document.values()))
    if isinstance(document, list | tuple):
        return max(1, sum(_leaves(value) for value in document))
    return 1


def _shown(path: str, key: object = None) -> str:
    return f"{path}.{key}".lstrip(".") if key is not None else path.lstrip(".")


@report_wrong_arguments
def json_match(
    output: str, gold: str | None = None, keys: Sequence[str] = (), subset: bool = False
) -> JsonMatch:
    """Score 1 if the output and the gold field are equal as JSON, else 0; the order of keys is irrelevant.

    Text is parsed, also from a fenced block. The part ``fields`` is the share of gold values that
    the output has at the same place. A gold list is one JSON array, not a list of alternatives.

    Args:
        output: The system output to read.
        gold: The field of `Example.gold` with the document or its text; default: the output's name.
        keys: Compare only these keys of the outermost object; default: all.
        subset: Whether objects of the output may have further keys.

    >>> row = Example("e1", {}, {"order": {"item": "tea", "n": 2}})
    >>> json_match("order").score({"order": '{"n": 2.0, "item": "tea"}'}, row).value
    1.0
    >>> json_match("order").score({"order": {"item": "tea", "n": 3}}, row)
    Score(value=0.0, feedback='n: expected 2, got 3', parts={'fields': 0.5})
    """
    if isinstance(keys, str):
        raise DeclarationError(f"json_match: keys must be a list of names, got {keys!r}")
    return JsonMatch("json_match", output, gold or output, tuple(keys), subset)
