"""Rows of settled days, and helpers that quarantine or reject a day."""

from datetime import date
from typing import Any

from .fixtures import ok
from .step_fixtures import TODAY, Stepping

NODE = "node.even-stride"


async def backwards(steps: Stepping, day: date = TODAY, **fields: Any) -> None:
    """Quarantine a day with a counter that decreases."""
    await steps.walk(day, 5000, hours=(6, 10), **fields)
    await steps.walk(day, 3000, hours=(6, 11), **fields)


async def take(steps: Stepping, node: str = NODE) -> None:
    """Allocate a node while steps are pending."""
    device = steps.game.device()
    await device.finish("quest.001")
    (allocation,) = ok(await device.allocate(node))["allocations"]
    assert allocation["provisional"] is True


async def allocations(steps: Stepping) -> list[tuple[str, bool]]:
    tree = await steps.game.device().tree()
    return [(each["nodeId"], each["provisional"]) for each in tree["allocations"]]


async def outcome(steps: Stepping, walker: str) -> dict[str, Any]:
    days = await steps.days(walker)
    return {
        "days": {
            day: (item["reconciliationStatus"], item["acceptedCount"], item["attested"])
            for day, item in days.items()
        },
        "streak": await steps.streak(walker),
        "energy": await steps.energy(walker),
    }
