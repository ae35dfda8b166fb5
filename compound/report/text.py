"""Format numbers, intervals, values and text differences for reports."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher, unified_diff
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from rich.cells import cell_len

from compound.core.formatting import NO_LIMIT, cut
from compound.core.security.sanitize import encodable
from compound.core.storage.artifacts import is_reference

Piece = tuple[Literal["same", "old", "new"], str]

LONG = 600  # maximum characters of a value to show
NARROWEST = 8  # columns of cells of a table that are cut
ALIKE = 0.4  # below this similarity, texts are shown one after the other
WORDS = 4_000  # of both texts: compare lines if there are more, and nothing if there are more lines

# Control characters, bidirectional marks and tags, which could disguise text: shown by their code.
_CODES = [
    *(*range(32), *range(127, 160), *range(0x2028, 0x202F), *range(0x2066, 0x206A), 0xFEFF),
    *range(0xE0000, 0xE0080),
]
_UNSEEN = {
    code: f"\\u{code:04x}" if code < 2**16 else f"\\U{code:08x}"
    for code in _CODES
    if code not in (9, 10)
}


def escape_invisible(document: str) -> str:
    """Escape control characters, bidirectional marks and lone surrogates.

    >>> escape_invisible("a\\x00b\\ud800 é")
    'a\\\\u0000b\\\\ud800 é'
    """
    return document.translate(_UNSEEN).encode("utf-8", "backslashreplace").decode()


def number(value: float | None) -> str:
    """Format a score with three decimals, or fewer for large values.

    >>> number(0.5), number(-0.25), number(1234.5678), number(None)
    ('0.500', '−0.250', '1,234.6', '–')
    """
    if value is None:
        return "–"
    text = f"{value:.3f}" if abs(value) < 1000 else f"{value:,.1f}"
    return "0.000" if text == "-0.000" else text.replace("-", "−")


def signed(value: float | None) -> str:
    """Format a difference with its sign."""
    text = number(value)
    return f"+{text}" if value is not None and value > 0 else text


def limits(summary: Mapping[str, Any]) -> str:
    """Format the limits of an interval in brackets, ``""`` if there is no interval."""
    if summary["low"] is None:
        return ""
    return f"[{number(summary['low'])}, {number(summary['high'])}]"


def interval(
    summary: Mapping[str, Any] | None, form: Callable[[float | None], str] = number
) -> str:
    """Format a mean with its limits."""
    return f"{form(summary['mean'])} {limits(summary)}".strip() if summary else "–"


def gain(summary: Mapping[str, Any] | None) -> str:
    """Format the mean of differences with its limits."""
    return interval(summary, signed)


def p_value(p: float | None) -> str:
    """Format a p-value or a level with three significant digits.

    >>> p_value(0.00001), p_value(0.025), p_value(0.123456), p_value(1.0)
    ('< 0.0001', '0.025', '0.123', '1')
    """
    if p is None:
        return "–"
    return "< 0.0001" if p < 1e-4 else f"{float(f'{p:.3g}'):.7f}".rstrip("0").rstrip(".")


def equals(p: float) -> str:
    """Format a p-value with its sign of comparison."""
    text = p_value(p)
    return text if text.startswith("<") else f"= {text}"


def count(value: float | None) -> str:
    """Format a count; fractions of runs keep one decimal, small ones three digits.

    >>> count(12_000), count(2.25), count(0.004), count(0)
    ('12,000', '2.2', '0.004', '0')
    """
    if value is None:
        return "–"
    if 0 < abs(value) < 0.1:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value - round(value)) < 0.05 else f"{value:,.1f}"


def money(value: float | None, unpriced: float | None = 0) -> str:
    """Format an amount in US dollars; ``unpriced`` is the number of calls with an unknown price.

    >>> money(0.0), money(0.0, unpriced=3), money(1.5, unpriced=3)
    ('$0', 'unknown cost', 'at least $1.50')
    """
    if value is None:
        return "–"
    if unpriced:
        return f"at least {money(value)}" if value else "unknown cost"
    if value >= 1:
        return f"${value:,.2f}"
    return f"${value:.4f}" if value >= 0.001 else f"${value:.3g}" if value else "$0"


def seconds(value: float | None) -> str:
    """Format a duration in seconds.

    >>> seconds(0.004), seconds(3.21), seconds(75), seconds(7300)
    ('4 ms', '3.2 s', '1 min 15 s', '2 h 1 min')
    """
    if value is None:
        return "–"
    if 0 < value < 0.1:
        return f"{1000 * value:.3g} ms"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def percent(share: float | None) -> str:
    """Format a share as a percentage.

    >>> percent(0.125).split(), percent(None)
    (['12', '%'], '–')
    """
    return "–" if share is None else f"{share:.0%}".replace("%", "\u00a0%")


def mebibytes(amount: float | None) -> str:
    """Format an amount of memory in MiB."""
    return "–" if amount is None else f"{amount:,.0f} MiB"


def first_last(both: Sequence[float | None], form: str = "number") -> str:
    """Format the first and the last value of a number, in a form of `FORMATS`.

    >>> first_last([0.25, 0.5]), first_last([None, None]), first_last([None, 0.5])
    ('0.250 → 0.500', '–', '– → 0.500')
    """
    return "–" if both[0] is None and both[1] is None else " → ".join(map(FORMATS[form], both))


def clip(text: str, limit: int = LONG) -> str:
    """Truncate a long text and append its length."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text):,} characters)"


