"""Comparable forms of texts, and the labels that texts decide on."""

from __future__ import annotations

import math
import numbers
import re
import string
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
ANSWER = re.compile(r"\banswer(?:\s+is)?[\s*_]*:", re.IGNORECASE)
# possessive, since backtracking would take quadratic time
_EMPHASIS = re.compile(r"(?<!\w)_++|(?<!_)_++(?!\w)|\*++")
_DENIAL = re.compile(
    r"(?:\b(?:not|never|nor|non|neither)|n['’]t)(?:\s+(?:a|an|the|very))?[\s\-\"'`*]*$", re.IGNORECASE
)
_LONGEST = 24  # maximum length of a negation before a label
DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_BARE_NUMBER = re.compile(rf"[^\w.+−-]*+([-+−]?)[^\w.+−-]*+({DIGITS})\W*+")


def normalize(text: str) -> str:
    """Lowercase, remove punctuation and articles, and collapse white space (SQuAD's normalisation).

    A text that would become empty keeps its letters, so that the label ``A`` does not become ``""``.

    >>> normalize("The Eiffel   Tower!"), normalize("A")
    ('eiffel tower', 'a')
    """
    lowered = text.lower()
    return " ".join(_ARTICLES.sub(" ", lowered.translate(_PUNCTUATION)).split()) or " ".join(lowered.split())


def bare_number(text: str) -> float | None:
    """Return the number that a text consists of, apart from punctuation around it; else None.

    >>> bare_number("-$1,250.50"), bare_number("42%."), bare_number("3,5"), bare_number("42 km")
    (-1250.5, 42.0, None, None)
    """
    match = _BARE_NUMBER.fullmatch(text)
    return float(f"{match[1]}{match[2]}".replace("−", "-").replace(",", "")) if match else None


def are_different_numbers(one: str, other: str) -> bool:
    """Return whether two texts are numbers with different values; `normalize` may make them equal.

    >>> are_different_numbers("3.5", "35"), are_different_numbers("1,000", "1000"), normalize("-3.5")
    (True, False, '35')
    """
    values = bare_number(one), bare_number(other)
    return None not in values and values[0] != values[1]


def is_number(value: object) -> bool:
    """Return whether a value is a number; a text or a bool is none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def equal_answers(found: object, answer: object) -> bool:
    """Return whether an output equals an answer: by value if one is a number, else as normalised texts.

    >>> equal_answers("The Rímac.", "rímac"), equal_answers("3.5", "35"), equal_answers(2.5, "2.50")
    (True, False, True)
    """
    text, wanted = str(found), str(answer)
    if not (is_number(found) or is_number(answer)):
        return normalize(text) == normalize(wanted) and not are_different_numbers(text, wanted)
    one, other = bare_number(text), bare_number(wanted)
    if one is None or other is None or math.inf in (one, other):
        return text == wanted
    return math.isclose(one, other, rel_tol=1e-9)


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
    markers = list(ANSWER.finditer(plain))
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


def is_negated(text: str, start: int) -> bool:
    """Return whether a negation directly precedes a position in a text.

    >>> is_negated("It is not positive", 10), is_negated("It is positive, not bad", 6)
    (True, False)
    """
    return _DENIAL.search(text[max(0, start - _LONGEST) : start]) is not None
