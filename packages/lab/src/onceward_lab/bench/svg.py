"""SVG of the charts: text, shapes, the page around them, and colours for light and dark pages.

Plain SVG, without a chart library: charts need logarithmic axes and both colour schemes, and are
shown as images, without scripts.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

__all__ = ["conditions", "element", "page", "text"]

_CSS: Final = (Path(__file__).parent / "charts.css").read_text(encoding="utf-8")


def page(
    title: str, legend: Sequence[str], body: Sequence[str], *, size: tuple[float, float]
) -> str:
    """Return a chart of this width and height, with its title and lines that explain it."""
    width, height = size
    box = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{_CSS}</style>",
            element("rect", "paper", x=0.5, y=0.5, width=width - 1, height=height - 1, rx=8),
            text(20, 32, title, "title"),
            *(text(20, 54 + 17 * line, each, "faint") for line, each in enumerate(legend)),
            *body,
            "</svg>\n",
        ]
    )


def conditions(runs: Mapping[str, Any]) -> str:
    """Return when and where the results were measured."""
    if not runs:
        return "Measured by onceward bench."
    dates = sorted(str(run["at"])[:10] for run in runs.values() if "at" in run)
    last = max(runs.values(), key=lambda run: str(run.get("at", "")))
    where = ", ".join(
        each
        for each in (
            f"{last['cores']} cores" if "cores" in last else "",
            f"Python {last['python']}" if "python" in last else "",
            "fsync on",
            dates[-1] if dates else "",
        )
        if each
    )
    return f"Measured by onceward bench: contenders in turns; {where}."


def text(x: float, y: float, content: str, kind: str, *, anchor: str = "start") -> str:
    """Return a line of text."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(content)}</text>'


def element(name: str, kind: str, **attributes: float | str) -> str:
    """Return a shape."""
    written = " ".join(
        f'{key}="{value}"' if isinstance(value, str) else f'{key}="{value:.1f}"'
        for key, value in attributes.items()
    )
    return f'<{name} class="{kind}" {written}/>'
