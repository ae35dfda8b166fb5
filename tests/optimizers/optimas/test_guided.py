"""Search guided by local rewards: allocation, what a candidate sees, and what is proposed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from compound.benchmarks.simulated.ablations import fit_nothing
from compound.benchmarks.simulated.relays import Relay, RelayStep
from compound.components.llm import LLM
from compound.errors import TransientError
from compound.evaluation.metrics.custom import custom
from compound.example import Example
from compound.graph.component import CallContext, Input
from compound.graph.space import Text
from compound.graph.system import System
from compound.optimization.prices import estimate_prices
from compound.optimizers.optimas.guided import GuidedSearch, is_worthwhile
from compound.optimizers.optimas.part import part_of
from compound.optimizers.search.prompts import PromptSearch
from compound.rewards.gains.critic import fit_critic
from compound.testing import ScriptedLM
from optimas_settings import learning, optimas

LEARNING = learning(optimas(model="none"))


def relay_job(job: Any, world: Relay, key: str, share: float, seed: int = 0) -> Any:
    return job(world.system(), world, world.examples(80), keys=(key,), share=share, seed=seed, minibatch=8)


class TestRelay:
    """A chain of four steps; the first has eight options, whose outputs only the answer can judge."""

    WORLD = Relay(4, 1, seed=3)

    def test_a_local_reward_finds_better_options_than_races_at_equal_runs(self, job: Any) -> None:
        reached: dict[str, list[float]] = {"guided": [], "alone": []}
        for seed in range(8):
            world = Relay(4, 1, seed=seed)
            for name, fit in (("guided", fit_critic), ("alone", fit_nothing)):
                assignment = relay_job(job, world, "a.option", 100, seed)
                _, proposal = assignment.run(GuidedSearch(LEARNING, PromptSearch(()), fit=fit))
                assert assignment.spent <= 100 + 1e-6
                option = proposal.values.get("a.option", 0)
                reached[name].append(world.value({"a": option}) / world.optimum()[1])
        assert np.mean(reached["guided"]) > 0.95
        assert np.mean(reached["guided"]) >= np.mean(reached["alone"])

    def test_the_share_is_spent(self, job: Any) -> None:
        assignment = relay_job(job, self.WORLD, "a.option", 60)
        assignment.run(GuidedSearch(LEARNING, PromptSearch(())))
        assert 45 <= assignment.spent <= 60 + 1e-6

    def test_every_job_reports_what_its_reward_was_worth(self, job: Any) -> None:
        _, proposal = relay_job(job, self.WORLD, "a.option", 100).run(
            GuidedSearch(LEARNING, PromptSearch(()))
        )
        facts = proposal.facts
        assert facts["savings"] == pytest.approx(4.0)
        assert facts["steered"]
        assert 0 < facts["guided"]["ratio"] < 1
        assert facts["guided"]["accuracy"] > 0.6

    def test_the_candidate_proposed_was_never_eliminated(self, job: Any) -> None:
        """Regression test: finalists came from rungs that they had not survived.

        After some of the races an eliminated candidate has the highest estimated gain; ranked with those left,
        it would be proposed.
        """
        led_by_eliminated = 0
        for seed in range(6):
            assignment = relay_job(job, Relay(4, 1, seed=seed), "a.option", 100, seed)
            states, proposal = assignment.run(GuidedSearch(LEARNING, PromptSearch(())))
            races = [s["guided"] for s in states if s["guided"]]
            candidates = next(s["candidates"] for s in states if s["candidates"])
            assert all(set(b["alive"]) <= set(a["alive"]) for a, b in pairwise(races))
            (left,), gains = races[-1]["alive"], races[-1]["gains"]
            assert proposal.values == (candidates[left] if gains[left] > 0 else {})
            led_by_eliminated += max(gains) > max(0.0, gains[left])
        assert led_by_eliminated

    def test_answers_are_not_among_the_features_of_stored_rewards(self, job: Any) -> None:
        assignment = relay_job(job, self.WORLD, "a.option", 100)
        assignment.run(GuidedSearch(LEARNING, PromptSearch(())))
        card = (assignment.memory.folder / "rewards" / "card.json").read_text()
        assert '"a"' in card
        assert "gold:" not in card
        assert any("gold:" in str(record) for record in assignment.memory.records())


def test_no_job_collects_pairs_apart_from_its_race(job: Any) -> None:
    """Regression test: each job bought runs of the incumbent on "fresh" inputs, a third of them repeated.

    All system runs of a job are those of its race, and all pairs come from examples that raced.
    """
    for seed in range(3):
        assignment = relay_job(job, Relay(4, 1, seed=3), "a.option", 60, seed)
        states, _ = assignment.run(GuidedSearch(LEARNING, PromptSearch(()), rounds=1))
        race = [state["guided"] for state in states if state["guided"]][-1]
        assert assignment.spent == pytest.approx(race["spent"])
        draws = [record["draw"] for record in assignment.memory.records()]
        assert 0 < len({draw["example"] for draw in draws}) <= race["n_global"]


class Flaky(RelayStep):
    """A step whose server is overloaded for two options."""

    retries = 0

    async def run(self, inputs: Mapping[str, Any], values: Mapping[str, Any], call: CallContext) -> Any:
        if values.get("option") in (1, 2):
            raise TransientError("503 overloaded")
        return await super().run(inputs, values, call)


def test_transient_failures_say_nothing_about_a_candidate(job: Any) -> None:
    """Regression test: an outage became a preference against what it hit."""
    skills = (0.5, 0.9, 0.8, 0.6, 0.4)
    found = Flaky("a", True, skills, 0.05, 0)(question=Input("question", str))
    for name in "bcd":
        found = RelayStep(name, False, (0.9,), 0.05, 0)(question=Input("question", str), found=found)
    world = Relay(4, 1, options=5)
    assignment = job(
        System("flaky", outputs={"answer": found}), world, world.examples(60), keys=("a.option",), share=80
    )
    states, _ = assignment.run(GuidedSearch(LEARNING, PromptSearch(())))
    guided = [state["guided"] for state in states if state["guided"]][-1]
    assert guided["evaluations"]["failed"] == []
    for row in (1, 2):
        assert set(guided["evaluations"]["scores"][row].values()) <= {None}
        assert guided["gains"][row - 1] is None
    stored = [record["draw"] for record in assignment.memory.records()]
    assert not any(c[2].get("option") in (1, 2) for draw in stored for c in draw["candidates"])


def test_nothing_is_saved_where_nothing_counted_follows() -> None:
    system = Relay(4, 4).system()
    prices = estimate_prices(system)
    worth = {name: is_worthwhile(part_of(system, [name], prices), prices.change([name])) for name in "abcd"}
    assert worth == {"a": True, "b": True, "c": True, "d": False}


def test_opro_sees_the_prompts_of_earlier_rounds_with_their_gains(job: Any) -> None:
    """Regression test: OPRO was shown the incumbent alone, without any score."""
    seen: list[str] = []

    def reply(message: str, rng: np.random.Generator) -> str:
        if "<prompt>" in message:
            seen.append(message)
            return f"<prompt>Rule {len(seen)}: be {('clear', 'brief', 'long')[len(seen) % 3]}.</prompt>"
        is_short = any(word in message for word in ("short", "brief")) or (
            "clear" in message and "1" in message
        )
        return "short" if is_short else "a rather long answer"

    first = LLM("first", prompt=Text("Answer."))(question=Input("question"))
    last = LLM("last", prompt="Copy.")(text=first)
    system = System("two", outputs={"answer": last}, lm="scripted")
    rows = [Example(f"e{i}", {"question": f"q{i}"}, {"answer": "short"}) for i in range(30)]

    def score(outputs: Mapping[str, Any], example: Example) -> float:
        return float(len(outputs["answer"]) < 10)

    assignment = job(system, custom(score), rows, lambda: ScriptedLM(reply), 200, keys=("first.prompt",))
    assignment.task = replace(assignment.task, candidates=4)
    states, _ = assignment.run(GuidedSearch(LEARNING, PromptSearch(("opro",)), rounds=2))
    race = [state["guided"] for state in states if state["round"] == 0 and state["guided"]][-1]
    prompts = [values["first.prompt"] for values in states[0]["candidates"]]
    assert race["gains"][0] == pytest.approx(1.0)  # always brief
    assert race["gains"][1] == pytest.approx(0.0)
    assert 0.1 < race["gains"][2] < 0.9
    later = [message for message in seen if "Rule 1" in message]
    assert later
    for message in later:
        for prompt, gain in zip(prompts, race["gains"], strict=True):
            assert f"<prompt>{prompt}</prompt> score {gain:.3f}\n" in message
        assert "<prompt>Answer.</prompt> score 0.000\n" in message  # the incumbent's
