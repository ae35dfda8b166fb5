"""Generalized advantage estimation, worked out by hand."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compound.core.errors import DeclarationError
from compound.optimizers.weights.credit.advantages import explained_variance, gae, whiten

NUMBERS = st.floats(-5, 5)


def test_three_tokens_by_hand() -> None:
    # V = .5, .4, .8; reward 1; gamma .9, lambda .5
    # delta = .9 * .4 - .5 = -.14;  .9 * .8 - .4 = .32;  1 - .8 = .2
    # A3 = .2;  A2 = .32 + .45 * .2 = .41;  A1 = -.14 + .45 * .41 = .0445
    found, targets = gae([0.5, 0.4, 0.8], 1.0, gamma=0.9, lam=0.5)
    assert found == pytest.approx([0.0445, 0.41, 0.2])
    assert targets == pytest.approx([0.5445, 0.81, 1.0])


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


def test_the_usual_lambda_is_the_default() -> None:
    assert gae([0.0, 0.0], 1.0)[0] == [1.0, 1.0]


@given(st.integers(1, 6), NUMBERS)
def test_without_values_and_discounts_it_is_reinforce(length: int, reward: float) -> None:
    found, targets = gae([0.0] * length, reward, lam=1.0)
    assert found == targets == [reward] * length


@given(st.lists(NUMBERS, min_size=1, max_size=6), NUMBERS, st.floats(0, 1))
def test_lambda_one_is_the_return_less_the_value(
    values: list[float], reward: float, gamma: float
) -> None:
    found, targets = gae(values, reward, gamma=gamma, lam=1.0)
    returns = [gamma ** (len(values) - 1 - t) * reward for t in range(len(values))]
    assert targets == pytest.approx(returns, abs=1e-9)
    assert found == pytest.approx([g - v for g, v in zip(returns, values, strict=True)], abs=1e-9)


@given(st.lists(NUMBERS, min_size=1, max_size=6), NUMBERS, st.floats(0, 1))
def test_lambda_zero_is_the_one_step_difference(
    values: list[float], reward: float, gamma: float
) -> None:
    found, _ = gae(values, reward, gamma=gamma, lam=0.0)
    following = [*(gamma * v for v in values[1:]), reward]
    assert found == pytest.approx([f - v for f, v in zip(following, values, strict=True)], abs=1e-9)


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


def test_perfect_values_leave_nothing_to_learn() -> None:
    assert gae([0.7, 0.7, 0.7], 0.7) == ([0.0] * 3, [0.7] * 3)


def test_a_sample_without_tokens_has_no_advantages() -> None:
    assert gae([], 1.0) == ([], [])


def test_whitening_by_hand() -> None:
    # 1, 2, 6: mean 3, variance 14 / 3
    scale = math.sqrt(14 / 3 + 1e-8)
    assert whiten([[1.0], [2.0, 6.0]])[1] == pytest.approx([-1 / scale, 3 / scale], rel=1e-12)


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


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(DeclarationError, match="must be between 0 and 1, but are 1.1 and 1.0"):
        gae([0.0], 1.0, gamma=1.1)
    with pytest.raises(DeclarationError, match="must be between 0 and 1, but are 1.0 and -0.1"):
        gae([0.0], 1.0, lam=-0.1)
    with pytest.raises(DeclarationError, match="there are 2 values, but 1 KL estimates"):
        gae([0.0, 0.0], 1.0, kl=[0.1])
    for values, reward in [([math.nan], 1.0), ([0.0], math.inf)]:
        with pytest.raises(DeclarationError, match="must be finite numbers"):
            gae(values, reward)
