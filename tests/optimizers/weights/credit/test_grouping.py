"""Module-level groups: algorithm 1 of mmGRPO, its paddings, and the choice of the most diverse elements."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compound.components.llm import LLM
from compound.core.engine import Completion, TokenRecord
from compound.core.errors import DeclarationError
from compound.execution.executor import Executor
from compound.execution.trace import Call, Failure, Trace
from compound.graph.component import Input
from compound.graph.space import LoRA, Text
from compound.graph.system import System
from compound.optimizers.weights.credit.advantages import advantages
from compound.optimizers.weights.credit.grouping import (
    PADDINGS,
    ModuleGroups,
    call_samples,
    module_groups,
    select_diverse,
    trajectory_samples,
)
from compound.optimizers.weights.learner.samples import Sample
from compound.testing import ScriptedLM

TOKENS = TokenRecord((1,), (2, 3), (-0.5, -0.25), "stop")


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


def shape(grouped: ModuleGroups) -> dict[int, list[tuple[int, int]]]:
    """By invocation of the group, the (rollout, own invocation) of its elements."""
    found: dict[int, list[tuple[int, int]]] = {}
    for row in grouped.samples:
        assert row.group[:2] == (row.example, row.component)
        found.setdefault(int(row.group[2]), []).append((row.rollout, row.invocation))
    return found


# --- the choice of the most diverse elements -----------------------------------------------------------

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


def test_the_choice_of_known_rewards() -> None:
    rng = np.random.default_rng(0)
    # sorted 0, .2, .4, .5, 1: variances (times 3) of {0, .5, 1}: .5, of {0, .2, 1}: .56, of {.4,
    # .5, 1}: .21
    assert select_diverse([0.5, 1.0, 0.2, 0.0, 0.4], 3, rng) == [1, 2, 3]
    assert select_diverse([0.0, 1.0, 0.0, 1.0], 4, rng) == [0, 1, 2, 3]


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


# --- groups --------------------------------------------------------------------------------------------


def test_complete_trajectories_make_one_group_for_each_invocation() -> None:
    rows = ragged(2, 2, 2) + [sample(r, 0, float(r), "b") for r in range(3)]
    grouped = module_groups(rows)
    assert Counter(row.group for row in grouped.samples) == {
        ("e", "a", 0): 3,
        ("e", "a", 1): 3,
        ("e", "b", 0): 3,
    }
    assert [row.reward for row in grouped.samples if row.group == ("e", "a", 1)] == [0.0, 1.0, 2.0]
    assert {row.weight for row in grouped.samples} == {1.0}
    assert (grouped.truncated, grouped.deselected) == (0, 0)


def test_examples_are_never_compared_with_each_other() -> None:
    rows = [sample(r, 0, float(r), example=e) for e in ("x", "y") for r in range(2)]
    groups = {row.group for row in module_groups(rows).samples}
    assert groups == {("x", "a", 0), ("y", "a", 0)}


def test_the_number_of_groups_is_the_largest_number_of_invocations() -> None:
    assert set(shape(module_groups(ragged(1, 4, 2)))) == {
        0,
        1,
        2,
        3,
    }  # section 3.1: the sum of max_j K


def test_truncate_drops_invocations_that_not_every_rollout_has() -> None:
    grouped = module_groups(ragged(1, 3, 2), padding="truncate")
    assert shape(grouped) == {0: [(0, 0), (1, 0), (2, 0)]}
    assert grouped.truncated == 3


def test_truncate_knows_of_rollouts_that_left_no_sample() -> None:
    rows = ragged(1, 1)
    assert len(module_groups(rows, padding="truncate").samples) == 2
    assert module_groups(rows, padding="truncate", rollouts={"e": 3}).samples == ()
    with pytest.raises(
        DeclarationError, match="rollouts of example 'e' is 1, but samples come from 2"
    ):
        module_groups(rows, rollouts={"e": 1})


def test_a_rollout_that_called_only_another_component_counts_too() -> None:
    rows = [*ragged(1, 1), sample(2, 0, 1.0, "b")]
    assert module_groups(rows, padding="truncate").samples == ()


def test_fill_lets_the_elements_of_a_short_group_weigh_more() -> None:
    grouped = module_groups(ragged(1, 2, 2, rewards=[0.0, 0.25, 1.0]))
    assert shape(grouped) == {0: [(0, 0), (1, 0), (2, 0)], 1: [(1, 1), (2, 1)]}
    assert [row.weight for row in grouped.samples] == [1.0, 1.0, 1.0, 1.5, 1.5]


def test_three_answers_in_a_group_of_eight_push_as_eight_would() -> None:
    """Rollouts that left no sample count, too."""
    grouped = module_groups(ragged(1, 1, 1, rewards=[0.0, 0.0, 1.0]), rollouts={"e": 8})
    trained, _ = advantages(grouped.samples, "center")
    assert [row.weight for row in trained] == pytest.approx([8 / 3] * 3)
    assert [row.advantages[0] for row in trained] == pytest.approx([-1 / 3, -1 / 3, 2 / 3])


def test_a_single_element_stays_without_gradient_whatever_it_weighs() -> None:
    grouped = module_groups(ragged(1, 2), size=4)
    trained, facts = advantages(grouped.samples)
    assert {row.group for row in trained} == {("e", "a", 0)}
    assert (facts.groups, facts.skipped, facts.dropped) == (2, 1, 1)


def test_more_rollouts_than_group_elements_are_selected_unless_that_is_off() -> None:
    rows = ragged(1, 1, 1, 1, rewards=[0.5, 0.0, 0.5, 1.0])
    grouped = module_groups(rows, size=2)
    assert shape(grouped) == {0: [(1, 0), (3, 0)]}
    assert grouped.deselected == 2
    assert len(module_groups(rows).samples) == 4


def test_none_leaves_short_groups_short() -> None:
    grouped = module_groups(ragged(1, 2, 2), padding="none", size=2)
    assert {key: len(rows) for key, rows in shape(grouped).items()} == {0: 2, 1: 2}
    grouped = module_groups(ragged(1, 2, 2), padding="none", size=3)
    assert {key: len(rows) for key, rows in shape(grouped).items()} == {0: 3, 1: 2}
    assert {row.weight for row in grouped.samples} == {1.0}


@given(
    st.lists(st.integers(0, 4), min_size=2, max_size=5),
    st.sampled_from(PADDINGS),
    st.none() | st.integers(2, 6),
    st.integers(0, 3),
)
def test_laws_of_groups(lengths: list[int], padding: str, size: int | None, seed: int) -> None:
    rows = ragged(*lengths)
    stated = {"e": len(lengths)}
    grouped = module_groups(rows, padding=padding, size=size, rollouts=stated, seed=seed)
    again = module_groups(rows, padding=padding, size=size, rollouts=stated, seed=seed)
    assert grouped == again
    assert len(grouped.samples) + grouped.truncated + grouped.deselected == len(rows)
    groups = shape(grouped)
    largest = min(lengths) if padding == "truncate" else max(lengths)
    assert set(groups) == set(range(largest))
    for invocation, elements in groups.items():
        full = size or len(lengths)
        assert len(elements) <= full
        assert len(set(elements)) == len(elements)
        assert {own for _, own in elements} == {invocation}
        weight = sum(row.weight for row in grouped.samples if row.group[2] == invocation)
        assert weight == pytest.approx(len(elements) if padding == "none" else full)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(DeclarationError, match="unknown padding 'fil'; did you mean 'fill'"):
        module_groups([], padding="fil")
    with pytest.raises(DeclarationError, match="at least 2 elements, but size is 1"):
        module_groups([], size=1)
    with pytest.raises(DeclarationError, match=r"reward of 'a' on example 'e' .* is nan"):
        module_groups([sample(0, reward=float("nan"))])


# --- from traces ---------------------------------------------------------------------------------------


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
