"""A language model as judge of pairs: what it is shown, how it is asked, and how its replies count."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.measure.judge import (
    JudgeSettings,
    judge,
    score_reply,
)
from compound import Function, Input, System
from compound.core.errors import CallError
from compound.rewards.buffer import PairBuffer
from compound.rewards.candidates import Candidate
from compound.rewards.pairs import Draw
from compound.testing import ScriptedLM


def shorten(text: str) -> str:
    return text[:5]


def small() -> System:
    return System(
        "small", outputs={"y": Function("short", shorten)(text=Input("text", str))}, lm="lm"
    )


def filled(inputs: int = 12, length: int = 0) -> PairBuffer:
    buffer = PairBuffer(small().identity)
    for i in range(inputs):
        outputs = {"one": 1.0, "one two": 0.5, "one two three": 0.0}
        found = tuple(
            Candidate({"output": f"<{i}: {y}{'.' * length}>"}, (r,), certain=True)
            for y, r in outputs.items()
        )
        draw = Draw(
            "short", "short", f"e{i}", "digest", {"text": f"[text {i}]" + "," * length}, found
        )
        buffer.add([draw], 1)
    return buffer


def asked_of(message: str) -> list[str]:
    return re.findall(r"^Output [AB]: (.*)$", message, re.MULTILINE)


def knowing(message: str) -> str:
    a, b = asked_of(message)
    return " A." if len(a) < len(b) else "**B**"


def judged(
    script: Callable[[str], Any], buffer: PairBuffer | None = None, **how: Any
) -> tuple[Any, list[str]]:
    lm = ScriptedLM(script)
    judging = JudgeSettings(**{name: how.pop(name) for name in list(how) if name != "held_out"})
    found = asyncio.run(judge(lm.generate, buffer or filled(), small(), "short", judging, **how))
    return found, [request.messages[-1].text for request in lm.requests]


class TestAccuracy:
    @pytest.mark.parametrize(
        ("script", "mean"),
        [
            (lambda message: "A", 0.5),
            (lambda message: "B", 0.5),
            (knowing, 1.0),
            (lambda message: "A" if knowing(message) == "**B**" else "B", 0.0),
            (lambda message: "Both are good.", 0.5),
            (lambda message: CallError("no answer"), 0.5),
        ],
        ids=["always A", "always B", "knows", "is always wrong", "says neither", "fails"],
    )
    def test_is_the_mean_over_both_orders(self, script: Callable[[str], Any], mean: float) -> None:
        found, requests = judged(script)
        assert (found.mean, found.pairs, found.inputs) == (mean, 36, 12)
        assert len(requests) == 72

    def test_is_measured_on_at_most_so_many_pairs_of_as_many_inputs_as_possible(self) -> None:
        found, requests = judged(knowing, pairs=10)
        assert (found.pairs, found.inputs, len(requests)) == (10, 10, 20)
        found, _ = judged(knowing, pairs=14)
        assert (found.pairs, found.inputs) == (14, 12)


class TestExamples:
    def test_never_are_of_the_judged_input_and_are_twenty_at_most(self) -> None:
        _, requests = judged(knowing)
        for message in requests:
            shown, question = message.split("Now compare")
            (number,) = set(re.findall(r"\[text (\d+)\]", question))
            assert f"[text {number}]" not in shown
            assert f"<{number}:" not in shown
            assert shown.count("This output is good.") <= 10
            assert shown.count("This output is bad.") <= 10

    def test_are_of_the_other_folds_alone(self) -> None:
        """Inputs of one fold see the same examples, and none of each other."""
        _, requests = judged(knowing, filled(40), high=40, low=40)
        groups: dict[frozenset[str], set[str]] = {}
        for message in requests:
            shown, question = message.split("Now compare")
            seen = frozenset(re.findall(r"\[text (\d+)\]", shown))
            groups.setdefault(seen, set()).update(re.findall(r"\[text (\d+)\]", question))
        assert len(groups) == 5
        assert all(not seen & judged_ for seen, judged_ in groups.items())
        assert set().union(*groups.values()) == {str(i) for i in range(40)}

    def test_held_out_inputs_are_judged_by_the_others(self) -> None:
        found, requests = judged(knowing, filled(40), held_out=True)
        assert 0 < found.inputs < 20
        questions = {re.findall(r"\[text (\d+)\]", m.split("Now compare")[1])[0] for m in requests}
        examples = {
            n for m in requests for n in re.findall(r"\[text (\d+)\]", m.split("Now compare")[0])
        }
        assert not questions & examples


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("A", 1.0),
        (" a", 0.5),
        ("A\nB", 1.0),
        ("Output A", 0.5),
        ("AB", 0.5),
        ("", 0.5),
        ("(B)", 0.0),
    ],
)
def test_only_a_letter_alone_is_a_verdict(text: str, share: float) -> None:
    assert score_reply(text, swapped=False) == share
    assert score_reply(text, swapped=True) == 1 - share
