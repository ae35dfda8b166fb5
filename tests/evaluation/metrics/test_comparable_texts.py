"""Comparison of texts: spelling never matters, digits, signs, operators and decimal points always do."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

import compound as cp
from compound.evaluation.metrics.text import find_label, normalize

WORDS = st.sampled_from(
    ["x", "y", "km", "Lima", "5", "15", "1.5", "1,200", "北京", "कि", "don't", "Straße", "İz"]
)
OPERATORS = ["+", "-", "/", "%", "#", "<", ">", "&", "|", "=", "^", "*", "~", "!=", "×", "≤", "°"]
OUTER = [
    "{}.",
    "“{}”",
    "«{}»!",
    "({})",
    "'{}',",
    "{}。",
    "¿{}?",
    "**{}**",
    "`{}`",
    " {}\n",
    "\u200b{}…",
    "「{}」",
]


def scores(found: object, gold: object) -> set[float]:
    """Return the scores of both metrics in both directions."""
    metrics = cp.metrics.exact_match("y"), cp.metrics.token_f1("y")
    pairs = (found, gold), (gold, found)
    return {
        m.score({"y": one}, cp.Example("e", {}, {"y": other})).value
        for m in metrics
        for one, other in pairs
    }


EQUAL = [
    ("3.50", "3.5"),
    ("1.50 km", "1.5km"),
    ("1,200", "1200"),
    (".5", "0.5"),
    ("2e3", "2000"),
    ("-0", "0"),
    ("don’t", "don't"),
    ("Ri\u0301mac", "Rímac"),
    ("北京。", "北京"),
    ("x=−1", "x = -1"),
    ("10 – 12", "10-12"),
    ("１２．５", "12.5"),
    ("٣٫٥", "3.5"),
    ("½", "1/2"),
    ("1½", "1 1/2"),
    ("STRASSE", "Straße"),
    ("ﬁn", "fin"),
    ("İstanbul", "i̇stanbul"),
    ("a\u200bb", "ab"),
    ("co\u00adop", "coop"),
    ("5\u00a0km", "5 km"),
    ("²", "^2"),
    ("U.S.", "US"),
    ("$5", "5"),
    ("- Lima", "Lima"),
    ("$5$", "5"),
    ("H₂O", "H2O"),
    ("㎡", "m²"),
    ("", " "),
    ("The Rímac", "rímac"),
    ("Acme™", "acme"),
    ("कि।", "कि"),
    (1_234_567_890, "1,234,567,890"),
    (5, "$5.00"),
    ("5 €", "€5"),
    ("-$5", "$-5"),
    ("5′ 10″", "5' 10\""),
    ("5'10\"", "5' 10''"),
    ("'90'", "90"),
    ("x ≥ 5", "x >= 5"),
    ("dogs'", "dogs"),
    ("Guns N' Roses", "Guns N Roses"),
    ("$x = 5$", "x = 5"),
    ("**$x=5$**", "x=5"),
    ("[1,2,3]", "[1, 2, 3]"),
    ("(3,4)", "(3, 4)"),
    ("* A", "A"),
    ("F♯", "F#"),
    ("42!", "42"),
    ("Paris**", "Paris"),
    ("about 3.50", "about 3.5"),
    ("width 3.50 m", "width 3.5 m"),
    ("Python 3.10.", "python 3.10"),
    ("১২", "12"),
    ("1e3", "1E3"),
    ("0x1F", "0x1f"),
]
DIFFERENT = [
    ("1.5 km", "15 km"),
    ("x = -1", "x = 1"),
    ("1/2", "12"),
    ("1,5", "15"),
    ("1,5", "1.5"),
    ("C++", "C"),
    ("C#", "C"),
    ("a<b", "a>b"),
    ("10%", "10"),
    ("<5", "5"),
    ("<5", 5),
    ("A&B", "AB"),
    ("1:30", "130"),
    ("10-12", "1012"),
    ("2e3", "23"),
    ("v1.2", "v12"),
    ("v1.10", "v1.1"),
    ("10²", "102"),
    ("10²3", "10²³"),
    ("1½", "11/2"),
    ("½", "12"),
    ("log₂8", "log28"),
    ("2①", "21"),
    ("$5", "€5"),
    ("$", ""),
    ("A+", "A-"),
    ("A-", "A"),
    ("+5", "5"),
    ("007", "7"),
    ("2*3", "23"),
    ("a != b", "a = b"),
    ("(a+b)*c", "a+b*c"),
    ("1.a", "1a"),
    ("5°", "5"),
    ("5′", "5″"),
    ("👍", "👎"),
    ("?", ""),
    ("-", ""),
    ("the", ""),
    ("the", "a"),
    ("Vitamin A", "Vitamin"),
    ("The The", "The"),
    ("A, B", "B"),
    ("。", ""),
    ("1 200", "1200"),
    ("9007199254740993", "9007199254740992"),
    (9007199254740993, "9007199254740992"),
    (1_234_567_891, 1_234_567_890),
    ("A*", "A"),
    ("C*", "C"),
    ("*x", "x"),
    ("5'", '5"'),
    ("5'", "5"),
    ("5' 10\"", "5 10"),
    ("30'", '30"'),
    ("f'(x)", "f(x)"),
    ("f''", "f'"),
    ("Python 3.10", "Python 3.1"),
    ("version 1.10", "version 1.1"),
    ("(1, 2]", "[1, 2]"),
    ("!x", "x"),
    ("n!/k!", "n/k"),
    ("(n-k)!/2", "(n-k)/2"),
    ("1.234,56", "123456"),
    ("1'234", "1.234"),
    ("12,34,567", "12.34567"),
    ("-€5", "€5"),
    ("US$5", "A$5"),
    ("±5", "5"),
    ("≤5", "<5"),
    ("(5)", "-5"),
    ("0123", "123"),
    ("0xFF", "FF"),
    ("1e3", "13"),
    ("XII", "12"),
    ("2024-01-05", "2024-01-06"),
    ("١٫٥", "15"),
    ("१०", "1"),
    ("[1,200]", "[1, 200]"),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_spellings_of_one_answer_are_equal(one: object, other: object) -> None:
    assert scores(one, other) == {1.0}


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_answers_never_score_one(one: object, other: object) -> None:
    assert 1.0 not in scores(one, other)


@given(
    st.text("0123456789.,-+/:%#<&|=^* aX'\"!()]²½é北$€_", min_size=1, max_size=12),
    st.integers(0, 11),
    st.integers(1, 9),
)
def test_texts_that_differ_in_a_digit_are_never_equal(text: str, place: int, step: int) -> None:
    place %= len(text)
    if text[place] in "0123456789":
        other = text[:place] + str((int(text[place]) + step) % 10) + text[place + 1 :]
        assert 1.0 not in scores(text, other)


@given(
    st.lists(WORDS, min_size=2, max_size=4),
    st.sampled_from(OPERATORS),
    st.sampled_from(["", *OPERATORS]),
)
def test_another_operator_is_another_text(words: list[str], one: str, other: str) -> None:
    rest = " ".join(words[1:])
    if one != other:
        assert 1.0 not in scores(f"{words[0]} {one} {rest}", f"{words[0]} {other} {rest}")
        assert 1.0 not in scores(f"{words[0]}{one}{rest}", f"{words[0]}{other}{rest}")
    if one in "-+<>~#":
        assert 1.0 not in scores(f"{one}{words[0]} {rest}", f"{words[0]} {rest}")


@given(st.lists(WORDS, min_size=1, max_size=4).map(" ".join), st.sampled_from(OUTER))
def test_spellings_of_a_text_are_always_equal(text: str, outer: str) -> None:
    typographic = text.replace("'", "’").replace(" ", "\u00a0").replace("1", "１")
    for variant in (
        unicodedata.normalize("NFD", text),
        text.upper(),
        typographic,
        outer.format(text),
    ):
        assert scores(text, variant) == {1.0}


@given(st.text(max_size=12), st.text(max_size=12))
def test_comparison_is_reflexive_and_symmetric(one: str, other: str) -> None:
    assert scores(one, one) == {1.0}
    assert normalize(unicodedata.normalize("NFD", one)) == normalize(
        unicodedata.normalize("NFC", one)
    )
    for metric in (cp.metrics.exact_match("y"), cp.metrics.token_f1("y")):
        there, back = (
            metric.score({"y": a}, cp.Example("e", {}, {"y": b})).value
            for a, b in ((one, other), (other, one))
        )
        assert there == back


def test_scripts_without_spaces_overlap_by_characters() -> None:
    for found, gold, f1 in (("北京市", "北京", 0.8), ("東京", "京都", 0.5), ("ไทย", "ไทย", 1.0)):
        assert cp.metrics.token_f1("y").score(
            {"y": found}, cp.Example("e", {}, {"y": gold})
        ).value == pytest.approx(f1)


@pytest.mark.parametrize(
    ("text", "choices", "label"),
    [
        ("-1", ["-1", "0", "1"], "-1"),
        ("Answer: −1", ["-1", "0", "1"], "-1"),
        ("It is 1.5", ["1", "5"], None),
        ("C++", ["C", "C++", "C#"], "C++"),
        ("Answer: C#.", ["C", "C++", "C#"], "C#"),
        ("C++", ["C", "Java"], None),
        ("A-", ["A", "B"], None),
        ("Answer: A*", ["A", "A*"], "A*"),
        ("A — because", ["A", "B"], "A"),
        ("Cafe\u0301", ["Café", "Bar"], "Café"),
        ("It is a B", ["A", "B", "C"], "B"),
        ("(C)", ["A", "B", "C"], "C"),
        ("a good one", ["A", "B", "C"], None),
        ("A or B", ["A", "B", "C"], None),
        ("verdict: NOT SUPPORTED", ["SUPPORTED", "NOT SUPPORTED"], "NOT SUPPORTED"),
        ("Answer: likely not, I think", ["likely", "likely not"], "likely not"),
        ("10%", ["10", "20"], None),
        ("**yes**", ["yes", "no"], "yes"),
    ],
)
def test_signs_and_suffixes_are_of_labels(text: str, choices: list[str], label: str | None) -> None:
    assert find_label(text, choices) == label
    if label is not None:
        row = cp.Example("e", {}, {"y": unicodedata.normalize("NFD", label)})
        assert cp.metrics.accuracy("y", choices=choices).score({"y": text}, row).value == 1


@pytest.mark.parametrize(
    "metric",
    [
        cp.metrics.accuracy("y"),
        cp.metrics.mrr("y"),
        cp.metrics.recall_at_k("y"),
        cp.metrics.json_match("y"),
    ],
)
def test_composed_letters_equal_decomposed_ones(metric: cp.ext.Metric) -> None:
    found: object = ["Ri\u0301mac"] if metric.name in ("mrr", "recall_at_5") else "Ri\u0301mac"
    score = metric.score({"y": found}, cp.Example("e", {}, {"y": "Rímac"}))
    assert isinstance(score, cp.Score)
    assert score.value == 1
