"""Optimizers and the scheduler: hand-computed plans, laws of each part, and the defects not to have."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import hypothesis
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from compound.benchmarks.simulated.relays import Relay
from compound.components.agent_prompt import AgentPrompt
from compound.components.agents.agent import Agent
from compound.components.external_agent import ExternalAgent
from compound.components.function import Function
from compound.components.index import PassageIndex
from compound.components.llm import LLM
from compound.components.retriever import Retriever
from compound.engine import Completion, Request
from compound.errors import CallError
from compound.evaluation.evaluate import Evaluation, EvaluationRules, ScoredRun, evaluate
from compound.evaluation.metrics.built_in import token_f1
from compound.evaluation.metrics.custom import custom
from compound.example import Example
from compound.execution.cache import MemoryCache
from compound.execution.executor import Executor
from compound.execution.rng import generator
from compound.execution.trace import Call, Failure, Trace
from compound.graph.component import Input
from compound.graph.configuration import canonical_json
from compound.graph.space import Choice, Demos, Float, Int, Text
from compound.graph.system import System
from compound.optimization.method import (
    Job,
    JobContext,
    JobRecord,
    Method,
    Optimizer,
    Progress,
    Proposal,
    ScoredCandidate,
    Task,
)
from compound.optimization.prices import CallShare, Prices, estimate_prices
from compound.optimization.problem import Problem
from compound.optimization.scorer import TRAIN_SAMPLE, JobScorer
from compound.optimizers.baselines.random import RandomSearch
from compound.optimizers.scheduling.scheduler import Uniform
from compound.optimizers.search.joint import JointSearch
from compound.optimizers.search.prompts import PromptSearch, bootstrap_pools, demo_keys, propose_winner, split
from compound.optimizers.search.proposers import edits
from compound.optimizers.search.proposers.demos import (
    Correction,
    WeightedDemo,
    bootstrap,
    correct_calls,
    draw_demos,
)
from compound.optimizers.search.proposers.edits import edit_prompt, sentences
from compound.optimizers.search.proposers.opro import parse_prompt, prompt_request
from compound.optimizers.search.racing import Race, Standing, Track, race, rungs_of
from compound.optimizers.search.sampling import NumberProgress, NumberSearch, enumerate_settings, suggest
from compound.optimizers.search.sources import CandidateSources
from compound.settings.optimize import OptimizeSettings
from compound.testing import PlainMemory, ScriptedLM

# --- doubles -------------------------------------------------------------------------------------------


JOINT = JointSearch(CandidateSources())


def examples(n: int) -> list[Example]:
    return [Example(f"e{i}", {"question": f"q{i}"}, {"answer": f"a{i}"}) for i in range(n)]


@dataclass
class Simulated:
    """A scorer whose true scores are known: ``worth`` says the chance that a candidate is right.

    The same candidate on the same example always scores the same, as runs from the cache do. A run of the
    incumbent takes one system run, and that of a candidate ``price``, since the incumbent was run before.
    """

    worth: Any
    runs_left: float = math.inf
    has_free_repeats: bool = True
    price: float = 1.0
    written: Sequence[str] = ()
    asked: list[Request] = field(default_factory=list)
    asked_of: list[str | None] = field(default_factory=list)
    batches: list[list[str]] = field(default_factory=list)
    scored: list[dict[str, Any]] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    known: set[tuple[str, str]] = field(default_factory=set)
    outcomes: list[str] = field(default_factory=list)
    spent: float = 0.0

    async def score(
        self, candidates: Sequence[Mapping[str, Any]], examples: Sequence[Example]
    ) -> list[Evaluation]:
        self.batches.append([e.id for e in examples])
        self.scored += [dict(c) for c in candidates]
        return [self._evaluation(candidate, examples) for candidate in candidates]

    def _evaluation(self, candidate: Mapping[str, Any], examples: Sequence[Example]) -> Evaluation:
        text = canonical_json(candidate)
        rows, runs = [], 0.0
        for example in examples:
            right = generator("simulated", text, example.id).random() < self.worth(candidate)
            rows.append(ScoredRun(example.id, -1, float(right)))
            runs += self._pay(text, example)
        return Evaluation(text, tuple(rows), system_runs=runs)

    def _pay(self, text: str, example: Example) -> float:
        if (text, example.id) in self.known and self.has_free_repeats:
            return 0.0
        self.known.add((text, example.id))
        runs = self.price if text != "{}" and self.has_free_repeats else 1.0
        self.spent += runs
        self.runs_left = max(0.0, self.runs_left - runs)
        return runs

    def may_ask(self, lm: str | None = None) -> bool:
        return True

    def record_outcome(self, outcome: str, lm: str | None = None) -> None:
        self.outcomes.append(outcome)

    def leaks(self, text: str, request: Any, lm: str | None = None) -> bool:
        return False

    async def traces(self, values: Mapping[str, Any], examples: Sequence[Example]) -> list[Trace]:
        self.shown += [e.id for e in examples]
        for example in examples:
            self._pay(canonical_json(values), example)
        return [trace(e, score=float(i % 3 != 0)) for i, e in enumerate(examples)]

    async def generate(self, request: Request, lm: str | None = None) -> Completion:
        self.asked.append(request)
        self.asked_of.append(lm)
        return Completion(self.written[(len(self.asked) - 1) % len(self.written)])


def trace(example: Example, score: float | None, *, failure: Failure | None = None, **call: Any) -> Trace:
    made = Call(
        "answerer", "answerer", "answerer", (),
        **{"inputs": dict(example.inputs), "outputs": {"output": f"right {example.id}"}, **call},
    )  # fmt: skip
    return Trace(example.id, "digest", 0, 0, example.inputs, (made,), failure=failure, score=score)


QUESTION = Input("question", str)


def system(**settings: Any) -> System:
    given = {"prompt": Text("Answer the question."), "demos": Demos(max=3), "lm": "lm", **settings}
    return System("demo", outputs={"answer": LLM("answerer", **given)(question=QUESTION)})


def weigh(answer: str, a: float, k: int, mode: str) -> str:
    return answer


def numeric(**spaces: Any) -> System:
    given = {"a": Float(0, 1, value=0.5), "k": Int(1, 100), "mode": Choice("x", "y", "z"), **spaces}
    return System("demo", outputs={"answer": Function("weigh", weigh, **given)(answer=QUESTION)})


def task(target: System, scorer: Any, *, train: int = 120, **changes: Any) -> Task:
    given: dict[str, Any] = {
        "system": target,
        "keys": tuple(target.parameters),
        "train": examples(train),
        "scorer": scorer,
        "seed": 1,
        "pool_seed": 2,
        "minibatch": 8,
        "candidates": 8,
        "context": JobContext(
            Executor(), custom(lambda outputs, example: 0.0), EvaluationRules(), PlainMemory(Path("unused"))
        ),
        **changes,
    }
    return Task(**given)


def proposed(optimizer: Optimizer, assignment: Task) -> tuple[list[Progress], Proposal]:
    async def collect() -> list[Progress | Proposal]:
        return [event async for event in optimizer.propose(assignment)]

    *progress, last = asyncio.run(collect())
    assert isinstance(last, Proposal)
    assert all(isinstance(event, Progress) for event in progress)
    return [event for event in progress if isinstance(event, Progress)], last


def through_json(state: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(state))


def good_at(optimum: Mapping[str, Any]) -> Any:
    """Right more often the more values are as in ``optimum``."""
    return lambda candidate: 0.2 + 0.6 * sum(candidate.get(k) == v for k, v in optimum.items()) / len(optimum)


# --- racing --------------------------------------------------------------------------------------------


class TestTrack:
    @pytest.mark.parametrize(
        ("track", "arguments", "expected"),
        [
            # the incumbent and eight candidates: 9 runs per example
            (Track(8, 100), (90, 8), 10),
            (Track(8, 100), (89, 8), 9),
            # 1 + 8/4 = 3 runs per example
            (Track(8, 100, price=0.25), (90, 8), 30),
            # a cached incumbent: 2 runs per example
            (Track(8, 100, price=0.25, incumbent_price=0.0), (90, 8), 45),
            # the four examples seen before are free: 4 + 30
            (Track(8, 100, price=0.25), (90, 8, 4), 34),
            # on six more, only the candidates cost something: 6·2 = 12, then (90 - 12) / 3 = 26
            (Track(8, 100, price=0.25), (90, 8, 4, 10), 36),
            # these are more than 11 runs cover: 11 / 2 = 5 examples
            (Track(8, 100, price=0.25), (11, 8, 4, 10), 9),
            # where repeats cost, the examples seen before cost again
            (Track(8, 100, free_repeats=False), (90, 8, 4), 10),
            (Track(8, 100), (10_000, 8), 100),
            (Track(8, 100), (math.inf, 8), 100),
            (Track(8, 100), (0, 8), 0),
            (Track(8, 100, price=0.0, incumbent_price=0.0), (0, 8), 100),
            (Track(8, 0), (90, 8), 0),
        ],
    )
    def test_the_runs_cover_the_examples_worked_out_by_hand(
        self, track: Track, arguments: tuple[float, int, int, int], expected: int
    ) -> None:
        assert track.affordable(*arguments) == expected

    @pytest.mark.parametrize(
        ("track", "candidates", "runs", "expected"),
        [
            # four examples of the incumbent leave 128 runs, a quarter for each rung: 32 = 8·4
            (Track(8, 100), 8, 132, 8),
            # 127.9 / 4 is less; seven candidates have four rungs, too: 28 = 7·4
            (Track(8, 100), 8, 131.9, 7),
            # a quarter of the price: 4 + 4·8 = 36
            (Track(8, 100, price=0.25), 8, 36, 8),
            # 4 + 3·12 = 40 for three candidates with three rungs
            (Track(8, 100), 8, 40, 3),
            # 4 + 2·8 = 20 for two with two
            (Track(8, 100), 8, 20, 2),
            (Track(8, 100), 8, 19.9, 1),
            # one candidate needs an example
            (Track(8, 100), 8, 2, 1),
            (Track(8, 100), 8, 1.9, 0),
            (Track(8, 100), 8, 0, 0),
            # fewer examples than half of a minibatch
            (Track(8, 2), 8, 2 + 4 * 16, 8),
            (Track(8, 0), 8, 100, 0),
            (Track(8, 100), 8, math.inf, 8),
            (Track(8, 100), 0, 100, 0),
            # where repeats cost, a rung of two takes 3·4 runs, and there are two rungs
            (Track(8, 100, free_repeats=False), 8, 24, 2),
            (Track(8, 100, free_repeats=False), 8, 23, 1),
        ],
    )
    def test_as_many_candidates_enter_as_worked_out_by_hand(
        self, track: Track, candidates: int, runs: float, expected: int
    ) -> None:
        assert track.entrants(candidates, runs) == expected

    @pytest.mark.parametrize(("runs", "examples"), [(1, 0), (2, 1), (7, 3), (8, 4), (100, 4), (math.inf, 0)])
    def test_the_incumbent_is_measured_where_a_candidate_is_affordable_too(
        self, runs: float, examples: int
    ) -> None:
        """On half a minibatch of 8 at most; a candidate and the incumbent take 2 runs for each example."""
        assert Track(minibatch=8, examples=100).measured(runs) == examples

    @given(
        st.integers(1, 20), st.integers(0, 100), st.floats(0, 1), st.booleans(), st.integers(0, 40),
        st.floats(0, 2000),
    )  # fmt: skip
    def test_more_runs_and_lower_prices_never_hold_fewer_candidates(
        self, minibatch: int, n: int, price: float, free: bool, candidates: int, runs: float
    ) -> None:
        entrants = Track(minibatch, n, price, free_repeats=free).entrants(candidates, runs)
        assert 0 <= entrants <= candidates
        assert Track(minibatch, n, price, free_repeats=free).entrants(candidates, runs + 1) >= entrants
        assert Track(minibatch, n, price / 2, free_repeats=free).entrants(candidates, runs) >= entrants

    @pytest.mark.parametrize(
        ("candidates", "runs", "entrants"),
        [(2, 19, 1), (2, 20, 2), (3, 19, 1), (3, 20, 2), (3, 39, 2), (3, 40, 3), (1, 8, 1), (1, 1, 0)],
    )
    def test_few_candidates_enter_one_by_one(self, candidates: int, runs: float, entrants: int) -> None:
        """The incumbent takes 4 runs on half a minibatch. Two candidates need 8 in the first of two rungs.

        Three need 12 in the first of three: 4 + 2 · 8 = 20 runs, and 4 + 3 · 12 = 40.
        """
        assert Track(minibatch=8, examples=100).entrants(candidates, runs) == entrants

    @given(st.integers(1, 200))
    def test_as_many_rungs_as_halvings_to_one_candidate(self, candidates: int) -> None:
        alive, rungs = candidates, 1
        while alive > 1:
            alive, rungs = math.ceil(alive / 2), rungs + 1
        assert rungs_of(candidates) == rungs


async def raced(
    arms: Sequence[Mapping[str, Any]],
    rows: Sequence[Example],
    scorer: Simulated,
    minibatch: int,
    resume: Race | None = None,
    price: float | None = None,
) -> tuple[list[Race], list[Standing]]:
    """Race arms; their price is predicted correctly, unless another one is given."""
    predicted = scorer.price if price is None else price
    progress = [after async for after in race(arms, rows, scorer, minibatch, predicted, resume)]
    last = progress[-1] if progress else resume
    return progress, last.ranking() if last else []


def sizes(progress: Sequence[Race]) -> list[tuple[int, int]]:
    """Return the number of candidates and of examples of each rung."""
    return [(sum(s.n == after.seen for s in after.standings), after.seen) for after in progress]


def arms(n: int) -> list[dict[str, Any]]:
    return [{"arm": i} for i in range(n)]


def better(arm: Mapping[str, Any]) -> float:
    """Return the chance that a candidate is right: higher numbers are better, and all beat the incumbent."""
    return 0.5 + 0.05 * arm["arm"] if arm else 0.1


PRICES = st.floats(0, 1, allow_subnormal=False)


class TestRaceSizes:
    @pytest.mark.parametrize(
        ("candidates", "runs", "price", "n", "expected"),
        [
            # 4 for the incumbent. 128/4 = 32 = 8·4; 96/3 = 32: 4 + 32/5 = 10; 66/2 = 33: 10 + 33/3 = 21;
            # 33 for the last: 21 + 33/2 = 37
            (8, 132, 1.0, 100, [(8, 4), (4, 10), (2, 21), (1, 37)]),
            # 2 runs per example for eight candidates: 4·2 + 8·3 = 32 for 12 examples; 32/2 = 16 more for four;
            # 32/1.5 = 21 for two, which leaves 32.5 = 26·1.25
            (8, 132, 0.25, 100, [(8, 12), (4, 28), (2, 49), (1, 75)]),
            # candidates cost nothing: 128/4 = 32 further runs of the incumbent for each rung
            (8, 132, 0.0, 1000, [(8, 36), (4, 68), (2, 100), (1, 132)]),
            # both on eight examples: 16
            (1, 16, 1.0, 100, [(1, 8)]),
            (1, 17, 1.0, 100, [(1, 8)]),
            (2, 20, 1.0, 100, [(2, 4), (1, 8)]),
            (8, 1.9, 1.0, 100, []),
            (8, 0, 1.0, 100, []),
            (8, 100, 1.0, 0, []),
            # the runs cover all examples for all candidates
            (4, 1000, 1.0, 5, [(4, 5)]),
            # without a limit, the last rung has eight times the examples of the first
            (8, math.inf, 1.0, 100, [(8, 8), (4, 16), (2, 32), (1, 64)]),
            (2, math.inf, 1.0, 100, [(2, 8), (1, 64)]),
            (1, math.inf, 1.0, 100, [(1, 64)]),
            (8, math.inf, 1.0, 20, [(8, 8), (4, 16), (2, 20)]),
        ],
    )
    def test_the_rungs_are_those_worked_out_by_hand(
        self, candidates: int, runs: float, price: float, n: int, expected: list[tuple[int, int]]
    ) -> None:
        scorer = Simulated(better, runs_left=runs, price=price)
        progress, _ = asyncio.run(raced(arms(candidates), examples(n), scorer, 8))
        assert sizes(progress) == expected

    def test_where_repeats_are_paid_for_every_rung_costs_all_its_examples(self) -> None:
        """Of 248 runs, a quarter is 62 = 9·6 + 8; then 64 = 5·12 + 4; 67 = 3·22 + 1; 68 = 2·34."""
        scorer = Simulated(better, runs_left=248, has_free_repeats=False, price=0.25)
        progress, _ = asyncio.run(raced(arms(8), examples(100), scorer, 8))
        assert sizes(progress) == [(8, 6), (4, 12), (2, 22), (1, 34)]
        assert scorer.spent == 248

    def test_a_cached_incumbent_leaves_its_runs_to_the_candidates(self) -> None:
        """A rung spends 12 of 48 runs: 12/2 = 6 examples, 12/1 = 12 and 12/0.5 = 24 further ones.

        The last one spends 11 on 44, since one more run of the incumbent could cost more than the run left.
        """
        scorer = Simulated(better, runs_left=48, price=0.25)
        rows = examples(200)
        scorer.known = {("{}", row.id) for row in rows}
        progress, _ = asyncio.run(raced(arms(8), rows, scorer, 8))
        assert sizes(progress) == [(8, 6), (4, 18), (2, 42), (1, 86)]
        assert scorer.spent == 47

    def test_an_incumbent_whose_runs_are_cached_on_the_first_examples_only_is_not_relied_upon(self) -> None:
        """The first four examples suggest that the incumbent is free, which would size the rungs too large."""
        for known in range(5, 60, 5):
            scorer = Simulated(better, runs_left=48, price=0.05)
            scorer.known = {("{}", f"e{i}") for i in range(known)}
            progress, _ = asyncio.run(raced(arms(8), examples(1000), scorer, 8))
            assert sizes(progress)[0][0] == 8
            assert 0.9 * 48 < scorer.spent <= 48 + 1e-9

    @pytest.mark.parametrize("real", [0.0, 0.1, 0.5, 1.0])
    def test_a_price_that_was_predicted_too_high_leaves_nothing_unspent(self, real: float) -> None:
        """Candidates with equal outputs share the calls that follow, which no prediction can know."""
        scorer = Simulated(better, runs_left=200, price=real)
        progress, standings = asyncio.run(raced(arms(8), examples(5000), scorer, 8, price=1.0))
        assert sizes(progress)[0][0] == 8
        assert standings[0].n > 37
        assert 0.9 * 200 < scorer.spent <= 200


def within_its_runs(scorer: Simulated, progress: Sequence[Race], runs: float, n: int) -> None:
    """Check that a race kept to its runs and examples, and that its rungs are nested."""
    assert scorer.spent <= runs + 1e-6
    fields = [[s.candidate for s in after.standings if s.n == after.seen] for after in progress]
    assert all(set(later) <= set(earlier) for earlier, later in itertools.pairwise(fields))
    seen = [after.seen for after in progress]
    assert all(earlier < later <= n for earlier, later in itertools.pairwise([0, *seen]))
    for batch in scorer.batches:
        assert batch == [f"e{i}" for i in range(len(batch))]


class TestRaceLaws:
    @settings(max_examples=150)
    @given(
        st.integers(1, 12), st.integers(1, 10), st.integers(0, 100), st.floats(0, 400), st.booleans(),
        st.tuples(PRICES, PRICES), st.sets(st.integers(0, 99)),
    )  # fmt: skip
    def test_a_race_never_spends_more_than_its_runs(
        self, candidates: int, minibatch: int, n: int, runs: float, free: bool, prices: tuple[float, float],
        known: set[int],
    ) -> None:  # fmt: skip
        """Whichever runs of the incumbent are cached, if candidates cost what was predicted, or less."""
        predicted, part = prices
        scorer = Simulated(better, runs_left=runs, has_free_repeats=free, price=predicted * part)
        scorer.known = {("{}", f"e{i}") for i in known}
        progress, _ = asyncio.run(raced(arms(candidates), examples(n), scorer, minibatch, price=predicted))
        within_its_runs(scorer, progress, runs, n)

    @settings(max_examples=100)
    @given(
        st.integers(1, 12), st.integers(2, 10), st.integers(40, 400), st.booleans(),
        st.floats(0.05, 1), st.floats(0.05, 1), st.integers(0, 100),
    )  # fmt: skip
    @hypothesis.example(5, 2, 40, True, 0.078125, 0.5, 39)
    @hypothesis.example(9, 2, 50, False, 1.0, 1.0, 0)
    def test_a_race_spends_its_runs_while_examples_remain(
        self, candidates: int, minibatch: int, runs: int, free: bool, predicted: float, part: float,
        known: int,
    ) -> None:  # fmt: skip
        """What remains is less than half of a minibatch takes, if the last candidate is the better one."""
        real = max(0.05, predicted * part)
        scorer = Simulated(better, runs_left=runs, has_free_repeats=free, price=real)
        scorer.known = {("{}", f"e{i}") for i in range(known)}
        progress, standings = asyncio.run(
            raced(arms(candidates), examples(20_000), scorer, minibatch, price=max(real, predicted))
        )
        if standings[0].gain > 0:
            assert runs - scorer.spent < max(1, math.ceil(minibatch / 2)) * 2 + 1e-6
        # else the runs left do not cover a further example, with all earlier ones if these are not free
        needed = (1 + real) * (1 if free else progress[-1].seen + 1)
        assert progress[-1].is_finished or runs - scorer.spent < needed

    @pytest.mark.parametrize("price", [0.0, 0.3, 1.0])
    @pytest.mark.parametrize("free", [True, False])
    def test_a_race_without_runs_scores_nothing(self, price: float, free: bool) -> None:
        scorer = Simulated(better, runs_left=0, has_free_repeats=free, price=price)
        assert asyncio.run(raced(arms(8), examples(50), scorer, 8)) == ([], [])
        assert scorer.spent == 0

    @pytest.mark.parametrize("free", [True, False])
    def test_a_race_resumes_from_every_progress_to_the_same_result(self, free: bool) -> None:
        def scorer(spent: float = 0.0) -> Simulated:
            return Simulated(better, runs_left=400 - spent, has_free_repeats=free, price=0.4)

        rows, whole_scorer = examples(900), scorer()

        async def recorded() -> list[tuple[Race, float, set[tuple[str, str]]]]:
            known = whole_scorer.known
            return [
                (after, whole_scorer.spent, {*known})
                async for after in race(arms(7), rows, whole_scorer, 5, 0.5)
            ]

        points = asyncio.run(recorded())
        assert len(points) >= 4
        for i, (point, spent, known) in enumerate(points):
            stored = Race.from_json(through_json(point.to_json()))
            assert stored == point
            resumed = scorer(spent)
            resumed.known = {*known}
            rest, standings = asyncio.run(raced(arms(7), rows, resumed, 5, stored, price=0.5))
            assert rest == [after for after, _, _ in points[i + 1 :]]
            assert standings == points[-1][0].ranking()
            assert spent + resumed.spent == pytest.approx(whole_scorer.spent)

    def test_a_finished_race_resumes_to_nothing_more(self) -> None:
        progress, standings = asyncio.run(raced(arms(4), examples(50), Simulated(better, runs_left=90), 8))
        idle = Simulated(better, runs_left=90)
        assert asyncio.run(raced(arms(4), examples(50), idle, 8, progress[-1])) == ([], standings)
        assert not idle.batches


class TestRace:
    @pytest.mark.parametrize(("runs", "price"), [(math.inf, 1.0), (250, 1.0), (80, 0.25)])
    def test_the_best_arm_wins_nearly_always(self, runs: float, price: float) -> None:
        """One arm of eight is right 90 % of the time, the others and the incumbent 40 %."""
        won = 0
        for repeat in range(100):
            best = repeat % 8
            scorer = Simulated(
                lambda arm, best=best: 0.9 if arm.get("arm") == best else 0.4, runs_left=runs, price=price
            )
            rows = [replace(e, id=f"{repeat}-{e.id}") for e in examples(100)]
            _, standings = asyncio.run(raced(arms(8), rows, scorer, 8))
            won += standings[0].candidate == best
        assert won >= (95 if math.isinf(runs) else 85)

    def test_the_incumbent_meets_the_very_same_examples_at_every_rung(self) -> None:
        scorer = Simulated(lambda arm: 0.8 if arm else 0.1)
        asyncio.run(raced(arms(6), examples(40), scorer, 4))
        assert scorer.batches == [[f"e{i}" for i in range(n)] for n in (4, 8, 16, 32)]
        assert scorer.scored.count({}) == 4

    def test_the_note_counts_the_candidates_of_the_last_rung(self) -> None:
        standings = [
            Standing(candidate=0, mean=0.75, incumbent=0.5, n=8),
            Standing(candidate=1, mean=0.25, incumbent=0.5, n=8),
            Standing(candidate=2, mean=1.0, incumbent=0.5, n=1),
        ]
        state = Race(alive=[0], rungs=2, seen=8, standings=standings)
        assert state.note() == "2 candidates on 8 examples: best 0.750, incumbent 0.500"
        alone = Race(alive=[2], rungs=2, seen=1, standings=standings[2:])
        assert alone.note() == "1 candidate on 1 example: best 1.000, incumbent 0.500"

    @pytest.mark.parametrize("runs", [40, 100, 300])
    def test_the_finalist_survived_every_rung(self, runs: float) -> None:
        """Regression test: rungs were mixed, and in 38 % of searches the first finalist had been eliminated.

        Scores of short rungs are noisy, so that the highest mean of all is often that of an eliminated arm.
        """
        mixed = 0
        for seed in range(20):
            scorer = Simulated(lambda arm: 0.5, runs_left=runs, price=1.0)
            rows = [replace(e, id=f"{seed}-{e.id}") for e in examples(100)]
            progress, _ = asyncio.run(raced(arms(8), rows, scorer, 8))
            first, *others = progress[-1].ranking()
            survivors = set.intersection(*(set(after.alive) for after in progress))
            assert first.candidate in survivors
            assert first.n == max(standing.n for standing in progress[-1].standings)
            mixed += any(other.mean > first.mean for other in others)
        assert mixed > 0

    def test_d3_scores_of_arms_are_those_of_the_examples_they_are_said_to_be_of(self) -> None:
        """Every standing equals the mean that the candidate and the incumbent have on just these rows."""
        rows = examples(40)
        scorer = Simulated(lambda arm: 0.3 + 0.1 * arm.get("arm", 0))
        _, standings = asyncio.run(raced(arms(6), rows, scorer, 4))
        for standing in standings:
            (own,) = asyncio.run(scorer.score([arms(6)[standing.candidate]], rows[: standing.n]))
            (incumbent,) = asyncio.run(scorer.score([{}], rows[: standing.n]))
            assert (standing.mean, standing.incumbent) == (own.mean, incumbent.mean)
            assert standing.gain == own.mean - incumbent.mean

    def test_the_last_rung_decides_and_a_tie_keeps_the_incumbent(self) -> None:
        values = [{"a": 1}, {"a": 2}]
        tie = [
            Standing(candidate=0, mean=0.5, incumbent=0.5, n=16),
            Standing(candidate=1, mean=1.0, incumbent=0.5, n=8),
        ]
        assert propose_winner(values, tie).values == {}
        winner = [Standing(candidate=1, mean=0.6, incumbent=0.5, n=16)]
        assert propose_winner(values, winner).values == {"a": 2}
        assert propose_winner(values, []).values == {}

    def test_a_hopeless_last_arm_is_not_measured_any_further(self) -> None:
        """It cost less than predicted, so that the runs left would cover more than 900 further examples."""
        scorer = Simulated(lambda arm: 0.1 if arm else 0.9, runs_left=100, price=0.0)
        progress, _ = asyncio.run(raced(arms(1), examples(1000), scorer, 8, price=1.0))
        assert sizes(progress) == [(1, 50)]
        assert progress[-1].is_finished
        assert scorer.runs_left >= 48

    def test_a_promising_last_arm_is_measured_further(self) -> None:
        scorer = Simulated(better, runs_left=100, price=0.0)
        progress, _ = asyncio.run(raced(arms(1), examples(1000), scorer, 8, price=1.0))
        assert len(progress) > 1
        assert scorer.runs_left < 4 * 2  # half of a minibatch at the predicted price


class TestAnalyticChain:
    """A chain of four components whose runs are cached; a candidate of the last one costs a quarter."""

    @pytest.mark.parametrize("n", [60, 120])
    def test_a_job_of_the_last_component_races_all_candidates(self, n: int) -> None:
        """Priced at whole runs, two of eight candidates were raced, and 6 of 48 runs spent."""
        world = Relay(4, 4, options=9, seed=3)
        system, rows = world.system(), world.examples(n)
        method = Method("none", {}, [], Uniform())
        problem = Problem(system, rows, (), (), world, OptimizeSettings(), method, {})
        share, executor = 48.0, Executor(cache=MemoryCache())
        asyncio.run(evaluate(executor, system, rows, world, samples=[TRAIN_SAMPLE]))
        scorer = JobScorer(problem, executor, system, share, executor.meter.system_runs)
        candidates = [{"d.option": i} for i in range(1, 9)]
        price = estimate_prices(system).keys(["d.option"])
        assert price == 0.25

        async def collect() -> list[Race]:
            return [after async for after in race(candidates, rows, scorer, 8, price)]

        progress = asyncio.run(collect())
        assert sizes(progress)[0][0] == 8
        assert len(progress[-1].standings) == 8
        assert min(s.n for s in progress[-1].ranking()[:2]) >= 20
        assert share - scorer.runs_left >= 0.8 * share


# --- edits ---------------------------------------------------------------------------------------------

OURS = [clause for clauses in edits.CLAUSES.values() for clause in clauses]
FILLED = [
    "Please answer.", "You should use the following passages.", "Make sure that you list all of the words.",
    "Write a very short answer.", "please", "Summarize as well as you can.", "Do it!", "Why?", "x",
]  # fmt: skip
PARTS = st.lists(st.sampled_from(OURS + FILLED), min_size=1, max_size=6)
SEEDS = st.integers(0, 2**32)


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


class TestEdits:
    @given(PARTS, SEEDS)
    def test_add_puts_one_clause_of_a_missing_kind_at_its_place(self, parts: list[str], seed: int) -> None:
        after = edits.add(parts, rng(seed))
        kinds = {edits.kind_of(part) for part in parts} - {None}
        if len(kinds) == len(edits.CLAUSES):
            assert after == parts
            return
        (new,) = (Counter(after) - Counter(parts)).elements()
        assert edits.kind_of(new) not in kinds
        assert after == ([new, *parts] if edits.kind_of(new) == "role" else [*parts, new])

    @given(PARTS, SEEDS)
    def test_drop_takes_one_sentence_and_never_the_last(self, parts: list[str], seed: int) -> None:
        after = edits.drop(parts, rng(seed))
        assert len(after) == max(1, len(parts) - 1)
        assert not Counter(after) - Counter(parts)

    @given(PARTS, SEEDS)
    def test_swap_changes_one_clause_for_another_of_its_kind(self, parts: list[str], seed: int) -> None:
        after = edits.swap(parts, rng(seed))
        changed = [i for i, (a, b) in enumerate(zip(parts, after, strict=True)) if a != b]
        assert len(changed) <= 1
        for i in changed:
            assert edits.kind_of(parts[i]) == edits.kind_of(after[i]) is not None

    @given(PARTS, SEEDS)
    def test_reorder_keeps_every_sentence(self, parts: list[str], seed: int) -> None:
        assert sorted(edits.reorder(parts, rng(seed))) == sorted(parts)

    @given(PARTS, SEEDS)
    def test_shorten_only_shortens_and_leaves_something(self, parts: list[str], seed: int) -> None:
        after = edits.shorten(parts, rng(seed))
        assert len(" ".join(after)) <= len(" ".join(parts))
        assert any(after)

    def test_shortening_breaks_no_sentence(self) -> None:
        kept = ["Do the following: sort.", "Write to please the reader.", "Add the tone you should use.",
                "List as well as you can.", "Choose all of the above.", "Rate it as very good, good or bad.",
                "You should not guess.", "Make sure you are right.", "x is a number.", "iPhone or Mac?"]  # fmt: skip
        assert edits.shorten(kept, rng(0)) == kept
        assert edits.shorten(["Please sort in order to win.", "please stop."], rng(0)) == [
            "Sort to win.",
            "stop.",
        ]

    @pytest.mark.parametrize(
        "sentence",
        [
            "Use e.g. Lima.", "Ask Dr. Smith, or J. S. Bach.", "The law of the U.S. Senate applies.",
            "No. 5 is right.", "First: 1. Read. 2. Think. 3. Write.", 'Write {"a": "B. C"}.', 'Say "Yes. It is." or no.',
            "Wait... then answer.", "Nutze z.B. Wörter, ca. Drei.", "Choose A. B. or C.", "(See it. Really.)",
        ],
    )  # fmt: skip
    def test_a_sentence_is_moved_and_dropped_as_a_whole(self, sentence: str) -> None:
        assert edits.sentences(f"Be kind. {sentence} Be brief.") == ["Be kind.", sentence, "Be brief."]
        assert edits.sentences(f"{sentence} Be brief. You are an expert.")[0] == sentence

    @pytest.mark.parametrize(
        ("output", "passages", "kinds", "never"),
        [
            (str, True, {"length", "format", "evidence", "care", "role"}, "option"),
            (str, False, {"length", "format", "care", "role"}, "passages"),
            (Literal["a", "b"], False, {"length", "format", "care", "role"}, "result"),
            (bool, False, {"care", "role"}, "option"),
            (list[str], False, {"care", "role"}, "result"),
        ],
    )
    def test_clauses_are_true_of_the_task(
        self, output: Any, passages: bool, kinds: set[str], never: str
    ) -> None:
        wires: dict[str, Any] = {"text": Input("text", str)}
        if passages:
            wires["context"] = Retriever("search", PassageIndex())(
                query=wires["text"], passages=Input("docs", list)
            )
        made = LLM("c", prompt=Text("Do it."), output=output)(**wires)
        found = edits.clauses_for(System("s", {"o": made}), "c.prompt")
        assert set(found) == kinds
        assert never not in " ".join(clause for clauses in found.values() for clause in clauses)

    def test_the_text_of_a_tool_gets_no_clause(self) -> None:
        def look_up(word: str) -> str:
            """Look a word up."""
            return word

        agent = Agent("agent", [look_up], prompt=Text("Answer."), tune_tools=True)(text=Input("text", str))
        target = System("s", {"o": agent})
        assert set(edits.clauses_for(target, "agent.prompt")) == {"care", "role"}
        (key,) = (key for key in target.parameters if "look_up" in key)
        assert edits.clauses_for(target, key) == {}

    def test_prompts_of_an_agent_of_ones_own_get_the_clauses_of_any_task(self) -> None:
        prompt = AgentPrompt("planner", system=Text("You plan."), prompt=Text("Plan {{text}}."))
        agent = ExternalAgent("agent", call="module:function", prompts=[prompt])(text=Input("text", str))
        target = System("s", {"o": agent})
        for key in ("planner.system", "planner.prompt"):
            assert set(edits.clauses_for(target, key)) == {"care", "role"}

    @given(st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip) | PARTS.map(" ".join), SEEDS)
    def test_an_edited_prompt_is_never_empty_and_the_same_for_the_same_seed(
        self, prompt: str, seed: int
    ) -> None:
        after = edit_prompt(prompt, rng(seed), 3)
        assert after.strip()
        assert after == edit_prompt(prompt, rng(seed), 3)

    @given(PARTS, SEEDS, st.integers(1, 4))
    def test_the_distance_is_bounded_by_the_number_of_edits(
        self, parts: list[str], seed: int, most: int
    ) -> None:
        """Shortening touches many sentences, and so counts by its own law; each other edit one at most."""
        prompt = " ".join(parts)
        before, after = (
            Counter(part.removesuffix(".") for part in sentences(text))
            for text in (prompt, edit_prompt(prompt, rng(seed), most))
        )
        added, removed = (after - before).total(), (before - after).total()
        shortened = sum(edits.shorten([part], rng(0)) != [part] for part in sentences(prompt))
        assert max(added, removed) <= most + shortened

    @pytest.mark.parametrize("prompt", ["Be brief. x", "Answer the question", "Use the text. Question:"])
    def test_sentences_never_merge(self, prompt: str) -> None:
        whole = {part.removesuffix(".") for part in sentences(prompt)}
        known = whole | {clause.removesuffix(".") for kind in edits.CLAUSES.values() for clause in kind}
        made = {edit_prompt(prompt, rng(seed), 1) for seed in range(100)}
        assert len(made) > 1
        for text in made:
            assert {part.removesuffix(".") for part in sentences(text)} <= known

    def test_other_seeds_give_other_prompts(self) -> None:
        made = {edit_prompt("Answer the question. Use the passages.", rng(seed)) for seed in range(50)}
        assert len(made) > 20

    def test_lines_stay_lines(self) -> None:
        for seed in range(20):
            after = edit_prompt("Rules:\n- use the passages\n- be short", rng(seed), 1)
            assert "- use" in after.splitlines()[1] or "\n" in after


# --- opro ----------------------------------------------------------------------------------------------


def shown_prompts(request: Request) -> list[tuple[str, str]]:
    return re.findall(r"<prompt>(.+?)</prompt> (.+)", request.messages[-1].text)


class TestOpro:
    @given(st.dictionaries(st.text("abc", min_size=1), st.floats(0, 1), min_size=1, max_size=20))
    def test_the_history_is_shown_in_ascending_order_and_the_best_are_kept(
        self, history: dict[str, float]
    ) -> None:
        shown = shown_prompts(prompt_request("step", list(history.items()), seed=0, shown=5))
        scores = [float(score.removeprefix("score ")) for _, score in shown]
        assert scores == sorted(scores)
        best = sorted(history.values())[-5:]
        assert scores == [float(f"{score:.3f}") for score in best]

    def test_a_prompt_without_a_score_is_said_to_have_none(self) -> None:
        request = prompt_request("step", [("Known.", 0.4), ("New.", None)], seed=0)
        assert shown_prompts(request) == [("New.", "not scored yet"), ("Known.", "score 0.400")]

    def test_the_request_names_its_random_stream(self) -> None:
        assert prompt_request("step", [], seed=7).seed == 7
        assert prompt_request("step", [], seed=7) == prompt_request("step", [], seed=7)

    @pytest.mark.parametrize(
        ("reply", "expected"),
        [
            ("<prompt>One line.</prompt>", "One line."),
            ("Sure!\n<prompt>\nFirst.\nSecond.\n\nThird.\n</prompt> Good luck.", "First.\nSecond.\n\nThird."),
            ("<PROMPT>Cut off\nin the mid", "Cut off\nin the mid"),
            ("<prompt>a</prompt><prompt>b</prompt>", "a"),
            ("no mark at all", None),
            ("<prompt>  \n </prompt>", None),
            ("", None),
        ],
    )
    def test_d13_a_proposal_keeps_all_its_lines(self, reply: str, expected: str | None) -> None:
        assert parse_prompt(reply) == expected


# --- demonstrations ------------------------------------------------------------------------------------

ANSWERER = LLM("answerer", prompt=Text("Answer."), demos=Demos(max=3))


class TestCorrected:
    """A right answer in too many words becomes a demonstration of the right one."""

    METRIC = token_f1("answer")

    def corrected(self, system: System, metric: Any, *scores: float) -> list[Correction]:
        rows = examples(len(scores))
        traces = [
            replace(trace(e, score), outputs={"answer": f"right {e.id}"})
            for e, score in zip(rows, scores, strict=True)
        ]
        return correct_calls(traces, system, metric, {e.id: e for e in rows})

    def of(self, gold: Any, system: System | None = None) -> list[Correction]:
        row = Example("e0", {"question": "q0"}, {"answer": gold})
        made = replace(trace(row, 0.5), outputs={"answer": "right e0"})
        return correct_calls([made], system or answering(), self.METRIC, {"e0": row})

    def test_what_scored_in_part_gets_the_right_answer_and_its_score(self) -> None:
        found = self.corrected(answering(), self.METRIC, 0.5, 0.0, 1.0)
        assert [score for score, _ in found] == [1.0]  # one was wrong all over, one needs no correction
        assert found[0][1].outputs == {"output": "a0"}
        assert found[0][1].inputs == {"question": "q0"}
        (demo,) = bootstrap([], ANSWERER, found)
        assert (demo.demo["outputs"], demo.weight) == ({"output": "a0"}, 1.0)

    @pytest.mark.parametrize(
        ("gold", "shown"),
        [
            (["one", "two"], "one"),  # the first of several
            ({"two", "one"}, "one"),  # in an order that no hash seed changes
            ([1, "one"], "one"),  # the first that the component may write
        ],
    )
    def test_of_several_right_answers_one_is_shown(self, gold: Any, shown: str) -> None:
        assert [call.outputs for _, call in self.of(gold)] == [{"output": shown}]

    def test_a_right_answer_of_another_type_is_no_demonstration(self) -> None:
        assert self.of(7) == []

    @pytest.mark.parametrize("metric", [custom(lambda o, e: 0.5), token_f1("other")])
    def test_a_metric_that_compares_no_output_with_an_answer_corrects_nothing(self, metric: Any) -> None:
        assert self.corrected(answering(), metric, 0.5) == []

    def test_an_output_that_no_model_wrote_is_left_as_it_is(self) -> None:
        def shout(output: str) -> str:
            return output.upper()

        loud = Function("shout", shout)(output=ANSWERER(question=QUESTION))
        assert self.of("one", System("loud", outputs={"answer": loud}, lm="lm")) == []

    def test_earlier_calls_of_the_same_component_keep_their_score(self) -> None:
        """Where a component is used twice, only the call that answered was corrected."""
        row = Example("e0", {"question": "q0"}, {"answer": "a0"})
        first = ANSWERER(question=QUESTION, name="first")
        twice = System("twice", outputs={"answer": ANSWERER(question=first)}, lm="lm")
        made = replace(trace(row, 0.5), outputs={"answer": "right e0"})
        made = replace(made, calls=(replace(made.calls[0], address="first", node="first"), *made.calls))
        found = correct_calls([made], twice, self.METRIC, {"e0": row})
        assert [call.address for _, call in found] == ["answerer"]
        weights = [f.weight for f in bootstrap([made], ANSWERER, found)]
        assert weights == pytest.approx([1.0, 0.5**4])

    def test_the_search_draws_from_them(self, job: Any) -> None:
        """All answers have two words too many."""
        lm = lambda: ScriptedLM(lambda message, rng: f"it is {asked(message)}")  # noqa: E731
        rows = [Example(f"e{i}", {"question": f"say a{i}"}, {"answer": f"a{i}"}) for i in range(20)]
        made = job(answering(), self.METRIC, rows, lm)
        pools = asyncio.run(bootstrap_pools(made.task, rows))
        shown = {found.demo["outputs"]["output"]: found.weight for found in pools["answerer.demos"]}
        assert shown["a3"] == 1.0
        assert shown["it is a3"] == pytest.approx(0.5**4)


def answering() -> System:
    return System("answering", outputs={"answer": ANSWERER(question=QUESTION)}, lm="lm")


def asked(message: str) -> str:
    return str(re.findall(r"say (a\d+)", message)[-1])


class TestDemos:
    def test_traces_that_score_become_demonstrations_weighed_by_their_scores(self) -> None:
        rows = examples(6)
        traces = [trace(e, score) for e, score in zip(rows, (1.0, 0.0, 0.6, 0.4, 0.5, None), strict=True)]
        traces.append(trace(Example("broken", {"question": "q"}), 1.0, failure=Failure("error", "down")))
        found = bootstrap(traces, ANSWERER)
        assert [f.demo["outputs"]["output"] for f in found] == [
            "right e0",
            "right e2",
            "right e4",
            "right e3",
        ]
        assert [f.weight for f in found] == pytest.approx([1.0, 0.1296, 0.0625, 0.0256])

    def test_weights_do_not_depend_on_the_scale_of_the_metric(self) -> None:
        rows = examples(2)
        small, large = (
            bootstrap([trace(e, s * scale) for e, s in zip(rows, (0.9, 0.45), strict=True)], ANSWERER)
            for scale in (0.1, 100)
        )
        assert [f.weight for f in small] == pytest.approx([1.0, 1 / 16])
        assert [f.weight for f in large] == pytest.approx([1.0, 1 / 16])

    def test_demonstrations_of_better_traces_are_drawn_more_often(self) -> None:
        pool = [WeightedDemo({"inputs": {"n": 0}}, 1.0), WeightedDemo({"inputs": {"n": 1}}, 1 / 16)]
        drawn = [draw_demos(pool, 1, rng(seed)) for seed in range(400)]
        firsts = sum(d == [{"inputs": {"n": 0}}] for d in drawn)
        assert 355 <= firsts <= 395  # 16 of 17: 376, standard deviation 4.7

    def test_a_failed_call_is_no_demonstration(self) -> None:
        rows = examples(3)
        traces = [trace(e, 1.0, failure=None) for e in rows]
        bad = replace(traces[1].calls[0], failure=Failure("parse", "no field"))
        traces[1] = replace(traces[1], calls=(bad, replace(traces[1].calls[0], outputs={"output": "again"})))
        found = bootstrap(traces, ANSWERER)
        assert [f.demo["outputs"]["output"] for f in found] == ["right e0", "again", "right e2"]

    def test_where_nothing_is_right_there_are_no_demonstrations(self) -> None:
        assert bootstrap([trace(e, 0.0) for e in examples(5)], ANSWERER) == []

    def test_equal_demonstrations_appear_once_and_long_ones_not_at_all(self) -> None:
        one, two, three = examples(3)
        same = trace(two, 1.0, inputs=dict(one.inputs), outputs={"output": "right e0"})
        found = bootstrap(
            [trace(one, 1.0), same, trace(three, 1.0, outputs={"output": "x" * 2000})], ANSWERER
        )
        assert found == [WeightedDemo({"inputs": {"question": "q0"}, "outputs": {"output": "right e0"}}, 1.0)]

    def test_demonstrations_show_inputs_and_no_settings(self) -> None:
        (example,) = examples(1)
        wired = trace(example, 1.0, inputs={"question": "q0", "temperature": 0.5})
        assert bootstrap([wired, trace(example, 1.0)], ANSWERER)[0].demo["inputs"] == {"question": "q0"}

    @given(st.integers(1, 10), st.integers(1, 6), SEEDS)
    def test_drawn_demonstrations_are_distinct_and_not_too_many(self, n: int, most: int, seed: int) -> None:
        pool = [
            WeightedDemo({"inputs": {"q": i}, "outputs": {"a": i}}, 0.0 if i % 3 else 1.0) for i in range(n)
        ]
        drawn = draw_demos(pool, most, rng(seed))
        assert 1 <= len(drawn) <= min(n, most)
        assert len({canonical_json(d) for d in drawn}) == len(drawn)
        assert drawn == draw_demos(pool, most, rng(seed))

    @pytest.mark.parametrize(
        "optimizer", [PromptSearch(), JOINT, RandomSearch()], ids=["prompts", "joint", "random"]
    )
    @pytest.mark.parametrize("left", [math.inf, 300, 60, 20])
    @pytest.mark.parametrize("train", [120, 20, 5, 2])
    def test_d12_examples_that_demonstrations_come_from_are_never_scored_on(
        self, optimizer: Optimizer, left: float, train: int
    ) -> None:
        seen: set[str] = set()
        scored: set[str] = set()
        for seed in range(4):  # several jobs of one run: what one showed, another must not score on
            scorer = Simulated(lambda _: 0.5, runs_left=left)
            proposed(optimizer, task(system(), scorer, train=train, seed=seed))
            seen |= set(scorer.shown)
            scored |= {name for batch in scorer.batches for name in batch}
        assert not seen & scored

    @pytest.mark.parametrize("left", [math.inf, 100])
    def test_d12_other_jobs_do_not_score_on_examples_the_system_shows(self, left: float) -> None:
        """The answers stand in the prompt: whatever copies them would win."""
        step = LLM("answerer", prompt=Text("Answer."), demos=Demos(max=3), lm="lm")(question=QUESTION)
        checked = LLM("checker", prompt=Text("Check."), lm="lm", temperature=Float(0, 1))(text=step)
        two = System("two", outputs={"answer": checked})
        shown: set[str] = set()
        scored: set[str] = set()
        jobs: list[tuple[Optimizer, tuple[str, ...]]] = [
            (PromptSearch(), ("answerer.prompt", "answerer.demos")),
            (PromptSearch(), ("checker.prompt",)),
            (NumberSearch(), ("checker.temperature",)),
        ]
        for seed, (optimizer, keys) in enumerate(jobs):
            scorer = Simulated(lambda _: 0.5, runs_left=left)
            proposed(optimizer, task(two, scorer, seed=seed, keys=keys))
            shown |= set(scorer.shown)
            scored |= {name for batch in scorer.batches for name in batch}
        assert shown
        assert not shown & scored

    def test_without_demonstrations_no_example_is_set_aside(self) -> None:
        plain = system(demos=())
        pool, rest = split(task(plain, Simulated(lambda _: 0.5)))
        assert (len(pool), len(rest)) == (0, 120)

    def test_a_space_for_no_demonstrations_is_left_alone(self) -> None:
        none = system(demos=Demos(max=0))
        assert demo_keys(task(none, None)) == []
        for optimizer in (PromptSearch(), RandomSearch()):
            proposed(optimizer, task(none, Simulated(lambda _: 0.5)))


# --- numbers -------------------------------------------------------------------------------------------


class TestNumbers:
    def small(self) -> System:
        return numeric(a=0.5, k=Int(1, 3), mode=Choice("x", "y", "z"))

    def test_a_small_space_is_enumerated_without_what_is_there_already(self) -> None:
        found = enumerate_settings(task(self.small(), None))
        assert len(found) == 8
        assert {"weigh.k": 1, "weigh.mode": "x"} not in found
        assert len({canonical_json(f) for f in found}) == 8

    def test_a_small_space_is_raced_as_a_whole(self) -> None:
        best = {"weigh.k": 2, "weigh.mode": "z"}
        scorer = Simulated(lambda candidate: 0.9 if candidate == best else 0.2)
        _, last = proposed(NumberSearch(), task(self.small(), scorer))
        assert last.values == best
        assert last.tried == 8
        assert all(
            canonical_json(c) in map(canonical_json, scorer.scored)
            for c in enumerate_settings(task(self.small(), None))
        )

    @pytest.mark.parametrize("candidates", range(1, 12))
    def test_a_space_is_enumerated_exactly_when_it_fits(self, candidates: int) -> None:
        found = enumerate_settings(task(self.small(), None, candidates=candidates))
        assert (len(found) <= candidates) == (candidates >= 8)

    def test_a_space_of_one_value_proposes_nothing(self) -> None:
        alone = numeric(a=0.5, k=3, mode=Choice("x"))
        _, last = proposed(NumberSearch(), task(alone, Simulated(lambda _: 0.5)))
        assert last.values == {}

    @pytest.mark.parametrize(("price", "sampled"), [(0.25, 16), (0.5, 7), (1.0, 2)])
    def test_as_many_settings_are_sampled_as_the_runs_cover_at_their_price(
        self, price: float, sampled: int
    ) -> None:
        """Of six minibatches of runs, the incumbent takes one and three finalists three times the price.

        The rest covers 4.25 / 0.25 = 17 samples, of which 16 are wanted; 3.5 / 0.5 = 7; and 2.
        """
        prices = Prices(
            calls=[
                CallShare(component="before", depends=["before"], share=1 - price),
                CallShare(component="weigh", depends=["before", "weigh"], share=price),
            ]
        )
        scorer = Simulated(lambda candidate: 0.2 + 0.6 * bool(candidate), runs_left=48, price=price)
        progress, _ = proposed(NumberSearch(), task(numeric(), scorer, prices=prices))
        final = NumberProgress.from_json(progress[-1].state)
        assert len(final.samples) == sampled
        assert final.race is not None
        assert 0.9 * 48 < scorer.spent <= 48

    @pytest.mark.parametrize("n", range(9))
    def test_suggestions_follow_from_seed_and_trials_alone(self, n: int) -> None:
        """A study rebuilt from our own record goes on as one that was never interrupted."""
        target = task(numeric(), None)
        trials: list[Any] = []
        for i in range(n):
            trials.append((suggest(target, trials), math.sin(i)))
        before = suggest(target, trials)
        assert suggest(target, through_json(trials)) == before  # type: ignore[arg-type]
        assert suggest(replace(target, seed=99), trials) != before

    def test_suggestions_lie_in_their_spaces(self) -> None:
        target = task(numeric(), None)
        trials: list[Any] = []
        for i in range(10):
            values = suggest(target, trials)
            target.system.bind(values)  # refuses what lies outside
            trials.append((values, float(i)))

    def test_sampling_uses_what_it_learned(self) -> None:
        """TPE must do better than the same number of random draws, which four start-up trials are."""
        target = task(numeric(), None, candidates=16)
        scorer = Simulated(lambda c: 0.5 * c.get("weigh.a", 0) + 0.4 * (c.get("weigh.mode") == "z"))
        progress, _ = proposed(NumberSearch(), replace(target, scorer=scorer))
        trials = progress[-1].state["samples"]
        early, late = trials[:4], trials[-12:]

        def worth(some: Sequence[Any]) -> float:
            return float(np.mean([scorer.worth(sample["values"]) for sample in some]))

        assert worth(late) > worth(early)

    @pytest.mark.parametrize("left", [math.inf, 150, 60])
    def test_a_search_resumes_at_every_trial_to_the_same_proposal(self, left: float) -> None:
        check_resume(NumberSearch(), task(numeric(), None), lambda c: 0.2 + 0.7 * c.get("weigh.a", 0), left)


def check_resume(optimizer: Optimizer, assignment: Task, worth: Any, left: float) -> None:
    """Interrupt after every progress; the rest must be as if nothing had happened."""

    async def watch(state: Any, scorer: Simulated) -> list[tuple[Any, Any]]:
        seen: list[tuple[Any, Any]] = []
        assigned = replace(assignment, scorer=scorer, resume=state)
        async for event in optimizer.propose(assigned):
            kept = (scorer.runs_left, set(scorer.known), len(scorer.asked))
            seen.append((event, kept))
        return seen

    def scorer(left: float, known: set[tuple[str, str]] = frozenset(), asked: int = 0) -> Simulated:  # type: ignore[assignment]
        made = Simulated(worth, left, written=[f"<prompt>Written {i}.</prompt>" for i in range(50)])
        made.known = set(known)
        made.asked = [prompt_request("", [], 0)] * asked
        return made

    whole = asyncio.run(watch(None, scorer(left)))
    assert len(whole) >= 3
    for i, (event, (rest, known, asked)) in enumerate(whole[:-1]):
        assert isinstance(event, Progress)
        resumed = asyncio.run(watch(through_json(event.state), scorer(rest, known, asked)))
        for (a, _), (b, _) in zip(resumed, whole[i + 1 :], strict=True):
            if isinstance(a, Progress):
                assert isinstance(b, Progress)
                assert through_json(a.state) == through_json(b.state)
            else:
                assert canonical_json(a.__dict__) == canonical_json(b.__dict__)


# --- prompt search -------------------------------------------------------------------------------------


class TestPromptSearch:
    def test_all_three_proposers_take_turns(self) -> None:
        scorer = Simulated(lambda _: 0.5, written=[f"<prompt>Written {i}.</prompt>" for i in range(20)])
        search = PromptSearch(("demos", "edits", "opro"))
        progress, _ = proposed(search, task(system(), scorer))
        candidates = progress[0].state["candidates"]
        assert len(candidates) == 8
        assert any("answerer.demos" in c for c in candidates)
        assert any(c.get("answerer.prompt", "").startswith("Written") for c in candidates)
        assert any(
            "answerer.prompt" in c and not c["answerer.prompt"].startswith("Written") for c in candidates
        )
        assert len({canonical_json(c) for c in candidates}) == len(candidates)

    def test_a_written_prompt_that_is_right_wins(self) -> None:
        scorer = Simulated(
            good_at({"answerer.prompt": "Do well.\nVery well."}),
            written=["<prompt>Bad.</prompt>", "<prompt>Do well.\nVery well.</prompt>", "nothing"],
        )
        _, last = proposed(PromptSearch(("opro",)), task(system(), scorer))
        assert last.values == {"answerer.prompt": "Do well.\nVery well."}
        assert last.before is not None
        assert last.after is not None
        assert last.after > last.before

    def test_the_model_that_writes_is_the_one_that_was_named(self) -> None:
        scorer = Simulated(lambda _: 0.5, written=["<prompt>A.</prompt>"])
        proposed(PromptSearch(("opro",), lm="big"), task(system(), scorer))
        assert set(scorer.asked_of) == {"big"}

    def test_what_was_tried_before_reaches_the_request_with_its_own_score(self) -> None:
        """The memory across iterations: earlier jobs' candidates, and the incumbent's true score."""
        keys = ("answerer.prompt", "answerer.demos")
        tried = [
            ScoredCandidate({"answerer.prompt": "Old one.", "answerer.demos": []}, 0.75, 8),
            ScoredCandidate({"answerer.prompt": "Answer the question.", "answerer.demos": []}, 0.25, 8),
        ]
        scorer = Simulated(lambda _: 0.5, written=["<prompt>Fresh.</prompt>"])
        proposed(PromptSearch(("opro",)), task(system(), scorer, keys=keys, tried=tried))
        for request in scorer.asked:
            assert shown_prompts(request) == [
                ("Answer the question.", "score 0.250"),
                ("Old one.", "score 0.750"),
            ]

    def test_a_first_request_invents_no_score(self) -> None:
        scorer = Simulated(lambda _: 0.5, written=["<prompt>Fresh.</prompt>"])
        proposed(PromptSearch(("opro",)), task(system(), scorer))
        assert shown_prompts(scorer.asked[0]) == [("Answer the question.", "not scored yet")]

    def test_requests_of_one_job_differ_and_are_the_same_for_the_same_seed(self) -> None:
        def seeds(seed: int) -> list[int]:
            scorer = Simulated(lambda _: 0.5, written=["<prompt>A.</prompt>"])
            proposed(PromptSearch(("opro",)), task(system(), scorer, seed=seed))
            return [request.seed for request in scorer.asked]

        assert seeds(1) == seeds(1)
        assert len(set(seeds(1))) == len(seeds(1)) > 1
        assert not set(seeds(1)) & set(seeds(2))

    def test_what_was_tried_before_is_not_tried_again(self) -> None:
        plain = system(demos=())
        first = Simulated(lambda _: 0.5)
        progress, _ = proposed(PromptSearch(("edits",)), task(plain, first))
        made = progress[0].state["candidates"]
        tried = [ScoredCandidate(c, 0.5, 8) for c in made]
        again, _ = proposed(PromptSearch(("edits",)), task(plain, Simulated(lambda _: 0.5), tried=tried))
        assert not {canonical_json(c) for c in again[0].state["candidates"]} & {
            canonical_json(c) for c in made
        }

    def test_a_text_longer_than_allowed_is_not_proposed(self) -> None:
        tight = system(prompt=Text("Answer the question.", max_length=40), demos=())
        scorer = Simulated(lambda _: 0.5, written=["<prompt>" + "x" * 41 + "</prompt>"])
        searches: list[Optimizer] = [PromptSearch(("opro", "edits")), RandomSearch()]
        for search in searches:
            progress, _ = proposed(search, task(tight, scorer))
            assert progress[0].state["candidates"]
            for candidate in progress[0].state["candidates"]:
                tight.bind(candidate)

    @pytest.mark.parametrize("left", [math.inf, 300, 100])
    def test_a_search_resumes_at_every_point_to_the_same_proposal(self, left: float) -> None:
        worth = good_at({"answerer.prompt": "Written 3."})
        check_resume(PromptSearch(("demos", "edits", "opro")), task(system(), None), worth, left)
        check_resume(RandomSearch(), task(system(temperature=Float(0, 1)), None), worth, left)
        written = JointSearch(CandidateSources(("describe", "reflect", "demos", "edits")))
        check_resume(written, task(system(temperature=Float(0, 1)), None), worth, left)

    @settings(max_examples=40)
    @given(st.integers(16, 400), st.integers(1, 12), st.integers(1, 12), st.integers(2, 150), st.booleans())
    def test_no_search_spends_more_than_its_share(
        self, left: int, minibatch: int, candidates: int, train: int, free: bool
    ) -> None:
        """A job gets two minibatches at least."""
        pairs: list[tuple[Optimizer, System]] = [
            (PromptSearch(), system()),
            (NumberSearch(), numeric()),
            (NumberSearch(), numeric(a=0.5, k=3)),
            (RandomSearch(), system(temperature=Float(0, 1))),
            (JOINT, system(temperature=Float(0, 1))),
            (JOINT, numeric(a=0.5, k=3)),
        ]
        for search, target in pairs:
            share = max(left, 2 * minibatch)
            scorer = Simulated(lambda _: 0.5, runs_left=share, has_free_repeats=free)
            assignment = task(target, scorer, minibatch=minibatch, candidates=candidates, train=train)
            proposed(search, assignment)
            assert scorer.spent <= share


def test_d2_every_job_meets_fresh_examples() -> None:
    """The batches of two jobs differ, in their first rung already; the same job meets the same ones."""

    def first_batches(optimizer: Optimizer, target: System, seeds: Sequence[int]) -> list[tuple[str, ...]]:
        batches = []
        for seed in seeds:
            scorer = Simulated(lambda _: 0.5)
            proposed(optimizer, task(target, scorer, seed=seed))
            batches.append(tuple(scorer.batches[0]))
        return batches

    for optimizer, target in (
        (PromptSearch(), system()),
        (NumberSearch(), numeric()),
        (RandomSearch(), system()),
    ):
        fresh = first_batches(optimizer, target, range(10))
        assert len({frozenset(batch) for batch in fresh}) == 10
        assert first_batches(optimizer, target, range(3)) == fresh[:3]


# --- scheduling ----------------------------------------------------------------------------------------

JOBS = [Job("prompts", (f"c{i}.prompt",)) for i in range(4)] + [Job("numbers", ("n.k", "n.a"))]


def schedule(n: int, seed: int, jobs: Sequence[Job] = JOBS) -> list[Job]:
    history: list[JobRecord] = []
    chosen = []
    for _ in range(n):
        job = Uniform().choose(jobs, history, seed)
        chosen.append(job)
        history.append(recorded(job))
    return chosen


def recorded(job: Job) -> JobRecord:
    """Return the record of a job, as a resumed run reads it."""
    return JobRecord.from_json(
        through_json(JobRecord(job=0, optimizer=job.optimizer, keys=job.keys).to_json())
    )


def key(job: Job) -> tuple[str, tuple[str, ...]]:
    return job.optimizer, tuple(job.keys)


class TestUniform:
    @given(SEEDS, st.integers(1, 6))
    def test_every_job_comes_once_in_a_round(self, seed: int, rounds: int) -> None:
        chosen = [key(job) for job in schedule(rounds * len(JOBS), seed)]
        for i in range(rounds):
            one_round = chosen[i * len(JOBS) : (i + 1) * len(JOBS)]
            assert sorted(one_round) == sorted(map(key, JOBS))

    def test_d1_all_components_are_visited_whatever_the_seed(self) -> None:
        for seed in range(50):
            assert len({key(job) for job in schedule(len(JOBS), seed)}) == len(JOBS)

    def test_d1_training_that_seeds_the_global_generator_changes_no_choice(self) -> None:
        """The reference seeded numpy in every iteration, and then chose one component for ever."""
        expected = [key(job) for job in schedule(20, seed=3)]
        history: list[JobRecord] = []
        chosen = []
        for _ in range(20):
            np.random.seed(42)
            job = Uniform().choose(JOBS, history, 3)
            chosen.append(key(job))
            history.append(recorded(job))
        assert chosen == expected
        assert len(set(chosen)) == len(JOBS)

    def test_rounds_come_in_different_orders(self) -> None:
        chosen = [key(job) for job in schedule(20 * len(JOBS), seed=0)]
        orders = {tuple(chosen[i : i + len(JOBS)]) for i in range(0, len(chosen), len(JOBS))}
        assert len(orders) > 10

    def test_seeds_matter(self) -> None:
        assert len({tuple(map(key, schedule(len(JOBS), seed))) for seed in range(20)}) > 10

    def test_history_alone_decides(self) -> None:
        """A scheduler that is made anew, as after a crash, chooses what the old one would have chosen."""
        old = Uniform()
        history: list[JobRecord] = []
        for _ in range(12):
            job = old.choose(JOBS, history, 5)
            assert Uniform().choose(JOBS, list(history), 5) == job
            history.append(recorded(job))

    def test_a_choice_says_which_numbers_it_was_made_from(self) -> None:
        reasons = [dict(job.reason) for job in schedule(6, seed=0)]
        assert [r["waiting"] for r in reasons] == [5.0, 4.0, 3.0, 2.0, 1.0, 5.0]
        assert [r["rounds"] for r in reasons] == [0.0] * 5 + [1.0]


def test_demonstrations_are_what_a_configuration_can_hold() -> None:
    """An output may be a model or a number that is not finite."""

    class Answer(BaseModel):
        text: str

    one, two = examples(2)
    typed = trace(one, 1.0, outputs={"output": Answer(text="hi")})
    (found,) = bootstrap([typed, trace(two, 1.0, outputs={"output": math.inf})], ANSWERER)
    assert found.demo["outputs"] == {"output": {"text": "hi"}}


def test_random_search_draws_ratios_where_a_space_says_so() -> None:
    target = system(
        demos=(),
        prompt="x",
        temperature=Float(1e-6, 1.0, value=1.0, log=True),
        max_tokens=Int(1, 1000, log=True),
    )
    search = RandomSearch()
    progress, _ = proposed(search, task(target, Simulated(lambda _: 0.5), candidates=200, minibatch=1))
    drawn = [
        c["answerer.temperature"] for c in progress[0].state["candidates"] if "answerer.temperature" in c
    ]
    small = sum(value < 1e-3 for value in drawn) / len(drawn)
    assert 0.35 < small < 0.65  # half of the ratios
    words = [c["answerer.max_tokens"] for c in progress[0].state["candidates"] if "answerer.max_tokens" in c]
    assert set(map(type, words)) == {int}
    assert 0.3 < sum(value < 32 for value in words) / len(words) < 0.7


def test_an_edit_leaves_the_other_lines_as_they_are() -> None:
    prompt = "Answer the question.\n\n  - Be brief.\n  - Use the passages.\n"
    for seed in range(60):
        after = edit_prompt(prompt, rng(seed), 1)
        lines, now = prompt.split("\n"), after.split("\n")
        assert len(now) == len(lines)
        changed = [i for i, (a, b) in enumerate(zip(lines, now, strict=True)) if a != b]
        assert len(changed) <= 1
        assert all(now[i].startswith(lines[i][: len(lines[i]) - len(lines[i].lstrip())]) for i in changed)


def test_a_prompt_that_no_model_writes_is_a_candidate_less() -> None:
    class Silent(Simulated):
        async def generate(self, request: Request, lm: str | None = None) -> Completion:
            raise CallError("content filter")

    scorer = Silent(lambda _: 0.5)
    progress, last = proposed(PromptSearch(("opro", "edits")), task(system(demos=()), scorer))
    assert progress[0].state["candidates"]
    assert last.tried
