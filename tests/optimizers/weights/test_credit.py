"""Credit by hand and by law: groups of samples, advantages, and rewards propagated back over calls."""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compound import LLM, Executor, Function, Input, Loop, LoRA, Map, System, Text, Trace
from compound.core.engine import TokenRecord
from compound.core.errors import DeclarationError
from compound.execution.trace import Call, Failure
from compound.ext import Completion
from compound.optimizers.weights.credit import (
    MIXED,
    STANDARDIZATIONS,
    Credit,
    advantages,
    call_samples,
    explained_variance,
    gae,
    module_groups,
    propagate,
    regroup,
    select_diverse,
    trajectory_samples,
    whiten,
)
from compound.optimizers.weights.learner.samples import Group, Sample
from compound.testing import ScriptedLM

TOKENS = TokenRecord((1,), (2, 3), (-0.5, -0.25), "stop")
G: Group = ("e", "a", 0)


def rewarded(reward: float, group: Group = G, **more: Any) -> Sample:
    return Sample("a", "e", "a", 0, TOKENS, reward, group, **more)


def values(rewards: list[float], standardize: str) -> list[float]:
    trained, _ = advantages([rewarded(r) for r in rewards], standardize)
    return [row.advantages[0] for row in trained]


class TestAdvantages:
    # rewards 1, 2, 6: mean 3, deviations -2, -1, 3, squares 4 + 1 + 9 = 14;
    # sample variance 14 / 2 = 7, population variance 14 / 3
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("trl", [n / (math.sqrt(7) + 1e-4) for n in (-2, -1, 3)]),
            ("plain", [-0.7559289460184544, -0.3779644730092272, 1.1338934190276817]),
            ("population", [n / math.sqrt(14 / 3 + 1e-6) for n in (-2, -1, 3)]),
            ("center", [-2.0, -1.0, 3.0]),
            (
                "leave_one_out",
                [-3.0, -1.5, 4.5],
            ),  # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2
            ("none", [1.0, 2.0, 6.0]),
        ],
    )
    def test_each_standardization_on_three_rewards(self, name: str, expected: list[float]) -> None:
        assert values([1.0, 2.0, 6.0], name) == pytest.approx(expected, rel=1e-12)

    @pytest.mark.parametrize("name", [name for name in STANDARDIZATIONS if name != "none"])
    def test_a_group_that_says_nothing_is_dropped_and_counted(self, name: str) -> None:
        """Groups of equal rewards, of one sample, and samples without a group."""
        flat = [rewarded(reward, ("flat",)) for reward in (0.1 + 0.2, 0.3, 0.3)]
        rows = [*flat, rewarded(7.0, ("one",)), rewarded(2.0, ()), rewarded(0.0), rewarded(1.0)]
        trained, facts = advantages(rows, name)
        assert trained[0].advantages[0] == -trained[1].advantages[0] != 0
        assert [row.reward for row in trained] == [0.0, 1.0]
        assert facts.pop("variance") == pytest.approx(0.25 / 4)
        assert facts == {"groups": 4, "skipped": 3, "samples": 7, "dropped": 5}

    def test_without_standardization_nothing_is_skipped(self) -> None:
        trained, facts = advantages([rewarded(0.5, ()), rewarded(0.5), rewarded(0.5)], "none")
        assert [row.advantages[0] for row in trained] == [0.5, 0.5, 0.5]
        assert (facts["skipped"], facts["dropped"]) == (0, 0)

    def test_statistics_come_from_the_references(self) -> None:
        rows = [rewarded(1.0), rewarded(1.0), rewarded(6.0)]
        references = {G: [1.0, 2.0, 6.0], ("other",): [1.0]}
        trained, facts = advantages(rows, "center", references=references)
        assert [row.advantages[0] for row in trained] == [-2.0, -2.0, 3.0]
        assert facts["groups"] == 1
        assert facts["variance"] == pytest.approx(14 / 3)

    @pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
    def test_a_reward_that_is_no_number_is_refused_with_its_place(self, reward: float) -> None:
        told = r"reward of 'a' on example 'e' \(call 'a', rollout 3\) must be a finite"
        with pytest.raises(DeclarationError, match=told):
            advantages([rewarded(1.0), rewarded(reward, rollout=3)])


