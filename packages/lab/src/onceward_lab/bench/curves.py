"""Growth curves: the time of one operation as the tables grow."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["Curve", "Point", "sizes"]


class Point(NamedTuple):
    """The time with ``rows`` rows, and its ratio to the time with few or none."""

    rows: int
    us: float
    ratio: float


@dataclass(frozen=True)
class Curve:
    """One operation at growing table sizes; ``unit`` names the rows."""

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
    """Return ``least`` and its multiples by powers of ten, up to ``most``."""
    found = [least]
    while found[-1] * 10 <= most:
        found.append(found[-1] * 10)
    return found
