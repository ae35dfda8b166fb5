"""Answers of models in all the forms they take, read by a component."""

from __future__ import annotations

import datetime
import enum
from decimal import Decimal
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

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


class Message(TypedDict):
    role: str
    text: str


REFUSED: Any = object()


def phrases(text: str) -> list[str]:
    return " ".join(text.split()).split(" ; ")


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


# Multiples, bounds, ranges, dates, times and several numbers.
NO_INTEGERS = """
4 million ; 4-million ; 4k ; 4K ; $4M ; 4 thousand ; 4 dozen ; 4万 ; 5² ; 5 or 6 ; five or 6 ;
5 and 6 ; 5~6 ; 5...6 ; 1,200, or 1,300 ; 3 apples, 4 pears ; 3 apples and 4 pears ;
5 hours 30 minutes ; 5 January 2024 ; January 5 ; 10 am ; 10:30 ; 1990s ; minus 5 ; - 5 ;
more than 5 ; >5 ; 4 and a half ; 1.000 ; 4 mil ; 4 millones ; 4 миллиона ; 5만 ; 4h30 ;
twice 4 ; half of 4 ; 4 squared ; √4 ; -(4) ; 1) 4 ; 3, no wait: 4 ; 3... actually 4 ; x>5 ;
at least 5 ; up to 5 ; 5+ ; not 5 ; 1.200 ; {"n": 1, "m": 2} ;
{"name": "add", "arguments": {"a": 1}}
"""
NO_NUMBERS = """
1.200,50 ; 5½ ; 5 ½ ; 5±1 ; ٣٫٥ ; 5% ; 45 percent ; 50 pct
"""
NO_DECISIONS = """
No idea. ; No one knows ; true story ; not sure ; yes and no ; yes, and no ; No. 5 ;
no-brainer ; 1 apple ; No information ; false alarm ; No answer ; true, but false ; yes-and-no
"""
TWO = {"reasoning": str, "answer": str}
YES = Literal["yes", "no"]
CASES: list[tuple[str, Any, object]] = [
    # ordinary numbers
    ("The answer is 4.", int, 4),
    ("**4**", int, 4),
    ("$4", int, 4),
    ("4 km", int, 4),
    ("4km", int, 4),
    ("about 5", int, 5),
    ("-5", int, -5),
    ("–5", int, -5),
    ("5%", int, 5),
    ("1.5e3", int, 1500),
    ("٣", int, 3),
    ("4 people in 2 groups", int, 4),
    ("It adds up to 5", int, 5),
    ("4 may be", int, 4),
    ("1,200", int, 1200),
    ("Four (4)", int, 4),
    ('{"answer": 4}', int, 4),
    ("12345678901234567890.0", int, 12345678901234567890),
    ("1e23", int, 10**23),
    ("5 milliseconds", int, 5),
    ("12, because of 3", int, 12),
    ("<answer>4</answer>", int, 4),
    ("4 mm", int, 4),
    ("5 миллиметров", int, 5),
    ("4 or so, with no doubt", int, 4),
    *((text, int, REFUSED) for text in (*phrases(NO_INTEGERS), "5\n6", "4;5")),
    *((text, float, REFUSED) for text in phrases(NO_NUMBERS)),
    ("4 million", int | None, REFUSED),
    ("4 million", list[int], REFUSED),
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
    # decisions
    ("Yes.", bool, True),
    ("Yes, it is.", bool, True),
    ("No.", bool, False),
    ("No, it is not", bool, False),
    ("no it isn't", bool, False),
    ("The answer is no.", bool, False),
    ("**Answer:** yes", bool, True),
    *((text, bool, REFUSED) for text in phrases(NO_DECISIONS)),
    ("No idea.", YES, REFUSED),
    ("true story", Literal["true", "false"], REFUSED),
    ("The label is no", YES, "no"),
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
    ("There is no evidence, so yes", YES, "yes"),
    # lists
    ("Washington, D.C.", list[str], REFUSED),
    ("a; b", list[str], REFUSED),
    ("1. a, 2. b", list[str], REFUSED),
    ("1. Lima 2. Quito", list[str], REFUSED),
    ("Washington, D.C.\nLima", list[str], ["Washington, D.C.", "Lima"]),
    ("- Washington, D.C.", list[str], ["Washington, D.C."]),
    ("Lima", list[str], ["Lima"]),
    ("北京、上海", list[str], REFUSED),
    ("a | b", list[str], REFUSED),
    ("None.", list[str], REFUSED),
    ("(1) a\n(2) b", list[str], ["a", "b"]),
    ("– a\n– b", list[str], ["a", "b"]),
    ("+ a\n+ b", list[str], ["a", "b"]),
    ('{"items": ["a, b", "c"]}', list[str], ["a, b", "c"]),
    ('{"a": 1}', list[str], REFUSED),
    ('["a", ["b"]]', list[str], REFUSED),
    ('["a", null]', list[str], REFUSED),
    ("1|2", list[int], REFUSED),
    ("+1\n+2", list[int], [1, 2]),
    ("1,200", list[int], REFUSED),
    ("1,5", list[float], REFUSED),
    ("1, 2, 3", list[int], [1, 2, 3]),
    ("1,2,3", list[int], [1, 2, 3]),
    ("yes, no", list[YES], ["yes", "no"]),
    ("1,200\n3", list[int], [1200, 3]),
    # unions
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
    ("<think>a</think><think>draft: yes</think>", YES, REFUSED),
    ("<think>\nThere are 7 apples", int, REFUSED),
    ('<think>a</think>x <think>{"n": 1}</think>{"n": 2}', dict[str, int], {"n": 2}),
    ('["<think>", "</think>"]', list[str], ["<think>", "</think>"]),
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
    ("4 </think>", int, REFUSED),
    ("[THINK]7", int, REFUSED),
    ("<longcat_think>yes", YES, REFUSED),
    ("<think >yes", YES, REFUSED),
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


@pytest.mark.parametrize("kind", [int, bool, YES, list[str], TWO])
def test_an_uncertain_answer_in_words_is_asked_for_again(kind: Any) -> None:
    good: dict[Any, str] = {int: "4000000", bool: "no", YES: "no", list[str]: "- a"}
    uncertain = "Washington, D.C., or no idea: 4 million or 5"
    again = good[kind] if not isinstance(kind, dict) else "reasoning: r\nanswer: a"
    lm = ScriptedLM([uncertain, again])
    node = cp.LLM("a", prompt="P.", output=kind)(q=cp.Input("q"))
    system = cp.System("s", {"y": node["answer"] if isinstance(kind, dict) else node}, lm="m")
    assert cp.run(system, {"q": "z"}, engines={"m": lm}).calls[0].failure is None
    assert "The answer is invalid" in lm.requests[1].messages[-1].text


@pytest.mark.parametrize(
    ("value", "kind", "shown"),
    [
        ([{"role": "user", "text": "Hi"}], list[dict[str, str]], '[{"role":"user","text":"Hi"}]'),
        ([{"text": "great", "rating": 1}], list[dict[str, Any]], '[{"rating":1,"text":"great"}]'),
        ([{"role": "user", "text": "Hi"}], list[Message], '[{"role":"user","text":"Hi"}]'),
        ([{"title": None, "text": None}], list[dict[str, Any]], '[{"text":null,"title":null}]'),
        ([{"text": 3}], list[dict[str, int]], '[{"text":3}]'),
        ([[{"text": "a", "by": "b"}]], list[list[dict[str, str]]], '[[{"by":"b","text":"a"}]]'),
        (
            [{"title": None, "text": "a"}, {"id": "2", "title": "T", "text": "b", "score": 1.5}],
            list[dict[str, Any]],
            "\na\nT: b",
        ),
    ],
)
def test_objects_are_shown_whole_unless_they_are_passages(
    value: Any, kind: Any, shown: str
) -> None:
    shot = {"inputs": {"chat": value}, "outputs": {"output": "x"}}
    system = cp.System("s", {"y": cp.LLM("a", demos=[shot])(chat=cp.Input("chat", kind))}, lm="m")
    lm = ScriptedLM(["x"])
    cp.run(system, {"chat": value}, engines={"m": lm})
    text = lm.requests[0].messages[0].text
    assert text.count(f"Chat:{shown}" if shown.startswith("\n") else f"Chat: {shown}") == 2
    assert "None" not in text


def test_thoughts_in_a_text_are_kept_with_a_warning_how_to_read_it_without_them() -> None:
    text = "<think>?</think> Lima"
    with pytest.warns(UserWarning, match=r"'a': the text starts with thoughts; .*str \| None"):
        assert ask(text, str) == text


def test_what_was_read_is_kept_when_the_last_field_was_cut() -> None:
    with pytest.raises(ParseError) as error:
        parse("a: 1\nb: two wor", {"a": Port(int), "b": Port(str)}, "fields", is_cut=True)
    assert error.value.outputs == {"a": 1}
