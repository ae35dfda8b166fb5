"""Groups of samples: algorithm 1 of mmGRPO with its paddings, and singletons of several examples."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compound import LLM, Executor, Input, LoRA, System, Text, Trace
from compound.core.engine import TokenRecord
from compound.core.errors import DeclarationError
from compound.execution.trace import Call, Failure
from compound.ext import Completion
from compound.optimizers.weights.credit.advantages import advantages
from compound.optimizers.weights.credit.grouping import (
    MIXED,
    call_samples,
    module_groups,
    regroup,
    select_diverse,
    trajectory_samples,
)
from compound.optimizers.weights.learner.samples import Group, Sample
from compound.testing import ScriptedLM

TOKENS = TokenRecord((1,), (2, 3), (-0.5, -0.25), "stop")
Grouped = tuple[list[Sample], dict[str, int]]


def sample(
    rollout: int, invocation: int = 0, reward: float = 0.0, component: str = "a", example: str = "e"
) -> Sample:
    return Sample(
        component, example, f"{component}[{invocation}]", invocation, TOKENS, reward, (), rollout
    )


def ragged(*lengths: int, rewards: Sequence[float] = ()) -> list[Sample]:
    """One rollout for each length, which says how often it called the component; rewards are 0, 1, 2, …"""
    return [
        sample(rollout, invocation, rewards[rollout] if rewards else float(rollout))
        for rollout, length in enumerate(lengths)
        for invocation in range(length)
    ]


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


@given(REWARDS, st.integers(1, 7), st.integers(0, 9))
def test_no_subset_has_a_larger_variance(rewards: list[float], size: int, seed: int) -> None:
    size = min(size, len(rewards))
    chosen = select_diverse(rewards, size, np.random.default_rng(seed))
    assert len(set(chosen)) == size
    assert chosen == sorted(chosen)
    possible = itertools.combinations(rewards, size)
    largest = max(map(statistics.pvariance, possible))
    assert statistics.pvariance([rewards[i] for i in chosen]) == pytest.approx(largest)


def test_ties_are_broken_by_the_stream_and_every_one_of_them_is_possible() -> None:
    drawn = Counter(
        tuple(select_diverse([0.0, 0.0, 0.0, 1.0], 2, np.random.default_rng(seed)))
        for seed in range(300)
    )
    assert set(drawn) == {(0, 3), (1, 3), (2, 3)}
    assert min(drawn.values()) > 60
    # a prefix of two and a suffix of one, or the other way round
    either = {
        tuple(select_diverse([0.0, 0.1, 0.9, 1.0], 3, np.random.default_rng(s))) for s in range(50)
    }
    assert either == {(0, 1, 3), (0, 2, 3)}


def grouped(rows: Sequence[Sample], count: int = 3, **how: Any) -> Grouped:
    return module_groups(rows, dict.fromkeys("exy", count), **how)


def test_complete_trajectories_make_one_group_for_each_invocation() -> None:
    rows = ragged(2, 2, 2) + [sample(r, 0, float(r), "b") for r in range(3)]
    found, facts = grouped(rows)
    assert Counter(row.group for row in found) == {
        ("e", "a", 0): 3,
        ("e", "a", 1): 3,
        ("e", "b", 0): 3,
    }
    assert [row.reward for row in found if row.group == ("e", "a", 1)] == [0.0, 1.0, 2.0]
    assert {row.weight for row in found} == {1.0}
    assert facts == {"truncated": 0, "deselected": 0}


def test_truncate_drops_invocations_that_not_every_rollout_has() -> None:
    found, facts = grouped(ragged(1, 3, 2), padding="truncate")
    assert shape(found) == {0: [(0, 0), (1, 0), (2, 0)]}
    assert facts["truncated"] == 3
    assert len(grouped(ragged(1, 1), 2, padding="truncate")[0]) == 2
    assert grouped(ragged(1, 1), 3, padding="truncate")[0] == []  # one left no sample


def test_fill_lets_the_elements_of_a_short_group_weigh_more() -> None:
    found, _ = grouped(ragged(1, 2, 2, rewards=[0.0, 0.25, 1.0]))
    assert shape(found) == {0: [(0, 0), (1, 0), (2, 0)], 1: [(1, 1), (2, 1)]}
    assert [row.weight for row in found] == [1.0, 1.0, 1.0, 1.5, 1.5]


def test_three_answers_in_a_group_of_eight_push_as_eight_would() -> None:
    """Rollouts that left no sample count, too."""
    trained, _ = advantages(grouped(ragged(1, 1, 1, rewards=[0.0, 0.0, 1.0]), 8)[0], "center")
    assert [row.weight for row in trained] == pytest.approx([8 / 3] * 3)
    assert [row.advantages[0] for row in trained] == pytest.approx([-1 / 3, -1 / 3, 2 / 3])


def test_a_single_element_stays_without_gradient_whatever_it_weighs() -> None:
    trained, facts = advantages(grouped(ragged(1, 2), 2, size=4)[0])
    assert {row.group for row in trained} == {("e", "a", 0)}
    assert (facts["groups"], facts["skipped"], facts["dropped"]) == (2, 1, 1)


@given(
    st.lists(st.integers(0, 4), min_size=2, max_size=5),
    st.sampled_from(["fill", "truncate", "none"]),
    st.none() | st.integers(2, 6),
    st.integers(0, 3),
)
def test_laws_of_groups(lengths: list[int], padding: Any, size: int | None, seed: int) -> None:
    rows = ragged(*lengths)
    how = {"padding": padding, "size": size, "seed": seed}
    found, facts = grouped(rows, len(lengths), **how)
    assert (found, facts) == grouped(rows, len(lengths), **how)
    assert len(found) + sum(facts.values()) == len(rows)
    groups = shape(found)
    largest = min(lengths) if padding == "truncate" else max(lengths)
    assert set(groups) == set(range(largest))
    for invocation, elements in groups.items():
        full = size or len(lengths)
        assert len(set(elements)) == len(elements) <= full
        assert {own for _, own in elements} == {invocation}
        weight = sum(row.weight for row in found if row.group[2] == invocation)
        assert weight == pytest.approx(len(elements) if padding == "none" else full)


def single(example: int, component: str = "a", reward: float = 0.0, fork: str = "c") -> Sample:
    group = (f"e{example}", component, fork)
    return Sample(component, f"e{example}", component, 0, TOKENS, reward, group)


def pool(sample: Sample) -> Group:
    return (sample.component, sample.group[2])


def sizes(samples: Sequence[Sample]) -> dict[Group, int]:
    return dict(Counter(sample.group for sample in samples))


@pytest.mark.parametrize(
    ("n", "expected"), [(1, []), (2, [2]), (4, [4]), (5, [5]), (6, [4, 2]), (9, [4, 5])]
)
def test_a_pool_is_cut_into_groups_and_a_single_one_joins_the_one_before(
    n: int, expected: list[int]
) -> None:
    found, facts = regroup([single(i) for i in range(n)], 4, pool)
    mixed = {group: size for group, size in sizes(found).items() if group[0] == MIXED}
    assert mixed == {(MIXED, "a", "c", k): size for k, size in enumerate(expected)}
    assert (facts["mixed_groups"], facts["alone"]) == (len(expected), n == 1)


def test_groups_of_more_than_one_are_left_as_they_are() -> None:
    together = [replace(single(9), rollout=k) for k in range(3)]
    found, _ = regroup([single(0), *together, single(1)], 2, pool)
    assert found[1:4] == together
    assert found[0].group == found[4].group == (MIXED, "a", "c", 0)


def test_a_call_of_several_requests_is_one_element() -> None:
    """Its samples have one reward, so they would be dropped as a group of equal rewards."""
    rows = [single(i, reward=float(i)) for i in range(3) for _ in range(i + 1)]
    found, facts = regroup(rows, 4, pool)
    assert sizes(found) == {(MIXED, "a", "c", 0): 6}
    assert facts == {"mixed_groups": 1, "alone": 0, "mixed_variance": pytest.approx(2 / 3)}


def test_pools_are_compared_apart_and_their_variance_is_reported() -> None:
    rows = [
        single(0, reward=0.0),
        single(1, reward=1.0),
        single(2, "b", 0.0),
        single(3, "b", 4.0),
        single(4, fork="z", reward=9.0),
    ]
    found, facts = regroup(rows, 4, pool)
    assert facts["mixed_variance"] == (0.25 + 4.0) / 2
    trained, counts = advantages(found, "center")
    assert [row.advantages[0] for row in trained] == [-0.5, 0.5, -2.0, 2.0]
    assert counts["dropped"] == 1


def test_the_shuffle_is_the_streams() -> None:
    rows = [single(i, component) for component in "ab" for i in range(12)]
    found = [regroup(rows, 4, pool, seed=seed)[0] for seed in range(20)]
    assert len({tuple(s.group for s in each) for each in found}) == 20
    assert found[7] == regroup(rows, 4, pool, seed=7)[0]
    assert [s.group[3] for s in found[0][:12]] != [s.group[3] for s in found[0][12:]]


@given(st.lists(st.sampled_from("abc"), max_size=20), st.integers(2, 6), st.integers(0, 5))
def test_laws_of_regrouping(components: list[str], size: int, seed: int) -> None:
    rows = [single(i, component, float(i)) for i, component in enumerate(components)]
    found, facts = regroup(rows, size, pool, seed=seed)
    assert [replace(row, group=()) for row in found] == [replace(row, group=()) for row in rows]
    counts = sizes(found)
    assert facts["mixed_groups"] == sum(count > 1 for count in counts.values())
    assert all(count <= size + 1 for count in counts.values())
    assert facts["alone"] == sum(count == 1 for count in Counter(components).values())


def call(component: str, invocation: int = 0, *, failed: bool = False, tokens: int = 1) -> Call:
    failure = Failure("parse", "no field") if failed else None
    return Call(
        f"{component}[{invocation}]",
        component,
        component,
        (),
        {},
        {},
        failure,
        invocation=invocation,
        tokens=(TOKENS,) * tokens,
    )


def trace(*calls: Call, score: float | None = None, failed: bool = False) -> Trace:
    return Trace(
        "e",
        "",
        0,
        0,
        {},
        calls,
        failure=Failure("parse", "no field") if failed else None,
        score=score,
    )


def test_every_call_of_a_trained_component_gets_the_runs_reward() -> None:
    rows = trajectory_samples(
        trace(call("a"), call("tool"), call("a", 1), score=0.75), {"a"}, rollout=3
    )
    assert [(r.address, r.invocation, r.reward, r.rollout) for r in rows] == [
        ("a[0]", 0, 0.75, 3),
        ("a[1]", 1, 0.75, 3),
    ]


def test_m2_a_failed_run_keeps_its_calls_up_to_the_failing_one_at_the_fallback_reward() -> None:
    run = trace(call("a"), call("b", failed=True), score=0.9, failed=True)
    rows = trajectory_samples(run, {"a", "b"}, fallback=-1.0)
    assert [(r.component, r.reward) for r in rows] == [("a", -1.0), ("b", -1.0)]


def test_m3_a_reward_of_zero_that_was_earned_stays_zero() -> None:
    assert [
        r.reward for r in trajectory_samples(trace(call("a"), score=0.0), {"a"}, fallback=-1.0)
    ] == [0.0]
    failed = trace(call("a", failed=True), failed=True)
    assert [r.reward for r in trajectory_samples(failed, {"a"}, fallback=0.0)] == [0.0]


def test_a_run_without_a_score_is_refused() -> None:
    with pytest.raises(DeclarationError, match="a run of example 'e' has no score"):
        trajectory_samples(trace(call("a")), {"a"})


def test_m7_each_request_of_a_call_is_a_sample_with_the_prompt_it_had() -> None:
    empty, again = TokenRecord((1,), (), (), "stop"), TokenRecord((1, 9, 3), (8,), (-1.0,), "stop")
    several = call("a", 2)
    several.tokens = (TOKENS, empty, again)
    rows = call_samples(several, "e", 0.5, group=("g",), on_policy=False)
    assert [(r.invocation, r.group, r.on_policy) for r in rows] == [(2, ("g",), False)] * 2
    assert [r.tokens for r in rows] == [TOKENS, again]


def test_m4_a_text_that_did_not_parse_is_kept_with_its_own_inputs_and_tokens() -> None:
    one, two = (
        TokenRecord((1,), (7,), (-1.0,), "stop"),
        TokenRecord((1, 7), (8, 9), (-1.0, -2.0), "stop"),
    )
    lm = ScriptedLM([Completion("what?", tokens=one), Completion("no number", tokens=two)])
    asker = LLM("asker", prompt=Text("Ask."), lm="m", weights=LoRA())
    counter = LLM("counter", prompt=Text("Count."), output=int, lm="m", weights=LoRA())
    after = LLM("after", prompt=Text("Repeat."), lm="m", weights=LoRA())
    n = counter(question=asker(x=Input("x", str)))
    run = asyncio.run(
        Executor({"m": lm}).run(System("s", outputs={"y": after(n=n)}), {"x": "go"}, example="e")
    )
    assert run.failure is not None
    rows = trajectory_samples(run, {"asker", "counter", "after"}, fallback=-1.0)
    assert [(r.component, r.tokens, r.reward) for r in rows] == [
        ("asker", one, -1.0),
        ("counter", two, -1.0),
    ]
    assert [(c.component, c.inputs) for c in run.calls] == [
        ("asker", {"x": "go"}),
        ("counter", {"question": "what?"}),
    ]
