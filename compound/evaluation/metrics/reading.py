"""Metrics that read a value from a text: regular expressions and numbers."""

from __future__ import annotations

import functools
import math
import numbers
import re
import warnings
from dataclasses import dataclass

from compound.core.errors import DataError, DeclarationError
from compound.core.example import Example, Score
from compound.core.narrowing import report_wrong_arguments
from compound.evaluation.metrics.comparison import (
    Comparison,
    format_value,
    format_values,
    text_of,
    verdict,
)
from compound.evaluation.metrics.text import ANSWER, CURRENCY, DIGITS, equal_answers, fold
from compound.evaluation.rows import ClassName

MAX_PATTERN = 1_000  # characters; patterns may come from data
# not part of a fraction, a power, a time or a number with a decimal comma
_NUMBER = re.compile(rf"(?<![\w.])(?<!\d[,/^:])[-+]?{DIGITS}(?![.,/^:]?\d)(?!\^)")


@dataclass(frozen=True)
class RegexMatch(Comparison):
    """1 if a pattern is found in the text, or if what it finds is an acceptable answer; see `regex_match`."""

    pattern: str = ""
    extracts: bool = False
    whole: bool = False
    ignore_case: bool = False

    @property
    def answers(self) -> bool:
        """Whether gold values are outputs: patterns are not."""
        return self.extracts

    def accepted(self, example: Example) -> list[object]:
        """Return the acceptable answers, or the patterns."""
        if self.pattern and not self.extracts:
            return [self.pattern]
        found = super().accepted(example)
        if not self.extracts:
            where = f"{self.name}, example {example.id!r}"
            for pattern in found:
                try:
                    compile_pattern(pattern, ignore_case=self.ignore_case, whole=self.whole)
                except DeclarationError as error:
                    problem = f"{where}: gold field {self.gold!r}: {error.message}"
                    raise DataError(problem, hint=error.hint) from error
        return found

    def compare(self, found: object, accepted: list[object], where: str) -> Score:
        """Return 1 or 0."""
        text = text_of(found, where)
        if not self.extracts:
            if any(self._find(pattern, text) is not None for pattern in accepted):
                return Score(1.0, "correct")
            return Score(0.0, f"no match of {format_values(accepted)} in {format_value(text)}")
        value = self._find(self.pattern, text)
        if value is None:
            return Score(0.0, f"no match of {format_value(self.pattern)} in {format_value(text)}")
        return verdict(any(equal_answers(value, answer) for answer in accepted), accepted, value)

    def _find(self, pattern: object, text: str) -> str | None:
        """Return what a pattern finds in a text: its first group, if it has one; None if there is none."""
        compiled = compile_pattern(pattern, ignore_case=self.ignore_case, whole=self.whole)
        if bounded := _has_boundary(str(pattern)):
            text = re.sub(r"\b", _BOUNDARY, text.replace(_BOUNDARY, " "))
        text = text.encode(errors="replace").decode()  # without lone surrogates
        match = compiled.fullmatch(text) if self.whole else compiled.search(text)
        found = (
            None if match is None else match[1] if compiled.groups and self.extracts else match[0]
        )
        return found.replace(_BOUNDARY, "") if found is not None and bounded else found


