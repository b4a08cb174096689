"""Small charts as SVG, made here: nothing is drawn in the browser."""

from collections.abc import Sequence
from typing import Final

from onceward_protocol.extras import needs_extra

with needs_extra("", "onceward-operator"):
    from markupsafe import Markup

__all__ = ["sparkline"]

_WIDTH: Final = 240
_HEIGHT: Final = 40
_PADDING: Final = 2


def sparkline(values: Sequence[float], label: str) -> Markup:
    """Draw numbers as a line over an area; ``label`` is what a screen reader says."""
    top = max(values, default=0.0) or 1.0
    step = _WIDTH / max(1, len(values) - 1)
    height = _HEIGHT - 2 * _PADDING
    points = " ".join(
        f"{place * step:.1f},{_HEIGHT - _PADDING - height * value / top:.1f}"
        for place, value in enumerate(values)
    )
    return Markup(
        '<svg viewBox="0 0 {w} {h}" preserveAspectRatio="none" role="img" aria-label="{label}">'
        '<polygon points="0,{h} {points} {w},{h}" fill="currentColor" opacity="0.15"/>'
        '<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5" '
        'vector-effect="non-scaling-stroke"/></svg>'
    ).format(w=_WIDTH, h=_HEIGHT, label=label, points=points)
