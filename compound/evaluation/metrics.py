"""Metrics: the quality of an output, from 0 to 1, with feedback text for optimizers that use it.

A metric names the system output it reads and the field of `Example.gold` it compares with. A gold field
may hold a list of acceptable answers; the best match counts. Text is compared after SQuAD's
normalisation (Rajpurkar et al. 2016); labels and list items are compared exactly.
"""

from __future__ import annotations

import inspect
import math
import numbers
import re
import string
import types
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NoReturn, Union, get_args, get_origin

import numpy as np

from compound.errors import CallError, DataError, DeclarationError, MissingOutput, suggest_name
from compound.evaluation.labels import is_negated
from compound.evaluation.statistics import ROUNDING, UNIT, Bounds
from compound.example import Example, Metric, Score
from compound.registry.user_code import check_signature

HIT_RANKS = (1, 5)  # of the parts of the reciprocal rank
MAX_SHOWN = 8  # maximum number of labels and gold values in a message
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_ANSWER = re.compile(r"\banswer(?:\s+is)?[\s*_]*:", re.IGNORECASE)
_EMPHASIS = re.compile(r"(?<!\w)_+|_+(?!\w)|\*+")


def normalize(text: str) -> str:
    """Lowercase, remove punctuation and articles, and collapse white space (SQuAD's normalisation).

    A text that would become empty keeps its letters, so that the label ``A`` does not become ``""``.

    >>> normalize("The Eiffel   Tower!"), normalize("A")
    ('eiffel tower', 'a')
    """
    lowered = text.lower()
    return " ".join(_ARTICLES.sub(" ", lowered.translate(_PUNCTUATION)).split()) or " ".join(lowered.split())


def find_label(text: str, choices: Sequence[str]) -> str | None:
    """Return the one of ``choices`` that a text decides on, or None.

    Labels match as whole words, ignoring case (single letters match case: "a" is a word). Rules in order:
    the text is a label; a label directly follows the last ``answer:``; the last label after that marker; the
    only label mentioned. Two labels without a marker give None.

    >>> find_label("The diagnosis is X. Answer: yes", ["yes", "no"])
    'yes'
    >>> find_label("yes and no", ["yes", "no"]) is None
    True
    """
    plain = _EMPHASIS.sub("", text).strip()
    by_name = {choice.lower(): choice for choice in choices}
    longest_first = sorted(choices, key=len, reverse=True)
    any_case = "|".join(re.escape(choice) for choice in longest_first)
    own_case = "|".join(re.escape(c) if len(c) > 1 else f"(?-i:{re.escape(c)})" for c in longest_first)
    first = re.compile(rf"\W*({any_case})(?!\w)(?!-\w)", re.IGNORECASE)
    word = re.compile(rf"(?<!\w)(?<!\w-)({own_case})(?!\w)(?!-\w)", re.IGNORECASE)
    markers = list(_ANSWER.finditer(plain))
    rest = plain[markers[-1].end() :] if markers else ""
    if plain.strip(string.punctuation + " ").lower() in by_name:
        return by_name[plain.strip(string.punctuation + " ").lower()]
    if markers and (match := first.match(rest)):
        return by_name[match[1].lower()]
    if behind := _find_affirmed(word, rest):
        return by_name[behind[-1].lower()]
    mentioned = {label.lower() for label in _find_affirmed(word, plain)}
    return by_name[mentioned.pop()] if len(mentioned) == 1 else None


def _find_affirmed(label: re.Pattern[str], text: str) -> list[str]:
    return [found[1] for found in label.finditer(text) if not is_negated(text, found.start())]


