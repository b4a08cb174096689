"""Measurements: a ratio with its spread and, for some, a target."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Target:
    """A limit for a ratio. It is only reported: machines differ, so no run fails because of it."""

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
class Measurement:
    """The median ratio of all rounds, with the smallest and the largest."""

    group: str
    name: str
    ratio: float
    least: float | None = None
    most: float | None = None
    target: Target | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        met = None if self.target is None else self.target.is_met(self.ratio)
        target = None if self.target is None else str(self.target)
        return asdict(self) | {"target": target, "met": met}


def measurement(
    group: str, name: str, row: Mapping[str, Any], target: Target | None = None
) -> Measurement:
    """Build a measurement from a row with ``ratio``, ``least``, ``most`` and other figures."""
    figures = {key: value for key, value in row.items() if key not in ("ratio", "least", "most")}
    return Measurement(
        group, name, row["ratio"], row.get("least"), row.get("most"), target, figures
    )
