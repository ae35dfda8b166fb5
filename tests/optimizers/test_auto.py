"""Method `auto`: what it chooses, its reasons, and the settings that it takes over."""

from __future__ import annotations

from typing import Any

import pytest

from compound import LLM, Choice, Function, Input, LoRA, System, Text
from compound.ext import Method
from compound.optimization.settings.optimize import make_settings
from compound.optimizers import methods
from compound.optimizers.methods import method
from compound.optimizers.search.joint import JointSearch
from compound.optimizers.search.local_gains import RewardGuide
from compound.optimizers.weights.methods import NothingToTune
from compound.testing import ScriptedLM

QUESTION = Input("question", str)


def upper(text: str, mode: str) -> str:
    return text.upper() if mode == "up" else text


def chained(**weights: Any) -> System:
    """Three steps, of which the first one is tuned: its evaluations cost a third of whole runs."""
    draft = LLM("draft", prompt=Text("Think."), **weights)(question=QUESTION)
    checked = LLM("checker", prompt="Check.")(draft=draft)
    answer = LLM("answer", prompt="Answer.")(draft=checked)
    return System("chained", outputs={"answer": answer}, lm="small")


def single() -> System:
    answer = LLM("answer", prompt=Text("Answer."))(question=QUESTION)
    return System("single", outputs={"answer": answer}, lm="small")


def trained() -> System:
    answer = LLM("answer", prompt="Answer.", weights=LoRA())(question=QUESTION)
    return System("trained", outputs={"answer": answer}, lm="small")


def chosen(system: System, **settings: Any) -> Method:
    return method("auto", system, make_settings(settings), engines=lambda lm: ScriptedLM([]))


def joint_of(made: Method) -> JointSearch:
    found = next(each for each in made.optimizers.values() if isinstance(each, JointSearch))
    assert isinstance(found, JointSearch)
    return found


class TestSearch:
    def test_local_rewards_where_local_evaluations_cost_less(self) -> None:
        made = chosen(chained())
        guide = joint_of(made).guide
        assert isinstance(guide, RewardGuide)
        assert guide.learning.backbone.model == "none"
        note, savings = made.notes
        assert savings.startswith("local rewards may make an evaluation of a candidate cheaper: ")
        assert note.startswith(
            "method auto: optimas, since evaluating draft alone can make it at most 3 times"
        )

    def test_none_where_nothing_follows(self) -> None:
        made = chosen(single())
        assert joint_of(made).guide is None
        assert made.notes == [
            "method auto: search, since evaluating single components would save little"
        ]

    def test_none_without_the_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(methods, "find_spec", lambda name: None)
        made = chosen(chained())
        assert joint_of(made).guide is None
        assert "the extra 'rewards'" in made.notes[0]

    @pytest.mark.parametrize("section", ["search", "optimas"])
    @pytest.mark.parametrize("system", [chained(), single()], ids=["optimas", "search"])
    def test_settings_of_either_section_count(self, section: str, system: System) -> None:
        sources = joint_of(chosen(system, **{section: {"lm": "writer"}})).sources
        assert (sources.lm, sources.writes) == ("writer", True)

    def test_a_backbone_that_the_user_names_is_used(self) -> None:
        guide = joint_of(chosen(chained(), optimas={"backbone": {"model": "tiny"}})).guide
        assert isinstance(guide, RewardGuide)
        assert guide.learning.backbone.model == "tiny"

    def test_the_form_of_the_paper_is_kept(self) -> None:
        made = chosen(chained(weights=LoRA()), optimas={"form": "paper"})
        assert {job.optimizer for job in made.jobs} == {"local"}

    def test_nothing_to_tune_is_an_error(self) -> None:
        fixed = Function("upper", upper, mode="up")(text=QUESTION)
        with pytest.raises(NothingToTune, match="'search' can change"):
            chosen(System("fixed", outputs={"answer": fixed}))
        single = Function("upper", upper, mode=Choice("up"))(text=QUESTION)
        with pytest.raises(NothingToTune, match="'search' can change"):
            chosen(System("single", outputs={"answer": single}))

    def test_choices_alone_are_searched(self) -> None:
        tuned = Function("upper", upper, mode=Choice("up", "as is"))(text=QUESTION)
        assert [job.keys for job in chosen(System("tuned", outputs={"answer": tuned})).jobs] == [
            ("upper.mode",)
        ]


class TestWeights:
    def test_they_stay_without_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(methods, "device_count", lambda kind: 0)
        made = chosen(chained(weights=LoRA()))
        assert all(not key.endswith("weights") for job in made.jobs for key in job.keys)
        assert made.notes[1] == (
            "method auto: the weights of draft stay, since there is no GPU; "
            "method: better_together trains them anyway"
        )

    def test_they_stay_if_the_budget_covers_few_steps(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(methods, "device_count", lambda kind: 1)
        made = chosen(chained(weights=LoRA()), budget={"system_runs": 600})
        assert "half of the budget covers" in made.notes[1]
        assert len(made.jobs) == 1

    def test_they_are_trained_after_the_search(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(methods, "device_count", lambda kind: 1)
        made = chosen(chained(weights=LoRA()), budget={"system_runs": 100_000})
        assert made.notes[1] == "method auto: then mmgrpo for the weights of draft"
        assert [job.keys for job in made.jobs] == [("draft.prompt",), ("draft.weights",)]

    def test_they_are_trained_if_there_is_nothing_else(self) -> None:
        made = chosen(trained())
        assert made.notes == ["method auto: mmgrpo, since only the weights of answer can change"]
        assert [job.keys for job in made.jobs] == [("answer.weights",)]
