"""SVG of the charts: text, shapes, the page around them, and colours for light and dark pages.

Plain SVG, without a chart library: charts need logarithmic axes and both colour schemes, and are
shown as images, without scripts.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final
from xml.sax.saxutils import escape

__all__ = ["conditions", "element", "page", "text"]

_CSS: Final = """
  text { font: 13px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .title { font-size: 17px; font-weight: 600; }
  .section { font-weight: 600; }
  .faint { fill: #59636e; font-size: 12px; }
  .paper { fill: #ffffff; stroke: #d8dee4; }
  .grid { stroke: #d8dee4; }
  .one { stroke: #59636e; stroke-width: 1.5; }
  .ours { fill: #1b7f5c; }
  .other { fill: #9aa4af; }
  .missed { fill: #bc4c00; font-weight: 600; }
  .goal { stroke: #1f2328; stroke-width: 2; }
  .spread { stroke: #1f2328; stroke-width: 1.2; opacity: 0.75; }
  .curve { fill: none; stroke-width: 2; }
  .c0 { stroke: #1b7f5c; } .c1 { stroke: #bc4c00; } .c2 { stroke: #0969da; }
  .c3 { stroke: #8250df; }
  .k0 { fill: #1b7f5c; } .k1 { fill: #bc4c00; } .k2 { fill: #0969da; } .k3 { fill: #8250df; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .faint { fill: #9198a1; }
    .paper { fill: #0d1117; stroke: #30363d; }
    .grid { stroke: #30363d; }
    .one { stroke: #9198a1; }
    .ours { fill: #2f9e77; }
    .other { fill: #6e7781; }
    .missed { fill: #f0883e; }
    .goal { stroke: #e6edf3; }
    .spread { stroke: #e6edf3; }
    .c0 { stroke: #2f9e77; } .c1 { stroke: #f0883e; } .c2 { stroke: #58a6ff; }
    .c3 { stroke: #bc8cff; }
    .k0 { fill: #2f9e77; } .k1 { fill: #f0883e; } .k2 { fill: #58a6ff; } .k3 { fill: #bc8cff; }
  }
"""


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
            f"<style>{_CSS}</style>",
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