class TestValues:
    def test_three_tokens_with_a_kl_penalty_by_hand(self) -> None:
        # r = -.1 * (1, 2, 3) + (0, 0, 1) = -.1, -.2, .7; V = .5, .4, .8; gamma 1, lambda .5
        # delta = -.1 + .4 - .5 = -.2;  -.2 + .8 - .4 = .2;  .7 - .8 = -.1
        # A3 = -.1;  A2 = .2 - .05 = .15;  A1 = -.2 + .075 = -.125
        found, targets = gae([0.5, 0.4, 0.8], 1.0, lam=0.5, kl=[1.0, 2.0, 3.0], beta=0.1)
        assert found == pytest.approx([-0.125, 0.15, -0.1])
        assert targets == pytest.approx([0.375, 0.55, 0.7])
        # discounted by .5: 1 - .25 = .75;  .5 * .25 - .5 + .5 * .75 = 0
        assert gae([0.5, 0.25], 1.0, gamma=0.5) == ([0.0, 0.75], [0.5, 1.0])
        with pytest.raises(DeclarationError, match="must be finite numbers"):
            gae([0.5, math.nan], 1.0)

    def test_how_much_was_expected_by_hand(self) -> None:
        # returns 0, 1, 2 of variance 2/3; errors -1, 0, 1 halved have variance 1/6
        assert explained_variance([[0.5, 1.0], [1.5]], [[0.0, 1.0], [2.0]]) == pytest.approx(0.75)
        assert explained_variance([[9.0, 9.0]], [[0.0, 1.0]]) == pytest.approx(0.0)  # a constant
        assert explained_variance([[0.5]], [[1.0]]) is None
        assert explained_variance([], []) is None

    def test_whitening_weighs_every_token_of_the_batch_alike(self) -> None:
        found = whiten([[0.0, 0.0, 0.0], [4.0]])
        tokens = [a for sample in found for a in sample]
        assert (statistics.fmean(tokens), statistics.pvariance(tokens)) == pytest.approx((0.0, 1.0))
        assert [len(sample) for sample in found] == [3, 1]
        assert whiten([[0.25], [0.25, 0.25]]) == [[0.0], [0.0, 0.0]]  # no division by 0
        assert whiten([[], []]) == [[], []]


def ragged(*lengths: int, rewards: Sequence[float] = ()) -> list[Sample]:
    """One rollout for each length, which says how often it called the component; rewards are 0, 1, 2, …"""
    return [
        Sample("a", "e", f"a[{k}]", k, TOKENS, (rewards or range(99))[rollout], (), rollout)
        for rollout, length in enumerate(lengths)
        for k in range(length)
    ]


def grouped(
    rows: Sequence[Sample], count: int = 3, **how: Any
) -> tuple[list[Sample], dict[str, int]]:
    return module_groups(rows, dict.fromkeys("exy", count), **how)


def shape(rows: Sequence[Sample]) -> dict[int, list[tuple[int, int]]]:
    """By invocation of the group, the (rollout, own invocation) of its elements."""
    found: dict[int, list[tuple[int, int]]] = {}
    for row in rows:
        assert row.group[:2] == (row.example, row.component)
        found.setdefault(int(row.group[2]), []).append((row.rollout, row.invocation))
    return found


REWARDS = st.lists(
    st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 1.0, -1.0, 3.0]), min_size=1, max_size=7
)


