"""Lists in a model's text: JSON arrays, or one item in each line, among the words around them."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal

from compound.execution.answer_text import json_values, label_pattern

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
        item: the name of the items' type; commas in a line separate numbers and labels, but not
            texts.

    Raises:
        ValueError: a JSON array is incomplete, or it is unclear which lines are items.
    """
    text = _unfenced(raw.strip())
    if (members := _members(text)) is not None and item != "json":
        if len(members) != 1 or not isinstance(members[0], list):
            raise ValueError(
                f"{raw!r:.100} is no list; write one item in each line, or a JSON array"
            )
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


NO_JSON = object()


def json_of(text: str) -> object:
    """Return the JSON value that a text is, or `NO_JSON`."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return NO_JSON


def _members(text: str) -> list[object] | None:
    """Return the values of the JSON object that a text is."""
    value = json_of(text) if text.startswith("{") else None
    return list(value.values()) if isinstance(value, dict) else None


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
    if (before and not _introduces(before.splitlines()[-1])) or any(
        map(MARKER.match, after.splitlines())
    ):
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


TRUE, FALSE = {"yes", "true", "1"}, {"no", "false", "0"}
# A sign directly after a word is a hyphen (GPT-4); commas count only between groups of three
# digits.
NUMBER = re.compile(
    r"(?:(?<!\w)[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|(?<!\w)\.\d+)(?:[eE][-+]?\d+)?"
)
MINUS = re.compile(r"[\N{MINUS SIGN}\N{FULLWIDTH HYPHEN-MINUS}]|(?<![^\s(\[*\"'])[–—](?=\d)")
MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?|(?-i:May))\b"
)
# What makes a number before it a part of something longer: a decimal comma, a fraction, a date, a
# range, an equation, a power, a multiple, a time, or one of several numbers.
CONTINUATION = re.compile(
    r"""(?:[.:_'’٫٬…h|]|[,;]\s?|\)[ \t]*|[ \t]*[-/⁄^*×÷·+=–—±~～〜xX|][-^*/]?[ \t]*|[ \t\u00a0\u202f]+
        |[ \t,;]+(?:or|to|and|&|bis|oder|und|y|et|ou)[ \t]+
        |(?:[ \t]+(?!(?:because|since|as|so|is|are|was|were|of|out|from|in|for|with|by|on|at|per|which|that|if
            |when|given|equals|plus|minus|times)\b)[^\W\d_]+){1,2}[ \t]*[,;&]?[ \t]*(?:(?:and|or|to)[ \t]+)?
        )[-+]?[$€£]?\.?\d
    |\+(?!\w)|\s*\n\s*[-+$€£]?\d[\d.,]*\s*(?:\n|\Z)
    |[ \t\u00a0-]*(?:hundred|thousand|mil\b|mill?i?[oó]n|milliard|milh|mln\b|bn\b|bill?i|trill?i|dozen|lakh
        |crore|mio\b|mrd\b|tausend|тыс|млн|млрд|милли[оа]|[천만억]|लाख|करोड़)
    |[ \t]+(?:(?:and|&)[ \t]+(?:a[ \t]+)?(?:half|third|quarter)|squared|cubed|factorial)
    |[ \t]?(?-i:[kKMBT]|(?<=\d)[mb])(?!\w)
    |(?:st|nd|rd|th)?[ \t]*(?:of[ \t]+)?(?:"""
    + MONTH
    + r""")|[ \t]*(?:[ap]\.?m\b|o['’]clock)|(?<=\d\d\d0)['’]?s\b""",
    re.IGNORECASE | re.VERBOSE,
)
# What changes the value of a number after it: a bound, a sign in words, an alternative, a month.
BEFORE = re.compile(
    r"""(?:\b(?:(?:more|less|fewer|greater|higher|lower|other)[ ]than|at[ ](?:least|most)
    |(?<!adds[ ])(?<!sums[ ])up[ ]to|over|under|above|below|between|minus|negative|or
    |(?:twice|double|triple|half|thirds?|quarters?|root|log|ln|sin|cos|tan|factorial)(?:[ ]of)?
    |(?:one|two|three|four|five|six|seven|eight|nine|ten)[ ]to)
    |[<>≤≥]=?|√|[-–—](?=[ \t(])|(?:"""
    + MONTH
    + r""")\.?)[\s*_`"'$€£(]*\Z""",
    re.IGNORECASE | re.VERBOSE,
)
CORRECTION = re.compile(
    r"\b(?:no|wait|actually|sorry|correction|rather|I mean|oops|instead)\b", re.IGNORECASE
)
NEGATION = re.compile(
    r"(?:\b(?:not|never|nor|non|neither)|n['’]t)(?:\s+(?:a|an|the|very))?[\s\-\"'`*]*$",
    re.IGNORECASE,
)
ANSWER_IS = re.compile(
    r"[\W_]*(?:(?:the|my|final|correct)\s+)*answer\b(?:\s+is)?[\s:*_`\"']*", re.IGNORECASE
)
# A question that is repeated, or an alternative, before or instead of the decision.
UNDECIDED = re.compile(
    r"\s*\?|[\s,-]*(?:[/|]|\b(?:or|and|but)\b)[\s-]*(?:yes|no|true|false|[01])\b", re.IGNORECASE
)
# A word that makes "no" or "true" before it a modifier ("no idea", "true story") is none of these.
FOLLOWING = re.compile(
    r"""a|absolutely|according|all|always|an|and|are|as|at|based|because|both|but|can|cannot|certainly
    |definitely|did|didn|do|does|doesn|don|for|given|had|has|have|he|i|if|in|indeed|is|isn|it|its|not|of|on|only
    |she|since|so|that|the|there|these|they|this|those|to|under|was|wasn|we|were|when|will|with|won|would|you""",
    re.IGNORECASE | re.VERBOSE,
)


def read_number(raw: str, kind: str) -> int | float:
    """Return the only number of a text, or the one that it starts with, as an ``int`` or ``float``.

    Raises:
        ValueError: there is none, or it is uncertain which number is meant.
    """
    plain = re.sub(r"</?[A-Za-z]\w*>", " ", MINUS.sub("-", raw))
    matches = list(NUMBER.finditer(plain))
    if not matches:
        raise ValueError(f"{raw!r:.100} holds no number")
    text, start, end = matches[0].group().replace(",", ""), matches[0].start(), matches[0].end()
    leads = not any(character.isalnum() for character in plain[:start])
    several = len({match.group().replace(",", "") for match in matches}) > 1
    if several and not leads:
        raise ValueError(f"{raw!r:.100} holds several numbers and does not start with one")
    if several and CORRECTION.search(plain, end):
        raise ValueError(f"{raw!r:.100} seems to correct the number that it starts with")
    following = plain[end:].lstrip(" \t")[:1]
    if CONTINUATION.match(plain, end) or following.isnumeric():
        raise ValueError(f"{raw!r:.100} does not start with a single number")
    if BEFORE.search(plain[:start]) or NEGATION.search(plain[:start]):
        raise ValueError(f"{raw!r:.100} does not state a single number")
    if kind == "float" and re.match(r"\s*(?:[%‰]|per\s?cent\b|pct\b)", plain[end:], re.IGNORECASE):
        raise ValueError(f"{raw!r:.100} is a percentage; write a number without a sign")
    value = Decimal(text)
    if not math.isfinite(float(value)):
        raise ValueError(f"{raw!r:.100} is not a finite number")
    if kind == "float":
        return float(value)
    may_be_thousands = re.fullmatch(r"[-+]?\d{1,3}\.\d{3}", text)
    if value != value.to_integral_value() or may_be_thousands:
        raise ValueError(f"{raw!r:.100} is not a whole number")
    return int(value)


def read_bool(raw: str) -> bool:
    """Return whether a text says yes (or true, or 1) at its beginning.

    Raises:
        ValueError: it says neither yes nor no, or both.
    """
    text = ANSWER_IS.sub("", raw, count=1) if ANSWER_IS.match(raw) else raw
    words = list(re.finditer(r"\w+", text.lower()))
    first = words[0].group() if words else ""
    if first not in TRUE | FALSE or _is_modifier(text, words[0]):
        raise ValueError(f"{raw!r:.100} is neither yes nor no")
    rest = text[words[0].end() :]
    denied = len(words) == 2 and words[1].group() in (FALSE if first in TRUE else TRUE)
    if denied or UNDECIDED.match(rest) or (first in ("0", "1") and CONTINUATION.match(rest)):
        raise ValueError(f"{raw!r:.100} does not decide between yes and no")
    return first in TRUE


def _is_modifier(text: str, word: re.Match[str]) -> bool:
    """Return whether a word such as ``no`` or ``true`` describes the word after it, as in "no idea"."""
    found = re.match(r"-\w|\.?[ \t]*#?\d|[ \t]+([^\W\d_]+)", text[word.end() :])
    if found is None or word.group().lower() == "yes":
        return False
    return found[1] is None or not FOLLOWING.fullmatch(found[1])


def read_label(raw: str, options: Sequence[object]) -> object:
    """Return the only option that occurs as whole words and is not negated; an exact match wins.

    Raises:
        ValueError: none occurs, or several.
    """
    whole = raw.strip().lower()
    plain = whole if whole in map(str.lower, map(str, options)) else whole.strip("\"'`.*")
    exact = [option for option in options if str(option).lower() == plain]
    longest_first = sorted((str(o).lower() for o in options if str(o)), key=len, reverse=True)
    words = re.finditer("|".join(map(label_pattern, longest_first)) or "(?!)", raw.lower())
    found = {
        word.group()
        for word in words
        if not NEGATION.search(raw[max(0, word.start() - 24) : word.start()])
        and not (word.group() in ("no", "true", "false") and _is_modifier(raw, word))
    }
    named = exact or [o for o in options if str(o).lower() in found]
    if len(named) != 1:
        raise ValueError(
            f"{raw!r:.100} names {'none' if not named else 'several'} of {', '.join(map(str, options))}"
        )
    return named[0]


def plain_text(raw: str) -> str:
    """Return the text of a value in words, also from a JSON object that holds nothing else.

    >>> plain_text('{"answer": "4 km"}'), plain_text("4 km")
    ('4 km', '4 km')

    Raises:
        ValueError: it is another JSON object, or an incomplete one.
    """
    text = re.sub(r"\A```\w*\n(.*)```\Z", r"\1", raw.strip(), flags=re.DOTALL).strip()
    if not text.startswith("{"):
        return raw
    value, *others = _members(text) or [{}]
    if isinstance(value, (dict, list)) or others:
        raise ValueError(f"{raw!r:.100} is a JSON object and no single value")
    return value if isinstance(value, str) else json.dumps(value)


def read_union(raw: str, options: Sequence[tuple[str, Callable[[str], object]]]) -> object:
    """Return the value of one of several types.

    An exact number is one. If any text is valid (``str``), another type must be the whole text;
    otherwise, only one of the types may find a value.

    Raises:
        ValueError: the text has a value of no type, or several values.
    """
    if len(options) == 1:
        return options[0][1](raw)
    names, text = [name for name, _ in options], raw.strip()
    number = (
        json.loads(text)
        if re.fullmatch(r"-?(?:0|[1-9]\d{0,4000})(?:\.\d+)?(?:[eE][-+]?\d+)?", text)
        else None
    )
    if number is not None and math.isfinite(number):
        if type(number).__name__ in names:
            return number
        if "float" in names:
            return float(number)
    found: list[object] = []
    for name, read in options:
        if "str" in names and (
            name in ("str", "int", "float", "json")
            or (name == "bool" and text.lower() not in TRUE | FALSE)
        ):
            continue
        try:
            value = read(raw)
        except ValueError:
            continue
        found += [value] if value not in found else []
    if len(found) == 1:
        return found[0]
    if "str" in names:
        return raw
    raise ValueError(f"{raw!r:.100} is {'several' if found else 'none'} of {', '.join(names)}")


def check_cut(
    raw: str, form: str, value: object, read: Callable[[str], object], labels: Sequence[str] = ()
) -> None:
    """Check that a text cut at the maximum length certainly holds the whole value.

    Raises:
        ValueError: the value may be incomplete.
    """
    text, found = raw.strip(), json_values(raw)
    bare_text = text.strip("\"'`.*").lower()
    if [label.lower() for label in labels if label.lower().startswith(bare_text)] == [bare_text]:
        return
    if form == "list":
        certain = is_array(raw) or _reads(text.rpartition("\n")[0], value, read)
    elif (form == "json" or text.startswith(("{", "`"))) and found:
        certain = re.search(r"[{\[]", raw[found[-1][2] :]) is None
    elif text.startswith('"') and (form == "json" or isinstance(value, str)):
        certain = json_of(text) is not NO_JSON
    else:
        # the value must come first, and not depend on the last words, which may be incomplete
        lines, words = text.splitlines(), ANSWER_IS.sub("", text, count=1).split()
        size = len(str(value).split())
        whole = lines[0] if len(lines) > 1 else " ".join(text.split(" ")[:-2])
        certain = _reads(whole, value, read) and _reads(" ".join(words[:size]), value, read)
    if not certain:
        raise ValueError(f"the answer was cut before its end: {raw[-100:]!r}")


def _reads(text: str, value: object, read: Callable[[str], object]) -> bool:
    try:
        return bool(text.strip()) and read(text) == value
    except ValueError:
        return False


def labelled_fields(text: str, names: Sequence[str]) -> dict[str, str]:
    """Find ``name: value`` for each name, in the order of the text; the last line with a name counts.

    Case, markdown and line breaks within values are tolerated.
    """
    options = "|".join(
        re.escape(name).replace("_", "[_ ]") for name in sorted(names, key=len, reverse=True)
    )
    pattern = re.compile(
        rf"^[ \t#>*\-`]*({options})[ \t*`]*[:：=]\**", re.IGNORECASE | re.MULTILINE
    )
    text = re.sub(r"\A\s*```\w*\n(.*)```\s*\Z", r"\1", text, flags=re.DOTALL)
    last: dict[str, re.Match[str]] = {}
    for mark in pattern.finditer(text):
        key = mark.group(1).lower().replace(" ", "_")
        name = next(n for n in names if n.lower() == key)
        last.pop(name, None)
        last[name] = mark
    ends = [*(mark.start() for mark in last.values()), len(text)]
    return {
        name: bare(text[mark.end() : ends[i + 1]]) for i, (name, mark) in enumerate(last.items())
    }


def bare(text: str) -> str:
    """Remove a value's common indentation, and emphasis that encloses the whole value."""
    first, _, rest = text.partition("\n")
    value = (text if first.strip() else textwrap.dedent(rest)).strip()
    if whole := re.fullmatch(r"(\*{1,3}|`)([^*`\n]+)\1", value):
        return whole.group(2).strip()
    if value.endswith("**") and value.count("**") % 2:  # `**name: value**`
        return value[:-2].strip()
    return value


def json_object(
    text: str, names: Sequence[str], parse_float: Callable[[str], float] = float
) -> Mapping[str, object]:
    """Return the last JSON object with at least one of the fields; surrounding text is ignored.

    Raises:
        ValueError: an incomplete object follows it.
    """
    values = json_values(text, r"\{", parse_float)
    found: Mapping[str, object] = {}
    for value, _, _ in values:
        pending: list[object] = [value]
        while pending:
            part = pending.pop()
            if isinstance(part, dict) and not part.keys().isdisjoint(names):
                found = part
            elif isinstance(part, (dict, list)):
                pending += reversed(list(part.values()) if isinstance(part, dict) else part)
    if found and re.search(r'\{\s*"', text[values[-1][2] :]):
        raise ValueError("an incomplete JSON object follows the last complete one")
    return found
