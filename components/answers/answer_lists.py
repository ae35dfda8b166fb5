"""Lists in a model's text: JSON arrays, or one item in each line, among the words around them.

The code is copied into exported programs (`compound.exports.modules`): standard library only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

MARKER = re.compile(r"\s*(?:(?:[-–—•‣◦▪+]|\*(?!\*))(?!\d)|\(?\d+[.)](?!\d)|\[\d+\])\s*")
FENCE = re.compile(r"```(?:[\w+-]*[ \t]*\n|json\b)?(.*?)```", re.DOTALL)
ARRAY_INTRODUCTION = re.compile(r"[^\n\[\]]*:[*_]*\s*(?=\[)")
SEVERAL = re.compile(r"[,;，；、،؛|•]|(?<!\w)\(?2[.)]\s")  # in a line that may be several items
BARE_ARRAY = re.compile(r"\[([^\[\]\"\n]*)\]")  # without quotes, or with those of Python
EMPHASIS = "*_ \t"


def list_items(raw: str, item: str) -> list[object]:
    """Return the items in a text, as JSON values or texts; a JSON array, or one item in each line.

    Code fences, an introduction and a closing remark are skipped.

    Args:
        raw: the text.
        item: the name of the items' type; commas in a line separate numbers and labels, but not texts.

    Raises:
        ValueError: a JSON array is incomplete, or it is unclear which lines are items.
    """
    text = _unfenced(raw.strip())
    if (members := _members(text)) is not None and item != "json":
        if len(members) != 1 or not isinstance(members[0], list):
            raise ValueError(f"{raw!r:.100} is no list; write one item in each line, or a JSON array")
        return members[0]
    array = _array(_introduced(text))
    if array is not None:
        return array
    if (bare := BARE_ARRAY.fullmatch(text)) and not MARKER.match(text):
        parts = [part.strip() for part in bare[1].split(",")]
        if "'" not in text or all(re.fullmatch("'[^']*'", part) for part in parts):
            return [part.strip("'") for part in parts if part]
    if text.startswith("[") and not MARKER.match(text):
        raise ValueError(f"{raw!r:.100} holds no complete JSON array")
    lines = text.splitlines()
    filled = [i for i, line in enumerate(lines) if line.strip()]
    if any(MARKER.match(lines[i]) for i in filled):
        if len(filled) == 1 and re.search(r"[,;]\s*(?:[-•*]|\d+[.)])\s|\s\(?2[.)]\s", text):
            raise ValueError(f"{raw!r:.100} may be several items; write one item in each line")
        return list(_marked_items(lines))
    if len(filled) == 1:
        return _in_one_line(text, item)
    if filled and lines[filled[0]].rstrip(EMPHASIS).endswith(":"):
        filled = filled[1:]
    return [lines[i].strip() for i in filled]


def _members(text: str) -> list[object] | None:
    """Return the values of the JSON object that a text is."""
    try:
        value = json.loads(text, strict=False) if text.startswith("{") else None
    except (ValueError, RecursionError):
        return None
    return None if value is None else list(value.values())


def is_array(raw: str) -> bool:
    """Return whether `list_items` reads the items of a complete JSON array."""
    return _array(_introduced(_unfenced(raw.strip()))) is not None


def _introduced(text: str) -> str:
    found = ARRAY_INTRODUCTION.match(text)
    return text[found.end() :] if found else text


def _in_one_line(line: str, item: str) -> list[object]:
    """Return the items of a line; a text with a comma, and digits with one between them, are uncertain."""
    is_text = item in ("str", "any")
    if is_text and re.fullmatch(r"\W*(?:none|nothing|null|n/?a|empty)\W*", line, re.IGNORECASE):
        raise ValueError(f"{line!r:.100} may be one item or none; write [] for an empty list")
    if is_text and not SEVERAL.search(line):
        return [line]
    number = r"\d,\d" if item == "float" else r"\d,\d{3}(?!\d)"
    if is_text or (re.search(number, line) and not re.search(r"[,;]\s", line)):
        raise ValueError(f"{line!r:.100} may be one item or several; write one item in each line")
    separator = r"[,;]\s+" if re.search(r"[,;]\s", line) else r"[,;]"
    return [part.strip() for part in re.split(separator, line) if part.strip()]


def _unfenced(text: str) -> str:
    """Return the content of the only code fence, if only an introduction precedes it; else the text."""
    found = FENCE.search(text) if text.count("```") == 2 else None
    if found is None:
        return text
    before, after = text[: found.start()].strip(), text[found.end() :]
    if (before and not _introduces(before.splitlines()[-1])) or any(map(MARKER.match, after.splitlines())):
        return text
    return found[1].strip()


def _array(text: str) -> list[object] | None:
    """Return the JSON array that a text begins with, if a remark in other lines at most follows."""
    if not text.startswith("["):
        return None
    try:
        value, end = json.JSONDecoder(strict=False).raw_decode(text)
    except (ValueError, RecursionError):
        return None
    rest = text[end:].lstrip(" \t.`")
    return value if not rest or (rest.startswith("\n") and "[" not in rest) else None


def _marked_items(lines: Sequence[str]) -> list[str]:
    """Return the items of lines of which some are marked, such as by a number or a hyphen."""
    places = [i for i, line in enumerate(lines) if MARKER.match(line)]
    items: list[list[str]] = []
    for i, line in enumerate(lines):
        blank_before = i > 0 and not lines[i - 1].strip()
        if mark := MARKER.match(line):
            items.append([line[mark.end() :].strip()])
        elif not line.strip():
            continue
        elif i < places[0]:
            if i == places[0] - 1 and not _introduces(line):
                raise ValueError(f"{line.strip()!r:.100} is neither an item nor an introduction")
        elif line[0].isspace():
            items[-1].append(line.strip())
        elif i > places[-1] and blank_before:
            break
        else:
            raise ValueError(f"{line.strip()!r:.100} is not marked as an item")
    return [text for item in items if (text := " ".join(item).strip())]


def _introduces(line: str) -> bool:
    return line.rstrip(EMPHASIS).endswith(":") or re.match(r"\s*#+\s", line) is not None