class TestModuleGroups:
    """Algorithm 1 of mmGRPO, with its paddings."""

    @given(REWARDS, st.integers(1, 7), st.integers(0, 9))
    def test_no_subset_has_a_larger_variance(
        self, rewards: list[float], size: int, seed: int
    ) -> None:
        size = min(size, len(rewards))
        chosen = select_diverse(rewards, size, np.random.default_rng(seed))
        assert len(set(chosen)) == size
        assert chosen == sorted(chosen)
        largest = max(map(statistics.pvariance, itertools.combinations(rewards, size)))
        assert statistics.pvariance([rewards[i] for i in chosen]) == pytest.approx(largest)

    def test_ties_are_broken_by_the_stream_and_every_one_of_them_is_possible(self) -> None:
        def drawn(rewards: list[float], size: int) -> Counter[tuple[int, ...]]:
            streams = map(np.random.default_rng, range(300))
            return Counter(tuple(select_diverse(rewards, size, rng)) for rng in streams)

        counts = drawn([0.0, 0.0, 0.0, 1.0], 2)
        assert set(counts) == {(0, 3), (1, 3), (2, 3)}
        assert min(counts.values()) > 60
        # a prefix of two and a suffix of one, or the other way round
        assert set(drawn([0.0, 0.1, 0.9, 1.0], 3)) == {(0, 1, 3), (0, 2, 3)}

    def test_truncate_drops_invocations_that_not_every_rollout_has(self) -> None:
        found, facts = grouped(ragged(1, 3, 2), padding="truncate")
        assert shape(found) == {0: [(0, 0), (1, 0), (2, 0)]}
        assert facts == {"truncated": 3, "deselected": 0}
        assert grouped(ragged(1, 1), 3, padding="truncate")[0] == []  # one left no sample

    def test_fill_lets_the_elements_of_a_short_group_weigh_more(self) -> None:
        """Rollouts that left no sample count, too."""
        found, _ = grouped(ragged(1, 2, 2, rewards=[0.0, 0.25, 1.0]))
        assert shape(found) == {0: [(0, 0), (1, 0), (2, 0)], 1: [(1, 1), (2, 1)]}
        assert [row.weight for row in found] == [1.0, 1.0, 1.0, 1.5, 1.5]
        trained, _ = advantages(grouped(ragged(1, 1, 1, rewards=[0.0, 0.0, 1.0]), 8)[0], "center")
        assert [row.weight for row in trained] == pytest.approx([8 / 3] * 3)
        assert [row.advantages[0] for row in trained] == pytest.approx([-1 / 3, -1 / 3, 2 / 3])

    @given(
        st.lists(st.integers(0, 4), min_size=2, max_size=5),
        st.sampled_from(["fill", "truncate", "none"]),
        st.none() | st.integers(2, 6),
        st.integers(0, 3),
    )
    def test_laws_of_groups(
        self, lengths: list[int], padding: Any, size: int | None, seed: int
    ) -> None:
        rows = ragged(*lengths)
        how = {"padding": padding, "size": size, "seed": seed}
        found, facts = grouped(rows, len(lengths), **how)
        assert (found, facts) == grouped(rows, len(lengths), **how)
        assert len(found) + sum(facts.values()) == len(rows)
        groups = shape(found)
        assert set(groups) == set(range((min if padding == "truncate" else max)(lengths)))
        full = size or len(lengths)
        for invocation, elements in groups.items():
            assert len(set(elements)) == len(elements) <= full
            assert {own for _, own in elements} == {invocation}
            weight = sum(row.weight for row in found if row.group[2] == invocation)
            assert weight == pytest.approx(len(elements) if padding == "none" else full)


def single(example: int, component: str = "a", reward: float = 0.0, fork: str = "c") -> Sample:
    group = (f"e{example}", component, fork)
    return Sample(component, f"e{example}", component, 0, TOKENS, reward, group)


def pool(sample: Sample) -> Group:
    return (sample.component, sample.group[2])


