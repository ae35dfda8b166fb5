"""Comparable forms of texts, and the labels that texts decide on.

docs/reference/yaml_metrics.md, section Comparison of texts, states the rule.
"""

from __future__ import annotations

import math
import numbers
import re
import unicodedata
from collections.abc import Sequence
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal

from compound.execution.answer_text import label_pattern

_TYPOGRAPHY = str.maketrans(
    {
        **dict.fromkeys("‘’‚‛ʻʼ´`՚׳", "'"),
        **dict.fromkeys("“”„‟״", '"'),
        **dict.fromkeys("‐‑‒–—―−⁃﹘", "-"),
        **dict.fromkeys("⁄∕", "/"),
        "∶": ":",
        "〜": "~",
        "٫": ".",
        "٬": ",",
        "٪": "%",
        "ı": "i",
        "♯": "#",
    }
)
_MEANINGFUL = "‰‱′″‴§·"  # the other punctuation beyond ASCII only separates
_COMPARED = {"≤": "<=", "≥": ">=", "≠": "!="}
_DECORATION = "™℠®©"
# Thai, Lao, Tibetan, Burmese, Khmer, kana and ideographs: scripts without spaces
_UNSPACED = (
    "\u0e01-\u0e3e\u0e40-\u0fff\u1000-\u109f\u1780-\u17da\u17dc-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff"
    "\u3400-\u9fff\U00020000-\U0003ffff"
)
_CURRENCY = "$¢-¥฿៛\u20a0-\u20cf"
CURRENCY = re.compile(f"[{_CURRENCY}]")
_PRICED = re.compile(rf"[{_CURRENCY}](?= ?\.?\d)|(?<=\d) ?[{_CURRENCY}]")
_SIGNED_PRICE = re.compile(rf"([{_CURRENCY}]) ?([-+])(?=\.?\d)")
_PRICE = re.compile(rf"(?<![\w.,{_CURRENCY}])(\d[\d.,]*) ?([{_CURRENCY}])(?! ?\.?\w)")
_LETTER = rf"[^\s\d!-/:-@\[-`{{-~{_UNSPACED}{_CURRENCY}]"  # includes combining marks, unlike \w
_BORDER = r"(?<![^\s!-/:-@\[-`{-~])(?<![)\]}%])"  # no operand directly before
_PAIRS = (  # of emphasis, formulas, and quotation marks, whose ends are no primes
    re.compile(r"(?<![^\s\"'(\[*])(\*{1,3})(?=[^\s*])(?P<inner>[^*]*+)(?<=\S)\1(?![\w*])"),
    re.compile(r"(?<![^\s\"'(\[])(\${1,2})(?=[^\s$])(?P<inner>[^$]*+)(?<=\S)\1(?![\w$])"),
    re.compile(r"(?<![\w\"')\]}])([\"'])(?P<inner>(?:(?!\1).|'(?=\w)){1,300}+)\1(?!\w)"),
)
_LIST_MARK = re.compile(rf"\A(?:(?:(?:[-+*>]|#+) )++(?={_LETTER}{{2}}|[{_UNSPACED}])|\* )")
_ARTICLES = ("a", "an", "the")
_ACRONYM = re.compile(r"(?<![^\W_])(?<!\.)[^\W\d_](?:\.[^\W\d_])++(?:\.(?![^\W_])|(?![^\W_]|\.))")
_SPACED_SIGN = re.compile(r"(^|[-+*/=<>^(] ?)([-+]) (?=\.?\d)")
_FORMULA = re.compile(  # whose brackets group, and whose "!" is an operator
    r"[)\]}!] ?[-+*/^%=<>]|[-+*/^=<>] ?[(\[{]|\([^()\[\]{}]*\]|\[[^()\[\]{}]*\)"
)
_SINGLE = r"(?<=[^\W\d_])(?<![^\W_][^\W_])"  # after a word of one letter
_PRIME = re.compile(
    rf"""(?<=\d)(?:'+(?!\w)|'(?=\d{{1,2}}(?:\.\d+)?")|")|{_SINGLE}'+(?!\w|(?<=[cdjlmnoqst]') \w)"""
)
_COMPACT_LIST = re.compile(
    r"(?<![\w.,])(?!\d{1,3}(?:,\d{2,3})*,\d{3}(?![\d,]))"
    r"(?:\d+(?:\.\d+)?(?:,\d+(?:\.\d+)?){2,}|(?<=[(\[{])\d+(?:\.\d+)?,\d+(?:\.\d+)?(?=[)\]}]))(?![\w.,])"
)
# a number of parts, whose zeros count, as in "version 3.10": after a word that says so
_PARTED = "version release build section chapter figure table python"
_VERSION = (
    "(?:" + "|".join(rf"(?<=\b{word}\ )" for word in _PARTED.split()) + r")"
    r"\d{1,3}\.\d*[1-9]0+(?![\w:%]|[.,]\d)"
)
_LEXEME = re.compile(
    rf"""
    {_VERSION}
    | (?P<number> (?:{_BORDER}[-+])? (?:(?:[1-9]\d{{0,2}}(?:,\d{{3}})+|0|[1-9]\d*)(?:\.\d+)?|(?<![\w.])\.\d+)
        (?:e[-+]?\d{{1,9}}(?!\w))? (?![.,:'_]?\d|[.:'_]{_LETTER}) )
    | \d+(?:[.,:'_]\d+)*(?:[.:'_]{_LETTER}(?:{_LETTER}|\d)*)*  # no single number, such as 10:30, 1.2.3 or 007
    | (?:{_BORDER}[-+>\#])?{_LETTER}(?:{_LETTER}|\d|(?:[.:']|_+)(?={_LETTER}|\d))*
    | [{_UNSPACED}] | != | \\(?=\w) | \*\*+ | [-+/%\#<>&|=^*~@{_CURRENCY}]
    | (?<![^\s(\[{{=&|])!(?=\w) | (?P<grouping>[()\[\]{{}}]|(?:(?<=[\d)])|{_SINGLE})!)
    """,
    re.VERBOSE,
)
ANSWER = re.compile(r"\banswer(?:\s+is)?[\s*_]*:", re.IGNORECASE)
# possessive, since backtracking would take quadratic time
_EMPHASIS = re.compile(r"(?<!\w)_++|(?<!_)_++(?!\w)|\*++")
_DENIAL = re.compile(
    r"(?:\b(?:not|never|nor|non|neither)|n['’]t)(?:\s+(?:a|an|the|very))?[\s\-\"'`*]*$",
    re.IGNORECASE,
)
_LONGEST = 24  # maximum length of a negation before a label
DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,9}(?!\d))?"
_BARE_NUMBER = re.compile(rf"[\s\"'(*_]*+([-+]?)\s*+({DIGITS})[\s\"')*_.,;:!?]*+")


