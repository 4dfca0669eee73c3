"""Pictures for a page that needs nothing else: SVG text, coloured by the page's style sheet, light or dark.

Each is drawn in a box of 860 units that scales with the page. A `Colour` is a class c0 to c9 of `STYLE`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from html import escape

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import printable
from penstock.trace import Cause

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 860, 76, 12, 10, 34
_PLOT = _WIDTH - _LEFT - _RIGHT
#: Of a picture unless it says otherwise; and the top of its scale where all is 0.
_HEIGHT, _LEAST = 180, 1e-12


class Colour(IntEnum):
    """The palette of Okabe and Ito, whose yellow and black (the ink) change with the background, a brown and a grey."""

    RED = 0
    ORANGE = 1
    BLUE = 2
    GREEN = 3
    PURPLE = 4
    SKY = 5
    GREY = 6
    YELLOW = 7
    INK = 8
    BROWN = 9


#: Of each cause of waiting, on pages and in pictures: the darkest for what is worst known.
COLOUR_OF_CAUSE = {
    Cause.SOURCE_READ: Colour.RED,
    Cause.TIER_READ: Colour.ORANGE,
    Cause.DECODE: Colour.BLUE,
    Cause.NO_FREE_SLOT: Colour.PURPLE,
    Cause.START: Colour.BROWN,
    Cause.HAND_OVER: Colour.GREEN,
    Cause.NO_BATCH: Colour.YELLOW,
    Cause.UNSEEN: Colour.INK,
}

STYLE = """
:root{color-scheme:light dark;--page:#fff;--ink:#222;--quiet:#555b63;--line:#d5d9de;--panel:#f6f7f9;--link:#0b5cad}
:root{--c0:#d55e00;--c1:#e69f00;--c2:#0072b2;--c3:#009e73;--c4:#cc79a7;--c5:#56b4e9;--c6:#8a8f96;--c7:#b8a400;--c8:#222;
--c9:#7a4b26}
@media (prefers-color-scheme:dark){:root{--page:#16181b;--ink:#e8eaed;--quiet:#aab1b9;--line:#3b4148;--panel:#1f2226;
--link:#8ab4f8;--c0:#ff8c42;--c1:#f0b429;--c2:#4aa3df;--c3:#2ec79a;--c4:#e08fbd;--c5:#7cc7f2;--c6:#969ca4;--c7:#f0e442;
--c8:#e8eaed;--c9:#b98a5e}}
svg{display:block;width:100%;height:auto;font:12px system-ui,sans-serif}
svg text{fill:var(--quiet)}svg .axis{stroke:var(--line);fill:none}
""" + "".join(f".c{n}{{fill:var(--c{n})}}.s{n}{{stroke:var(--c{n});fill:none}}" for n in map(int, Colour))


@dataclass(frozen=True, slots=True)
class Layer:
    """Values that a picture shows in one colour: float64 each, as many as the picture's places."""

    name: str
    values: NDArray[np.float64]
    colour: Colour


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page: a picture, SVG as text, and the table behind it, of text cells."""

    title: str
    picture: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def stacked_areas(
    title: str,
    edges: NDArray[np.float64],
    layers: Sequence[Layer],
    x_unit: Callable[[float], str],
    y_unit: Callable[[float], str],
) -> str:
    """Return layers, at least one, on each other as steps. edges: float64[n + 1]. x_unit, y_unit: word an amount."""
    top = float(np.sum([layer.values for layer in layers], axis=0).max(initial=_LEAST))
    chart = _Chart(title, _HEIGHT, (float(edges[0]), float(edges[-1])), top)
    chart.axes(x_unit, y_unit)
    below = np.zeros(edges.size - 1)
    for layer in layers:
        if not layer.values.any():
            continue
        above = below + layer.values
        x, y, base = np.repeat(edges, 2)[1:-1], np.repeat(above, 2), np.repeat(below, 2)
        points = [*zip(x, y, strict=True), *zip(x[::-1], base[::-1], strict=True)]
        chart.add(f'<path class="c{layer.colour}" d="{chart.path(points)}Z"/>')
        below = above
    return chart.text() + legend(layers)


def lines(
    title: str,
    x: ArrayLike,
    layers: Sequence[Layer],
    x_unit: Callable[[float], str],
    y_unit: Callable[[float], str],
) -> str:
    """Return layers, at least one, as lines over x, the second and later ones dashed."""
    places = np.asarray(x, np.float64)
    top = max(float(layer.values.max(initial=_LEAST)) for layer in layers)
    chart = _Chart(title, _HEIGHT, (float(places.min(initial=0)), float(places.max(initial=1))), top)
    chart.axes(x_unit, y_unit)
    for number, layer in enumerate(layers):
        dash = ' stroke-dasharray="6 4"' if number else ""
        points = list(zip(places, layer.values, strict=True))
        chart.add(f'<path class="s{layer.colour}" stroke-width="2"{dash} d="{chart.path(points)}"/>')
    return chart.text() + legend(layers)


def points(title: str, layers: Sequence[tuple[str, NDArray[np.float64], NDArray[np.float64], Colour]]) -> str:
    """Return dots: (name, float64[n] seconds from left to right, float64[n] upwards, colour) of one layer or more."""
    every_x, every_y = (np.concatenate([layer[field] for layer in layers]) for field in (1, 2))
    x_range = float(every_x.min(initial=0)), float(every_x.max(initial=1))
    chart = _Chart(title, 240, x_range, float(every_y.max(initial=1)))
    chart.axes(seconds, lambda value: f"{value:,.0f}")
    for _, x, y, colour in layers:
        dots = "".join(f"M{chart.x(one):.1f} {chart.y(other):.1f}h0" for one, other in zip(x, y, strict=True))
        chart.add(f'<path class="s{colour}" stroke-width="2.4" stroke-linecap="round" d="{dots}"/>')
    return chart.text() + legend([Layer(name, np.zeros(0), colour) for name, _, _, colour in layers])


def bars(title: str, rows: Sequence[tuple[str, Sequence[Layer]]], unit: Callable[[float], str]) -> str:
    """Return a horizontal bar for each row, at least one: its name, and layers of one value each, side by side."""
    most = max(sum(float(layer.values.sum()) for layer in layers) for _, layers in rows) or 1.0
    left, step = 300, 24
    height = step * len(rows) + 8
    parts = [_head(title, height)]
    for number, (name, layers) in enumerate(rows):
        y, x = 4 + step * number, float(left)
        parts.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escaped(name)}</text>')
        total = sum(float(layer.values.sum()) for layer in layers)
        for layer in layers:
            wide = float(layer.values.sum()) / most * (_WIDTH - left - 100)
            parts.append(
                f'<rect class="c{layer.colour}" x="{x:.1f}" y="{y + 3}" width="{wide:.1f}" height="16"/>'
            )
            x += wide
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 15}">{escaped(unit(total))}</text>')
    return "".join(parts) + "</svg>"


def lanes(title: str, rows: Sequence[tuple[str, Sequence[tuple[float, float, Colour]]]]) -> str:
    """Return a lane for each row: its name, and (start, end, colour) of what ran in it, in seconds; one at least."""
    step, left = 20, 190
    height = step * len(rows) + _BOTTOM
    first = min(start for _, spans in rows for start, _, _ in spans)
    last = max(first + 1e-9, *(end for _, spans in rows for _, end, _ in spans))
    scale = (_WIDTH - left - _RIGHT) / (last - first)
    parts = [_head(title, height)]
    for number, (name, spans) in enumerate(rows):
        y = 2 + step * number
        parts.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{escaped(name)}</text>')
        parts += [
            f'<rect class="c{colour}" x="{left + (start - first) * scale:.1f}" y="{y + 2}" '
            f'width="{max((end - start) * scale, 1.0):.1f}" height="14"/>'
            for start, end, colour in spans
        ]
    for tick in _ticks(0.0, last - first, 6):
        x = left + tick * scale
        parts.append(
            f'<text x="{x:.1f}" y="{height - 10}" text-anchor="middle">{escaped(seconds(tick))}</text>'
        )
        parts.append(f'<path class="axis" d="M{x:.1f} 0V{height - 24}"/>')
    return "".join(parts) + "</svg>"


def legend(layers: Sequence[Layer]) -> str:
    """Return which colour is which, in words."""
    items = "".join(
        f'<li><svg class="key" viewBox="0 0 12 12" aria-hidden="true"><rect class="c{layer.colour}" width="12" '
        f'height="12"/></svg>{escaped(layer.name)}</li>'
        for layer in layers
        if layer.values.any() or not layer.values.size
    )
    return f'<ul class="legend">{items}</ul>' if items else ""


class _Chart:
    """Axes and what is drawn in them."""

    def __init__(self, title: str, height: int, x: tuple[float, float], top: float) -> None:
        self._x, self._top, self._height = x, top, height
        self._parts = [_head(title, height)]

    def x(self, value: float) -> float:
        return _LEFT + (value - self._x[0]) / ((self._x[1] - self._x[0]) or 1.0) * _PLOT

    def y(self, value: float) -> float:
        return self._height - _BOTTOM - value / self._top * (self._height - _TOP - _BOTTOM)

    def path(self, places: Sequence[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in places)

    def axes(self, x_unit: Callable[[float], str], y_unit: Callable[[float], str]) -> None:
        low = self._height - _BOTTOM
        for tick in _ticks(*self._x, 7):
            self.add(
                f'<text x="{self.x(tick):.1f}" y="{low + 18}" text-anchor="middle">{escaped(x_unit(tick))}</text>'
            )
        for tick in _ticks(0.0, self._top, 4):
            y = self.y(tick)
            self.add(f'<path class="axis" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
            self.add(
                f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escaped(y_unit(tick))}</text>'
            )

    def add(self, part: str) -> None:
        self._parts.append(part)

    def text(self) -> str:
        return "".join(self._parts) + "</svg>"


def _head(title: str, height: int) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escaped(title)}">'


def escaped(text: str) -> str:
    """Return text of which nothing is markup, and that can be printed."""
    return escape(printable(text))


def seconds(value: float) -> str:
    """Return a point in time as the ticks of an axis have it."""
    if value >= 7200:
        return f"{value / 3600:g} h"
    if value >= 120:
        return f"{value / 60:g} min"
    return f"{1000 * value:g} ms" if 0 < value < 0.5 else f"{value:g} s"


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Return round numbers in [low, high], about so many: 1, 2 or 5 times a power of ten apart."""
    raw = (high - low) / about
    if not raw > 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [float(f"{number * step:.10g}") for number in range(first, math.floor(high / step + 1e-9) + 1)]
