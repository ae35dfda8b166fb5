"""Answers of models in all the forms they take, read by a component."""

from __future__ import annotations

import datetime
import enum
from decimal import Decimal
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

import compound as cp
from compound.components.fields import parse
from compound.core.engine import Completion, FinishReason, Usage
from compound.core.errors import ParseError
from compound.graph.types import Port
from compound.testing import ScriptedLM


class Search(BaseModel):
    query: str | None = None
    limit: int = 10


class Answer(BaseModel):
    text: str


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    name: str = ""


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str = ""


class Level(enum.Enum):
    LOW = 1
    HIGH = 2


REFUSED: Any = object()


def phrases(texts: str) -> list[str]:
    return [
        text for line in texts.strip().splitlines() for text in line.removesuffix(" ;").split(" ; ")
    ]


def ask(answer: str, kind: Any, finish: FinishReason = "stop") -> object:
    """Return what a component reads from an answer, or `REFUSED` if it is a parse error."""
    node = cp.LLM("a", prompt="P.", output=kind, reasks=0)(q=cp.Input("q"))
    named = {name: node[name] for name in kind} if isinstance(kind, dict) else {"output": node}
    lm = ScriptedLM(lambda _: Completion(answer, Usage(1, 50, 5), finish))
    trace = cp.run(cp.System("s", named, lm="m"), {"q": "z"}, engines={"m": lm}, check=False)
    if trace.failure is None:
        return trace.outputs if isinstance(kind, dict) else trace.outputs["output"]
    assert trace.failure.kind == "parse"
    return REFUSED


