"""Slopes of scores on local rewards: by hand, without a relation, and their shrinkage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from compound.rewards.gains import shrink, slope_within, trust_in

SLOPES = st.dictionaries(
    st.sampled_from("abcd"), st.tuples(st.floats(-2, 2), st.floats(1e-4, 4)), min_size=1
)


class TestSlopeWithin:
    def test_its_numbers_by_hand(self) -> None:
        """Centred in each call, rewards are ±1/2 and scores ±1/2, ±2/5 and ±3/10."""
        found = slope_within(
            np.array([0.0, 1.0, 0.0, 1.0, 1.0, 0.0]),
            np.array([0.0, 1.0, 0.2, 1.0, 0.6, 0.0]),
            [0, 0, 1, 1, 2, 2],
            ["a", "a", "b", "b", "c", "c"],
        )
        assert found is not None
        slope, variance = found
        assert slope == pytest.approx((1 + 0.8 + 0.6) / 2 / (6 / 4))
        rest = np.array([0.1, 0.0, -0.1])  # of the better output of each call
        clustered = float((rest**2).sum()) * 3 / 2 / (6 / 4) ** 2
        plain = 2 * float((rest**2).sum()) / (6 - 3 - 1) / (6 / 4)
        assert variance == pytest.approx(max(clustered, plain))

    @pytest.mark.parametrize("rewards", [[1.0, 1.0, 2.0, 2.0], [0.0, 1.0, 2.0, 3.0]])
    def test_without_differences_or_freedom_there_is_none(self, rewards: list[float]) -> None:
        calls = [0, 0, 1, 1] if rewards[0] == rewards[1] else [0, 1, 2, 3]
        assert slope_within(np.array(rewards), np.arange(4.0), calls, list("abcd")) is None

    def test_a_useless_reward_is_rarely_significant(self) -> None:
        """Of 400 rewards without a relation, about 5 % have a slope beyond the one-sided 5 % quantile."""
        rng, beyond = np.random.default_rng(0), 0
        for _ in range(400):
            calls = np.repeat(np.arange(12), 3)
            scores = rng.integers(0, 2, 36).astype(float)
            found = slope_within(
                rng.normal(size=36), scores, calls.tolist(), [str(c) for c in calls]
            )
            assert found is not None
            beyond += found[0] / math.sqrt(found[1]) > stats.t.ppf(0.95, 11)
        assert beyond < stats.binom.ppf(0.999, 400, 0.05)


class TestShrink:
    def test_equal_slopes_are_estimated_together(self) -> None:
        found = shrink({"a": (0.6, 0.25), "b": (0.6, 0.25)}, 0.5)
        assert found["a"] == found["b"] == pytest.approx((0.6 * 8 / 10, 1 / 10))

    def test_clearly_different_slopes_stay_apart(self) -> None:
        found = shrink({"a": (2.0, 0.001), "b": (0.0, 0.001)}, 1.0)
        assert found["a"][0] == pytest.approx(2.0, abs=0.02)
        assert found["b"][0] == pytest.approx(0.0, abs=0.02)

    @given(SLOPES, st.floats(0, 2))
    def test_estimates_are_finite_and_no_surer_of_less(
        self, slopes: dict[str, tuple[float, float]], scale: float
    ) -> None:
        found = shrink(slopes, scale)
        assert set(found) == set(slopes)
        for mean, variance in found.values():
            assert math.isfinite(mean)
            assert 0 <= variance < math.inf
        if not scale:
            assert all(
                abs(mean) <= max(abs(slope) for slope, _ in slopes.values())
                for mean, _ in found.values()
            )


def test_trust_grows_with_the_slope() -> None:
    trusts = [trust_in((mean, 0.04)) for mean in (-0.5, 0.0, 0.1, 0.3, 2.0)]
    assert trusts[:2] == [0.0, 0.0]
    assert trusts == sorted(trusts)
    assert trusts[-1] == pytest.approx(1.0)
    assert trust_in((0.0, 0.0)) == 0.0
