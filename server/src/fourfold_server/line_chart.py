"""Line charts as SVG text, side by side. Knows numbers and names, nothing of what they mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 560, 360
"""Of one panel, in pixels."""
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 40, 50
"""Around the lines."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Told apart by colour-blind readers too; after Okabe and Ito, Color Universal Design, 2008."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One chart."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_log: bool = False
    """Whether equal factors are equally far apart; what is not above zero is left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LineChart:
    """Panels from left to right."""

    panels: Sequence[Panel]

    def svg(self) -> str:
        """The whole document."""
        width = WIDTH * len(self.panels)
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" font-family="sans-serif">',
            f'<rect width="{width}" height="{HEIGHT}" fill="white"/>',
        ]
        for index, panel in enumerate(self.panels):
            lines += [f'<g transform="translate({index * WIDTH} 0)">', *_panel(panel), "</g>"]
        return "\n".join([*lines, "</svg>", ""])


class _Scale:
    """From values to pixels."""

    def __init__(self, values: Sequence[float], start: float, stop: float, *, log: bool) -> None:
        self._log = log
        low, high = min(values, default=1.0), max(values, default=1.0)
        if not log:
            low = min(low, 0.0)
        if low == high:
            high = low + 1.0
        self.ticks = _decades(low, high) if log else _round_steps(low, high)
        self._low, self._high = self._read(min(low, self.ticks[0])), self._read(max(high, self.ticks[-1]))
        self._start, self._stop = start, stop

    def __call__(self, value: float) -> float:
        share = (self._read(value) - self._low) / (self._high - self._low)
        return round(self._start + share * (self._stop - self._start), 1)

    def _read(self, value: float) -> float:
        return math.log10(value) if self._log else value


def _panel(panel: Panel) -> list[str]:
    points = [[(x, y) for x, y in zip(one.x, one.y) if not panel.x_log or x > 0] for one in panel.series]
    across = _Scale([x for line in points for x, _ in line], LEFT, WIDTH - RIGHT, log=panel.x_log)
    up = _Scale([y for line in points for _, y in line], HEIGHT - BOTTOM, TOP, log=False)
    middle = (LEFT + WIDTH - RIGHT) / 2
    lines = [_text(middle, 20, panel.title, "middle", size=14), _text(middle, HEIGHT - 12, panel.x_label, "middle")]
    for tick in across.ticks:
        lines.append(_line(across(tick), TOP, across(tick), HEIGHT - BOTTOM))
        lines.append(_text(across(tick), HEIGHT - BOTTOM + 18, f"{tick:g}", "middle"))
    for tick in up.ticks:
        lines.append(_line(LEFT, up(tick), WIDTH - RIGHT, up(tick)))
        lines.append(_text(LEFT - 8, up(tick) + 4, f"{tick:g}{panel.y_label}", "end"))
    for index, (one, line) in enumerate(zip(panel.series, points)):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(f"{across(x)},{up(y)}" for x, y in line)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        lines.append(_text(WIDTH - RIGHT - 8, HEIGHT - BOTTOM - 12 - 16 * index, one.name, "end", colour=colour))
    return lines


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#dddddd"/>'


def _text(x: float, y: float, text: str, anchor: str, *, size: int = 12, colour: str = "#333333") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{escape(text)}</text>'


def _decades(low: float, high: float) -> list[float]:
    return [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]


def _round_steps(low: float, high: float) -> list[float]:
    """About five multiples of 1, 2 or 5 times a power of ten, around ``low`` to ``high``."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(index * step, 10) for index in range(first, last + 1)]