@dataclass(frozen=True)
class Comparison(ABC):
    """Base of metrics that compare one output with one gold field.

    Attributes:
        name: name for messages and tables.
        output: the system output to read.
        gold: the field of `Example.gold` with the right answer, or with several right answers.
        bounds: minimum and maximum score; ``None`` unless declared by a subclass.
        listed: whether the output is a list.
    """

    bounds: ClassVar[Bounds | None] = None
    listed: ClassVar[bool] = False

    name: str
    output: str
    gold: str

    def score(self, outputs: Mapping[str, object], example: Example) -> Score:
        """Compare the output with the acceptable answers."""
        where = f"{self.name}, example {example.id!r}"
        if self.output not in outputs:
            raise _missing(where, self.output, outputs)
        return self.compare(outputs[self.output], self.accepted(example), where)

    def check(self, outputs: Collection[str], examples: Iterable[Example]) -> None:
        """Reject outputs and examples that cannot be compared, before anything is run.

        Raises:
            DataError: the output does not exist, an example has no right answer, or the output's fixed set
                of labels excludes the right answer.
        """
        if self.output not in outputs:
            raise DataError(
                f"{self.name}: no output {self.output!r}", hint=suggest_name(self.output, outputs)
            )
        labels = _values(getattr(outputs[self.output], "type", Any) if isinstance(outputs, Mapping) else Any)
        labels = labels if self.listed == any(isinstance(label, list) for label in labels) else []
        unmatched: dict[str, list[str]] = {}
        seen: dict[str, bool] = {}
        for example in examples:
            accepted = self.accepted(example)
            shown = " or ".join(map(repr, accepted))
            if not labels:
                continue
            if shown not in seen:
                seen[shown] = self._reachable(labels, accepted)
            if not seen[shown]:
                unmatched.setdefault(shown, []).append(example.id)
        if unmatched:
            self._raise_unmatched(labels, unmatched)

    def _reachable(self, labels: Sequence[object], accepted: list[object]) -> bool:
        """Return whether any value of the output scores above zero."""
        try:
            return any(self.compare(label, accepted, self.name).value > 0 for label in labels)
        except CallError:  # outputs of this type are rejected in each run
            return True

    def _raise_unmatched(self, labels: Sequence[object], unmatched: Mapping[str, Sequence[str]]) -> NoReturn:
        """Reject gold values that no label matches: their rows would silently score 0 in every run.

        A free-text output could match them, but an output with a fixed set of labels cannot.
        """
        named = list(unmatched.items())
        shown = ", ".join(f"{gold} ({len(ids)} row{'s' * (len(ids) > 1)})" for gold, ids in named[:MAX_SHOWN])
        more = f" and {len(named) - MAX_SHOWN} more" if len(named) > MAX_SHOWN else ""
        known = ", ".join(
            _shown(label[0] if isinstance(label, list) else label) for label in labels[:MAX_SHOWN]
        )
        cut = ", …" if len(labels) > MAX_SHOWN else ""
        choices = getattr(self, "choices", ())
        raise DataError(
            f"{self.name}: no label of output {self.output!r} matches the gold values {shown}{more} of "
            f"{self.gold!r}, such as example {named[0][1][0]!r}: these rows can only score 0",
            hint=f"labels: {known}{cut}{'; choices: ' + ', '.join(choices) if choices else ''}; "
            "make the spelling of gold values and labels equal",
        )

    def accepted(self, example: Example) -> list[object]:
        """Return the right answers of an example, in the given order.

        Raises:
            DataError: there are none.
        """
        where = f"{self.name}, example {example.id!r}"
        if self.gold not in example.gold:
            close = suggest_name(self.gold, map(str, example.gold))
            hint = f"fields: {_names(example.gold)}" + (f"; {close}" if close.endswith("?") else "")
            raise DataError(f"{where}: no gold field {self.gold!r}", hint=hint)
        gold = example.gold[self.gold]
        accepted = list(gold) if isinstance(gold, list | tuple) else [gold]
        if isinstance(gold, set | frozenset):
            accepted = sorted(gold, key=repr)  # deterministic across processes
        if not accepted or None in accepted:
            raise DataError(
                f"{where}: gold field {self.gold!r} is {_shown(gold)}, but must hold a value to compare with"
            )
        return accepted

    @abstractmethod
    def compare(self, found: object, accepted: list[object], where: str) -> Score:
        """Score an output against all acceptable answers; ``where`` starts error messages."""


@dataclass(frozen=True)
class ExactMatch(Comparison):
    """1 if the normalised texts are equal; a numeric gold value is compared as a number."""

    bounds: ClassVar[Bounds | None] = UNIT

    def compare(self, found: object, accepted: list[object], where: str) -> Score:
        """Return 1 or 0."""
        text = _text(found, where)
        return _verdict(any(_equal(text, answer) for answer in accepted), accepted, found)


@dataclass(frozen=True)
class TokenF1(Comparison):
    """Harmonic mean of word precision and recall; a numeric gold value scores 0 or 1."""

    bounds: ClassVar[Bounds | None] = UNIT

    def compare(self, found: object, accepted: list[object], where: str) -> Score:
        """Return the best F1, with its precision and recall as parts."""
        text = _text(found, where)
        f1, precision, recall = max(_overlap(text, answer) for answer in accepted)
        parts = {"precision": precision, "recall": recall}
        return replace(_verdict(f1 == 1.0, accepted, found), value=f1, parts=parts)


