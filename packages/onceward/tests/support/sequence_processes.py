"""Processes that are killed while they run numbered requests, for a fork server."""

import asyncio
from typing import Any

from onceward import Policy
from onceward.batch.options import BatchOptions
from packages.onceward.tests.support.batch_lab import BatchLab, Item, item, open_batch_lab
from packages.onceward.tests.support.batch_processes import KillAt

STRICT = Policy(ordering="strict")
COUNT = 6
REFUSED = 5
"""The number of a request that is refused, and whose refusal is stored."""
NUMBER_USED = "number_used"
"""Where the numbers are written in the transaction, and nothing is committed."""


def items_of(client: str) -> list[Item]:
    """Return the requests of a client. A refusal ends its lane, so that is in a batch the last."""
    return [
        item(
            f"{client}-{number}",
            "422" if number == REFUSED else "",
            client_id=client,
            sequence=number,
        )
        for number in range(1, COUNT + 1)
    ]


def headers_of(one: Item) -> dict[str, str]:
    return {"X-Client-ID": one["client_id"], "X-Sequence": str(one["sequence"])}


def send(database: str, client: str, *, is_batch: bool, point: str, times: int) -> None:
    """Send what a client has, one by one or as a batch, and be killed."""

    async def run() -> None:
        batch = BatchOptions(chunk_items=3, max_seconds=300, stall_seconds=120)
        options: dict[str, Any] = {"policy": STRICT, "batch": batch}
        faults = KillAt(point, times)
        async with open_batch_lab(database, faults=faults, **options) as lab:
            reach_after_use(lab, faults)
            await (send_batch(lab, client) if is_batch else send_singles(lab, client))

    asyncio.run(run())


def reach_after_use(lab: BatchLab, faults: KillAt) -> None:
    numbers: Any = lab.onceward.runtime.idempotency.sequences.numbers
    use = numbers.use

    async def use_and_reach(*given: Any) -> Any:
        found = await use(*given)
        await faults.reach(NUMBER_USED)
        return found

    numbers.use = use_and_reach


async def send_batch(lab: BatchLab, client: str) -> None:
    await lab.results(items_of(client)[:REFUSED])


async def send_singles(lab: BatchLab, client: str) -> None:
    for one in items_of(client):
        await lab.single(one, **headers_of(one))
