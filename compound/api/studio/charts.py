"""Charts as SVG, drawn without a library: small, quick, readable without a script, in the page's colours.

Each chart comes with the table of the same values on its page, so that its text alternative is a
sentence. Texts are untrusted and escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from markupsafe import Markup

WIDTH, HEIGHT, TICKS = 720, 280, 5
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 34, 44
COLORS = ("accent", "other1", "other2", "other3", "good")
SHAPES = (  # a circle, a square, a diamond, a triangle, a cross and another triangle; not as many as colours
    "m-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0",
    "m-4 -4h8v8h-8z",
    "m0 -5.5l5.5 5.5l-5.5 5.5l-5.5 -5.5z",
    "m0 -5.5l5.5 9.5h-11z",
    "m-5 -1.5h3.5v-3.5h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5z",
    "m0 5.5l5.5 -9.5h-11z",
)


@dataclass(frozen=True)
class Point:
    """A point with its interval, the series it belongs to, its description and the page it leads to."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    series: str = ""
    title: str = ""
    link: str = ""
    marked: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart of points, and of a line through some of them.

    Attributes:
        label: text alternative.
        lines: lines by name, each through points given as pairs.
        steps: whether lines are horizontal between their points.
    """

    label: str
    x_label: str
    y_label: str
    points: Sequence[Point] = ()
    lines: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    steps: bool = False

    @property
    def series(self) -> list[str]:
        """The names of the series of points, in order of their appearance."""
        return [*dict.fromkeys(point.series for point in self.points)]

    def __html__(self) -> str:
        """Return the chart as an element of a page."""
        return str(draw(self))


@dataclass(frozen=True)
class Scale:
    """A linear map from values to coordinates."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float) -> Scale:
        """Return the scale over some values, with a margin."""
        known = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
        low, high = min(known), max(known)
        size = max(abs(low), abs(high)) or 1.0
        margin = (high - low) * 0.05 if high - low > size * 1e-6 else size * 0.1
        lower = low - margin
        return cls(0.0 if low >= 0 > lower else lower, high + margin, start, end)

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value."""
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, least: float = 0.0) -> list[float]:
        """Return round values in the range, at least ``least`` apart.

        >>> Scale(0.0, 1.0, 0, 100).ticks()
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
        """
        rough = max(least, (self.high - self.low) / TICKS)
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [float(f"{place * step:.12g}") for place in range(first, last + 1)]


def draw(chart: Chart) -> Markup:
    """Return a chart as an SVG element that scales with the page."""
    drawn = [(x, y) for line in chart.lines.values() for x, y in line]
    xs = [point.x for point in chart.points] + [x for x, _ in drawn]
    ys = [point.y for point in chart.points] + [y for _, y in drawn]
    ys += [limit for p in chart.points for limit in (p.low, p.high) if limit is not None]
    across = Scale.over(xs, LEFT, WIDTH - RIGHT)
    up = Scale.over(ys, HEIGHT - BOTTOM, TOP)
    parts = [*_axes(chart, across, up), *_lines(chart, across, up), *_points(chart, across, up)]
    label = escape(chart.label, quote=True)
    role = "group" if any(point.link for point in chart.points) else "img"  # with parts of its own
    return Markup(  # nosec B704  # every text is escaped
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="{role}" aria-label="{label}">'
        f"{''.join(parts)}</svg>{_legend(chart)}"
    )


def _axes(chart: Chart, across: Scale, up: Scale) -> Iterator[str]:
    for tick in up.ticks():
        y = up(tick)
        yield f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>'
        yield f'<text class="tick" x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{tick:g}</text>'
    whole = all(float(p.x).is_integer() for p in chart.points)  # such as numbers of candidates
    for tick in across.ticks(1.0 if whole else 0.0):
        x = across(tick)
        place = f'x="{x}" y="{HEIGHT - BOTTOM + 18}"'
        yield f'<text class="tick" {place} text-anchor="middle">{tick:,g}</text>'
    x_label, y_label = escape(chart.x_label), escape(chart.y_label)
    at = f'x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end"'
    yield f'<text class="axis" {at}>{x_label}</text><text class="axis" x="0" y="18">{y_label}</text>'


def _lines(chart: Chart, across: Scale, up: Scale) -> Iterator[str]:
    for number, line in enumerate(chart.lines.values()):
        places = [(across(x), up(y)) for x, y in line]
        if not places:
            continue
        path = f"M{places[0][0]} {places[0][1]}"
        for x, y in places[1:]:
            path += f"H{x}V{y}" if chart.steps else f"L{x} {y}"
        yield f'<path class="line" style="stroke:{_color(number)}" d="{path}"/>'


def _points(chart: Chart, across: Scale, up: Scale) -> Iterator[str]:
    series = {name: number for number, name in enumerate(chart.series)}
    for point in chart.points:
        number = series[point.series]
        x, y = across(point.x), up(point.y)
        color, shape = _color(number), SHAPES[number % len(SHAPES)]
        drawn = ""
        if point.low is not None and point.high is not None:
            span = f"M{x} {up(point.low)}V{up(point.high)}"
            drawn = f'<path class="interval" style="stroke:{color}" d="{span}"/>'
        drawn += f'<path style="fill:{color}" d="M{x} {y}{shape}"/>'
        if point.marked:
            drawn += f'<circle class="ring" cx="{x}" cy="{y}" r="9"/>'
        title = f"<title>{escape(point.title)}</title>"
        if point.link:
            href = escape(point.link, quote=True)
            yield f'<a class="point" href="{href}">{title}{drawn}</a>'
        else:
            yield f"<g>{title}{drawn}</g>"


def _legend(chart: Chart) -> str:
    """Return the names of series with their marks, if there are several."""
    fills = [
        f'style="fill:{_color(n)}" d="M6 6{SHAPES[n % len(SHAPES)]}"/></svg>{escape(name)}'
        for n, name in enumerate(chart.series)
    ]
    strokes = [
        f'class="line" style="stroke:{_color(n)}" d="M0 6H12"/></svg>{escape(name)}'
        for n, name in enumerate(chart.lines)
    ]
    mark = '<li><svg viewBox="0 0 12 12" aria-hidden="true"><path '
    marks = [f"{mark}{rest}</li>" for rest in (*fills, *strokes)]
    return f'<ul class="legend">{"".join(marks)}</ul>' if len(marks) > 1 else ""


def _color(number: int) -> str:
    return f"var(--{COLORS[number % len(COLORS)]})"