def shown(value: object, limit: int = LONG) -> str:
    """Format a value: strings unchanged, floats with six digits, everything else as JSON.

    >>> shown(0.1234567), shown([1]), shown({"path": "memory/model-9f", "sha256": "9f"})
    ('0.123457', '[1]', 'stored in model-9f')
    """
    if is_reference(value):
        value = f"stored in {Path(value['path']).name}"
    text = value if isinstance(value, str) else json.dumps(_rounded(value), ensure_ascii=False)
    return clip(text, limit)


def full(value: object) -> str:
    """Format a value like `shown`, without a limit."""
    return shown(value, sys.maxsize)


def _rounded(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def line(value: object, limit: int = 120) -> str:
    """Format a value on one line."""
    return clip(" ".join(shown(value, 10 * limit).split()), limit)


def word_diff(before: str, after: str) -> list[Piece]:
    """Return the pieces that two texts share and those that only one has, in reading order.

    >>> word_diff("Answer the question.", "Answer in a few words.")
    [('same', 'Answer '), ('old', 'the question'), ('new', 'in a few words'), ('same', '.')]
    """
    old, new = _tokens(before), _tokens(after)
    if len(old) + len(new) > WORDS:
        old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    if len(old) + len(new) > WORDS:
        return _changed(before, after)
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    if matcher.ratio() < ALIKE:
        return _changed(before, after)
    steps = matcher.get_opcodes()
    runs: list[tuple[bool, str, str]] = []
    for place, (operation, a, b, c, d) in enumerate(steps):
        gone, come = "".join(old[a:b]), "".join(new[c:d])
        blank_between = gone.isspace() and 0 < place < len(steps) - 1
        runs.append((operation == "equal" and not blank_between, gone, come))
    pieces: list[Piece] = []
    for same, group in groupby(runs, key=itemgetter(0)):
        gone, come = ("".join(texts) for texts in zip(*[run[1:] for run in group], strict=True))
        pieces += [("same", gone)] if same else _changed(gone, come)
    return pieces


def _changed(gone: str, come: str) -> list[Piece]:
    pieces: list[Piece] = [("old", gone), ("new", come)]
    return [piece for piece in pieces if piece[1]]


def _tokens(text: str) -> list[str]:
    return re.findall(r"\s+|\w+|[^\w\s]", text)


def line_diff(before: str, after: str) -> list[str]:
    """Return the lines of both texts, each prefixed by ``-``, ``+`` or a space.

    >>> line_diff("one\\ntwo", "one\\n2")
    [' one', '-two', '+2']
    """
    old, new = before.split("\n"), after.split("\n")
    return list(unified_diff(old, new, lineterm="", n=len(old) + len(new)))[3:]


def align_columns(rows: Sequence[Sequence[str]], width: int = NO_LIMIT) -> list[str]:
    """Return rows of cells as lines of equal columns.

    To fit a width, the cells of the first column are cut; if that is not enough, the last columns
    are left out.

    >>> align_columns([["method", "test"], ["hbc", "0.5"]])
    ['method  test', 'hbc     0.5']
    >>> align_columns([["method", "test"], ["llm_selector", "0.5"]], width=16)
    ['method      test', 'llm_selec…  0.5']
    """
    rows = [[encodable(cell, sys.stdout.encoding) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    while (over := sum(widths) + 2 * len(widths) - 2 - width) > 0:
        if widths[0] - over >= NARROWEST or len(widths) == 1:
            widths[0] = max(1, widths[0] - over)
        else:
            widths.pop()
    return ["  ".join(map(_padded, row, widths)).rstrip() for row in rows]


def _padded(cell: str, width: int) -> str:
    shown = cut(cell, width)
    return shown + " " * (width - cell_len(shown))


def wrapped(text: str, width: int) -> str:
    """Break a paragraph into lines of a width."""
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


FORMATS: Mapping[str, Callable[..., str]] = {
    form.__name__: form
    for form in (
        *(count, equals, first_last, full, gain, interval, line, mebibytes, money),
        *(number, p_value, percent, seconds, shown, signed),
    )
}