@functools.lru_cache(maxsize=1_024)
def compile_pattern(
    pattern: object, *, ignore_case: bool = False, whole: bool = False
) -> re.Pattern[str]:
    """Compile a pattern in Python's syntax for an engine that matches in linear time (RE2).

    Raises:
        DeclarationError: it is no regular expression, is too long, or needs backtracking.
    """
    import re2

    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN:
        raise DeclarationError(
            f"a pattern must be text of at most {MAX_PATTERN} characters, got {format_value(pattern)}"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of syntax that a later Python reads in another way
            re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise DeclarationError(
            f"{format_value(pattern)} is not a regular expression: {error}"
        ) from error
    options = re2.Options()
    options.log_errors, options.case_sensitive = False, not ignore_case
    try:
        translated = _TOKEN.sub(functools.partial(_translated, pattern, whole), pattern)
        compiled: re.Pattern[str] = re2.compile(
            f"(?:{translated}){_BOUNDARY}?" if whole else translated, options
        )
    except (re2.error, ValueError) as error:
        reason = error.args[0].decode() if isinstance(error.args[0], bytes) else error
        raise DeclarationError(
            f"{format_value(pattern)} cannot be matched in linear time: {reason}",
            hint=r"use no look-around, back-references, \B, or \W between brackets",
        ) from None
    return compiled


_BOUNDARY = "\0"  # marks word boundaries of texts: those of RE2 know only ASCII
_SPACES = r"\t-\r\x1c-\x20\x{85}\pZ"
_CLASSES = {  # of Python, which include letters and digits of all scripts
    "d": r"\p{Nd}",
    "D": r"\P{Nd}",
    "w": r"\pL\pN_",
    "s": _SPACES,
    "S": r"\S",
    "b": r"\x08",
}
_TOKEN = re.compile(
    r"(?P<kept>\(\?(?:P?<\w+>|[a-zA-Z-]*[:)])|[()|^]|\\A|[*+?][?+]?|\{\d+(?:,\d*)?\}[?+]?)|\{,(?P<most>\d+)\}"
    r"|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])|(?P<boundary>(?:\\b)+)|(?P<end>\$|\\Z)"
    r"|\\(?P<escape>x[\da-fA-F]{2}|u[\da-fA-F]{4}|U[\da-fA-F]{8}|[pP]\{\w+\}|.)|(?P<char>.)",
    re.DOTALL,
)


@functools.lru_cache(maxsize=1_024)
def _has_boundary(pattern: str) -> bool:
    return any(match["boundary"] for match in _TOKEN.finditer(pattern))


def _translated(pattern: str, whole: bool, match: re.Match[str]) -> str:
    """Return a token of a pattern in RE2's syntax; with boundaries, for texts in which these are marked."""
    bounded = _has_boundary(pattern)
    mark = _BOUNDARY if bounded else ""
    if match["kept"]:
        return match[0]
    if match["most"]:
        return f"{{0,{match['most']}}}"
    if match["boundary"]:
        return mark
    if match["end"]:
        optional = f"{mark}?" if bounded else ""
        if match[0] == "$" and re.search(r"\(\?\w*m", pattern):
            return f"{optional}$"
        # Python's also matches before a final line break
        final = r"\n?" if match[0] == "$" and not whole else ""
        return rf"(?:{optional}{final}\z)"
    token = match[0]
    if match["set"]:
        start = "[^" if token.startswith("[^") else "["
        body = token[len(start) : -1]
        inner = re.sub(r"\\(x..|u....|U.{8}|.)|\[", _translated_in_set, body, flags=re.DOTALL)
        first = r"\]" if body.startswith("]") else ""
        token = f"{start}{mark if start == '[^' else ''}{first}{inner[1:] if first else inner}]"
    elif escape := match["escape"]:
        if escape in "WS":
            token = f"[^{_CLASSES[escape.lower()]}{mark}]"
        elif escape in "dDws":
            token = f"[{_CLASSES[escape]}]"
        elif escape[0] in "uU":
            token = rf"\x{{{escape[1:]}}}"
        elif escape == "B":
            raise ValueError("\\B")
    elif token == "." and bounded:
        token = f"[^{mark}]" if re.search(r"\(\?\w*s", pattern) else rf"[^\n{mark}]"
    return f"(?:{mark}?{token})" if bounded else token


def _translated_in_set(match: re.Match[str]) -> str:
    escape = match[1]
    if escape is None:
        return r"\["
    if escape == "W":
        raise ValueError(r"\W between brackets")
    if escape[0] in "uU" and len(escape) > 1:
        return rf"\x{{{escape[1:]}}}"
    return _CLASSES.get(escape, match[0])


@dataclass(frozen=True)
class NumericMatch(Comparison):
    """1 if the number in the text is close to the gold number; see `numeric_match`."""

    absolute: float = 0.0
    relative: float = 1e-9

    def accepted(self, example: Example) -> list[object]:
        """Return the acceptable numbers."""
        found = super().accepted(example)
        found = [answer for answer in found if not isinstance(answer, ClassName)] or found
        for answer in found:
            if find_number(answer) is None:
                raise DataError(
                    f"{self.name}, example {example.id!r}: gold field {self.gold!r} holds "
                    f"{format_value(answer)}, which contains no number"
                )
        return [find_number(answer) for answer in found]

    def compare(self, found: object, accepted: list[object], where: str) -> Score:
        """Return 1 or 0."""
        text_of(found, where)  # rejects other values
        value = find_number(found)
        if value is None:
            return Score(
                0.0, f"expected {format_values(accepted)}, but {format_value(found)} has no number"
            )
        return verdict(
            any(self._close(value, float(str(answer))) for answer in accepted), accepted, value
        )

    def _close(self, value: float, answer: float) -> bool:
        if value == answer:
            return True
        return abs(value - answer) <= max(self.absolute, self.relative * abs(answer))


def find_number(value: object) -> float | None:
    """Return the number that a value holds: its own, that after ``answer:``, or the last one in the text.

    Commas between groups of three digits are ignored, and so is what follows a number, such as a
    unit. Parts of fractions, powers and times, and numbers with a decimal comma, are no numbers.

    >>> find_number("It costs $1,250.50."), find_number("Answer: 4, as 2 + 2 = 4, not 5"), find_number("none")
    (1250.5, 4.0, None)
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if not isinstance(value, str):
        return None
    text = re.sub(f"(?<=[-+]){CURRENCY.pattern}", "", fold(value))
    markers = list(ANSWER.finditer(text))
    behind = _NUMBER.search(text, markers[-1].end()) if markers else None
    found = behind[0] if behind else next(iter(_NUMBER.findall(text)[-1:]), None)
    if found is None:
        return None
    number = float(found.replace(",", ""))
    return number if math.isfinite(number) else None


@report_wrong_arguments
def regex_match(
    output: str,
    pattern: str = "",
    gold: str | None = None,
    whole: bool = False,
    ignore_case: bool = False,
) -> RegexMatch:
    r"""Score 1 if a regular expression is found in the output, else 0.

    With ``pattern`` and ``gold``, the text that the pattern finds (its first group, if it has one)
    is compared with the gold field like by `exact_match`. With ``pattern`` alone, finding it is
    enough. Without ``pattern``, the gold field holds the pattern, or several of which one must be
    found. Patterns are matched in linear time by RE2, so that those from data cannot stall a run;
    it knows no look-around and no back-references.

    Args:
        output: The system output to read.
        pattern: The regular expression, in Python's syntax.
        gold: The field of `Example.gold`; without a pattern, the output's name by default.
        whole: Whether the pattern must match the whole output.
        ignore_case: Whether case is ignored.

    >>> score = regex_match("text", r"####\s*(\d+)", gold="n").score
    >>> score({"text": "6 x 7 = 42\n#### 42"}, Example("e1", {}, {"n": 42})).value
    1.0
    >>> regex_match("year", "[0-9]{4}", whole=True).score({"year": "May 5"}, Example("e1", {})).feedback
    "no match of '[0-9]{4}' in 'May 5'"
    """
    try:
        compile_pattern(pattern, ignore_case=ignore_case, whole=whole)
    except DeclarationError as error:
        raise DeclarationError(f"regex_match: {error.message}", hint=error.hint) from error
    extracts = bool(pattern) and gold is not None
    return RegexMatch("regex_match", output, gold or output, pattern, extracts, whole, ignore_case)


@report_wrong_arguments
def numeric_match(
    output: str, gold: str | None = None, absolute: float = 0.0, relative: float = 1e-9
) -> NumericMatch:
    """Score 1 if the output's number is close to an acceptable number, else 0.

    A number in a text is found by `find_number`. It is close if it differs from the gold number by
    at most ``absolute``, or by at most ``relative`` times the gold number.

    Args:
        output: The system output to read.
        gold: The field of `Example.gold` with the number or numbers; default: the output's name.
        absolute: Tolerated absolute difference.
        relative: Tolerated difference as a fraction of the gold number.

    >>> metric = numeric_match("answer", relative=0.01)
    >>> metric.score({"answer": "about 3.14"}, Example("e1", {}, {"answer": 3.14159})).value
    1.0
    """
    for name, value in (("absolute", absolute), ("relative", relative)):
        if not (math.isfinite(value) and value >= 0):
            raise DeclarationError(f"numeric_match: {name} >= 0 must hold, got {name}={value}")
    return NumericMatch("numeric_match", output, gold or output, absolute, relative)
