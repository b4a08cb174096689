"""SVG charts of the results: ratios with their targets, growth curves, and the comparison."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pygal
from pygal.style import Style

from onceward_lab.bench.comparison import draw_comparison

# pygal installs an import hook with an outdated interface, for plug-ins that are not used here. It
# would cause a warning at every later import.
sys.meta_path[:] = [hook for hook in sys.meta_path if not isinstance(hook, pygal.PluginImportFixer)]

__all__ = ["draw"]

_STYLE = Style(
    background="white",
    plot_background="white",
    font_family="Helvetica, Arial, sans-serif",
    colors=("#1b7f5c", "#c94f3d", "#3b6fb5", "#b58a3b", "#7a4fa3"),
    label_font_size=12,
    major_label_font_size=12,
    value_font_size=11,
    value_colors=("black",) * 5,
    title_font_size=16,
    legend_font_size=12,
)
# No scripts: the charts are shown as images.
_OPTIONS: dict[str, Any] = {
    "style": _STYLE,
    "js": (),
    "disable_xml_declaration": True,
    "no_prefix": True,
    "width": 960,
}


def draw(found: dict[str, Any], directory: Path) -> list[Path]:
    """Draw every chart for which there are results; returns the files."""
    written = []
    measurements = found.get("measurements", [])
    for name, title, sign in (
        ("at-least", "Share of the bare alternative or the best peer: more is better", "≥"),
        ("at-most", "Cost as a multiple: less is better", "≤"),
    ):
        chosen = [row for row in measurements if (row["target"] or "").startswith(sign)]
        if chosen:
            written.append(_bars(chosen, title, directory / f"{name}.svg"))
    if found.get("curves"):
        written.append(_curves(found["curves"], directory / "growth.svg"))
    comparison = draw_comparison(found)
    if comparison is not None:
        path = directory / "compare.svg"
        path.write_text(comparison, encoding="utf-8")
        written.append(path)
    return written


def _bars(measurements: Sequence[dict[str, Any]], title: str, path: Path) -> Path:
    chart = pygal.HorizontalBar(
        **_OPTIONS,
        height=90 + 44 * len(measurements),
        print_values=True,
        value_formatter=lambda value: f"{value:.2f}",
        legend_at_bottom=True,
    )
    chart.title = title
    # pygal draws the first bar at the bottom.
    upwards = list(reversed(measurements))
    chart.x_labels = [_label(row) for row in upwards]
    chart.add("measured", [row["ratio"] for row in upwards])
    chart.add("target", [float(row["target"].split()[1]) for row in upwards])
    path.write_text(chart.render(is_unicode=True), encoding="utf-8")
    return path


def _label(row: dict[str, Any]) -> str:
    return f"{row['group'].split(' ÷ ')[0]}: {row['name']}"[:70]


def _curves(curves: Sequence[dict[str, Any]], path: Path) -> Path:
    chart = pygal.Line(
        **_OPTIONS,
        height=460,
        legend_at_bottom=True,
        legend_at_bottom_columns=2,
        value_formatter=lambda value: f"{value:.2f} times",
        range=(0, max(2.0, *(p["ratio"] for c in curves for p in c["points"]))),
    )
    chart.title = "Time of one operation as the tables grow ÷ its time with few or no rows"
    every = sorted({point["rows"] for curve in curves for point in curve["points"]})
    chart.x_labels = [f"{rows:,}" for rows in every]
    for curve in curves:
        ratios = {point["rows"]: point["ratio"] for point in curve["points"]}
        chart.add(f"{curve['name']} ({curve['unit']})", [ratios.get(rows) for rows in every])
    path.write_text(chart.render(is_unicode=True), encoding="utf-8")
    return path
