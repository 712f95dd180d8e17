"""Plots as SVG: lines with error bars, reference lines, and a grid."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 60, 30, 14, 46
DODGE = 6
"""Distance in pixels between points of different series at the same place; error bars would hide each other."""
COLOURS = (
    "#8a8a8a",
    "#1f77b4",
    "#ff7f0e",
    "#2ca02c",
    "#d62728",
    "#9467bd",
    "#8c564b",
    "#e377c2",
    "#17becf",
    "#bcbd22",
)
"""Colours of series, readable on white and on black."""
SHAPES = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",
    "M-3.6,-3.6h7.2v7.2h-7.2z",
    "M0,-4.8L4.8,3.6H-4.8z",
    "M0,-5L5,0L0,5L-5,0z",
    "M0,4.8L4.8,-3.6H-4.8z",
    "M-1.5,-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",
    "M-4.5,-3L-3,-4.5L0,-1.5L3,-4.5L4.5,-3L1.5,0L4.5,3L3,4.5L0,1.5L-3,4.5L-4.5,3L-1.5,0z",
)
"""Markers, by which series can be told apart without colours. Seven shapes and ten colours make seventy pairs."""

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --faint: #d8d8d8; --good: #1a7f37; --bad: #c62828 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --paper: #16181d; --faint: #3a3f47; --good: #57c26e; --bad: #ff7b72 }
}
svg { width: 100%; height: auto } svg text { fill: var(--ink); font: 12px system-ui, sans-serif }
.grid { stroke: var(--faint) } .series polyline { fill: none; stroke: var(--c); stroke-width: 2 }
.series line { stroke: var(--c); stroke-width: 1.5; opacity: .45 } .series path, .legend path { fill: var(--c) }
.mark { stroke: var(--ink); stroke-dasharray: 5 4; opacity: .6 }
svg .name { font-size: 11px; paint-order: stroke; stroke: var(--paper); stroke-width: 4px; stroke-linejoin: round }
"""
"""CSS of plots, and of pages with plots."""


class Point(NamedTuple):
    """A value with its interval."""

    x: float
    y: float
    low: float
    high: float
    label: str


class Series(NamedTuple):
    """Points of one policy, joined by a line."""

    name: str
    points: Sequence[Point]


class Axis(NamedTuple):
    """The name of an axis, and named reference values on it."""

    name: str
    marks: Sequence[tuple[str, float]] = ()
    crowded: bool = False
    """Whether all series have points at the same places."""


def ticks(low: float, high: float) -> list[float]:
    """Round numbers, about five, from the last at or below ``low`` to the first at or above ``high``."""
    raw = (high - low or 1.0) / 5
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


class _Frame:
    """Converts values to coordinates. Axes begin at 0 unless there are values below."""

    def __init__(self, series: Sequence[Series], x: Axis, y: Axis) -> None:
        points = [point for item in series for point in item.points]
        marked = [[value for _, value in axis.marks] for axis in (x, y)]
        self.x_ticks = ticks(0, max([point.x for point in points] + marked[0]))
        self.y_ticks = ticks(min(0, *(point.low for point in points)), max([p.high for p in points] + marked[1]))

    def across(self, x: float) -> float:
        first, last = self.x_ticks[0], self.x_ticks[-1]
        return LEFT + (x - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def up(self, y: float) -> float:
        first, last = self.y_ticks[0], self.y_ticks[-1]
        return HEIGHT - BOTTOM - (y - first) / (last - first) * (HEIGHT - TOP - BOTTOM)


def svg(series: Sequence[Series], x: Axis, y: Axis) -> str:
    """The plot, for a page. Points with the same label are one point, shared by several series."""
    title = f"{escape(y.name)} against {escape(x.name)}"
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">'
    return "\n".join([head, *_content(series, x, y), "</svg>"])


def file_svg(title: str, series: Sequence[Series], x: Axis, y: Axis) -> str:
    """The plot as a standalone file for browsers, with a title and a legend."""
    head = 46
    names = []
    for index, item in enumerate(series):
        mark = f'<path style="--c:{_colour(index)}" d="{_shape(index)}"/>'
        at = LEFT + index * (WIDTH - LEFT - RIGHT) / len(series)
        names.append(f'<g transform="translate({at:.1f} 34)">{mark}<text x="10" y="4">{escape(item.name)}</text></g>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + head}" role="img">',
            f"<title>{escape(title)}</title><style>{STYLE}</style>",
            f'<rect width="{WIDTH}" height="{HEIGHT + head}" style="fill:var(--paper)"/>',
            f'<text x="{LEFT}" y="18">{escape(title)}</text>',
            f'<g class="legend">{"".join(names)}</g>',
            f'<g transform="translate(0 {head})">',
            *_content(series, x, y),
            "</g>",
            "</svg>",
            "",
        ]
    )


