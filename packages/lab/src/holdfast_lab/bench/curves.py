"""Growth curves: what one look costs as the tables grow tenfold, and tenfold again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["Curve", "Point", "sizes"]


class Point(NamedTuple):
    """One look beside so many: its microseconds, and by turns with a look beside few or none."""

    rows: int
    us: float
    ratio: float


@dataclass(frozen=True)
class Curve:
    """One look beside more and more of something."""

    name: str
    unit: str
    points: Sequence[Point]

    def as_json(self) -> dict[str, Any]:
        points = [
            {"rows": point.rows, "us": round(point.us, 2), "ratio": round(point.ratio, 3)}
            for point in self.points
        ]
        return {"name": self.name, "unit": self.unit, "points": points}


def sizes(least: int, most: int) -> list[int]:
    """Return tenfold steps."""
    found = [least]
    while found[-1] * 10 <= most:
        found.append(found[-1] * 10)
    return found
