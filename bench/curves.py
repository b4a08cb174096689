"""Growth curves: what one look costs as the tables grow tenfold, and tenfold again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Curve", "sizes"]

Points = list[tuple[int, float]]
"""How many there were, and the microseconds of one look beside them."""


@dataclass(frozen=True)
class Curve:
    """One look beside more and more of something."""

    name: str
    unit: str
    points: Sequence[tuple[int, float]]

    def as_json(self) -> dict[str, Any]:
        first = self.points[0][1]
        return {
            "name": self.name,
            "unit": self.unit,
            "points": [
                {"rows": rows, "us": round(us, 2), "ratio": round(us / first, 3)}
                for rows, us in self.points
            ],
        }


def sizes(least: int, most: int) -> list[int]:
    """Return tenfold steps."""
    found = [least]
    while found[-1] * 10 <= most:
        found.append(found[-1] * 10)
    return found
