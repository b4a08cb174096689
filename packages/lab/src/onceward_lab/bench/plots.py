"""SVG charts of the results: ratios with their targets, growth curves, and the comparison."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from onceward_lab.bench.comparison import draw_comparison
from onceward_lab.bench.svg import conditions, element, page, text

__all__ = ["draw"]

_WIDTH: Final = 960
# Of the labels, at most, by character; of the axis; of the values.
_CHARACTER, _AXIS, _VALUES = 7.6, 260, 150
_ROW, _DOT = 20, 4.5
_HEAD: Final = 112

_CHARTS: Final = (
    ("at-least", "≥", "Share of the bare alternative or the best peer: more is better"),
    ("at-most", "≤", "Cost as a multiple: less is better"),
)


def draw(found: dict[str, Any], directory: Path) -> list[Path]:
    """Draw every chart for which there are results; returns the files."""
    measurements = found.get("measurements", [])
    charts: dict[str, str | None] = {}
    for name, sign, title in _CHARTS:
        chosen = [row for row in measurements if (row["target"] or "").startswith(sign)]
        charts[name] = _dots(chosen, title, found.get("runs", {})) if chosen else None
    curves = found.get("curves")
    charts["growth"] = _curves(curves, found.get("runs", {})) if curves else None
    charts["compare"] = draw_comparison(found)
    written = []
    for name, chart in charts.items():
        if chart is not None:
            path = directory / f"{name}.svg"
            path.write_text(chart, encoding="utf-8")
            written.append(path)
    return written


def _dots(rows: Sequence[dict[str, Any]], title: str, runs: Mapping[str, Any]) -> str:
    """Return a chart with a dot and a tick for the target in each row, missed targets first."""
    ordered = sorted(rows, key=lambda row: bool(row["met"]))
    missed = sum(not row["met"] for row in rows)
    shown = [value for row in rows for value in (row["ratio"], _target(row))]
    ticks = _powers_of_two(min(shown), max(shown))
    left = 32 + _CHARACTER * max(len(_label(row)) for row in rows)
    width = left + _AXIS + _VALUES
    x = _logarithmic(ticks[0], ticks[-1], left, left + _AXIS)
    bottom = _HEAD + _ROW * len(rows)
    body = [
        element("line", "one" if tick == 1 else "grid", x1=x(tick), y1=_HEAD, x2=x(tick), y2=bottom)
        for tick in ticks
    ]
    for index, row in enumerate(ordered):
        body += _dot(_HEAD + _ROW * (index + 0.5), row, x, (left - 12, width - 20))
    for y in (_HEAD - 8, bottom + 16):
        body += [text(x(tick), y, _name(tick), "faint", anchor="middle") for tick in ticks]
    body.append(text(20, bottom + 44, conditions(runs), "faint"))
    legend = (
        "Dot: measured, the median of the rounds; tick: target. Logarithmic axis.",
        f"{missed} of {len(rows)} targets missed; these are first.",
    )
    return page(title, legend, body, size=(width, bottom + 58))


def _dot(
    y: float, row: Mapping[str, Any], x: Callable[[float], float], ends: tuple[float, float]
) -> list[str]:
    target, kind = _target(row), "ours" if row["met"] else "missed"
    value = f"{row['ratio']:.2f} ({row['target']})"
    label = "label" if row["met"] else "missed"
    return [
        text(ends[0], y + 4.5, _label(row), label, anchor="end"),
        element("line", "goal", x1=x(target), y1=y - 7, x2=x(target), y2=y + 7),
        element("circle", kind, cx=x(row["ratio"]), cy=y, r=_DOT),
        text(ends[1], y + 4.5, value if row["met"] else f"missed: {value}", label, anchor="end"),
    ]


def _label(row: Mapping[str, Any]) -> str:
    return f"{row['group'].split(' ÷ ')[0]}: {row['name'].removeprefix('Onceward, ')}"


def _target(row: Mapping[str, Any]) -> float:
    return float(row["target"].split()[1])


def _curves(curves: Sequence[dict[str, Any]], runs: Mapping[str, Any]) -> str:
    """Return a chart of ratios by rows, both on logarithmic axes from the same zero point."""
    left, right, top, height = 72, _WIDTH - 40, 96, 300
    rows = [point["rows"] for curve in curves for point in curve["points"]]
    ratios = [point["ratio"] for curve in curves for point in curve["points"]]
    decades = [
        10**power
        for power in range(math.floor(math.log10(min(rows))), math.ceil(math.log10(max(rows))) + 1)
    ]
    levels = _powers_of_two(min(ratios), max(ratios))
    bottom = top + height
    x = _logarithmic(decades[0], decades[-1], left, right)
    y = _logarithmic(levels[0], levels[-1], bottom, top)
    body = []
    for level in levels:
        kind = "one" if level == 1 else "grid"
        body.append(element("line", kind, x1=left, y1=y(level), x2=right, y2=y(level)))
        body.append(text(left - 10, y(level) + 4.5, f"{_name(level)}x", "faint", anchor="end"))
    for decade in decades:
        body.append(element("line", "grid", x1=x(decade), y1=top, x2=x(decade), y2=bottom))
        body.append(text(x(decade), bottom + 18, f"{decade:,}", "faint", anchor="middle"))
    for number, curve in enumerate(curves):
        points = [(x(point["rows"]), y(point["ratio"])) for point in curve["points"]]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        body.append(element("polyline", f"curve c{number % 4}", points=line))
        body += [element("circle", f"k{number % 4}", cx=a, cy=b, r=4) for a, b in points]
        at = bottom + 44 + 20 * number
        body.append(element("circle", f"k{number % 4}", cx=left + 4, cy=at - 4, r=4))
        last = curve["points"][-1]
        name = f"{curve['name']} ({curve['unit']}): {last['ratio']:.2f}x at {last['rows']:,}"
        body.append(text(left + 18, at, name, "label"))
    end = bottom + 44 + 20 * len(curves)
    body.append(text(20, end + 14, conditions(runs), "faint"))
    legend = (
        "Each point is measured in turns with few or no rows (1x). Both axes are logarithmic.",
    )
    title = "Time of one operation as the tables grow ÷ its time with few or no rows"
    return page(title, legend, body, size=(_WIDTH, end + 30))


def _logarithmic(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return the place of a value on a logarithmic axis."""
    span = math.log(high / low) or 1.0
    return lambda value: start + math.log(value / low) / span * (end - start)


def _powers_of_two(low: float, high: float) -> list[float]:
    """Return the powers of two around all values, and around 1."""
    first = math.floor(math.log2(min(low, 1)))
    last = math.ceil(math.log2(max(high, 1)))
    return [2.0**power for power in range(first, max(last, first + 1) + 1)]


def _name(tick: float) -> str:
    return f"{tick:g}" if tick >= 1 else f"1/{1 / tick:g}"
