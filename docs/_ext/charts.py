"""Charts as SVG: columns are states or peers, each row an arrow from one to another, top to bottom.

One shape serves for state machines (a row is a transition) and for who says what to whom (a row is
a message). Nothing overlaps however many rows there are, and no program has to lay anything out.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

COLUMN, ROW, HEAD, MARGIN = 150, 34, 40, 20
CHARACTER = 6.2  # of the labels, about


class Arrow(NamedTuple):
    """A row: from a column to a column, and what is written on it."""

    begin: str
    end: str
    label: str


def chart(columns: Sequence[str], arrows: Sequence[Arrow]) -> str:
    """An SVG element that takes its colours from the page around it."""
    place = {name: index for index, name in enumerate(columns)}
    names = max(map(len, columns)) * CHARACTER + 16
    column = max(COLUMN, names + 10, *(_wanted(a, place[a.end] - place[a.begin]) for a in arrows))
    x = {name: MARGIN + column * (index + 0.5) for index, name in enumerate(columns)}
    width = column * len(columns) + 2 * MARGIN + max(_overhang(a, x, column) for a in arrows)
    height = HEAD + ROW * len(arrows) + MARGIN
    parts = [
        f'<svg class="chart" role="img" viewBox="0 0 {width:.0f} {height}" '
        f'style="max-width: {width:.0f}px; width: 100%" fill="none" stroke="currentColor" '
        'font-size="12" font-family="sans-serif">'
    ]
    for name, at in x.items():
        parts.append(
            f'<rect x="{at - names / 2:.0f}" y="4" width="{names:.0f}" height="24" rx="4"/>'
            + _text(at, 20, name)
            + f'<path d="M{at:.0f} 28V{height - 6}" stroke-opacity="0.35"/>'
        )
    parts += [_arrow(arrow, x, HEAD + ROW * (row + 0.7)) for row, arrow in enumerate(arrows)]
    return "".join([*parts, "</svg>"])


def _wanted(arrow: Arrow, columns: int) -> float:
    """How wide columns must be for its label to fit, if it goes so many of them to the right."""
    return (len(arrow.label) * CHARACTER + 20) / abs(columns) if columns else 0.0


def _overhang(arrow: Arrow, x: dict[str, float], column: float) -> float:
    """How far the label of an arrow to its own column stands out on the right."""
    last = arrow.begin == arrow.end == list(x)[-1]
    return max(0.0, len(arrow.label) * CHARACTER + 40 - column / 2) if last else 0.0


def _arrow(arrow: Arrow, x: dict[str, float], y: float) -> str:
    begin, end = x[arrow.begin], x[arrow.end]
    if begin == end:
        line = f'<path d="M{begin:.0f} {y - 8:.0f}h26v12h-22"/>' + _head(begin + 2, y + 4, -1)
        return line + _text(begin + 34, y + 2, arrow.label, "start")
    way = 1 if end > begin else -1
    line = f'<path d="M{begin:.0f} {y:.0f}H{end - way * 3:.0f}"/>' + _head(end - way * 2, y, way)
    return line + _text((begin + end) / 2, y - 5, arrow.label)


def _head(x: float, y: float, way: int) -> str:
    back = x - way * 7
    return f'<path d="M{x:.0f} {y:.0f}L{back:.0f} {y - 4:.0f}V{y + 4:.0f}Z" fill="currentColor"/>'


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="currentColor" '
        f'stroke="none">{escape(text)}</text>'
    )
