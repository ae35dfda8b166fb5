"""Charts of the studio."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from hypothesis import example, given
from hypothesis import strategies as st

from compound.api.studio.charts import HEIGHT, WIDTH, Chart, Point, Scale, draw

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