def _content(series: Sequence[Series], x: Axis, y: Axis) -> list[str]:
    frame = _Frame(series, x, y)
    parts = [*_grid(frame, x, y)]
    labels = [point.label for item in series for point in item.points]
    shared = {label for label in labels if labels.count(label) > 1}
    for index, item in enumerate(series):
        shift = (index - (len(series) - 1) / 2) * DODGE if x.crowded else 0.0
        parts += [
            f'<g style="--c:{_colour(index)}" class="series">',
            *_drawn(frame, index, item, shift, shared),
            "</g>",
        ]
    return [*parts, *_marks(frame, x, y)]


def _grid(frame: _Frame, x: Axis, y: Axis) -> Iterator[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for value in frame.x_ticks:
        at = f"{frame.across(value):.1f}"
        yield f'<line class="grid" x1="{at}" x2="{at}" y1="{TOP}" y2="{bottom}"/>'
        yield f'<text x="{at}" y="{bottom + 17}" text-anchor="middle">{value:.4g}</text>'
    for value in frame.y_ticks:
        at = f"{frame.up(value):.1f}"
        yield f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at}" y2="{at}"/>'
        yield f'<text x="{LEFT - 7}" y="{at}" dy="4" text-anchor="end">{value:.4g}</text>'
    yield f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x.name)}</text>'
    turned = f"translate(14 {(TOP + bottom) / 2}) rotate(-90)"
    yield f'<text transform="{turned}" text-anchor="middle">{escape(y.name)}</text>'


def _marks(frame: _Frame, x: Axis, y: Axis) -> Iterator[str]:
    """Dashed lines with their names, drawn over the points; behind them they could not be read."""
    for name, value in x.marks:
        at = frame.across(value)
        yield f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        # On the side of the line with more room.
        beside, anchor = (at - 5, "end") if at > WIDTH / 2 else (at + 5, "start")
        yield f'<text class="name" x="{beside:.1f}" y="{TOP + 10}" text-anchor="{anchor}">{escape(name)}</text>'
    for name, value in y.marks:
        at = frame.up(value)
        yield f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text class="name" x="{WIDTH - RIGHT - 4}" y="{at - 4:.1f}" text-anchor="end">{escape(name)}</text>'


def _drawn(frame: _Frame, index: int, item: Series, shift: float, shared: set[str]) -> Iterator[str]:
    places = [
        (frame.across(point.x) + (0 if point.label in shared else shift), frame.up(point.y)) for point in item.points
    ]
    yield f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>'
    for point, (x, y) in zip(item.points, places, strict=True):
        low, high = frame.up(point.low), frame.up(point.high)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
        title = f"<title>{escape(point.label)}</title>"
        yield f'<path transform="translate({x:.1f} {y:.1f})" d="{_shape(index)}">{title}</path>'


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _shape(index: int) -> str:
    return SHAPES[index % len(SHAPES)]


def legend(series: Sequence[Series]) -> str:
    """Names of series next to their colours and shapes."""
    items = (
        f'<span style="--c:{_colour(index)}"><svg viewBox="-6 -6 12 12"><path d="{_shape(index)}"/></svg>'
        f"{escape(item.name)}</span>"
        for index, item in enumerate(series)
    )
    return f'<p class="legend">{" ".join(items)}</p>'
