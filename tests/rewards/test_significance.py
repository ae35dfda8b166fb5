"""The test of two outputs' order: known p-values, its level and power, and looks that cannot change it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from compound.rewards.candidates import (
    Candidate,
    Sampling,
    could_be_decided,
    is_decided,
    is_significant,
)

LEVEL = 0.1
DRAWS = 1500
NUMBERS = st.floats(-10, 10, allow_nan=False)


def threshold(differences: list[float]) -> float:
    low, high = 0.0, 1.0
    for _ in range(40):
        level = (low + high) / 2
        low, high = (low, level) if is_significant(differences, level) else (level, high)
    return high


class TestLevel:
    @given(st.lists(NUMBERS, min_size=2, max_size=9))
    @settings(max_examples=50)
    def test_the_p_value_is_students(self, differences: list[float]) -> None:
        sizes = {round(abs(d), 6) for d in differences if abs(d) > 1e-6}
        assume(len(sizes) > 1)
        expected = float(stats.ttest_1samp(differences, 0.0).pvalue)
        assume(1e-6 < expected < 0.99)
        assert threshold(differences) == pytest.approx(expected, rel=1e-3)

    def test_the_exact_p_of_coins_is_that_of_all_outcomes(self) -> None:
        """All 4096 outcomes of six pairs of coins: t is at least that of (1, 1, 1, 0, 0, 0) in 11.4 %."""

        def t(d: tuple[int, ...]) -> float:
            ratio = sum(d) ** 2 / sum(x * x for x in d) if any(d) else 0.0
            return ratio / (len(d) - ratio) if ratio < len(d) else np.inf

        observed = t((1, 1, 1, 0, 0, 0))
        coins = itertools.product((-1, 0, 0, 1), repeat=6)
        share = np.mean([t(outcome) >= observed - 1e-12 for outcome in coins])
        assert share > LEVEL
        assert threshold([1.0, 1.0, 1.0, 0.0, 0.0, 0.0]) == pytest.approx(share)
        assert not is_significant(
            [1.0, 1.0, 1.0, 0.0, 0.0, 0.0], LEVEL
        )  # although Student's p is 0.076
        assert is_significant([1.0, 1.0, 1.0, 1.0, 0.0, 0.0], LEVEL)


Noise = Callable[[np.random.Generator, float, float], float]


def normal(rng: np.random.Generator, shared: float, common: float) -> float:
    return common * shared + float(np.sqrt(1 - common**2)) * float(rng.normal())


def binary(rng: np.random.Generator, shared: float, common: float) -> float:
    return float(normal(rng, shared, common) > 0)


def rare(rng: np.random.Generator, shared: float, common: float) -> float:
    return float(normal(rng, shared, common) > 1)


def decided(noise: Noise, common: float, most: int, better: float = 0.0, seed: int = 0) -> float:
    """Return the share of decided pairs of four outputs, by the rule that ends their runs.

    The first output's rewards are higher by ``better``, and the others' are equal.
    """
    rng, sampling, found = np.random.default_rng(seed), Sampling(max_rollouts=most), 0
    for _ in range(DRAWS):
        rows: list[list[float]] = [[] for _ in range(4)]
        waiting = set(range(4))
        for _ in range(most):
            shared = float(rng.normal())
            for i in waiting:
                rows[i].append(noise(rng, shared, common) + better * (i == 0))
            made = [Candidate({"y": i}, tuple(row)) for i, row in enumerate(rows)]
            pairs = list(itertools.combinations(range(4), 2))
            waiting = {
                i
                for pair in pairs
                if could_be_decided(made[pair[0]], made[pair[1]], sampling)
                for i in pair
            }
        found += sum(
            is_decided(made[i], made[j], sampling.level) for i, j in pairs if not better or i == 0
        )
    return found / DRAWS / (3 if better else 6)


@pytest.mark.slow
@pytest.mark.parametrize("common", [0.0, 0.7])
@pytest.mark.parametrize("noise", [normal, binary, rare])
@pytest.mark.parametrize("most", [2, 4, 6])
def test_equally_good_outputs_make_a_pair_as_rarely_as_stated(
    noise: Noise, common: float, most: int
) -> None:
    """The rule before decided 18 to 26 % of them, and 35 % after two runs, at a nominal 10 %.

    9,000 pairs in 1,500 draws; the six pairs of a draw depend on each other, so the standard error
    is below that of 1,500 independent pairs, 0.8 %.
    """
    assert decided(noise, common, most) <= LEVEL + 3 * np.sqrt(LEVEL * (1 - LEVEL) / DRAWS)
