"""Base of metrics that compare an output with a gold field, their verdicts and their messages."""

from __future__ import annotations

import dataclasses
import numbers
import types
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from compound.core.errors import (
    CallError,
    CompoundError,
    DataError,
    InvalidRow,
    MissingOutput,
    check_installed,
    raise_all,
    suggest_name,
)
from compound.core.example import Example, Score
from compound.evaluation.rows import ClassName, is_finite, is_missing
from compound.evaluation.statistics import UNIT, Bounds
from compound.graph.json_values import SCALARS, json_form


def format_fields(fields: Mapping[str, object]) -> str:
    """Return the names of the fields, or ``none``."""
    return ", ".join(fields) or "none"


def format_values(values: Sequence[object]) -> str:
    """Return the first three values, joined by *or*."""
    shown = " or ".join(format_value(value) for value in values[:3])
    return shown if len(values) <= 3 else f"{shown} or {len(values) - 3} more"


def format_value(value: object) -> str:
    """Return a value on one line, with at most 80 characters."""
    text = " ".join(value.split()) if isinstance(value, str) else repr(value)
    text = text if len(text) <= 80 else text[:79] + "…"
    return repr(text) if isinstance(value, str) else text


def comparable(value: object) -> object:
    """Return a value in the form in which a data file holds it, so that equal values compare equal.

    Members of an Enum become their values, decimals numbers, dates ISO texts, models and
    dataclasses objects, and letters with accents single characters (NFC).

    >>> from datetime import date
    >>> comparable({1: [Decimal("1.5"), date(2024, 1, 2)]})
    {'1': [1.5, '2024-01-02']}
    """
    try:
        return _comparable(value)
    except RecursionError:  # metrics report documents that are nested too deeply
        return value


def _comparable(value: object) -> object:
    if isinstance(value, Enum):
        return _comparable(value.value)
    if isinstance(value, str):
        normal = unicodedata.normalize("NFC", value)
        return value if normal == value else normal
    if isinstance(value, Decimal):
        whole = value.is_finite() and value == value.to_integral_value()
        return int(value) if whole else float(value)
    if isinstance(value, Mapping):
        return {str(_comparable(key)): _comparable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_comparable(item) for item in value]
    if (
        isinstance(value, (set, frozenset, *SCALARS))
        or hasattr(value, "model_dump")
        or _is_record(value)
    ):
        try:
            found = json_form(value)
        except (TypeError, ValueError):  # such as bytes that are no text
            return value
        return _comparable(found)
    return value