class TestRegroup:
    @pytest.mark.parametrize(
        ("n", "expected"), [(1, []), (2, [2]), (4, [4]), (5, [5]), (6, [4, 2]), (9, [4, 5])]
    )
    def test_a_pool_is_cut_into_groups_and_a_single_one_joins_the_one_before(
        self, n: int, expected: list[int]
    ) -> None:
        found, facts = regroup([single(i) for i in range(n)], 4, pool)
        mixed = Counter(row.group for row in found if row.group[0] == MIXED)
        assert mixed == {(MIXED, "a", "c", k): size for k, size in enumerate(expected)}
        assert (facts["mixed_groups"], facts["alone"]) == (len(expected), n == 1)

    def test_groups_of_more_than_one_are_left_as_they_are(self) -> None:
        together = [replace(single(9), rollout=k) for k in range(3)]
        found, _ = regroup([single(0), *together, single(1)], 2, pool)
        assert found[1:4] == together
        assert found[0].group == found[4].group == (MIXED, "a", "c", 0)

    def test_a_call_of_several_requests_is_one_element(self) -> None:
        """Its samples have one reward, so they would be dropped as a group of equal rewards."""
        rows = [single(i, reward=float(i)) for i in range(3) for _ in range(i + 1)]
        found, facts = regroup(rows, 4, pool)
        assert Counter(row.group for row in found) == {(MIXED, "a", "c", 0): 6}
        assert facts == {"mixed_groups": 1, "alone": 0, "mixed_variance": pytest.approx(2 / 3)}

    def test_pools_are_compared_apart_and_their_variance_is_reported(self) -> None:
        own = [single(n, reward=float(n)) for n in range(2)]
        rows = [*own, single(2, "b", 0.0), single(3, "b", 4.0), single(4, fork="z", reward=9.0)]
        found, facts = regroup(rows, 4, pool)
        assert facts["mixed_variance"] == (0.25 + 4.0) / 2
        trained, counts = advantages(found, "center")
        assert [row.advantages[0] for row in trained] == [-0.5, 0.5, -2.0, 2.0]
        assert counts["dropped"] == 1

    @given(st.lists(st.sampled_from("abc"), max_size=20), st.integers(2, 6), st.integers(0, 5))
    def test_laws_of_regrouping(self, components: list[str], size: int, seed: int) -> None:
        rows = [single(i, component, float(i)) for i, component in enumerate(components)]
        found, facts = regroup(rows, size, pool, seed=seed)
        assert (found, facts) == regroup(rows, size, pool, seed=seed)
        assert [replace(row, group=()) for row in found] == [replace(row, group=()) for row in rows]
        counts = Counter(row.group for row in found)
        assert facts["mixed_groups"] == sum(count > 1 for count in counts.values())
        assert all(count <= size + 1 for count in counts.values())
        assert facts["alone"] == sum(count == 1 for count in Counter(components).values())

    def test_the_shuffle_is_the_streams(self) -> None:
        rows = [single(i, component) for component in "ab" for i in range(12)]
        found = [[s.group for s in regroup(rows, 4, pool, seed=seed)[0]] for seed in range(20)]
        assert len(set(map(tuple, found))) == 20
        assert [group[3] for group in found[0][:12]] != [group[3] for group in found[0][12:]]


def call(address: str, *parents: str, failed: bool = False, **more: Any) -> Call:
    failure = Failure("parse", "no field") if failed else None
    component = address.partition("[")[0]
    return Call(address, component, component, parents, {}, {}, failure, **more)


def run(*calls: Call, failed: bool = False, **more: Any) -> Trace:
    failure = Failure("parse", "no field") if failed else None
    return Trace("e", "", 0, 0, {}, calls, failure=failure, **more)


def answered(address: str, *parents: str, answer: int = 3, **more: Any) -> Call:
    tokens = (TokenRecord((1,), (answer,), (-1.0,), "stop"),)
    return call(address, *parents, tokens=tokens, **more)


