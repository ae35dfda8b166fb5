"""Advantages within groups and from values: hand-computed numbers, and the groups that say nothing."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compound.core.engine import TokenRecord
from compound.core.errors import DeclarationError
from compound.optimizers.weights.credit.advantages import (
    STANDARDIZATIONS,
    advantages,
    by_group,
    explained_variance,
    gae,
    is_flat,
    whiten,
)
from compound.optimizers.weights.learner.samples import Group, Sample

G: Group = ("e", "a", 0)


def sample(reward: float, group: Group = G, length: int = 2, **more: Any) -> Sample:
    tokens = TokenRecord((1,), tuple(range(length)), (-0.5,) * length, "stop")
    return Sample("a", "e", "a", 0, tokens, reward, group, **more)


def values(rewards: list[float], standardize: str) -> list[float]:
    trained, _ = advantages([sample(r) for r in rewards], standardize)
    return [row.advantages[0] for row in trained]


# rewards 1, 2, 6: mean 3, deviations -2, -1, 3, squares 4 + 1 + 9 = 14;
# sample variance 14 / 2 = 7, population variance 14 / 3
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "trl",
            [-2 / (math.sqrt(7) + 1e-4), -1 / (math.sqrt(7) + 1e-4), 3 / (math.sqrt(7) + 1e-4)],
        ),
        ("plain", [-0.7559289460184544, -0.3779644730092272, 1.1338934190276817]),
        (
            "population",
            [
                -2 / math.sqrt(14 / 3 + 1e-6),
                -1 / math.sqrt(14 / 3 + 1e-6),
                3 / math.sqrt(14 / 3 + 1e-6),
            ],
        ),
        ("center", [-2.0, -1.0, 3.0]),
        ("leave_one_out", [-3.0, -1.5, 4.5]),  # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2
        ("none", [1.0, 2.0, 6.0]),
    ],
)
def test_each_standardization_on_three_rewards(name: str, expected: list[float]) -> None:
    assert values([1.0, 2.0, 6.0], name) == pytest.approx(expected, rel=1e-12)


def test_groups_are_compared_within_and_samples_stay_in_order() -> None:
    rows = [sample(0.0, ("x",)), sample(10.0, ("y",)), sample(1.0, ("x",)), sample(14.0, ("y",))]
    trained, facts = advantages(rows, "center")
    assert [row.advantages[0] for row in trained] == [-0.5, -2.0, 0.5, 2.0]
    assert (facts["groups"], facts["skipped"], facts["samples"], facts["dropped"]) == (2, 0, 4, 0)
    assert facts["variance"] == (0.25 + 4.0) / 2


@pytest.mark.parametrize("name", [name for name in STANDARDIZATIONS if name != "none"])
def test_a_group_that_says_nothing_is_dropped_and_counted(name: str) -> None:
    flat = [sample(0.1 + 0.2, ("flat",)), sample(0.3, ("flat",)), sample(0.3, ("flat",))]
    rows = [*flat, sample(7.0, ("one",)), sample(0.0), sample(1.0)]
    trained, facts = advantages(rows, name)
    assert {row.group for row in trained} == {G}
    assert (facts["groups"], facts["skipped"], facts["samples"], facts["dropped"]) == (3, 2, 6, 4)
    assert facts["variance"] == pytest.approx(0.25 / 3)


def test_a_sample_without_a_group_is_compared_with_nobody() -> None:
    rows = [sample(0.0, ()), sample(1.0, ())]
    trained, facts = advantages(rows)
    assert (trained, facts["groups"], facts["skipped"]) == ([], 2, 2)
    assert list(by_group(rows).values()) == [[rows[0]], [rows[1]]]


def test_without_standardization_the_reward_is_the_advantage_and_nothing_is_skipped() -> None:
    trained, facts = advantages([sample(0.5, ()), sample(0.5), sample(0.5)], "none")
    assert [row.advantages[0] for row in trained] == [0.5, 0.5, 0.5]
    assert (facts["skipped"], facts["dropped"]) == (0, 0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("center", [-2.0, -2.0, 3.0]),
        ("leave_one_out", [-3.0, -3.0, 4.5]),
        ("plain", [-2 / math.sqrt(7), -2 / math.sqrt(7), 3 / math.sqrt(7)]),
    ],
)
def test_statistics_come_from_the_references(name: str, expected: list[float]) -> None:
    rows = [sample(1.0), sample(1.0), sample(6.0)]
    trained, facts = advantages(rows, name, references={G: [1.0, 2.0, 6.0], ("other",): [1.0]})
    assert [row.advantages[0] for row in trained] == pytest.approx(expected)
    assert (facts["groups"], facts["samples"]) == (1, 3)
    assert facts["variance"] == pytest.approx(14 / 3)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused_with_its_place(reward: float) -> None:
    with pytest.raises(
        DeclarationError,
        match=r"reward of 'a' on example 'e' \(call 'a', rollout 3\) must be a finite",
    ):
        advantages([sample(1.0), sample(reward, rollout=3)])


@given(st.lists(st.integers(-20, 20).map(lambda n: n / 4), min_size=2, max_size=8))
def test_laws_of_standardized_rewards(rewards: list[float]) -> None:
    if is_flat(rewards):
        assert len(set(rewards)) == 1
        return
    n = len(rewards)
    for name in ("trl", "plain", "population", "center", "leave_one_out"):
        found = values(rewards, name)
        assert math.fsum(found) == pytest.approx(0.0, abs=1e-9)
        assert [a > b for a in found for b in found] == [a > b for a in rewards for b in rewards]
        assert values([2.0 + r for r in rewards], name) == pytest.approx(found)
    assert statistics.stdev(values(rewards, "plain")) == pytest.approx(1.0)
    assert values(rewards, "leave_one_out") == pytest.approx(
        [n / (n - 1) * a for a in values(rewards, "center")]
    )


NUMBERS = st.floats(-5, 5)


def test_how_much_was_expected_by_hand() -> None:
    # returns 0, 1, 2 of variance 2/3; errors -1, 0, 1 halved have variance 1/6: 1 - (1/6) / (2/3) =
    # 3/4
    assert explained_variance([[0.5, 1.0], [1.5]], [[0.0, 1.0], [2.0]]) == pytest.approx(0.75)
    assert explained_variance([[9.0, 9.0]], [[0.0, 1.0]]) == pytest.approx(
        0.0
    )  # a constant expects nothing
    assert explained_variance([[1.0, 0.0]], [[0.0, 1.0]]) == pytest.approx(-3.0)
    assert explained_variance([[0.5]], [[1.0]]) is None
    assert explained_variance([], []) is None


def test_three_tokens_with_a_kl_penalty_by_hand() -> None:
    # r = -.1 * (1, 2, 3) + (0, 0, 1) = -.1, -.2, .7; V = .5, .4, .8; gamma 1, lambda .5
    # delta = -.1 + .4 - .5 = -.2;  -.2 + .8 - .4 = .2;  .7 - .8 = -.1
    # A3 = -.1;  A2 = .2 - .05 = .15;  A1 = -.2 + .075 = -.125
    found, targets = gae([0.5, 0.4, 0.8], 1.0, lam=0.5, kl=[1.0, 2.0, 3.0], beta=0.1)
    assert found == pytest.approx([-0.125, 0.15, -0.1])
    assert targets == pytest.approx([0.375, 0.55, 0.7])


@given(
    st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=6),
    NUMBERS,
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_it_is_the_weighted_sum_of_the_differences(
    tokens: list[tuple[float, float]], reward: float, gamma: float, lam: float, beta: float
) -> None:
    values, kl = [v for v, _ in tokens], [k for _, k in tokens]
    n = len(values)
    rewards = [-beta * k for k in kl]
    rewards[-1] += reward
    deltas = [rewards[t] + gamma * [*values, 0.0][t + 1] - values[t] for t in range(n)]
    expected = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]
    found, _ = gae(values, reward, gamma=gamma, lam=lam, kl=kl, beta=beta)
    assert found == pytest.approx(expected, abs=1e-9)


def test_whitening_weighs_every_token_of_the_batch_alike() -> None:
    found = whiten([[0.0, 0.0, 0.0], [4.0]])
    tokens = [a for sample in found for a in sample]
    assert statistics.fmean(tokens) == pytest.approx(0.0)
    assert statistics.pvariance(tokens) == pytest.approx(1.0)
    assert [len(sample) for sample in found] == [3, 1]


def test_whitening_equal_advantages_divides_by_no_zero() -> None:
    assert whiten([[0.25], [0.25, 0.25]]) == [[0.0], [0.0, 0.0]]
    assert whiten([[], []]) == [[], []]
    assert whiten([]) == []