def _is_record(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def text_of(value: object, where: str) -> str:
    """Return a text or a number as text; ``where`` starts the error message for other values."""
    if isinstance(value, str | numbers.Real):
        return str(value)
    raise CallError(f"{where}: the output must be text or a number, got {type(value).__name__}")


def verdict(right: bool, accepted: list[object], found: object) -> Score:
    """Return 1 or 0, with the acceptable answers as feedback on a wrong one."""
    return Score(
        float(right),
        "correct" if right else f"expected {format_values(accepted)}, got {format_value(found)}",
    )


MAX_SHOWN = 8  # maximum number of labels and gold values in a message


@dataclass(frozen=True)
class Comparison(ABC):
    """Base of metrics that compare one output with one gold field.

    Attributes:
        name: name for messages and tables.
        output: the system output to read.
        gold: the field of `Example.gold` with the right answer, or with several right answers.
        bounds: minimum and maximum score.
        listed: whether the output is a list.
    """

    bounds: ClassVar[Bounds] = UNIT
    listed: ClassVar[bool] = False
    requires: ClassVar[tuple[str, ...]] = ()  # modules of optional libraries

    name: str
    output: str
    gold: str

    @property
    def answers(self) -> bool:
        """Whether gold values are outputs that one could give for any example."""
        return True

    def score(self, outputs: Mapping[str, object], example: Example) -> Score:
        """Compare the output with the acceptable answers."""
        where = f"{self.name}, example {example.id!r}"
        if self.output not in outputs:
            raise missing_output(where, self.output, outputs)
        return self.compare(comparable(outputs[self.output]), self.accepted(example), where)

    def check(self, outputs: Collection[str], examples: Iterable[Example]) -> None:
        """Reject outputs and examples that cannot be compared, before anything is run."""
        for module in self.requires:
            check_installed(module, f"the metric {self.name}")
        if self.output not in outputs:
            raise DataError(
                f"{self.name}: no output {self.output!r}", hint=suggest_name(self.output, outputs)
            )
        labels = _values(
            getattr(outputs[self.output], "type", Any) if isinstance(outputs, Mapping) else Any
        )
        labels = labels if self.listed == any(isinstance(label, list) for label in labels) else []
        unmatched: dict[str, list[str]] = {}
        seen: dict[str, bool] = {}
        errors: list[CompoundError] = []
        for example in examples:
            try:
                accepted = self.accepted(example)
            except DataError as error:
                errors.append(_of_row(error, example))
                continue
            shown = " or ".join(map(repr, accepted))
            if not labels:
                continue
            if shown not in seen:
                seen[shown] = self._reachable(labels, accepted)
            if not seen[shown]:
                unmatched.setdefault(shown, []).append(example.id)
        if unmatched:
            errors.append(self._unmatched(labels, unmatched))
        raise_all(errors)

    def _reachable(self, labels: Sequence[object], accepted: list[object]) -> bool:
        try:
            return any(self.compare(label, accepted, self.name).value > 0 for label in labels)
        except CallError:  # outputs of this type are rejected in each run
            return True

    def _unmatched(
        self, labels: Sequence[object], unmatched: Mapping[str, Sequence[str]]
    ) -> DataError:
        """Return the error for gold values that no label matches: their rows would silently score 0."""
        named = list(unmatched.items())
        shown = ", ".join(
            f"{gold} ({len(ids)} row{'s' * (len(ids) > 1)})" for gold, ids in named[:MAX_SHOWN]
        )
        more = f" and {len(named) - MAX_SHOWN} more" if len(named) > MAX_SHOWN else ""
        known = ", ".join(
            format_value(label[0] if isinstance(label, list) else label)
            for label in labels[:MAX_SHOWN]
        )
        cut = ", …" if len(labels) > MAX_SHOWN else ""
        choices = getattr(self, "choices", ())
        return DataError(
            f"{self.name}: no label of output {self.output!r} matches the gold values {shown}{more} of "
            f"{self.gold!r}, such as example {named[0][1][0]!r}: these rows can only score 0",
            hint=f"labels: {known}{cut}{'; choices: ' + ', '.join(choices) if choices else ''}; "
            "make the spelling of gold values and labels equal",
        )

    def accepted(self, example: Example) -> list[object]:
        """Return the right answers of an example in their `comparable` form, in the given order."""
        where = f"{self.name}, example {example.id!r}"
        if self.gold not in example.gold:
            close = suggest_name(self.gold, map(str, example.gold))
            hint = f"fields: {format_fields(example.gold)}" + (
                f"; {close}" if close.endswith("?") else ""
            )
            raise DataError(f"{where}: no gold field {self.gold!r}", hint=hint)
        gold = example.gold[self.gold]
        accepted = list(gold) if isinstance(gold, list | tuple) else [gold]
        if isinstance(gold, set | frozenset):
            accepted = sorted(gold, key=repr)  # deterministic across processes
        if not accepted or not all(
            not is_missing(answer) and is_finite(answer) for answer in accepted
        ):
            raise DataError(
                f"{where}: gold field {self.gold!r} is {format_value(gold)}, "
                "but must hold a value to compare with"
            )
        if not self.listed:
            several = [one.answers if isinstance(one, ClassName) else (one,) for one in accepted]
            accepted = [answer for answers in several for answer in answers]
        return [comparable(answer) for answer in accepted]

    @abstractmethod
    def compare(self, found: object, accepted: list[object], where: str) -> Score:
        """Score an output in its `comparable` form against all right answers; ``where`` starts errors."""


def _of_row(error: DataError, example: Example) -> InvalidRow:
    key = error.message.replace(f", example {example.id!r}", "", 1)
    return InvalidRow(example.place, error.message, hint=error.hint, key=key)


def check_each(examples: Iterable[Example], check: Callable[[Example], object]) -> None:
    """Call a function with each example, and raise the errors of all."""
    errors = []
    for example in examples:
        try:
            check(example)
        except DataError as error:
            errors.append(_of_row(error, example))
    raise_all(errors)


def missing_output(where: str, output: str, outputs: Mapping[str, object]) -> MissingOutput:
    """Return the error for an output that does not exist; ``where`` names the metric and the example."""
    return MissingOutput(
        f"{where}: no output {output!r}", hint=f"outputs: {format_fields(outputs)}"
    )


def _values(kind: object) -> list[object]:
    """Return all values of a type that is a set of labels, as `comparable`; of a list, each in a list.

    >>> _values(Literal["yes", "no"] | None), _values(bool), _values(list[bool]), _values(str)
    (['yes', 'no'], [True, False], [[True], [False]], [])
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _values(arguments[0])
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [comparable(member) for member in kind]
    if origin is Literal:
        return [comparable(value) for value in arguments if value is not None]
    if kind is bool:
        return [True, False]
    if origin is list:
        return [[value] for value in _values(arguments[0])]
    if origin in (Union, types.UnionType):
        parts = [_values(part) for part in arguments if part is not type(None)]
        return [value for part in parts for value in part] if all(parts) else []
    return []