@dataclass(frozen=True)
class Accuracy(Comparison):
    """1 if the values are equal or, given ``choices``, if the text decides on the gold label."""

    bounds: ClassVar[Bounds | None] = UNIT

    choices: tuple[str, ...] = ()

    def accepted(self, example: Example) -> list[object]:
        """Return the right answers of an example, which must be among the choices."""
        found = super().accepted(example)
        known = {choice.lower() for choice in self.choices}
        unknown = sorted(str(answer).strip().lower() for answer in found)
        unknown = [label for label in unknown if label not in known] if known else []
        if unknown:
            raise DataError(
                f"{self.name}, example {example.id!r}: gold label {_shown(unknown[0])} "
                "is not one of the choices",
                hint="choices: " + ", ".join(self.choices),
            )
        return found

    def compare(self, found: object, accepted: list[object], where: str) -> Score:
        """Return 1 or 0."""
        if not self.choices:
            return _verdict(any(found == a or _item(found) == _item(a) for a in accepted), accepted, found)
        wanted = {str(answer).strip().lower() for answer in accepted}
        label = find_label(_text(found, where), self.choices)
        score = _verdict(label is not None and label.lower() in wanted, accepted, label)
        return score if label is not None else replace(score, feedback=f"no single label in {_shown(found)}")


@dataclass(frozen=True)
class MRR(Comparison):
    """Reciprocal rank of the first right item of a list; 0 if there is none (mean reciprocal rank)."""

    bounds: ClassVar[Bounds | None] = UNIT
    listed: ClassVar[bool] = True

    key: str | None = None

    def compare(self, found: object, accepted: list[object], where: str) -> Score:
        """Return the reciprocal rank, with whether a right item is among the first 1 and 5 as parts."""
        items, wanted = _items(found, self.key, where), {_item(answer) for answer in accepted}
        rank = next((rank for rank, item in enumerate(items, 1) if item in wanted), math.inf)
        parts = {f"hit@{k}": float(rank <= k) for k in HIT_RANKS}
        if rank == math.inf:
            return Score(0.0, f"{_list(accepted)} not among the {len(items)} items", parts)
        return Score(1 / rank, "correct" if rank == 1 else f"first right item at rank {rank}", parts)


@dataclass(frozen=True)
class RecallAtK(Comparison):
    """Share of the gold items among the first ``k`` items of a list."""

    bounds: ClassVar[Bounds | None] = UNIT
    listed: ClassVar[bool] = True

    k: int = 5
    key: str | None = None

    def compare(self, found: object, accepted: list[object], where: str) -> Score:
        """Return the share."""
        wanted = dict.fromkeys(_item(answer) for answer in accepted)
        missing = [item for item in wanted if item not in _items(found, self.key, where)[: self.k]]
        return Score(1 - len(missing) / len(wanted), f"missing {_list(missing)}" if missing else "correct")


@dataclass(frozen=True)
class Custom:
    """A metric that calls a user function; see `custom`."""

    function: Scoring
    name: str
    bounds: Bounds | None = None

    def score(self, outputs: Mapping[str, object], example: Example) -> Score | Awaitable[Score]:
        """Call the function and convert its result to a `Score`.

        Raises:
            MissingOutput: the function reads an output that does not exist.
        """
        value = self.function(_Outputs(outputs, self.name, example), example)
        return self._later(value) if inspect.isawaitable(value) else as_score(value, self.name)

    async def _later(self, value: Awaitable[object]) -> Score:
        return as_score(await value, self.name)


class _Outputs(dict[str, object]):
    """Outputs passed to a user function; reading an unknown one raises an error that lists the known ones."""

    def __init__(self, outputs: Mapping[str, object], name: str, example: Example) -> None:
        super().__init__(outputs)
        self._name = name
        self._example = example

    def __missing__(self, output: str) -> NoReturn:
        raise _missing(f"{self._name}, example {self._example.id!r}", output, self)


def _missing(where: str, output: str, outputs: Mapping[str, object]) -> MissingOutput:
    return MissingOutput(f"{where}: no output {output!r}", hint=f"outputs: {_names(outputs)}")


