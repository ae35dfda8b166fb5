"""A language model as judge of pairs: what it is shown, how it is asked, and how its replies count."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compound.benchmarks.measure.judge import (
    CUE,
    JudgeSettings,
    comparison_request,
    judge,
    score_reply,
    shorten_fields,
)
from compound.components.function import Function
from compound.components.selector import Selector
from compound.engine import Completion, Request
from compound.errors import BudgetExhausted, CallError
from compound.execution.budget import Budget, Meter
from compound.execution.cache import MemoryCache
from compound.execution.executor import Executor
from compound.graph.component import Input
from compound.graph.system import System
from compound.rewards.buffer import PairBuffer
from compound.rewards.pairs import Draw, Pair
from compound.rewards.sampling.candidates import Candidate
from compound.rewards.template import Template
from compound.testing import ScriptedLM


def shorten(text: str) -> str:
    return text[:5]


def weigh(x: float, by: float) -> float:
    return x * by


def small() -> System:
    return System("small", outputs={"y": Function("short", shorten)(text=Input("text", str))}, lm="lm")


def filled(inputs: int = 12, length: int = 0) -> PairBuffer:
    """One, two and three words; the shortest is best."""
    buffer = PairBuffer(small().identity)
    for i in range(inputs):
        outputs = {"one": 1.0, "one two": 0.5, "one two three": 0.0}
        found = tuple(
            Candidate({"output": f"<{i}: {y}{'.' * length}>"}, (r,), certain=True) for y, r in outputs.items()
        )
        draw = Draw("short", "short", f"e{i}", "digest", {"text": f"[text {i}]" + "," * length}, found)
        buffer.add([draw], 1)
    return buffer


def asked_of(message: str) -> list[str]:
    """Return the two outputs in question."""
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

    def test_one_readable_reply_of_two_counts_three_quarters(self) -> None:
        found, _ = judged(lambda message: "A" if knowing(message) == " A." else "hm")
        assert found.mean == 0.75

    def test_is_measured_on_at_most_so_many_pairs_of_as_many_inputs_as_possible(self) -> None:
        found, requests = judged(knowing, pairs=10)
        assert (found.pairs, found.inputs, len(requests)) == (10, 10, 20)
        found, _ = judged(knowing, pairs=14)
        assert (found.pairs, found.inputs) == (14, 12)

    def test_says_nothing_of_too_few_inputs(self) -> None:
        found, requests = judged(knowing, filled(3))
        assert (found.mean, found.pairs, requests) == (0.5, 0, [])

    def test_is_the_same_for_the_same_seed(self) -> None:
        first, second = judged(knowing, pairs=5)[1], judged(knowing, pairs=5)[1]
        assert first == second
        assert judged(knowing, pairs=5, seed=1)[1] != first


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

    def test_the_best_and_the_worst_output_of_each_input_come_first(self) -> None:
        _, requests = judged(knowing)
        shown = requests[0].split("Now compare")[0]
        assert len(re.findall(r": one>\nThis output is good", shown)) >= 9
        assert len(re.findall(r": one two three>\nThis output is bad", shown)) >= 9

    def test_held_out_inputs_are_judged_by_the_others(self) -> None:
        found, requests = judged(knowing, filled(40), held_out=True)
        assert 0 < found.inputs < 20
        questions = {re.findall(r"\[text (\d+)\]", m.split("Now compare")[1])[0] for m in requests}
        examples = {n for m in requests for n in re.findall(r"\[text (\d+)\]", m.split("Now compare")[0])}
        assert not questions & examples

    def test_equal_inputs_of_two_examples_are_one_input(self) -> None:
        buffer = filled(8)
        for i in range(8):
            draw = buffer.entries[i].draw
            buffer.add([Draw("short", "short", f"again{i}", "digest", draw.inputs, draw.candidates)], 2)
        _, requests = judged(knowing, buffer)
        for message in requests:
            shown, question = message.split("Now compare")
            (number,) = set(re.findall(r"\[text (\d+)\]", question))
            assert f"[text {number}]" not in shown


class TestRequest:
    template = Template.of(Function("short", shorten))
    pair = Pair("short", "e", "d", {"text": "Lima"}, {"output": "good one"}, {"output": "bad one"}, 1.0)

    def test_says_the_outputs_in_both_orders(self) -> None:
        plain, swapped = (
            comparison_request(self.template, self.pair, [], JudgeSettings(), swapped=swapped)
            for swapped in (False, True)
        )
        assert asked_of(plain.messages[-1].text) == ["good one", "bad one"]
        assert asked_of(swapped.messages[-1].text) == ["bad one", "good one"]
        assert (plain.temperature, plain.cue) == (0.0, CUE)

    def test_twenty_long_examples_fit_a_small_model(self) -> None:
        """Four characters a token: 1,500 tokens of examples, and what frames them."""
        _, requests = judged(knowing, filled(20, length=5_000))
        assert max(map(len, requests)) < 4 * 2_800
        shown = requests[0].split("Now compare")[0]
        assert shown.count("This output is") == 20
        assert len(shown) < 4 * 2_000

    def test_a_label_is_an_output_like_any_other(self) -> None:
        template = Template.of(Selector("model", "small", "large"))
        pair = Pair("model", "e", "d", {"q": "why?"}, {"choice": "large"}, {"choice": "small"}, 1.0)
        message = comparison_request(template, pair, [pair], JudgeSettings()).messages[-1].text
        assert asked_of(message) == ["large", "small"]
        assert "Output: large\nThis output is good." in message

    def test_several_outputs_keep_their_names(self) -> None:
        pair = Pair("short", "e", "d", {"text": "x"}, {"a": 1, "b": "yes"}, {"a": 2, "b": "no"}, 1.0)
        message = comparison_request(self.template, pair, [], JudgeSettings()).messages[-1].text
        assert "Output A: \na: 1\nb: yes" in message

    def test_wired_settings_are_not_shown(self) -> None:
        template = Template.of(Function("weigh", weigh, by=2.0))
        pair = Pair("weigh", "e", "d", {"x": 1.0, "by": 9.0}, {"output": 1.0}, {"output": 2.0}, 1.0)
        assert "by: " not in comparison_request(template, pair, [], JudgeSettings()).messages[-1].text

    @given(st.dictionaries(st.text(min_size=1), st.text()), st.integers(0, 200))
    def test_fields_never_take_more_than_their_room(self, values: dict[str, str], room: int) -> None:
        text = shorten_fields(values, room)
        names = sum(len(name) + len(": ") for name in values) + max(0, len(values) - 1)
        assert len(text) <= max(room, 2 * len(values)) + names


@pytest.mark.parametrize(
    ("text", "share"),
    [("A", 1.0), (" a", 0.5), ("A\nB", 1.0), ("Output A", 0.5), ("AB", 0.5), ("", 0.5), ("(B)", 0.0)],
)
def test_only_a_letter_alone_is_a_verdict(text: str, share: float) -> None:
    assert score_reply(text, swapped=False) == share
    assert score_reply(text, swapped=True) == 1 - share


class TestExecutor:
    def test_an_executor_asks_once_and_keeps_the_answers(self) -> None:
        lm = ScriptedLM(knowing)
        executor = Executor({"lm": lm}, cache=MemoryCache())

        async def both() -> list[Any]:
            def generate(request: Request) -> Any:
                return executor.request("lm", request)

            return [
                await judge(generate, filled(), small(), "short", JudgeSettings(pairs=5)) for _ in range(2)
            ]

        first, second = asyncio.run(both())
        assert first == second
        assert len(lm.requests) == 10

    def test_the_budget_holds(self) -> None:
        executor = Executor({"lm": ScriptedLM(knowing)}, meter=Meter(Budget(calls=3)))

        async def run() -> None:
            async def generate(request: Request) -> Completion:
                return await executor.request("lm", request)

            await judge(generate, filled(), small(), "short")

        with pytest.raises(BudgetExhausted):
            asyncio.run(run())
