"""Plots as inline SVG text; colours come from the page's style sheet, classes `s0`, `s1`, ... in the order given."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 12, 12, 40
_ROW, _LABELS = 34, 156
# Room for the larger letters of narrow pages.
_LEGEND_ROW, _LETTER = 24, 9.4


@dataclass(frozen=True)
class Series:
    """One curve; `number` is its colour's, equal numbers share it."""

    name: str
    values: Sequence[float | None]
    number: int


def draw_curves(
    series: Sequence[Series],
    label: str,
    band: tuple[Sequence[float | None], Sequence[float | None]] | None = None,
    log: bool = False,
    band_name: str = "envelope",
) -> str:
    """Draws curves over steps.

    Args:
        series: what to draw; None leaves a gap, and so does a number that a logarithm has not.
        label: of the vertical axis.
        band: lower and upper ends of a grey band.
        log: whether the vertical axis is logarithmic.
        band_name: what the band is, for the legend.
    """
    curves = [[_place(value, log) for value in each.values] for each in series]
    ends = [[_place(value, log) for value in end] for end in band] if band is not None else []
    known = [value for curve in (*curves, *ends) for value in curve if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    margin = 0.05 * (high - low) or max(abs(high), 1e-12) * 0.1
    low, high = low - margin, high + margin
    num_steps = max(len(curve) for curve in curves)

    def at(step: int, value: float) -> str:
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / max(1, num_steps - 1)
        y = _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - value) / (high - low)
        return f"{x:.1f},{y:.1f}"

    parts = _axes(low, high, num_steps, label, log)
    if ends:
        lower, upper = ([at(step, value) for step, value in enumerate(end) if value is not None] for end in ends)
        parts.append(f'<polygon class="band" points="{" ".join([*upper, *reversed(lower)])}"/>')
    for each, curve in zip(series, curves, strict=True):
        points = " ".join(at(step, value) for step, value in enumerate(curve) if value is not None)
        parts.append(f'<polyline class="line s{each.number}" points="{points}"/>')
    names = {each.name: f"s{each.number}" for each in series}
    return _svg(parts, _HEIGHT, label, names | ({band_name: "band"} if ends else {}))


def draw_intervals(rows: Sequence[tuple[str, float, float, float]], marks: Sequence[float], label: str) -> str:
    """Draws intervals (name, low, middle, high) one under the other, and dashed vertical lines at `marks`."""
    known = [value for _, *values in rows for value in values if math.isfinite(value)] + list(marks)
    low, high = min(known), max(known)
    margin = 0.08 * (high - low) or 0.1
    low, high = low - margin, high + margin
    height = _TOP + _ROW * len(rows) + _BOTTOM
    bottom = height - _BOTTOM

    def at(value: float) -> float:
        return _LABELS + (_WIDTH - _LABELS - _RIGHT) * (value - low) / (high - low)

    parts = [f'<line class="axis" x1="{_LABELS}" y1="{bottom}" x2="{_WIDTH - _RIGHT}" y2="{bottom}"/>']
    for tick in _ticks(low, high):
        parts.append(f'<text x="{at(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    for mark in marks:
        parts.append(f'<line class="mark" x1="{at(mark):.1f}" y1="{_TOP}" x2="{at(mark):.1f}" y2="{bottom}"/>')
    for number, (name, lower, middle, upper) in enumerate(rows):
        y = _TOP + _ROW * (number + 0.5)
        parts.append(f'<text x="{_LABELS - 8}" y="{y + 4}" text-anchor="end">{escape(name)}</text>')
        if all(math.isfinite(value) for value in (lower, middle, upper)):
            parts.append(f'<line class="line s{number}" x1="{at(lower):.1f}" y1="{y}" x2="{at(upper):.1f}" y2="{y}"/>')
            parts.append(f'<circle class="dot s{number}" cx="{at(middle):.1f}" cy="{y}" r="5"/>')
    return _svg(parts, height, label, {})


def draw_stacks(rows: Mapping[str, Mapping[str, float]], label: str) -> str:
    """Draws a stacked bar for each row, its parts in their order; what is negative has no width."""
    totals = {name: sum(max(0.0, value) for value in parts.values()) for name, parts in rows.items()}
    scale = (_WIDTH - _LABELS - _RIGHT - 70) / (max(totals.values()) or 1.0)
    parts = []
    for number, (name, row) in enumerate(rows.items()):
        x, y = float(_LABELS), _TOP + _ROW * number
        parts.append(f'<text x="{_LABELS - 8}" y="{y + 18}" text-anchor="end">{escape(name)}</text>')
        for colour, (part, value) in enumerate(row.items()):
            width = max(0.0, value) * scale
            title = f"<title>{escape(part)}: {value:.2f}</title>"
            place = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 10}"'
            parts.append(f'<rect class="bar s{colour}" {place}>{title}</rect>')
            x += width
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 18}">{totals[name]:.4g} ms</text>')
    names = {part: f"s{colour}" for colour, part in enumerate(next(iter(rows.values())))}
    return _svg(parts, _TOP + _ROW * len(rows), label, names)


def _axes(low: float, high: float, num_steps: int, label: str, log: bool) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = [f'<line class="axis" x1="{_LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>']
    for tick in _ticks(low, high):
        y = _TOP + (bottom - _TOP) * (high - tick) / (high - low)
        text = f"{10**tick:.0e}" if log else f"{tick + 0.0:g}"  # + 0.0: no minus before a zero
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for tick in _ticks(0, num_steps - 1):
        if tick == int(tick):
            x = _LEFT + (right - _LEFT) * tick / max(1, num_steps - 1)
            parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{right}" y="{_HEIGHT - 6}" text-anchor="end">step</text>')
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """Returns about five round numbers between two."""
    rough = (high - low) / 5 or 1.0
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step)
    return [round(index * step, 12) for index in range(first, math.floor(high / step) + 1)]


def _place(value: float | None, log: bool) -> float | None:
    if value is None or not math.isfinite(value) or (log and value <= 0):
        return None
    return math.log10(value) if log else value


def _svg(parts: list[str], height: int, label: str, legend: Mapping[str, str]) -> str:
    """Puts parts into a picture, with its legend underneath."""
    x, y = 8.0, height + 16.0
    entries = []
    for name, style in legend.items():
        width = 26 + _LETTER * len(name)
        if x + width > _WIDTH and x > 8:
            x, y = 8.0, y + _LEGEND_ROW
        entries.append(f'<rect class="bar {style}" x="{x:.1f}" y="{y - 10:.1f}" width="12" height="12"/>')
        entries.append(f'<text x="{x + 17:.1f}" y="{y:.1f}">{escape(name)}</text>')
        x += width
    total = y + 8 if legend else height
    body = "".join([*parts, *entries])
    return f'<svg viewBox="0 0 {_WIDTH} {total:.0f}" role="img" aria-label="{escape(label, quote=True)}">{body}</svg>'