def exact_match(output: str, gold: str | None = None) -> ExactMatch:
    """Score 1 if the output equals an acceptable answer after SQuAD's normalisation, else 0.

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


def token_f1(output: str, gold: str | None = None) -> TokenF1:
    """Score the word overlap with the best acceptable answer (SQuAD's F1).

    Args:
        output: The system output to read.
        gold: The field of `Example.gold` to compare with; default: the output's name.

    >>> score = token_f1("answer").score({"answer": "in Paris"}, Example("e1", {}, {"answer": "Paris"}))
    >>> round(score.value, 3), dict(score.parts)
    (0.667, {'precision': 0.5, 'recall': 1.0})
    """
    return TokenF1("token_f1", output, gold or output)


def accuracy(output: str, gold: str | None = None, choices: Sequence[str] = ()) -> Accuracy:
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
    return Accuracy("accuracy", output, gold or output, tuple(choices))


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


def recall_at_k(output: str, gold: str | None = None, k: int = 5, key: str | None = None) -> RecallAtK:
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


def custom(function: Scoring, name: str = "", bounds: Bounds | None = None) -> Custom:
    """Create a metric from a sync or async function of (outputs, example).

    Args:
        function: Scores one run; returns a number or a `Score`.
        name: Name in reports; default: the function's name.
        bounds: Minimum and maximum score, such as ``(0, 1)``. Confidence intervals then stay within them, and
            acceptance tests hold for every distribution of scores (`compound.evaluation.paired_tests`). After
            a score outside them they count as unknown, as they do by default.

    Raises:
        DeclarationError: The bounds are not two finite numbers in ascending order.
        UserCodeError: The function cannot be called with outputs and an example.

    >>> metric = custom(lambda outputs, example: len(outputs["answer"]) < 5, "short", bounds=(0, 1))
    >>> metric.score({"answer": "yes"}, None)
    Score(value=1.0, feedback='', parts={})
    """
    chosen = name or getattr(function, "__name__", type(function).__name__)
    check_signature(function, f"metric {chosen!r}", "outputs", "example")
    return Custom(function, chosen, None if bounds is None else _bounds(bounds, chosen))


def bounds_of(metric: Metric) -> Bounds | None:
    """Return the minimum and maximum score of a metric, or ``None`` if it does not declare them.

    A metric declares them by an attribute ``bounds``, a pair of numbers.

    Raises:
        DeclarationError: They are not two finite numbers in ascending order.

    >>> bounds_of(token_f1("answer")), bounds_of(custom(lambda outputs, example: 1.0))
    ((0.0, 1.0), None)
    """
    found = getattr(metric, "bounds", None)
    return None if found is None else _bounds(found, metric.name)


def _bounds(bounds: object, name: str) -> Bounds:
    if isinstance(bounds, list | tuple) and len(bounds) == 2:
        low, high = bounds
        if all(isinstance(b, numbers.Real) and math.isfinite(b) for b in bounds) and low < high:
            return float(low), float(high)
    raise DeclarationError(
        f"metric {name!r}: bounds must be the minimum and maximum score, but got {bounds!r}",
        hint="for example bounds=(0, 1)",
    )


Scoring = Callable[[Mapping[str, Any], Example], object]  # Any: only the user knows the types of outputs


def as_metric(metric: Metric | Scoring) -> Metric:
    """Return a metric unchanged, and wrap a function by `custom`.

    >>> as_metric(lambda outputs, example: 1.0).score({}, None).value
    1.0
    """
    return metric if isinstance(metric, Metric) else custom(metric)


METRICS: Mapping[str, Callable[..., Metric]] = {
    "exact_match": exact_match,
    "token_f1": token_f1,
    "accuracy": accuracy,
    "mrr": mrr,
    "recall_at_k": recall_at_k,
}


def check_rows(metric: Metric, outputs: Collection[str], examples: Iterable[Example]) -> None:
    """Reject examples that a metric cannot score, before the first call; user functions are not checked.

    Raises:
        DataError: the metric reads an unknown output, an example has no right answer, or the output's labels
            cannot match it.
    """
    if isinstance(metric, Comparison):
        metric.check(outputs, examples)


async def apply_metric(metric: Metric, outputs: Mapping[str, object], example: Example) -> Score:
    """Score outputs with a sync or async metric, and validate the result.

    Rounding errors at the metric's bounds are clipped. A score farther outside is returned as it is; see
    `bounds_violation`.

    Raises:
        CallError: The value is not a finite real number.
    """
    value = metric.score(outputs, example)
    score = as_score(await value if inspect.isawaitable(value) else value, metric.name)
    bounds = bounds_of(metric)
    if bounds is None:
        return score
    low, high = bounds
    nearest_bound = min(max(score.value, low), high)
    is_rounding = abs(score.value - nearest_bound) <= ROUNDING * (high - low)
    return replace(score, value=nearest_bound) if is_rounding else score


def bounds_violation(metric: Metric, score: float, example: str) -> str:
    """Return a message if a score of ``metric`` is outside the bounds that it declares, else ``""``.

    >>> bounds_violation(custom(lambda outputs, example: 7, "stars", bounds=(1, 5)), 7.0, "e3")
    "metric 'stars' returned 7 on example 'e3', outside its declared bounds [1, 5]"
    """
    bounds = bounds_of(metric)
    if bounds is None or bounds[0] <= score <= bounds[1]:
        return ""
    low, high = bounds
    return (
        f"metric {metric.name!r} returned {score:g} on example {example!r}, outside its declared bounds "
        f"[{low:g}, {high:g}]"
    )


def as_score(value: object, name: str) -> Score:
    """Convert the result of a metric to a `Score` of finite floats.

    >>> as_score(True, "short")
    Score(value=1.0, feedback='', parts={})
    """
    if not isinstance(value, Score):
        return Score(_finite(value, f"metric {name!r}"))
    parts = {part: _finite(number, f"{name}, part {part!r}") for part, number in value.parts.items()}
    return Score(_finite(value.value, f"metric {name!r}"), str(value.feedback), parts)


def _finite(value: object, source: str) -> float:
    if isinstance(value, numbers.Real | np.bool_) and math.isfinite(value):
        return float(value)
    if isinstance(value, Metric):
        raise CallError(
            f"{source} must return a finite real number, got another metric",
            hint="if the function returns a metric, call it with its settings: "
            "custom: {call: …, settings: {…}}, or cp.evaluate(…, metric=function(…)) in Python",
        )
    raise CallError(
        f"{source} must return a finite real number, got {_shown(value)} ({type(value).__name__})",
        hint="return a number, or cp.Score(number, feedback)",
    )


def _values(kind: object) -> list[object]:
    """Return all values of a type that is a set of labels; for a list type, each label in a list.

    >>> _values(Literal["yes", "no"] | None), _values(bool), _values(list[bool]), _values(str)
    (['yes', 'no'], [True, False], [[True], [False]], [])
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return [value for value in arguments if value is not None]
    if kind is bool:
        return [True, False]
    if origin is list:
        return [[value] for value in _values(arguments[0])]
    if origin in (Union, types.UnionType):
        parts = [_values(part) for part in arguments if part is not type(None)]
        return [value for part in parts for value in part] if all(parts) else []
    return []


def _text(value: object, where: str) -> str:
    if isinstance(value, str | numbers.Real):
        return str(value)
    raise CallError(f"{where}: the output must be text or a number, got {type(value).__name__}")


def _equal(text: str, answer: object) -> bool:
    if isinstance(answer, bool) or not isinstance(answer, numbers.Real):
        return normalize(text) == normalize(str(answer))
    try:
        return math.isclose(float(text.strip().rstrip(".").replace(",", "")), answer, rel_tol=1e-9)
    except ValueError:
        return False


def _overlap(text: str, answer: object) -> tuple[float, float, float]:
    """Return F1, precision and recall of the words of two texts."""
    if isinstance(answer, numbers.Real):
        return (float(_equal(text, answer)),) * 3
    found, wanted = normalize(text).split(), normalize(str(answer)).split()
    if not found or not wanted:
        return (float(found == wanted),) * 3
    common = (Counter(found) & Counter(wanted)).total()
    # Equal to 2pr / (p + r), but without its rounding errors and never 0 / 0.
    return 2 * common / (len(found) + len(wanted)), common / len(found), common / len(wanted)


def _names(fields: Mapping[str, object]) -> str:
    return ", ".join(fields) or "none"


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


def _verdict(right: bool, accepted: list[object], found: object) -> Score:
    return Score(float(right), "correct" if right else f"expected {_list(accepted)}, got {_shown(found)}")


def _list(values: Sequence[object]) -> str:
    shown = " or ".join(_shown(value) for value in values[:3])
    return shown if len(values) <= 3 else f"{shown} or {len(values) - 3} more"


def _shown(value: object) -> str:
    text = " ".join(value.split()) if isinstance(value, str) else repr(value)
    text = text if len(text) <= 80 else text[:79] + "…"
    return repr(text) if isinstance(value, str) else text
