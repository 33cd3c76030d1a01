"""Draws curves into an SVG file, without a library for plots."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Sequence

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 16, 44
# The second curve lies on the first where they agree, so it is thinner and dashed.
STYLES = [
    'stroke="#1b6ca8" stroke-width="3"',
    'stroke="#e07b00" stroke-width="1.5" stroke-dasharray="6 4"',
]


@dataclass
class Curve:
    """The losses of a run, one for each step."""

    name: str
    values: Sequence[float]

    def smooth(self, window: int = 10) -> list[float]:
        """The mean of the last few values at each step."""
        v = self.values
        parts = (v[max(i + 1 - window, 0) : i + 1] for i in range(len(v)))
        return [sum(part) / len(part) for part in parts]


def round_steps(low: float, high: float, count: int) -> list[float]:
    """Round numbers from low to high, about so many of them."""
    raw = max(high - low, 1e-9) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [i * step for i in range(first, last + 1)]


def draw(curves: Sequence[Curve]) -> str:
    """The SVG: smoothed curves, with axes from 0."""
    smooth = [curve.smooth() for curve in curves]
    steps = max(len(values) for values in smooth)
    finite = [v for values in smooth for v in values if math.isfinite(v)]
    top = max(finite, default=1.0) * 1.05

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / steps

    def y(loss: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * loss / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12" fill="#333">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for value in round_steps(0, top, 6):
        at = f"{y(value):.1f}"
        parts.append(f'<path d="M{LEFT} {at}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at}" dy="4" text-anchor="end">{value:g}</text>')
    for value in round_steps(0, steps, 8):
        at = f'x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 18}"'
        parts.append(f'<text {at} text-anchor="middle">{value:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">step</text>')
    side = f'transform="translate(16 {HEIGHT / 2}) rotate(-90)"'
    parts.append(f'<text {side} text-anchor="middle">loss</text>')
    for i, (curve, values) in enumerate(zip(curves, smooth)):
        style = STYLES[i % len(STYLES)]
        shown = ((n, v) for n, v in enumerate(values, 1) if math.isfinite(v))
        points = " ".join(f"{x(n):.1f},{y(v):.1f}" for n, v in shown)
        parts.append(f'<polyline points="{points}" fill="none" {style}/>')
        at = TOP + 16 + 20 * i
        parts.append(f'<path d="M{WIDTH - 150} {at}h30" {style}/>')
        label = escape(f"{curve.name}, {values[-1]:.3f}" if values else curve.name)
        parts.append(f'<text x="{WIDTH - 112}" y="{at}" dy="4">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


def write_plot(path: Path, curves: Sequence[Curve]) -> None:
    """Writes the drawing; whoever reads the file meets the old one or the new one, never half."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(draw(curves), encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
