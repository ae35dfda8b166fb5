"""Ratings of outputs by a model that knows the expected result: requests, readings, failures, and gains."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from benchmarks.simulated.relays import Relay
from compound.core.errors import CallError
from compound.core.example import Example
from compound.evaluation.metrics.custom import custom
from compound.execution.trace import Call
from compound.optimization.method import PlannedJob
from compound.optimizers.search.ratings import MOST_RATINGS, RATING, Ratings, read_rating
from compound.optimizers.search.sources import CandidateSources
from compound.testing import ScriptedLM
from optimas_settings import guided_search, optimas

WORLD = Relay(4, 2, seed=3)
REWARDS = optimas(model="none", gold=False, judge="judge")


def rate(message: str, *_: Any) -> str:
    """Rate what a step of a relay wrote: 10 if it is the answer."""
    answer, wrote = (
        re.search(r"answer: (s\d+)", message),
        re.search(r"It wrote found: (s\d+)", message),
    )
    assert answer is not None
    assert wrote is not None
    return "10" if answer[1] == wrote[1] else "0"


def made(job: Any, reply: Any = rate, **task: Any) -> Any:
    return job(
        WORLD.system(),
        custom(WORLD.score, thread="never"),
        WORLD.examples(80),
        lambda: ScriptedLM(reply),
        **task,
    )


def call(found: str, question: str = "train 0") -> Call:
    return Call("a", "a", "a", (), {"question": question}, {"found": found})


@pytest.mark.parametrize(
    ("reply", "rating"),
    [
        ("0", -1.0),
        ("5", 0.0),
        ("10", 1.0),
        ("Number: 7.5", 0.5),
        ("**8**/10", 0.6),
        ("9 out of 10.", 0.8),
        ("11", None),
        ("100", None),
        ("-3", None),
        ("", None),
        ("good", None),
        ("3, or rather 8", None),
    ],
)
def test_a_rating_is_the_only_number_in_its_range(reply: str, rating: float | None) -> None:
    assert read_rating(reply) == pytest.approx(rating)


class TestRequests:
    def test_one_shows_the_step_its_call_and_the_expected_result(self, job: Any) -> None:
        given = made(job)
        example = WORLD.examples(1)[0]
        asyncio.run(Ratings(given.task, "judge").of("a", [([call("s3")], example)]))
        ((lm, request),) = [(name, each) for name, each in given.proposal_requests]
        text = request.messages[0].text
        assert lm == "judge"
        for shown in (
            "a reads question",
            "It wrote found: s3",
            f"answer: {example.gold['answer']}",
        ):
            assert shown in text

    def test_equal_calls_are_rated_once_in_a_run(self, job: Any) -> None:
        """The memory of a run has the ratings, so that an interrupted job asks for none again."""
        given = made(job)
        example = WORLD.examples(1)[0]
        right, wrong = call(str(example.gold["answer"])), call("s99")
        for _ in range(2):
            runs = [([right], example), ([wrong, right], example), ([], example)]
            found = asyncio.run(Ratings(given.task, "judge").of("a", runs))
            assert found == [{RATING: 1.0}, {RATING: 0.0}, {}]
        assert len(given.proposal_requests) == 2

    def test_without_an_expected_result_there_is_none(self, job: Any) -> None:
        given = made(job)
        runs = [([call("s1")], Example("e", {"question": "q"}))]
        assert asyncio.run(Ratings(given.task, "judge").of("a", runs)) == [{}]
        assert not given.proposal_requests

    @pytest.mark.parametrize("reply", [CallError("the server is down"), "I cannot tell."])
    def test_a_model_that_does_not_rate_is_asked_a_few_times_and_counts_as_neutral(
        self, job: Any, reply: Any
    ) -> None:
        asked = []

        def answer(message: str, *_: Any) -> str:
            asked.append(message)
            if isinstance(reply, CallError):
                raise reply
            return str(reply)

        given = made(job, answer)
        for example in WORLD.examples(80):
            runs = [([call("s1", example.id)], example)]
            assert asyncio.run(Ratings(given.task, "judge").of("a", runs)) == [{RATING: 0.0}]
        assert 5 <= len(asked) <= 20


class TestInTheSearch:
    def test_requests_are_limited_by_the_runs(self) -> None:
        system = WORLD.system()
        job = PlannedJob(system, tuple(system.parameters), WORLD.examples(80), 8, 8, 100)
        (ratings,) = guided_search(REWARDS, CandidateSources(())).plan(job).requests
        assert (ratings.count, ratings.lm) == (MOST_RATINGS * 100, "judge")

    @pytest.mark.slow
    def test_a_judge_is_trusted_as_far_as_scores_confirm_it(self, job: Any) -> None:
        trust = {}
        for name, reply in {"right": rate, "random": lambda m, rng: str(rng.integers(11))}.items():
            proposal = made(job, reply, share=120).run(
                guided_search(REWARDS, CandidateSources(()))
            )[1]
            trust[name] = proposal.facts["local"]["a"][
                "trust"
            ]  # nothing else tells which symbol is right
        assert trust["right"] > 0.9
        assert trust["random"] < 0.9
