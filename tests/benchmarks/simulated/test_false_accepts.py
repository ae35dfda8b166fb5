"""The measurement of false accepts: its enumeration by hand, and the claims made from its recorded numbers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from scipy import stats

from benchmarks.measure import false_accepts
from benchmarks.measure.false_accepts import (
    LEVELS,
    NAMES,
    all_flips_p,
    exact,
    flips_p,
    limit,
)
from benchmarks.simulated.acceptance.gains import NONE
from benchmarks.simulated.acceptance.worlds import WORLDS
from compound.evaluation.acceptance import sign_flip_p

RECORDED: dict[str, Any] = json.loads(false_accepts.OUTPUT.read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", NONE)
def test_no_case_is_better_on_average(case: str) -> None:
    gains = NONE[case]
    assert gains.mean is not None
    assert gains.mean == pytest.approx(0, abs=1e-12) or gains.mean < 0
    sample = gains.draw(np.random.default_rng(0), (1, 100_000))[0]
    assert -1 <= sample.min() <= sample.max() <= 1
    assert abs(sample.mean() - gains.mean) < 5 * sample.std() / np.sqrt(len(sample))


def test_the_enumeration_is_that_by_hand() -> None:
    """Sign flips accept 10 examples without a loss, and with one loss p is above 1/2."""
    found = exact("+0.05 on 95 %, -1 on 5 %", 10)
    assert found["sign flips"] == pytest.approx([0.95**10] * 2)
    assert found["bounded mean"] == pytest.approx([0, 0], abs=1e-12)
    # Of 10 fair signs, 9 or 10 are up at level 0.05, and 10 at level 0.05/6.
    found = exact("+1 and -1 on half each", 10)
    for name in NAMES:
        assert found[name] == pytest.approx([11 / 1024, 1 / 1024])


def test_all_patterns_are_those_of_the_permutation_test() -> None:
    rng = np.random.default_rng(4)
    for _ in range(50):
        gains = rng.choice([-1.0, 0.0, 0.25], 12)
        assert all_flips_p(gains) == pytest.approx(sign_flip_p(gains, rng=rng))
    gains = rng.normal(0.2, 1, 40)
    few, many = flips_p(gains), sign_flip_p(gains, rng=rng)
    assert few == pytest.approx(many, abs=5 * np.sqrt(many / 2_000))


def test_the_limit_is_the_quantile_of_the_binomial() -> None:
    assert stats.binom.cdf(limit(2_000, 0.05), 2_000, 0.05) >= 0.999
    assert stats.binom.cdf(limit(2_000, 0.05) - 1, 2_000, 0.05) < 0.999


class TestRecorded:
    def test_the_bounded_test_is_below_its_level_in_every_enumerated_case(self) -> None:
        cases = RECORDED["exact"]["cases"]
        assert len(cases) >= 10
        for sizes in cases.values():
            assert list(sizes) == ["10", "20", "40", "80", "200"]
            for rates in sizes.values():
                assert all(
                    rate <= level for rate, level in zip(rates["bounded mean"], LEVELS, strict=True)
                )

    def test_the_bounded_test_is_within_the_limit_in_every_drawn_case(self) -> None:
        part = RECORDED["drawn"]
        for sizes in part["cases"].values():
            for counts in sizes.values():
                assert all(
                    n <= most
                    for n, most in zip(counts["bounded mean"], part["limits"], strict=True)
                )

    @pytest.mark.parametrize("case", ["+0.05 on 95 %, -1 on 5 %", "+0.1 on 60 %, -1 on 6 %"])
    def test_the_numbers_are_those_of_the_code(self, case: str) -> None:
        recorded = RECORDED["exact"]["cases"][case]["20"]
        for name, rates in exact(case, 20).items():
            assert rates == pytest.approx(recorded[name], rel=1e-4, abs=1e-12)

    def test_whole_runs_are_within_the_limit(self) -> None:
        part = RECORDED["runs"]
        wanted = {f"{name}, {looks}" for name in WORLDS for looks in ("1 look", "2 looks")}
        assert set(part["worlds"]) == wanted
        for found in part["worlds"].values():
            assert found["gain"] <= 0
            assert (found["runs"], found["supported"] <= part["limit"]) == (2_000, True)

    def test_of_the_tests_with_a_proof_the_bounded_one_finds_most(self) -> None:
        for sizes in RECORDED["power"]["cases"].values():
            for powers in sizes.values():
                for other in ("constant bets", "predictable bets", "empirical Bernstein"):
                    pairs = zip(powers["bounded mean"], powers[other], strict=True)
                    assert all(ours >= theirs for ours, theirs in pairs)