TWO = {"reasoning": str, "answer": str}
YES = Literal["yes", "no"]
# Answers of plain types, and what they say.
READ: dict[Any, str] = {
    int: """
The answer is 4. → 4 ; **4** → 4 ; $4 → 4 ; 4 km → 4 ; 4km → 4 ; about 5 → 5 ; -5 → -5 ; –5 → -5 ;
5% → 5 ; 1.5e3 → 1500 ; ٣ → 3 ; 4 people in 2 groups → 4 ; It adds up to 5 → 5 ; 4 may be → 4 ;
1,200 → 1200 ; Four (4) → 4 ; {"answer": 4} → 4 ; 12345678901234567890.0 → 12345678901234567890 ;
1e23 → 100000000000000000000000 ; 5 milliseconds → 5 ; 12, because of 3 → 12 ;
<answer>4</answer> → 4 ; 4 mm → 4 ; 5 миллиметров → 5 ; 4 or so, with no doubt → 4 ; 3 → 3 ;
3.0 → 3 ; 1,234,567 → 1234567 ; −7 → -7 ; 12345678901234567891 → 12345678901234567891 ;
Answer: 42. → 42 ; GPT-4 → 4 ; 3 of 5 → 3 ; There are 12. So the answer is 12. → 12 ; 7. → 7 ;
42 (6 * 7) → 42 ; 3, because 2 and 1 → 3
""",
    bool: """
Yes. → True ; Yes, it is. → True ; No. → False ; No, it is not → False ; no it isn't → False ;
The answer is no. → False ; **Answer:** yes → True ; no. → False ; no, it is not → False ;
TRUE → True ; 0 → False ; Yes, there is no doubt. → True ; Yes, no doubt. → True ;
1 is right. → True ; Yes, yes. → True
""",
    YES: """
The label is no → 'no' ; There is no evidence, so yes → 'yes' ; YES. → 'yes' ; 'No' → 'no' ;
**Yes** → 'yes'
""",
    list[str]: """
- Washington, D.C. → ['Washington, D.C.'] ; Lima → ['Lima'] ;
{"items": ["a, b", "c"]} → ['a, b', 'c'] ; ["<think>", "</think>"] → ['<think>', '</think>'] ;
["a, b", "c"] → ['a, b', 'c'] ; ```["a"]``` → ['a'] ; [a, b] → ['a', 'b'] ;
['a', 'b'] → ['a', 'b'] ; The items: ["a", "b"] → ['a', 'b'] ; - a, b → ['a, b']
""",
    list[int]: """
1, 2, 3 → [1, 2, 3] ; 1,2,3 → [1, 2, 3] ; [1, 2] → [1, 2] ; -3 → [-3]
""",
    float: """
$1,234.50 → 1234.5 ; about 3.5 km → 3.5 ; -2e3 → -2000.0 ; .5 → 0.5 ; -.5 → -0.5 ; 3 → 3.0
""",
    Literal["yes", "no", "maybe"]: """
The diagnosis is clear. Answer: yes → 'yes' ; It is not known ... Answer: maybe → 'maybe'
""",
    Literal["positive", "negative"]: """
It is not negative but positive → 'positive' ; positive, not negative → 'positive'
""",
}
# Multiples, bounds, ranges, dates, times, several values and no decisions.
UNREADABLE: dict[Any, str] = {
    int: """
4 million ; 4-million ; 4k ; 4K ; $4M ; 4 thousand ; 4 dozen ; 4万 ; 5² ; 5 or 6 ; five or 6 ;
5 and 6 ; 5~6 ; 5...6 ; 1,200, or 1,300 ; 3 apples, 4 pears ; 3 apples and 4 pears ;
5 hours 30 minutes ; 5 January 2024 ; January 5 ; 10 am ; 10:30 ; 1990s ; minus 5 ; - 5 ;
more than 5 ; >5 ; 4 and a half ; 1.000 ; 4 mil ; 4 millones ; 4 миллиона ; 5만 ; 4h30 ; twice 4 ;
half of 4 ; 4 squared ; √4 ; -(4) ; 1) 4 ; 3, no wait: 4 ; 3... actually 4 ; x>5 ; at least 5 ;
up to 5 ; 5+ ; not 5 ; 1.200 ; {"n": 1, "m": 2} ; {"name": "add", "arguments": {"a": 1}} ; 4;5 ;
4 </think> ; [THINK]7 ; many ; 3.5 ; 1e999 ; between 3 and 5 ; 1,2 ; 3, 5 ; 2^10 = 1024 ;
2 + 2 = 4 ; 3 x 4 ; 3-5 ; 3 to 5 ; 3 or 4 ; 2024-01-02 ; 1 234 ; 1'234
""",
    float: """
1.200,50 ; 5½ ; 5 ½ ; 5±1 ; ٣٫٥ ; 5% ; 45 percent ; 50 pct ; 1e999 ; It takes 2 of 3 parts. ;
3,5 ; 1/2 ; 5,5 km ; 3.5.1
""",
    list[int]: """
4 million ; 1|2 ; 1,200 ; a
""",
    bool: """
No idea. ; No one knows ; true story ; not sure ; yes and no ; yes, and no ; No. 5 ; no-brainer ;
1 apple ; No information ; false alarm ; No answer ; true, but false ; yes-and-no ;
Yes or no? No. ; yes/no ; Yes? No. ; Yes. No. ; true or false ; 1/2 ; 0.7 ; perhaps
""",
    YES: """
No idea. ; <think>a</think><think>draft: yes</think> ; <longcat_think>yes ; <think >yes ;
diagnosis ; casino ; yes and no
""",
    list[str]: """
Washington, D.C. ; a; b ; 1. a, 2. b ; 1. Lima 2. Quito ; 北京、上海 ; a | b ; None. ; {"a": 1} ;
["a", ["b"]] ; ["a", null] ; a, b, c ; ["a", "b ; ['a, b', 'c'] ; [it's, b]
""",
    datetime.datetime: """
2024 ; "2024" ; 20240102
""",
    Literal["positive", "negative"]: """
not positive ; It isn't a **positive** one ; not only negative but positive
""",
}
CASES: list[tuple[str, Any, object]] = [
    ("4 million", int | None, REFUSED),
    # decimals are exact
    ("12345678901234567.89", Decimal, Decimal("12345678901234567.89")),
    (
        '{"a": [0.1234567890123456789]}',
        dict[str, list[Decimal]],
        {"a": [Decimal("0.1234567890123456789")]},
    ),
    (
        '{"p": 12345678901234567.89, "q": {}}',
        {"p": Decimal, "q": dict[str, int]},
        {"p": Decimal("12345678901234567.89"), "q": {}},
    ),
    # labels
    ("I'd say C++.", Literal["C", "C++"], "C++"),
    ("I am not sure.", Literal["not sure", "sure"], "not sure"),
    ("2", Literal[1, 2], 2),
    ("true story", Literal["true", "false"], REFUSED),
    ("1.5", Literal[1, 2], REFUSED),
    ("-1", Literal[1, 2], REFUSED),
    ("2%", Literal[1, 2], REFUSED),
    ("1.0", Literal[1, 2], 1),
    ("A+", Literal["A", "B"], REFUSED),
    ("C#", Literal["C", "Java"], REFUSED),
    ("It is A+.", Literal["A", "A+"], "A+"),
    ("Option 2: yes", Literal[1, 2], 2),
    ("A*", Literal["A", "A*"], "A*"),
    ("**A**", Literal["A", "A*"], "A"),
    # lists
    ("- a\n- b", list[str], ["a", "b"]),
    ("1. a\n2) b", list[str], ["a", "b"]),
    ("[1] a\n[2] b", list[str], ["a", "b"]),
    ('```json\n["a", "b"]\n```', list[str], ["a", "b"]),
    ('```json\n[\n  "a",\n  "b"\n]\n```', list[str], ["a", "b"]),
    ("Here is the list:\n```\n- a\n- b\n```\nI hope it helps.", list[str], ["a", "b"]),
    ("**a**\n**b**", list[str], ["**a**", "**b**"]),
    ("Here are:\n- a\n- b", list[str], ["a", "b"]),
    ("**Items:**\n\n1. a\n2. b\n\nThese are all.", list[str], ["a", "b"]),
    ("Sure!\n\n* a\n* b", list[str], ["a", "b"]),
    ("## Items\n* a\n* b", list[str], ["a", "b"]),
    ("The items:\na\nb", list[str], ["a", "b"]),
    ("- a long\n  item\n- b", list[str], ["a long item", "b"]),
    ('["a", "b"]\n\nThese are all.', list[str], ["a", "b"]),
    ("Sources:\n[1] a\n[2] b", list[str], ["a", "b"]),
    ('["a"]\n["b"]', list[str], REFUSED),
    ("a\n- b\n- c", list[str], REFUSED),
    ("- a\nb\n- c", list[str], REFUSED),
    ("- a\n```\nb\n```", list[str], REFUSED),
    ("- 3\n- -4", list[int], [3, -4]),
    ("1,000\n2,000", list[int], [1000, 2000]),
    ("3.5", list[float], [3.5]),
    ('```json\n["yes"]\n```', list[YES], ["yes"]),
    ('```json\n[\n  {"text": "x"}\n]\n```', list[Answer], [Answer(text="x")]),
    ('{"text": "x"}\n{"text": "y"}', list[Answer], [Answer(text="x"), Answer(text="y")]),
    ('[{"txt": "x"}]', list[Answer], REFUSED),
    ("Washington, D.C.\nLima", list[str], ["Washington, D.C.", "Lima"]),
    ("(1) a\n(2) b", list[str], ["a", "b"]),
    ("– a\n– b", list[str], ["a", "b"]),
    ("+ a\n+ b", list[str], ["a", "b"]),
    ("+1\n+2", list[int], [1, 2]),
    ("1,5", list[float], REFUSED),
    ("yes, no", list[YES], ["yes", "no"]),
    ("1,200\n3", list[int], [1200, 3]),
    # unions
    ("none", int | None, None),
    ("null", str | None, None),
    ("12", int | None, 12),
    ("many", int | None, REFUSED),
    ("42\n\n1. First, 6 times 7.", int, 42),
    ("5\n6", int, REFUSED),
    ("2024-01-02", datetime.date, datetime.date(2024, 1, 2)),
    ("0", datetime.date, REFUSED),
    ("anything", Any, "anything"),
    ('{"a": 1}', dict[str, int], {"a": 1}),
    ("{", dict[str, int], REFUSED),
    # values of JSON
    (
        '{"v": 1999, "w": {}}',
        {"v": Literal["1999", "2000"], "w": dict[str, int]},
        {"v": "1999", "w": {}},
    ),
    ('{"v": 3, "w": {}}', {"v": float, "w": dict[str, int]}, {"v": 3, "w": {}}),
    ('{"v": 7, "w": {}}', {"v": str, "w": dict[str, int]}, {"v": "7", "w": {}}),
    ('{"v": Infinity, "w": {}}', {"v": float, "w": dict[str, int]}, REFUSED),
    ('{"v": null, "w": {}}', {"v": str, "w": dict[str, int]}, REFUSED),
    ('{"text": "It is Lima."}', Search | Answer, Answer(text="It is Lima.")),
    ('Here:\n```json\n{"text": "x"}\n```', Search | Answer | None, Answer(text="x")),
    ('{"limit": 5}', int | Search, Search(limit=5)),
    ('[{"text": "x"}]', list[Search | Answer], [Answer(text="x")]),
    (
        '{"kind": "dog", "name": "Rex"}',
        Annotated[Cat | Dog, Field(discriminator="kind")],
        Dog(name="Rex"),
    ),
    ('{"d": {"text": "x"}}', dict[str, Search | Answer], {"d": Answer(text="x")}),
    ("12", int | str, 12),
    ("12 apples", int | str, "12 apples"),
    ("007", int | str, "007"),
    ("2024-01-02", datetime.date | str, datetime.date(2024, 1, 2)),
    ("yes", bool | str, True),
    ("see [1] {x}", datetime.date | str, "see [1] {x}"),
    ("3.5", int | float, 3.5),
    ("1", bool | int, 1),
    ("a: 5", int | Literal["a", "no"], REFUSED),
    ('{"v": "12", "w": {}}', {"v": int | str, "w": dict[str, int]}, {"v": "12", "w": {}}),
    # thoughts
    ("<think>\nThere are 7 apples", int, REFUSED),
    ('<think>a</think>x <think>{"n": 1}</think>{"n": 2}', dict[str, int], {"n": 2}),
    ("- <think>\n- </think>\n- <b>", list[str], ["<think>", "</think>", "<b>"]),
    ("tag: </think>\nn: 1", {"tag": str, "n": int}, {"tag": "</think>", "n": 1}),
    (
        '{"tag": "</think>", "n": {}}',
        {"tag": str, "n": dict[str, int]},
        {"tag": "</think>", "n": {}},
    ),
    *(
        (f"{begin}4 or 6?{end}5", int, 5)
        for begin, end in (
            ("<thinking>", "</thinking>"),
            ("<thought>", "</thought>"),
            ("<reasoning>", "</reasoning>"),
            ("<seed:think>", "</seed:think>"),
            ("<longcat_think>", "</longcat_think>"),
            ("<|think|>", "<|/think|>"),
            ("<reason>", "</reason>"),
            ("<think >", "</think >"),
            ("<|begin_of_thought|>", "<|end_of_thought|>\n<|begin_of_solution|>"),
            ("[THINK]", "[/THINK]"),
            ("◁think▷", "◁/think▷"),
            (
                "<|channel|>analysis<|message|>",
                "<|end|><|start|>assistant<|channel|>final<|message|>",
            ),
            ("<|channel>thought\n", "<channel|>"),
            ("<unused94>thought\n", "<unused95>"),
            ("", "</think>"),
            ("analysis", "assistantfinal"),
            ("<|START_THINKING|>", "<|END_THINKING|><|START_RESPONSE|>"),
        )
    ),
    ("Sure.\n<think>There are 7", int, REFUSED),
    ("<think>Is it Lima?", str, REFUSED),
    ("<think>Is it Lima?</think>", str, REFUSED),
    ("<think>?</think> Lima", str | None, "Lima"),
    ("Use the <think> tag.", str, "Use the <think> tag."),
    # several fields or JSON values: the last one counts
    (
        "reasoning: Two options.\nAnswer: maybe Quito.\nSo Lima.\nanswer: Lima",
        TWO,
        {"reasoning": "Two options.\nAnswer: maybe Quito.\nSo Lima.", "answer": "Lima"},
    ),
    ("```\nreasoning: r\nanswer: a\n```", TWO, {"reasoning": "r", "answer": "a"}),
    ("reasoning：r\nanswer：a", TWO, {"reasoning": "r", "answer": "a"}),
    ("**answer**: a\n**reasoning**: r\n**Answer**: b", TWO, {"reasoning": "r", "answer": "b"}),
    ('Example: {"text": "example"}\nAnswer: {"text": "real"}', Answer, Answer(text="real")),
    (
        '```json\n{"text": "draft"}\n```\nBetter:\n```json\n{"text": "final"}\n```',
        Answer,
        Answer(text="final"),
    ),
    ('{"text": "draft"}\nFinal: {"text": "fin', Answer, REFUSED),
    ('{"text": "draft"}\nFinal: {"text": 3}', Answer, REFUSED),
    (
        'Draft {"a": "x", "b": {}}, final {"a": "y", "b": {"c": 1}}.',
        {"a": str, "b": dict[str, int]},
        {"a": "y", "b": {"c": 1}},
    ),
]


