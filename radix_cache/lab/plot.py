"""Line charts as SVG, drawn here: a few lines of text each, that any browser shows without a script or a download.

One chart is one string. What it draws: lines with a mark at each point, axes with round numbers, a legend. What it does
not: anything that moves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Line", "line_chart"]

# Okabe and Ito's colours, told apart also by the colour-blind; black last.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999933", "#000000")
_DASHES = ("", "6 3", "2 3", "8 3 2 3")
_MAX_MARKS = 60
_WIDTH, _HEIGHT = 760, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 230, 36, 52
_MAX_LABEL = 24  # characters that fit to the right of a chart


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart, its points from left to right. errors: half the height of a band around it."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    errors: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class _Axis:
    """Where values lie on the picture: from ``first`` to ``last`` in pixels."""

    low: float
    high: float
    first: float
    last: float
    is_log: bool

    def at(self, value: float) -> float:
        low, high, value = (math.log10(v) if self.is_log else v for v in (self.low, self.high, value))
        return self.first + (value - low) / (high - low or 1) * (self.last - self.first)

    def ticks(self) -> list[float]:
        """Return round numbers, five or so; the ends where there are no two."""
        if self.is_log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            factors = (1, 2, 5) if len(decades) <= 4 else (1,)
            found = [factor * 10.0**decade for decade in decades for factor in factors]
        else:
            rough = (self.high - self.low or 1) / 5
            unit = 10.0 ** math.floor(math.log10(rough))
            step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= rough)
            found = [step * number for number in range(math.floor(self.low / step), math.ceil(self.high / step) + 1)]
        found = [tick for tick in found if self.low <= tick <= self.high * (1 + 1e-9)]
        return found if len(found) > 1 else sorted({self.low, self.high})


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    lines: Sequence[Line],
    *,
    is_log_x: bool = False,
    y_high: float | None = None,
) -> str:
    """Return an ``<svg>`` element. The y axis begins at 0, and ends at ``y_high`` or above the highest point.

    With ``is_log_x``, points that are not above 0 are left out.
    """
    lines = [_kept(line, is_log_x) for line in lines]
    xs = [x for line in lines for x in line.xs] or [1.0]
    ys = [y + e for line in lines for y, e in zip(line.ys, line.errors or [0.0] * len(line.ys), strict=True)] or [1.0]
    across = _Axis(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT, is_log_x)
    up = _Axis(0.0, y_high or max(ys) * 1.05 or 1.0, _HEIGHT - _BOTTOM, _TOP, False)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img"',
        f'aria-label="{escape(title)}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
        *_axes(across, up, x_label, y_label),
        *(part for number, line in enumerate(lines) for part in _drawn(number, line, across, up)),
        "</svg>",
    ]
    return "\n".join(parts)


def _kept(line: Line, is_log_x: bool) -> Line:
    errors = line.errors or [0.0] * len(line.xs)
    points = [point for point in zip(line.xs, line.ys, errors, strict=True) if point[0] > 0 or not is_log_x]
    xs, ys, errors = zip(*points, strict=True) if points else ((), (), ())
    return Line(line.name, xs, ys, errors if line.errors else ())


def _axes(across: _Axis, up: _Axis, x_label: str, y_label: str) -> list[str]:
    bottom, middle = up.first, (up.first + up.last) / 2
    parts = []
    for tick in up.ticks():
        y = up.at(tick)
        parts += [
            f'<line x1="{across.first}" y1="{y:.1f}" x2="{across.last}" y2="{y:.1f}" stroke="#ddd"/>',
            f'<text x="{across.first - 8}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>',
        ]
    for tick in across.ticks():
        x = across.at(tick)
        parts += [
            f'<line x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 5}" stroke="black"/>',
            f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{_number(tick)}</text>',
        ]
    return [
        *parts,
        f'<path d="M{across.first} {up.last}V{bottom}H{across.last}" fill="none" stroke="black"/>',
        f'<text x="{(across.first + across.last) / 2}" y="{bottom + 40}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>',
    ]


def _drawn(number: int, line: Line, across: _Axis, up: _Axis) -> list[str]:
    colour, dash = _COLOURS[number % len(_COLOURS)], _DASHES[number // len(_COLOURS) % len(_DASHES)]
    points = [(across.at(x), up.at(y)) for x, y in zip(line.xs, line.ys, strict=True)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts = []
    if line.errors:
        edges = [[up.at(y + sign * e) for y, e in zip(line.ys, line.errors, strict=True)] for sign in (1, -1)]
        around = [(x, y) for (x, _), y in zip(points, edges[0], strict=True)]
        around += [(x, y) for (x, _), y in zip(reversed(points), reversed(edges[1]), strict=True)]
        outline = " ".join(f"{x:.1f},{y:.1f}" for x, y in around)
        parts.append(f'<polygon points="{outline}" fill="{colour}" opacity="0.2"/>')
    parts.append(
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
    )
    if len(points) <= _MAX_MARKS:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    left, y = _WIDTH - _RIGHT + 14, _TOP + 10 + 18 * number
    return [
        *parts,
        f'<line x1="{left}" y1="{y}" x2="{left + 24}" y2="{y}" stroke="{colour}" stroke-width="2"',
        f'stroke-dasharray="{dash}"/>',
        f'<text x="{left + 30}" y="{y + 4}">{_label(line.name)}</text>',
    ]


def _label(name: str) -> str:
    """Return the name, or its end, which tells policies of one's own apart; the whole is shown to who points at it."""
    if len(name) <= _MAX_LABEL:
        return escape(name)
    return f"<title>{escape(name)}</title>…{escape(name[1 - _MAX_LABEL :])}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:g}"
