"""Engines that deliver jobs to a worker: the database itself, or a broker of another package.

Workers lease jobs from the job table, woken by a notifier. A package adds a broker with an entry
point in its ``pyproject.toml``::

    [project.entry-points."onceward.engines"]
    nats = "onceward_nats.jetstream:jetstream"

The object is called with the broker's URL and returns an ``EngineMaker`` for ``Worker``.
"""

from collections.abc import Collection, Sequence
from importlib.metadata import entry_points
from typing import Any, Final

from onceward.errors import MissingExtraError
from onceward.jobs.job_store import JobStore
from onceward.ports import Delivery, Ending, Notifier

GROUP: Final = "onceward.engines"


def broker_engine(name: str, url: str, **options: Any) -> Any:
    """Return the ``EngineMaker`` of a broker. Raises ``MissingExtraError`` without its package."""
    for entry_point in entry_points(group=GROUP, name=name):
        return entry_point.load()(url, **options)
    raise MissingExtraError(
        f"jobs by {name} need the package onceward-{name}, which is not installed"
    )


class SqlEngine:
    """Delivers jobs from the database; needs no broker."""

    name = "sql"

    def __init__(
        self,
        job_store: JobStore,
        queues: Sequence[str],
        worker: str,
        lease_seconds: float,
        *,
        notifier: Notifier | None = None,
    ) -> None:
        self._job_store = job_store
        self._queues = tuple(queues)
        self._worker = worker
        self._lease_seconds = lease_seconds
        self._notifier = notifier or job_store.store.notifier()

    async def open(self) -> None:
        await self._notifier.open()

    async def close(self) -> None:
        await self._notifier.close()

    async def take(
        self,
        limit: int,
        wait_seconds: float,
        *,
        alone: bool = True,
        skipped: Collection[str] = (),
    ) -> Sequence[Delivery]:
        """Lease due jobs. If there are none, wait for a notification or the next due time.

        Returns an empty list after the wait; the worker calls again.
        """
        queues = [queue for queue in self._queues if queue not in skipped]
        jobs = await self._claim(queues, limit, alone=alone)
        if jobs or wait_seconds <= 0:
            return jobs
        due_in = await self._job_store.due_in(queues)
        if due_in == 0:  # became due just now, or another worker has locked the row
            jobs = await self._claim(queues, limit, alone=alone)
            if jobs:
                return jobs
            due_in = None
        await self._notifier.wait(
            wait_seconds if due_in is None else min(wait_seconds, due_in + 0.001)
        )
        return []

    async def renew(self, deliveries: Sequence[Delivery]) -> set[tuple[str, str]]:
        return await self._job_store.renew(
            (delivery.job.lease for delivery in deliveries),
            worker=self._worker,
            lease_seconds=self._lease_seconds,
        )

    async def settle(self, delivery: Delivery, ending: Ending) -> None:
        """Do nothing: the job table is up to date."""

    def notify(self) -> None:
        """Wake the workers of all processes."""
        self._notifier.notify()

    def wake(self) -> None:
        """Make a waiting ``take`` return."""
        self._notifier.notify()

    async def _claim(self, queues: Sequence[str], limit: int, *, alone: bool) -> list[Delivery]:
        jobs = await self._job_store.claim(
            queues,
            worker=self._worker,
            limit=limit,
            lease_seconds=self._lease_seconds,
            alone=alone,
        )
        return [Delivery(job) for job in jobs]
