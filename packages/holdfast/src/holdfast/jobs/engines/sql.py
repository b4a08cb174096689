"""The default engine: workers take jobs straight from the table and are woken by a bell."""

from collections.abc import Sequence

from holdfast.jobs.job_store import JobStore
from holdfast.ports import Delivery, Ending, Notifier

__all__ = ["SqlEngine"]


class SqlEngine:
    """Jobs on the database that also holds the business rows: nothing else to run."""

    name = "sql"

    def __init__(
        self,
        table: JobStore,
        queues: Sequence[str],
        *,
        worker: str,
        lease_seconds: float,
        notifier: Notifier | None = None,
    ) -> None:
        """Serve these queues under this worker's name."""
        self._table = table
        self._queues = tuple(queues)
        self._worker = worker
        self._lease_seconds = lease_seconds
        self._notifier = notifier or table.store.notifier()

    async def open(self) -> None:
        """Listen for the bell."""
        await self._notifier.open()

    async def close(self) -> None:
        """Stop listening."""
        await self._notifier.close()

    async def take(self, limit: int, wait_seconds: float) -> Sequence[Delivery]:
        """Claim what is due. With nothing due, wait for the bell, or for the next due time.

        After a wait it returns empty-handed, and the worker comes again: one look per wait.
        """
        jobs = await self._claim(limit)
        if jobs or wait_seconds <= 0:
            return jobs
        due_in = await self._table.due_in(self._queues)
        if due_in == 0:  # due since a moment ago; or held by someone, who rings when done
            jobs = await self._claim(limit)
            if jobs:
                return jobs
            due_in = None
        await self._notifier.wait(
            wait_seconds if due_in is None else min(wait_seconds, due_in + 0.001)
        )
        return []

    async def renew(self, deliveries: Sequence[Delivery]) -> set[tuple[str, str]]:
        """Renew leases in the table."""
        return await self._table.renew(
            (delivery.job.lease for delivery in deliveries),
            worker=self._worker,
            lease_seconds=self._lease_seconds,
        )

    async def settle(self, delivery: Delivery, ending: Ending) -> None:
        """Do nothing: the table knows already."""

    def notify(self) -> None:
        """Wake the workers, this one included."""
        self._notifier.notify()

    def wake(self) -> None:
        """Let a waiting ``take`` return."""
        self._notifier.notify()

    async def _claim(self, limit: int) -> list[Delivery]:
        jobs = await self._table.claim(
            self._queues, worker=self._worker, limit=limit, lease_seconds=self._lease_seconds
        )
        return [Delivery(job) for job in jobs]
