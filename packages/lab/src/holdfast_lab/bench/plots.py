"""Pictures of the results, as SVG: ratios with what they should be, and growth curves."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pygal
from pygal.style import Style

# pygal hangs an import hook of an older Python's kind on the interpreter, for plug-ins of its own
# that nobody here has. It would warn at every import from now on.
sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, pygal.PluginImportFixer)]

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
# No script: the pictures stand in a README.
_PLAIN: dict[str, Any] = {
    "style": _STYLE,
    "js": (),
    "disable_xml_declaration": True,
    "no_prefix": True,
    "width": 960,
}


def draw(found: dict[str, Any], folder: Path) -> list[Path]:
    """Draw what there is; returns the files."""
    written = []
    lines = found.get("lines", [])
    for name, title, wanted in (
        ("at-least", "Share of the bare alternative or the best peer: more is better", "≥"),
        ("at-most", "Cost as a multiple: less is better", "≤"),
    ):
        chosen = [one for one in lines if (one["target"] or "").startswith(wanted)]
        if chosen:
            written.append(_bars(chosen, title, folder / f"{name}.svg"))
    if found.get("curves"):
        written.append(_curves(found["curves"], folder / "growth.svg"))
    return written


def _bars(lines: Sequence[dict[str, Any]], title: str, path: Path) -> Path:
    chart = pygal.HorizontalBar(
        **_PLAIN,
        height=90 + 44 * len(lines),
        print_values=True,
        value_formatter=lambda value: f"{value:.2f}",
        legend_at_bottom=True,
    )
    chart.title = title
    # pygal draws the first at the bottom.
    upwards = list(reversed(lines))
    chart.x_labels = [_label(one) for one in upwards]
    chart.add("measured", [one["ratio"] for one in upwards])
    chart.add("should be", [float(one["target"].split()[1]) for one in upwards])
    path.write_text(chart.render(is_unicode=True), encoding="utf-8")
    return path


def _label(one: dict[str, Any]) -> str:
    return f"{one['part'].split(' ÷ ')[0]}: {one['name']}"[:70]


def _curves(curves: Sequence[dict[str, Any]], path: Path) -> Path:
    chart = pygal.Line(
        **_PLAIN,
        height=460,
        legend_at_bottom=True,
        legend_at_bottom_columns=2,
        value_formatter=lambda value: f"{value:.2f} times",
        range=(0, max(2.0, *(p["ratio"] for c in curves for p in c["points"]))),
    )
    chart.title = "One look as the tables grow: its time ÷ that of a look beside few or none"
    every = sorted({point["rows"] for curve in curves for point in curve["points"]})
    chart.x_labels = [f"{rows:,}" for rows in every]
    for curve in curves:
        ratios = {point["rows"]: point["ratio"] for point in curve["points"]}
        chart.add(f"{curve['name']} ({curve['unit']})", [ratios.get(rows) for rows in every])
    path.write_text(chart.render(is_unicode=True), encoding="utf-8")
    return path