def normalize(text: str) -> str:
    """Return the words, numbers and operators of a text in a comparable spelling, separated by spaces.

    A text without any is only folded, so that ``?`` does not become ``""``.

    >>> normalize("The Eiffel   Tower!"), normalize("x=-1.50"), normalize("“1,200 km”"), normalize("北京。")
    ('eiffel tower', 'x = -1.5', '1200 km', '北 京')
    """
    return _words(_unmarked(text)) or " ".join(
        unicodedata.normalize("NFKC", text).casefold().split()
    )


def _unmarked(text: str) -> str:
    """Return a text as `fold`, without marks of emphasis, formulas and quotations."""
    folded = fold(text)
    for pair in _PAIRS:
        folded = pair.sub(r"\g<inner>", folded)
    return folded


def _words(folded: str) -> str:
    text = _LIST_MARK.sub("", folded, count=1)
    text = _PRIME.sub(lambda found: found[0].replace('"', " ′ ′ ").replace("'", " ′ "), text)
    text = _SPACED_SIGN.sub(
        r"\1\2", _COMPACT_LIST.sub(lambda found: found[0].replace(",", ", "), text)
    )
    text = _ACRONYM.sub(lambda found: found[0].replace(".", ""), text)
    groups = _FORMULA.search(text) is not None
    matches = [m for m in _LEXEME.finditer(text) if groups or not m["grouping"]]
    found = [_canonical(m[0]) if m["number"] else m[0] for m in matches]
    for end in (0, -1):
        if found and found[end].startswith("**"):
            del found[end]
    return " ".join(word for i, word in enumerate(found) if not _is_article(found, i))