PLAIN = [(*case.split(" → "), kind) for kind, cases in READ.items() for case in phrases(cases)]


@pytest.mark.parametrize(("answer", "value", "kind"), PLAIN)
def test_an_answer_in_words_is_read(answer: str, value: str, kind: Any) -> None:
    found = ask(answer, kind)
    assert repr(found) == value


@pytest.mark.parametrize(
    ("answer", "kind"),
    [(text, kind) for kind, texts in UNREADABLE.items() for text in phrases(texts)],
)
def test_an_uncertain_answer_in_words_is_refused(answer: str, kind: Any) -> None:
    assert ask(answer, kind) is REFUSED


@pytest.mark.parametrize(("answer", "kind", "value"), CASES)
def test_an_answer_is_read_exactly_or_refused(answer: str, kind: Any, value: object) -> None:
    found = ask(answer, kind)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("answer", "kind", "is_complete"),
    [
        ("12", int, False),
        ("12 m", int, False),
        ("I first get 12. Then I must subtract the", int, False),
        ("12\n\nBecause of the", int, True),
        ("12 is the answer because", int, True),
        ("12", int | str, False),
        ("yes", YES, True),
        ("no", Literal["no", "not sure"], False),
        ("not sure", Literal["no", "not sure"], True),
        ("No", bool | None, False),
        ("Yes.", YES | None, True),
        ("TRUE", bool, True),
        ("1", Literal[1, 10], False),
        ("2", Literal[1, 10, 2], True),
        ("no ide", YES, False),
        ("n: 1\nl: no", {"n": int, "l": YES}, True),
        ("2", Level, True),
        ("I say yes", YES, False),
        ("yes", list[YES], False),
        ("neu", Literal["neg", "neu", "pos"], True),
        ("no\n\nThe", YES, True),
        ("Yes. The reason is", bool, True),
        ("Yes", bool, True),
        ("12", int | None, False),
        ("- a\n- b\n- verylo", list[str], False),
        ("- a\n- b\n\nThese are all", list[str], True),
        ('["a", "b"]', list[str], True),
        ('["a", "b', list[str], False),
        ("[1] a\n[2] b", list[str], False),
        ('{"text": "a"}', Answer, True),
        ('```json\n{"text": "a"}\n```', Answer, True),
        ('{"text": "a"} or {"te', Answer, False),
        ("2024-01-1", datetime.date | None, False),
        ("reasoning: r\nanswer: Li", TWO, False),
        ("a plain te", str, True),
        ("te", str | None, True),
        ('"ab"', Annotated[str, Field(max_length=5)], True),
        ('{"a": "x", "b": {}}', {"a": str, "b": dict[str, int]}, True),
        ("n: 1\nl: a", {"n": int, "l": str}, False),
    ],
)
def test_a_cut_answer_is_accepted_only_if_it_is_certainly_complete(
    answer: str, kind: Any, is_complete: bool
) -> None:
    assert (ask(answer, kind, "length") is not REFUSED) == is_complete


def test_thoughts_in_a_text_are_kept_with_a_warning_how_to_read_it_without_them() -> None:
    text = "<think>?</think> Lima"
    with pytest.warns(UserWarning, match=r"'a': the text starts with thoughts; .*str \| None"):
        assert ask(text, str) == text


def test_what_was_read_is_kept_when_the_last_field_was_cut() -> None:
    with pytest.raises(ParseError) as error:
        parse("a: 1\nb: two wor", {"a": Port(int), "b": Port(str)}, "fields", is_cut=True)
    assert error.value.outputs == {"a": 1}
