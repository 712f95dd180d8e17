"""A plot as SVG: lines with error bars, and a grid to read values off."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 640, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 16, 48
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
"""Readable on white and on black."""


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


def ticks(low: float, high: float) -> list[float]:
    """Round numbers, about five, from the last at or below ``low`` to the first at or above ``high``."""
    raw = (high - low or 1.0) / 5
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def svg(series: Sequence[Series], x_name: str, y_name: str) -> str:
    """The plot; axes begin at 0 unless values lie below."""
    points = [point for item in series for point in item.points]
    x_ticks = ticks(0, max(point.x for point in points))
    y_ticks = ticks(min(0, *(point.low for point in points)), max(point.high for point in points))

    def across(x: float) -> float:
        return LEFT + (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (WIDTH - LEFT - RIGHT)

    def up(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_name)} against {escape(x_name)}">'
    ]
    for x in x_ticks:
        parts += [
            f'<line class="grid" x1="{across(x):.1f}" x2="{across(x):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>',
            f'<text x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x:.4g}</text>',
        ]
    for y in y_ticks:
        parts += [
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(y):.1f}" y2="{up(y):.1f}"/>',
            f'<text x="{LEFT - 8}" y="{up(y) + 4:.1f}" text-anchor="end">{y:.4g}</text>',
        ]
    parts += [
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_name)}</text>',
        f'<text transform="translate(14 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_name)}</text>",
    ]
    for index, item in enumerate(series):
        parts.append(f'<g style="--c:{COLOURS[index % len(COLOURS)]}" class="series">')
        path = " ".join(f"{across(point.x):.1f},{up(point.y):.1f}" for point in item.points)
        parts.append(f'<polyline points="{path}"/>')
        for point in item.points:
            at = f"{across(point.x):.1f}"
            parts.append(
                f'<line x1="{at}" x2="{at}" y1="{up(point.low):.1f}" y2="{up(point.high):.1f}"/>'
                f'<circle cx="{at}" cy="{up(point.y):.1f}" r="3.5"><title>{escape(point.label)}</title></circle>'
            )
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"])


def legend(series: Sequence[Series]) -> str:
    """Names beside their colours."""
    items = (
        f'<span style="--c:{COLOURS[index % len(COLOURS)]}">{escape(item.name)}</span>'
        for index, item in enumerate(series)
    )
    return f'<p class="legend">{" ".join(items)}</p>'
