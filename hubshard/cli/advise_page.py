"""The advice on how often to save as a page: a chart, and the table below it. Nothing is loaded from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from hubshard.steps.intervals import Advice, IntervalCost, format_seconds

__all__ = ["page"]

_WIDTH, _HEIGHT = 820, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 28, 52
_POINTS = 120
_MOST_TIMES_BEST = 5.0
_LEAST_TICK_PIXELS = 78

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --dim: #667085; --grid: #e4e7ec; --paper: #ffffff;
        --total: #1d2330; --saving: #2f6fde; --lost: #c2410c; --best: #0f766e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ee; --dim: #98a2b3; --grid: #2b3240; --paper: #12151c; --total: #e6e8ee;
          --saving: #7aa7ff; --lost: #fb923c; --best: #5eead4; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 860px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } p { color: var(--dim); }
svg { width: 100%; height: auto; } svg text { fill: var(--dim); font-size: 12px; }
svg .grid { stroke: var(--grid); } svg path { fill: none; stroke-width: 2; }
svg .total { stroke: var(--total); } svg .saving { stroke: var(--saving); } svg .lost { stroke: var(--lost); }
svg .best { stroke: var(--best); stroke-dasharray: 4 4; }
svg text.best { fill: var(--best); font-weight: 600; stroke: none; }
svg circle { fill: var(--paper); stroke: var(--total); stroke-width: 2; } svg circle.is-best { fill: var(--best); }
.key { display: flex; gap: 1.5rem; flex-wrap: wrap; margin: .5rem 0 1.5rem; }
.key span::before { content: ""; display: inline-block; width: 1.2em; border-top: 3px solid; margin-right: .5em;
                    vertical-align: middle; }
.key .total::before { border-color: var(--total); } .key .saving::before { border-color: var(--saving); }
.key .lost::before { border-color: var(--lost); }
.table { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .35rem .6rem; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th { font-weight: 600; color: var(--dim); } tr.is-best td { color: var(--best); font-weight: 600; }
"""


def page(advice: Advice, *, columns: Sequence[str], rows: Sequence[Sequence[str]], said: str, notes: str) -> str:
    """The whole page.

    Args:
        advice: what is drawn.
        columns: headings of the table; ">" in front of one is left out.
        rows: its cells, as the rows of `advice`.
        said: the advice in a sentence.
        notes: what it stands on.
    """
    body = "".join(
        f"<tr{' class=is-best' if row.is_best else ''}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>\n"
        for row, cells in zip(advice.rows, rows, strict=True)
    )
    head = "".join(f"<th>{escape(column.removeprefix('>'))}</th>" for column in columns)
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>How often to save</title>
<style>{_STYLE}</style>
<h1>{escape(said)}</h1>
<p>{escape(notes)}</p>
{_Chart(advice).svg()}
<div class="key"><span class="total">in all</span><span class="saving">saving</span>
<span class="lost">work done twice, and beginning again</span></div>
<div class="table"><table>
<thead><tr>{head}</tr></thead>
<tbody>
{body}</tbody>
</table></div>
<p>Young, CACM 17(9), 1974; Daly, Future Generation Computer Systems 22(3), 2006. Failures come at random, at a constant
rate.</p>
</html>
"""


class _Chart:
    """Overhead over the interval, which is drawn to a logarithmic scale."""

    def __init__(self, advice: Advice) -> None:
        self._advice = advice
        seconds = [row.interval_seconds for row in advice.rows]
        self._low, self._high = math.log(min(seconds) * 0.9), math.log(max(seconds) * 1.1)
        self._top = _round_up(_MOST_TIMES_BEST * advice.best.overhead)
        step = math.exp((self._high - self._low) / _POINTS)
        self._curve = [advice.at(math.exp(self._low) * step**number) for number in range(_POINTS + 1)]

    def svg(self) -> str:
        """The chart."""
        best = self._advice.best
        x = self._x(best.interval_seconds)
        anchor = "end" if x > _WIDTH / 2 else "start"
        return (
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Overhead by interval between saves">'
            f"<defs><clipPath id='inside'><rect x='{_LEFT}' y='{_TOP}' width='{_WIDTH - _LEFT - _RIGHT}' "
            f"height='{_HEIGHT - _TOP - _BOTTOM}'/></clipPath></defs>"
            f"{self._grid()}"
            f'<line class="best" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
            f'<text class="best" x="{x + (-6 if anchor == "end" else 6):.1f}" y="{_TOP - 8}" text-anchor="{anchor}">'
            f"best: {escape(format_seconds(best.interval_seconds))}, {best.overhead:.1%}</text>"
            f"<g clip-path='url(#inside)'>"
            f"{self._line('saving', lambda row: row.saving)}"
            f"{self._line('lost', lambda row: row.overhead - row.saving)}"
            f"{self._line('total', lambda row: row.overhead)}"
            f"{''.join(map(self._dot, self._advice.rows))}</g></svg>"
        )

    def _x(self, seconds: float) -> float:
        return _LEFT + (math.log(seconds) - self._low) / (self._high - self._low) * (_WIDTH - _LEFT - _RIGHT)

    def _y(self, share: float) -> float:
        return _HEIGHT - _BOTTOM - min(share / self._top, 2.0) * (_HEIGHT - _TOP - _BOTTOM)

    def _grid(self) -> str:
        lines = []
        for number in range(6):
            share = self._top * number / 5
            y = self._y(share)
            lines.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            label = f"{100 * share:.3g} %"
            lines.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
        last = -math.inf
        for row in self._advice.rows:
            x = self._x(row.interval_seconds)
            if x - last >= _LEAST_TICK_PIXELS:
                label = escape(format_seconds(row.interval_seconds))
                lines.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{label}</text>')
                last = x
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        lines.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">work between two saves</text>')
        return "".join(lines)

    def _line(self, kind: str, share: Callable[[IntervalCost], float]) -> str:
        points = [f"{self._x(row.interval_seconds):.1f} {self._y(share(row)):.1f}" for row in self._curve]
        return f'<path class="{kind}" d="M{"L".join(points)}"/>'

    def _dot(self, row: IntervalCost) -> str:
        x, y = self._x(row.interval_seconds), self._y(row.overhead)
        title = (
            f"every {format_seconds(row.interval_seconds)}: {row.overhead:.2%} in all, {row.saving:.2%} saving, "
            f"{format_seconds(row.lost_seconds)} lost per failure"
        )
        kind = ' class="is-best"' if row.is_best else ""
        return f'<circle{kind} cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{escape(title)}</title></circle>'


def _round_up(share: float) -> float:
    """The next of 1, 2, 5, 10, ..."""
    power = 10.0 ** math.floor(math.log10(share))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= share)