def fold(text: str) -> str:
    """Return a text in one spelling of its characters: no case, widths, styles, or typographic marks.

    As Unicode's NFKC_Casefold, but without its losses: digits that are raised, lowered or part of a
    character stay apart from those beside them.

    >>> fold("Ｒ\u0131\u0301mac"), fold("10² km"), fold("1½"), fold("H₂O"), fold("−٣٫٥")
    ('rímac', '10^2 km', '1 1/2', 'h2o', '-3.5')
    """
    folded = text.translate(_TYPOGRAPHY).casefold()
    if not text.isascii():
        folded = unicodedata.normalize("NFC", unicodedata.normalize("NFD", folded).casefold())
        folded = "".join(map(_unsquared, folded))
        placed = zip(f" {folded}", folded, f"{folded[1:]} ", strict=False)
        folded = unicodedata.normalize("NFKC", "".join(map(_spelled, *zip(*placed, strict=True))))
        folded = "".join(map(_separated, folded.translate(_TYPOGRAPHY).casefold())).replace(
            "i\u0307", "i"
        )
        folded = unicodedata.normalize("NFC", folded)
    return " ".join(folded.split())


def _unsquared(char: str) -> str:
    """Return the characters of one such as ㎡, with their raised digits, which NFKC would lower."""
    kind, *points = unicodedata.decomposition(char).split() or [""]
    return "".join(chr(int(point, 16)) for point in points) if kind == "<square>" else char


def _spelled(before: str, char: str, after: str) -> str:
    """Return the plain spelling of a character between two others."""
    if char.isascii():
        return char
    if char.isdecimal():
        return str(unicodedata.decimal(char))
    plain = unicodedata.normalize("NFKC", char)
    kind = unicodedata.decomposition(char).partition(" ")[0]
    if char in _DECORATION or plain[0] == " ":  # such as an accent without a letter
        return " "
    if kind == "<super>" and char not in "ªº":
        raised = unicodedata.decomposition(before).startswith("<super>")
        return f"{'' if raised else '^'}{plain}{' ' if after.isdecimal() else ''}"
    if not any(map(str.isdecimal, plain)):
        return plain
    if kind == "<sub>":
        return f"{'_' if before.isdecimal() else ''}{plain}{'_' if after.isdecimal() else ''}"
    return f"{' ' if before.isalnum() else ''}{plain}{' ' if after.isalnum() else ''}"


def _separated(char: str) -> str:
    """Return a character without those that only separate or format, and a symbol as a word of its own."""
    kind = unicodedata.category(char)
    if kind == "Cf" or "\ufe00" <= char <= "\ufe0f":
        return char if "\U000e0020" <= char <= "\U000e007e" else ""  # tags tell flags apart
    if char.isascii() or kind[0] not in "PS" or kind == "Sc":
        return char
    return f" {_COMPARED.get(char, char)} " if kind[0] == "S" or char in _MEANINGFUL else " "


