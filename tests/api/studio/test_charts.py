"""Charts and the importance of parameters."""

from __future__ import annotations

import random
import re
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from compound.api.studio.charts import HEIGHT, WIDTH, Chart, Point, Scale, draw
from compound.optimization.runs.candidate_record import CandidateRecord, importance

NUMBERS = st.floats(-1e6, 1e6, allow_subnormal=False)


@given(st.lists(NUMBERS, min_size=1, max_size=20))
@example([1e6, 1e6 - 1e-10])
@example([0.0, 1e-300])
def test_a_scale_holds_its_values_and_has_a_few_round_ticks(values: list[float]) -> None:
    scale = Scale.over(values, 0, 100)
    assert all(0 <= scale(value) <= 100 for value in values)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 12
    slack = (scale.high - scale.low) * 1e-6
    assert all(scale.low - slack <= tick <= scale.high + slack for tick in ticks)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=9), st.text(max_size=9))
def test_a_chart_is_well_formed_and_within_its_frame(
    places: list[tuple[float, float]], text: str
) -> None:
    name = "".join(c for c in text if c.isprintable())
    points = [Point(x, y, series=name, title=name, link=f"/?{name}") for x, y in places]
    found = draw(Chart(name, name, name, points, {name: places}))
    svg = ElementTree.fromstring(str(found).partition("<ul")[0])
    assert svg.get("aria-label") == name
    for element in svg.iter("text"):
        assert 0 <= float(element.get("x", "0")) <= WIDTH
        assert 0 <= float(element.get("y", "0")) <= HEIGHT


def test_a_dozen_series_look_different() -> None:
    """Regression test: the sixth looked like the first."""
    chart = Chart("c", "x", "y", [Point(n, n, series=f"series {n}") for n in range(12)])
    legend = str(draw(chart)).partition('<ul class="legend">')[2]
    looks = re.findall(r'style="fill:[^"]*" d="[^"]*"', legend)
    assert len(set(looks)) == len(looks) == 12


def candidate(gain: float, **values: object) -> CandidateRecord:
    return CandidateRecord(
        digest=str(values),
        values=values,
        parent="",
        source="",
        job=0,
        fate="not proposed",
        chosen=False,
        evaluations=10,
        mean=gain,
        low=None,
        high=None,
        gain=gain,
        prompt_tokens=1,
        completion_tokens=1,
        usd=None,
        seconds=1,
    )


def test_the_parameter_that_decides_is_the_most_important_one() -> None:
    rng = random.Random(0)
    effects: dict[str, dict[object, float]] = {
        "k": {1: 0.0, 2: 0.1, 3: 0.2},
        "prompt": {"a": 0.0, "b": 0.4},
        "unused": {1: 0, 2: 0},
    }
    rows = []
    for _ in range(80):
        values = {key: rng.choice([*levels]) for key, levels in effects.items()}
        rows.append(candidate(sum(effects[k][v] for k, v in values.items()), **values))
    found = {row.key: row for row in importance(rows)}
    # variances of uniform draws: 0.04 for the prompt, 0.02/3 for k
    assert found["prompt"].share == pytest.approx(0.04 / (0.04 + 0.02 / 3), abs=0.03)
    assert found["unused"].share < 0.01
    assert (found["prompt"].best, found["k"].best) == ("b", 3)
    assert found["prompt"].effect == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize("count", [0, 5])
def test_few_candidates_say_nothing(count: int) -> None:
    assert importance([candidate(0.1 * i, k=i) for i in range(count)]) == []


def test_candidates_without_changes_say_nothing() -> None:
    assert importance([candidate(0.1) for _ in range(9)]) == []