class TestSamples:
    def test_every_call_of_a_trained_component_gets_the_runs_reward(self) -> None:
        """A reward of zero that was earned stays zero, and is not the fallback (M3)."""
        again = answered("a[1]", invocation=1)
        for score in (0.75, 0.0):
            trace = run(answered("a"), answered("tool"), again, score=score)
            rows = trajectory_samples(trace, {"a"}, rollout=3, fallback=-1.0)
            found = [(r.address, r.invocation, r.reward, r.rollout) for r in rows]
            assert found == [("a", 0, score, 3), ("a[1]", 1, score, 3)]
        with pytest.raises(DeclarationError, match="a run of example 'e' has no score"):
            trajectory_samples(run(answered("a")), {"a"})

    def test_m2_a_failed_run_keeps_its_calls_up_to_the_failing_one_at_the_fallback_reward(
        self,
    ) -> None:
        trace = run(answered("a"), answered("b", failed=True), score=0.9, failed=True)
        rows = trajectory_samples(trace, {"a", "b"}, fallback=-1.0)
        assert [(r.component, r.reward) for r in rows] == [("a", -1.0), ("b", -1.0)]

    def test_m7_each_request_of_a_call_is_a_sample_with_the_prompt_it_had(self) -> None:
        empty, again = (TokenRecord((1, 9, 3), some, (-1.0,), "stop") for some in ((), (8,)))
        several = call("a", invocation=2, tokens=(TOKENS, empty, again))
        rows = call_samples(several, "e", 0.5, group=("g",), on_policy=False)
        assert [(r.invocation, r.group, r.on_policy) for r in rows] == [(2, ("g",), False)] * 2
        assert [r.tokens for r in rows] == [TOKENS, again]

    def test_m4_a_text_that_did_not_parse_is_kept_with_its_own_inputs_and_tokens(self) -> None:
        one, two = (
            TokenRecord((1,), (7,), (-1.0,), "stop"),
            TokenRecord((1, 7), (8, 9), (-1.0, -2.0), "stop"),
        )
        lm = ScriptedLM([Completion("what?", tokens=one), Completion("no number", tokens=two)])
        asker = LLM("asker", prompt=Text("Ask."), weights=LoRA())
        counter = LLM("counter", prompt=Text("Count."), output=int, weights=LoRA())
        after = LLM("after", prompt=Text("Repeat."), weights=LoRA())
        n = counter(question=asker(x=Input("x", str)))
        system = System("s", outputs={"y": after(n=n)}, lm="m")
        trace = asyncio.run(Executor({"m": lm}).run(system, {"x": "go"}, example="e"))
        rows = trajectory_samples(trace, {"asker", "counter", "after"}, fallback=-1.0)
        found = [(r.component, r.tokens, r.reward) for r in rows]
        assert found == [("asker", one, -1.0), ("counter", two, -1.0)]
        inputs = [(c.component, c.inputs) for c in trace.calls]
        assert inputs == [("asker", {"x": "go"}), ("counter", {"question": "what?"})]


def shared(found: tuple[list[Credit], list[Call]]) -> dict[str, float]:
    return {credit.call.address: credit.shared for credit in found[0]}


def words(message: str, rng: np.random.Generator) -> str:
    return f"w{rng.integers(10**9)}-{zlib.crc32(message.encode())}"


def upper(text: str) -> str:
    return text.upper()


def twice(text: str) -> list[str]:
    return [text, text + "!"]


def agent(name: str) -> LLM:
    return LLM(name, prompt=Text(name), lm="m", temperature=1.0)


