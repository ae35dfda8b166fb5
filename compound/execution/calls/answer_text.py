"""Parts of a model's text: the answer after the thoughts of a reasoning model, and the JSON values in it.

The code is copied into exported programs (`compound.exports.modules`): standard library only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

# Marks of the beginning and the end of thoughts, as regular expressions.
THOUGHTS = [
    *(
        (rf"<\|?{name}\|?\s*>", rf"<\|?/{name}\|?\s*>")
        for name in (
            r"(?:\w+[:_|])?think",
            "thinking",
            "thoughts?",
            "reason",
            "reasoning",
            "reflection",
            "rationale",
            "analysis",
            "scratchpad",
            "cot",
            "(?:inner|internal)_monologue",
        )
    ),
    (r"\[THINK\]", r"\[/THINK\]"),
    (r"◁think▷", r"◁/think▷"),
    (r"<\|begin_of_thought\|>", r"<\|end_of_thought\|>"),
    (r"<\|START_THINKING\|>", r"<\|END_THINKING\|>"),
    (r"<\|inner_prefix\|>", r"<\|inner_suffix\|>"),
    (r"<\|channel>thought\b", r"<channel\|>"),
    (r"<unused94>thought\b", r"<unused95>"),
    (
        r"(?:<\|start\|>assistant)?<\|channel\|>(?:analysis|commentary)(?! to=).{0,60}?<\|message\|>",
        r"<\|end\|>|(?=<\|channel\|>final)",
    ),
]
BLOCKS = [(re.compile(begin, re.IGNORECASE), re.compile(end, re.IGNORECASE)) for begin, end in THOUGHTS]
BEGIN = re.compile("^(?:" + "|".join(begin for begin, _ in THOUGHTS) + ")", re.IGNORECASE | re.MULTILINE)
END = re.compile("|".join(end for _, end in THOUGHTS[:-1]), re.IGNORECASE)
# What may mark the answer itself. A server that drops special tokens leaves the names of the channels.
FINAL = re.compile(
    r"\A(?:analysis(?=\S).*assistantfinal|(?:<\|start\|>assistant)?<\|channel\|>final.{0,60}?<\|message\|>"
    r"|<\|START_RESPONSE\|>|<\|begin_of_solution\|>)",
    re.DOTALL,
)
FINAL_END = re.compile(r"(?:\s*<\|(?:return|end|END_RESPONSE|end_of_solution)\|>)+\s*\Z")


def after_thoughts(text: str) -> str:
    """Return the text after the blocks of thoughts that it begins with.

    >>> after_thoughts("<think>4?</think>5"), after_thoughts("Between <b> and </b>")
    ('5', 'Between <b> and </b>')

    Raises:
        ValueError: a block does not end, or nothing follows.
    """
    rest = text.lstrip()
    while block := next((pair for pair in BLOCKS if pair[0].match(rest)), None):
        ends = [mark for mark in block[1].finditer(rest) if mark.start()]
        end = next((mark for mark in ends if not _is_quoted(rest, mark)), ends[0] if ends else None)
        if end is None:
            raise ValueError(f"the thoughts do not end in {text!r:.200}")
        rest = rest[end.end() :].lstrip()
    rest = FINAL_END.sub("", FINAL.sub("", rest))
    if text.strip() and not rest.strip():
        raise ValueError(f"no answer follows the thoughts in {text!r:.200}")
    return rest if len(rest) < len(text.lstrip()) else text


def answer_part(text: str) -> str:
    """Return the part of a text that is the answer of a type: without any thoughts before it.

    The template of a chat may write the beginning of the thoughts, so that the text has only their end. A
    mark in a JSON value, in quotation marks, or as an item of a list is content.

    >>> answer_part("4 or 5?</think>5"), answer_part('["<think>", "</think>"]')
    ('5', '["<think>", "</think>"]')

    Raises:
        ValueError: thoughts do not end, or nothing follows.
    """
    rest = after_thoughts(text)
    marks = [m for m in (*END.finditer(rest), *BEGIN.finditer(rest)) if not _is_content(rest, m)]
    spans = [(start, end) for _, start, end in json_values(rest)] if marks else []
    marks = [m for m in marks if not any(start < m.start() < end for start, end in spans)]
    if not marks:
        return rest
    last = max(marks, key=lambda mark: mark.start())
    after = rest[last.end() :]
    if BEGIN.match(last.group()) or not after.strip():
        raise ValueError(f"no answer follows the thoughts in {text!r:.200}")
    return after


def _is_content(text: str, mark: re.Match[str]) -> bool:
    line = text[: mark.start()].rpartition("\n")[2]
    return _is_quoted(text, mark) or re.fullmatch(r"[ \t]*(?:[-*•]|\d+[.)])[ \t]*", line) is not None


def _is_quoted(text: str, mark: re.Match[str]) -> bool:
    before = text[: mark.start()][-1:]
    return before in ("'", '"', "`") and text.startswith(before, mark.end())


def label_pattern(label: str) -> str:
    """Return the pattern of a label that is no part of a longer word or number, and has no other suffix.

    >>> [word for word in ("C", "C++", "C-", "(C)") if re.search(label_pattern("C"), word)]
    ['C', '(C)']
    """
    before = r"(?<![\w.<>-])(?<!\d,)" if label[0].isdecimal() else r"(?<!\w)(?<!\w-)"
    after = r"(?![\w+#])(?!-(?!-))(?<!\d(?=,\d))(?!(?<=\d)\.(?!0+(?!\d))\d)(?<!\d(?=%))"
    return before + re.escape(label) + after


def json_values(
    text: str, begin: str = r"[{\[]", parse_float: Callable[[str], float] = float
) -> list[tuple[object, int, int]]:
    """Return the outermost JSON objects and arrays in a text and their places, with bounded work.

    Texts in them may have line breaks that are not escaped, as models write them.
    """
    decoder = json.JSONDecoder(strict=False, parse_float=parse_float)
    found: list[tuple[object, int, int]] = []
    left, last = 16 * len(text) + 100_000, 0
    for match in re.finditer(begin, text):
        if match.start() < last:
            continue
        try:
            value, last = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError) as error:
            left -= getattr(error, "pos", len(text))  # its line is counted from the beginning
        else:
            found.append((value, match.start(), last))
        if left < 0:
            break
    return found
