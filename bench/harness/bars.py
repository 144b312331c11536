"""Draws groups of bars as an SVG that is readable on dark and light pages."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

HEIGHT, TOP, BOTTOM, SIDE = 300, 58, 34, 16  # pixels; bars grow upwards from BOTTOM
BAR, GAP = 34, 30  # width of a bar, and between groups

STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328; }
.title { font-size: 14px; font-weight: 600; }
.value { font-size: 10.5px; text-anchor: middle; }
.group { text-anchor: middle; }
.axis { stroke: #8c959f; stroke-width: 1; }
.limit { stroke: #d1242f; stroke-width: 1.5; stroke-dasharray: 5 3; }
.bar0 { fill: #0969da; } .bar1 { fill: #8c959f; } .bar2 { fill: #c4cbd3; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .limit { stroke: #ff7b72; }
  .bar0 { fill: #4493f8; } .bar1 { fill: #7d8590; } .bar2 { fill: #4b535d; }
}
"""


@dataclass(frozen=True, slots=True)
class Chart:
    """Bars in groups; a series without a value in a group has no bar there."""

    title: str
    groups: Mapping[str, Mapping[str, float]]  # group to series to value
    series: Sequence[str]
    limit: str  # the series drawn as a line over its group
    form: str  # format of values, such as .2f


def svg(chart: Chart) -> str:
    """The chart as SVG."""
    shown = {group: _bars(chart, values) for group, values in chart.groups.items()}
    width = 2 * SIDE + sum(len(bars) * BAR + GAP for bars in shown.values())
    width = max(width, 420)
    largest = max(value for values in chart.groups.values() for value in values.values())
    scale = (HEIGHT - TOP - BOTTOM) / largest
    parts = [*_heading(chart), _line("axis", SIDE, HEIGHT - BOTTOM, width - SIDE)]
    left = SIDE + GAP / 2
    for group, bars in shown.items():
        right = left + len(bars) * BAR
        for place, (index, value) in enumerate(bars):
            parts += _bar(chart, index, value, left + place * BAR, value * scale)
        if chart.limit in chart.groups[group]:
            at = HEIGHT - BOTTOM - chart.groups[group][chart.limit] * scale
            parts.append(_line("limit", left - 4, at, right + 4))
        parts.append(_text("group", (left + right) / 2, HEIGHT - BOTTOM + 18, group))
        left = right + GAP
    frame = f'viewBox="0 0 {width:g} {HEIGHT}" width="{width:g}" height="{HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {frame} role="img">'
    title = f"<title>{escape(chart.title)}</title>"
    return "\n".join([head, title, f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def _bars(chart: Chart, values: Mapping[str, float]) -> list[tuple[int, float]]:
    """(number of the series, value) per bar of a group."""
    return [(i, values[name]) for i, name in enumerate(chart.series) if name in values]


def _heading(chart: Chart) -> Iterator[str]:
    yield _text("title", SIDE, 20, chart.title)
    left = float(SIDE)
    for index, name in enumerate(chart.series):
        yield f'<rect class="bar{index}" x="{left:g}" y="30" width="10" height="10" rx="2"/>'
        yield _text("legend", left + 14, 39, name)
        left += 32 + 7 * len(name)
    yield _line("limit", left, 35, left + 16)
    yield _text("legend", left + 21, 39, chart.limit)


def _bar(chart: Chart, index: int, value: float, left: float, height: float) -> Iterator[str]:
    top = HEIGHT - BOTTOM - height
    size = f'width="{BAR - 4}" height="{height:.1f}" rx="2"'
    yield f'<rect class="bar{index}" x="{left + 2:.1f}" y="{top:.1f}" {size}/>'
    yield _text("value", left + BAR / 2, top - 4, format(value, chart.form))


def _text(kind: str, x: float, y: float, text: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _line(kind: str, left: float, y: float, right: float) -> str:
    return f'<line class="{kind}" x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
