"""Just enough SVG: text, dots, lines and axes, in colours for light and dark.

A picture carries its own background and both sets of colours, so that it can be read wherever a
page shows it. Numbers are rounded to a tenth of a pixel: the same picture is the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from xml.sax.saxutils import escape

WIDTH = 720
LEFT, RIGHT = 24, WIDTH - 24

STYLE = """
:root { --paper: #ffffff; --ink: #20242c; --soft: #7b8190; --line: #c9cdd6;
  --value: #2f66b0; --code: #b4550d; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #1b1e26; --ink: #e6e8ee; --soft: #9aa1b1; --line: #454b59;
    --value: #7fb0f2; --code: #f0a35e; --bad: #f2877f; } }
text { font: 13px system-ui, sans-serif; fill: var(--ink) }
.soft { fill: var(--soft) } .end { text-anchor: end } .mid { text-anchor: middle }
.axis { stroke: var(--line) } .code { stroke: var(--code); stroke-width: 2 }
.range { stroke: var(--ink); stroke-width: 1.5 } .guide { stroke: var(--line) }
.curve { fill: none; stroke: var(--value); stroke-width: 1.5 }
.second { fill: none; stroke: var(--code); stroke-width: 2 }
.value { fill: var(--value); fill-opacity: 0.55 } .bad { fill: var(--bad) }
.first { fill: var(--value) } .other { fill: var(--code) }
.best { fill: none; stroke: var(--bad); stroke-width: 2 }
"""


@dataclass
class Axis:
    """A straight map from `low`..`high` to pixels."""

    low: float
    high: float
    start: float = LEFT
    end: float = RIGHT

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


@dataclass
class Picture:
    """Elements in the order in which they were drawn."""

    title: str
    height: int
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}"{_class(kind)}>{escape(words)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self.parts.append(f"<line {ends}{_class(kind)}/>")

    def dot(self, x: float, y: float, radius: float, kind: str) -> None:
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"{_class(kind)}/>')

    def curve(self, points: Iterable[tuple[float, float]], kind: str) -> None:
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{joined}"{_class(kind)}/>')

    def __str__(self) -> str:
        size = f'viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" height="{self.height}"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{escape(self.title)}</title>",
            f"<style>{STYLE}</style>",
            '<rect width="100%" height="100%" rx="8" style="fill: var(--paper)"/>',
            *self.parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def strip(
    picture: Picture,
    top: float,
    label: str,
    values: Sequence[float],
    codes: Sequence[float],
    axis: Axis,
    sizes: Sequence[float] | None = None,
) -> None:
    """Draw values on a line, and below it what they can be stored as; what is clipped is red."""
    picture.text(LEFT, top, label)
    middle = top + 26
    picture.line(LEFT, middle, RIGHT, middle, "axis")
    for code in codes:
        picture.line(axis(code), middle + 4, axis(code), middle + 16, "code")
    step = max(b - a for a, b in pairwise(codes))
    for value, size in zip(values, sizes or [3.0] * len(values), strict=True):
        clipped = not min(codes) - step / 2 <= value <= max(codes) + step / 2
        picture.dot(axis(value), middle, size, "bad" if clipped else "value")
