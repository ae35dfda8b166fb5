"""The gated reward of conversations: by hand, and every way to earn it without working."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.prompt_r1 import PromptTurn, gated, gated_reward, read_turn
from benchmarks.prompt_r1 import form as form_of
from compound.core.errors import DataError
from compound.core.example import Example

ASK = "<think>Who wrote it?</think><interaction_prompt>Who wrote Emma?</interaction_prompt>"
RIGHT = "<think>So it is her.</think>\n<answer>Jane Austen</answer>\n"
EXAMPLE = Example("e", {}, {"answer": "Jane Austen"})


def reward(*texts: str, answer: Any = "Jane Austen") -> float:
    return gated({"turns": list(texts)}, Example("e", {}, {"answer": answer})).value


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        ([ASK, RIGHT], 1.0),  # -1 + 0.4 + 0.25 + 0.25 + 0.1 + 1
        ([ASK, ASK, ASK, ASK, RIGHT], 1.0),  # further turns add nothing
        ([ASK, "<think>?</think><answer>Jane</answer>"], 2 / 3),  # F1 of 1 word of 1 against 2
        ([ASK, "<think>?</think><answer>Mary Shelley</answer>"], 0.0),  # complete, but wrong
        ([RIGHT], -0.4),  # a direct answer, however right: 0.25 + 0.25 + 0.1
        ([ASK], -0.6),
        (["Jane Austen"], -1.0),
        ([], -1.0),
    ],
)
def test_the_reward_is_the_sum_of_its_parts(texts: list[str], wanted: float) -> None:
    assert reward(*texts) == pytest.approx(wanted)


@pytest.mark.parametrize("turns", [1, 3, 5])
def test_r1_conversations_without_an_answer_earn_less_than_any_answer(turns: int) -> None:
    unanswered = reward(*[ASK] * turns)  # the published sum gives 0 from three turns on
    assert unanswered == pytest.approx(-0.6)
    assert unanswered < reward(RIGHT) < reward(ASK, "<think>?</think><answer>wrong</answer>")


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        ([ASK] * 5, -0.6),  # the turns are used up and the environment has the last word
        ([ASK] * 4 + ["so I think it is Austen"], -0.6),
        (["nonsense"] * 5, -1.0),  # not 0 because the reward would stand on an environment's token
        ([ASK, "<think>Still thinking</think>"], -0.6),
        ([ASK, ""], -0.6),
    ],
)
def test_r2_rollouts_that_end_on_the_environment_or_on_nothing_are_scored(
    texts: list[str], wanted: float
) -> None:
    assert reward(*texts) == pytest.approx(wanted)


def test_an_empty_answer_opens_no_gate() -> None:
    assert reward(ASK, "<think>?</think><answer> </answer>") == pytest.approx(
        -0.25
    )  # 0.4 + 0.25 + 0.1
    assert reward(ASK, "<think>?</think><answer></answer>", answer="") == pytest.approx(-0.25)


def test_a_turn_that_asks_and_answers_does_not_answer() -> None:
    both = f"{ASK}<answer>Jane Austen</answer>"
    assert read_turn(both) == PromptTurn("Who wrote it?", "Who wrote Emma?", None, False)
    assert reward(ASK, both) == pytest.approx(-0.6)


@pytest.mark.parametrize(
    "text",
    [
        "<think>a</think><interaction_prompt>b",  # cut off
        "<think>a<interaction_prompt>b</interaction_prompt>",
        "<think>a</think>Let me ask.<interaction_prompt>b</interaction_prompt>",
        "<interaction_prompt>b</interaction_prompt>",
        "<interaction_prompt>b</interaction_prompt><think>a</think>",
        "<think></think><interaction_prompt>b</interaction_prompt>",
        "<think>a</think><interaction_prompt>  </interaction_prompt>",
        "<think>a</think><think>a</think><interaction_prompt>b</interaction_prompt>",
        "<think>a</think><interaction_prompt>b</interaction_prompt><interaction_prompt>b</interaction_prompt>",
        "<think>a <answer>x</answer></think><interaction_prompt>b</interaction_prompt>",
        "<THINK>a</THINK><interaction_prompt>b</interaction_prompt>",
    ],
)
def test_r4_malformed_questions_earn_nothing(text: str) -> None:
    assert not read_turn(text).is_prompt
    assert reward(text) == -1.0
    assert reward(text, RIGHT) == pytest.approx(-0.4)


@pytest.mark.parametrize(
    ("text", "answer", "form"),
    [
        ("<think>a</think><answer>Emma</answer> I am sure.", "Emma", 0.5),
        ("<answer>Emma</answer>", "Emma", 0.5),
        ("<think>a</think><answer>Emma</answer><answer>Persuasion</answer>", "Emma", 0.5),
        ("<think>a</think><answer>Emma", None, 0.0),
        ("<think></think><answer>Emma</answer>", "Emma", 0.5),
        ("<think>a</think>\n\n<answer>\nEmma\n</answer>", "Emma", 0.6),
    ],
)
def test_final_turns_are_read(text: str, answer: str | None, form: float) -> None:
    assert read_turn(text).answer == answer
    assert form_of([read_turn(text)]) == pytest.approx(form)


TURNS = st.lists(
    st.sampled_from([ASK, RIGHT, "x", "<answer>y</answer>", "<think>z</think>"]), max_size=5
)


@given(TURNS, st.floats(0, 1))
def test_rewards_stay_in_range_and_f1_counts_only_behind_the_gate(
    texts: list[str], f1: float
) -> None:
    turns = [read_turn(text) for text in texts]
    found = gated_reward(turns, f1)
    assert -1.0 <= found <= 1.0
    passed = form_of(turns) == 1.0 and turns[-1].answer is not None
    assert found == pytest.approx(form_of(turns) - 1 + (f1 if passed else 0.0))
    assert (found > 0) <= passed


def test_the_metric_says_what_it_saw() -> None:
    score = gated({"turns": [ASK, "<think>?</think><answer>Jane</answer>"]}, EXAMPLE)
    assert dict(score.parts) == pytest.approx({"form": 1.0, "f1": 2 / 3, "turns": 2.0})
    assert score.feedback == "expected 'Jane Austen', got 'Jane'"
    assert gated({"turns": [ASK]}, EXAMPLE).feedback == "no answer after 1 turns"


def test_the_metric_names_what_is_missing() -> None:
    with pytest.raises(DataError, match="reads the output 'turns'.*outputs: answer"):
        gated({"answer": "x"}, EXAMPLE)
    with pytest.raises(DataError, match="no gold field 'answer'"):
        gated({"turns": [RIGHT]}, Example("e", {}, {}))
