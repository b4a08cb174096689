"""One speed line: a ratio, how far it spread, and what it should be."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Target:
    """What a ratio should be. Nobody's build fails by it: machines differ, and are noisy."""

    at: Literal["least", "most"]
    value: float

    def is_met(self, ratio: float) -> bool:
        return ratio >= self.value if self.at == "least" else ratio <= self.value

    def __str__(self) -> str:
        return f"{'≥' if self.at == 'least' else '≤'} {self.value:g}"


def at_least(value: float) -> Target:
    return Target("least", value)


def at_most(value: float) -> Target:
    return Target("most", value)


@dataclass(frozen=True)
class Line:
    part: str
    name: str
    ratio: float
    least: float | None = None
    most: float | None = None
    target: Target | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        met = None if self.target is None else self.target.is_met(self.ratio)
        told = None if self.target is None else str(self.target)
        return asdict(self) | {"target": told, "met": met}


def line(part: str, name: str, row: Mapping[str, Any], target: Target | None = None) -> Line:
    """Make a line of a row that has ``ratio``, ``least`` and ``most``, and whatever else."""
    figures = {key: value for key, value in row.items() if key not in ("ratio", "least", "most")}
    return Line(part, name, row["ratio"], row.get("least"), row.get("most"), target, figures)
