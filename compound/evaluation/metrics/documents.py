"""Metric of JSON documents."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from compound.core.errors import DataError, DeclarationError
from compound.core.example import Example, Score
from compound.core.narrowing import report_wrong_arguments
from compound.evaluation.metrics.comparison import Comparison, comparable, format_value
from compound.evaluation.rows import is_finite

_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


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
    block = _FENCE.search(value)
    for text in (value, *([block[1]] if block else [])):
        try:
            return json.loads(text)
        except RecursionError:
            raise _NotJson("nested too deeply") from None
        except ValueError:  # also of numbers with too many digits
            continue
    raise _NotJson(format_value(value))


def _equal(gold: object, found: object) -> bool:
    """Compare two scalars; true is not 1."""
    return isinstance(gold, bool) == isinstance(found, bool) and gold == found


def _leaves(document: object) -> int:
    """Return the number of scalars of a document, at least 1."""
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