def _canonical(number: str) -> str:
    """Return the spelling of a number that all with its value have; a plus sign stays."""
    value = Decimal(number.replace(",", ""))
    value = value.normalize(Context(prec=len(number), Emax=MAX_EMAX, Emin=MIN_EMIN))
    if not value:
        return "0"
    plain = f"{value:f}" if abs(value.adjusted()) < 30 else str(value).lower()
    return f"+{plain}" if number[0] == "+" else plain


def _is_article(words: Sequence[str], i: int) -> bool:
    """Return whether a word is an article that says nothing, unlike in *Vitamin A*, *A+* or *The The*."""
    if words[i] not in _ARTICLES or (words[i] != "the" and i > 0) or i + 1 == len(words):
        return False
    if words[i + 1] in _ARTICLES or (i > 0 and words[i - 1] in _ARTICLES):
        return False
    if words[i] == "the":
        return words[i + 1][0].isalnum()
    return words[i + 1][:2].isalpha() and len(words[i + 1]) > 1


def normalize_both(one: str, other: str) -> tuple[str, str]:
    """Return two texts as `normalize`, with currencies before their numbers; if only one has any, without it.

    >>> normalize_both("$5", "5"), normalize_both("5 €", "$5")
    (('5', '5'), ('€ 5', '$ 5'))
    """
    first, second = (
        _PRICE.sub(r"\2\1", _SIGNED_PRICE.sub(r"\2\1", _unmarked(text))) for text in (one, other)
    )
    if bool(_PRICED.search(first)) != bool(_PRICED.search(second)):
        first, second = _PRICED.sub("", first), _PRICED.sub("", second)
    return _words(first) or normalize(one), _words(second) or normalize(other)


def bare_number(text: str) -> Decimal | None:
    """Return the number that a text consists of, apart from a currency and punctuation around it; else None.

    >>> bare_number("-$1,250.50"), bare_number("42."), bare_number("3,5"), bare_number("42 km")
    (Decimal('-1250.50'), Decimal('42'), None, None)
    """
    match = _BARE_NUMBER.fullmatch(CURRENCY.sub("", fold(text)))
    return Decimal(f"{match[1]}{match[2]}".replace(",", "")) if match else None


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
        return len(set(normalize_both(text, wanted))) == 1
    one, other = bare_number(text), bare_number(wanted)
    if one is None or other is None:
        return text == wanted
    whole = one == one.to_integral_value() and other == other.to_integral_value()
    return one == other or (not whole and math.isclose(one, other, rel_tol=1e-9))


def find_label(text: str, choices: Sequence[str]) -> str | None:
    """Return the one of ``choices`` that a text decides on, or None.

    Labels match as whole words, ignoring case (single letters match case: "a" is a word); a sign, a
    decimal point or a suffix as in *C++* makes another word. Rules in order: the text is a label; a
    label directly follows the last ``answer:``; the last label after that marker; the only label
    mentioned. Two labels without a marker give None.

    >>> find_label("The diagnosis is X. Answer: yes", ["yes", "no"])
    'yes'
    >>> find_label("yes and no", ["yes", "no"]) is None
    True
    """
    text = unicodedata.normalize("NFC", text).replace("−", "-").strip()
    plain = text if any("*" in choice for choice in choices) else _EMPHASIS.sub("", text).strip()
    by_name = {choice.lower(): choice for choice in choices}
    same = [choice for choice in choices if normalize(choice) == normalize(plain)]
    if plain.lower() in by_name or len(same) == 1:
        return by_name.get(plain.lower()) or same[0]
    longest_first = sorted(choices, key=len, reverse=True)
    any_case = "|".join(map(label_pattern, longest_first))
    own_case = "|".join(
        label_pattern(c) if len(c) > 1 else f"(?-i:{label_pattern(c)})" for c in longest_first
    )
    first = re.compile(rf"\W*?({any_case})", re.IGNORECASE)
    word = re.compile(f"({own_case})", re.IGNORECASE)
    markers = list(ANSWER.finditer(plain))
    rest = plain[markers[-1].end() :] if markers else ""
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