class TestPropagation:
    def test_only_direct_successors_count(self) -> None:
        # a -> b -> c, and b is drawn twice: a's successors are b and b', whatever followed them
        first = run(call("a"), call("b", "a", sample=1), call("c", "b"), score=0.0)
        second = run(call("a"), call("b", "a", sample=2), call("c", "b"), score=1.0)
        third = run(call("a"), call("b", "a", sample=2), call("c", "b", sample=9), score=0.5)
        found = propagate([first, second, third], set("abc"))
        assert {(c.call.address, c.traces): c.shared for c in found[0]} == {
            ("a", (0, 1, 2)): (0.0 + 0.75) / 2,  # not (0 + 1 + .5) / 3
            ("b", (0,)): 0.0,
            ("c", (0,)): 0.0,
            ("b", (1, 2)): 0.75,
            ("c", (1,)): 1.0,
            ("c", (2,)): 0.5,
        }

    def test_a_successor_reached_along_two_ways_counts_once(self) -> None:
        # a's successors are b, directly and through a tool, and c
        def fork(which: int, score: float) -> Trace:
            calls = (call("a"), call("t", "a"), call("b", "a", "t", sample=which), call("c", "a"))
            return run(*calls, score=score, ends=("b",) if which else ("b", "c"))

        assert shared(propagate([fork(0, 1.0)], set("abc"))) == {"a": 1.0, "b": 1.0, "c": 1.0}
        found = propagate([fork(0, 1.0), fork(1, 0.0)], set("abc"))
        first = {credit.call.address: credit for credit in found[0] if credit.traces[0] == 0}
        assert first["a"].shared == (1.0 + 0.0 + 1.0) / 3  # b, b' and c
        assert first["c"].shared == 1.0  # the output of the first run only

    @pytest.mark.parametrize("other", [{"configuration": "teacher"}, {"seed": 1}])
    def test_runs_of_other_configurations_and_seeds_share_nothing(self, other: Any) -> None:
        student = run(answered("a", answer=1), score=0.0)
        teacher = replace(run(answered("a", answer=2), score=1.0), **other)
        assert [c.shared for c in propagate([student, teacher], {"a"})[0]] == [0.0, 1.0]

    def test_a_failed_run_gives_its_calls_the_fallback(self) -> None:
        calls = (call("a"), call("b", "a", failed=True), call("c", "a"))
        trace = run(*calls, score=0.9, failed=True, ends=("b",))
        found = shared(propagate([trace], set("abc"), fallback=-1.0))
        assert found == {"a": -1.0, "b": -1.0, "c": -1.0}

    def test_a_call_that_leads_nowhere_has_no_reward_and_is_reported(self) -> None:
        calls = (call("a"), call("note", "a"), call("tool", "note"), call("b", "a"))
        trace = run(*calls, score=0.5, ends=("b",))
        found = propagate([trace], {"a", "b", "note"}, penalties={"note": lambda made: -1.0})
        assert shared(found) == {"a": 0.5, "b": 0.5}
        assert [made.address for made in found[1]] == ["note"]

    def test_wrong_arguments_are_refused(self) -> None:
        trace = run(call("a"), score=0.5)
        with pytest.raises(DeclarationError, match="within one example"):
            propagate([trace, replace(trace, example="f")], {"a"})
        with pytest.raises(DeclarationError, match="a run of example 'e' has no score"):
            propagate([run(call("a"))], {"a"})
        with pytest.raises(DeclarationError, match="agent 'answer'; did you mean 'answerer'"):
            propagate([trace], {"answerer"}, penalties={"answer": lambda made: 0.0})
        forks = [run(answered("a", answer=n), score=0.0) for n in range(2)]
        with pytest.raises(DeclarationError, match="give each fork a distinct sample"):
            propagate(forks, {"a"})
        assert propagate([], {"a"}) == ([], [])

    def test_loops_and_maps_need_no_special_case(self) -> None:
        x = Input("x", str)
        written = agent("write")(x=x, note=Input("note", str))
        body = System("turn", outputs={"x": written, "note": agent("note")(x=written)})
        loop = Loop("draft", body, carry={"x": "x", "note": "note"}, max_turns=2)
        checked = System("one", outputs={"y": agent("check")(text=Input("text", str))})
        split = Function("split", twice)(text=loop(x=x, note=Input("start", str)).x)
        system = System("s", outputs={"y": Map("each", checked, over="text")(text=split)})
        executor = Executor({"m": ScriptedLM(words)})
        trace = asyncio.run(executor.run(system, {"x": "go", "start": ""}, example="e"))
        found = propagate([trace.with_score(0.5)], {"write", "note", "check"})
        drafts = {"draft[0]/write", "draft[0]/note", "draft[1]/write"}
        assert set(shared(found)) == {*drafts, "each[0]/check", "each[1]/check"}
        assert set(shared(found).values()) == {0.5}
        assert [made.address for made in found[1]] == ["draft[1]/note"]
