"""The relay: tells the broker of jobs that are due. The rows of the table are its outbox.

A row stays until its job is done, whatever the broker says. To publish comes first and to mark it
second, so a relay that dies in between publishes again: under the same number, which the broker
throws away for two minutes, and the lease after that.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from holdfast.errors import StoreError
from holdfast.jobs.engines.nats_connection import Broker
from holdfast.jobs.job_store import JobStore
from holdfast.ports import FaultPoints, Notifier

__all__ = ["FAULT_POINTS", "Relay"]

# Where a relay may die, and tests make it die.
FAULT_POINTS: Final = ("relay_before_publish", "relay_before_mark")

# How many due jobs of one queue the broker knows at most, and how many it hears of at once.
_FRONT: Final = 4000
_AT_ONCE: Final = 500
# Between publishing and marking: workers take the rows first, which the mark would be in the way
# of; and jobs that are committed meanwhile come along with the next round.
_BREATH_SECONDS: Final = 0.01
_LOOK_SECONDS: Final = 1.0
# A relay that hangs in its turn loses it after this time. Longer than any answer takes.
_TURN_SECONDS: Final = 30.0

_log = logging.getLogger("holdfast.jobs")


class Relay:
    """Publishes what is due, when the bell rings, when a job's time comes, and once a second."""

    def __init__(
        self,
        table: JobStore,
        queues: Sequence[str],
        broker: Broker,
        *,
        notifier: Notifier,
        name: str,
        again_after_seconds: float,
        faults: FaultPoints | None = None,
    ) -> None:
        """Publish jobs of these queues; relays of one ``name`` take turns."""
        self._table = table
        self._queues = tuple(queues)
        self._broker = broker
        self._notifier = notifier
        self._name = f"{name} {' '.join(sorted(queues))}"
        self._again_after_seconds = again_after_seconds
        self._faults = faults

    async def run(self) -> None:
        """Go on until cancelled."""
        while True:
            await self._broker.up.wait()
            try:
                seconds = await self._round()
            except StoreError as error:
                _log.warning("jobs cannot be published, trying again: %s", error)
                seconds = _LOOK_SECONDS
            except Exception:  # noqa: BLE001 - nobody else would publish; none may end us
                _log.exception("jobs cannot be published, trying again")
                seconds = _LOOK_SECONDS
            await self._notifier.wait(seconds)

    async def _round(self) -> float:
        """Publish one batch; returns after how many seconds to look again."""
        found, published = await self.publish_due()
        if published < found:
            await asyncio.sleep(_LOOK_SECONDS)
            return 0.0
        if found:
            return 0.0
        due_in = await self._table.publish_due_in(self._queues)
        return _LOOK_SECONDS if due_in is None else min(_LOOK_SECONDS, due_in + 0.001)

    async def publish_due(self) -> tuple[int, int]:
        """Publish and mark one batch; returns how many were due and how many were published."""
        async with self._table.relay_turn(self._name, idle_seconds=_TURN_SECONDS) as is_ours:
            if not is_ours:  # whoever has the turn was rung too, and looks again after it
                return 0, 0
            jobs = await self._table.to_publish(
                self._queues,
                front=_FRONT,
                limit=_AT_ONCE,
                again_after_seconds=self._again_after_seconds,
            )
            if not jobs:
                return 0, 0
            await self._reach("relay_before_publish")
            published = await self._broker.publish(jobs)
            if len(jobs) < _AT_ONCE:
                await asyncio.sleep(_BREATH_SECONDS)
            await self._reach("relay_before_mark")
            if published:
                await self._table.mark_published(published)
            return len(jobs), len(published)

    async def _reach(self, point: str) -> None:
        if self._faults is not None:
            await self._faults.reach(point)
