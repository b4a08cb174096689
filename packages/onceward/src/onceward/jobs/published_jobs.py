"""Statements of an engine with a broker: which jobs are published, and which are not."""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from onceward.jobs.job_store import JobStore, array_literal, json_text, named_as_json
from onceward.ports import Row

_RELAY: Final = "onceward.jobs.relay"


class ToDo(NamedTuple):
    """A job that is not finished."""

    queue: str
    # In how many seconds it can be leased; None if it waits for another one of its order key.
    free_in_seconds: float | None


class PublishedJobs:
    """The jobs of a database that a relay publishes to a broker."""

    def __init__(self, job_store: JobStore) -> None:
        self._job_store = job_store
        self._is_sqlite = job_store.store.name == "sqlite"

    @asynccontextmanager
    async def relay_lock(self, name: str, *, idle_seconds: float) -> AsyncIterator[bool]:
        """Try to lock publishing under this name; yields whether the lock was acquired.

        SQLite has no such lock: an open transaction would block all other writers.
        """
        if self._is_sqlite:
            yield True
            return
        unit = await self._job_store.store.begin(idle_seconds=idle_seconds)
        try:
            lock = {"lock": self._job_store.store.table_names.lock_number("", _RELAY, name)}
            yield bool((await self._job_store.run(unit.statements, "relay_lock", lock))[0]["mine"])
        finally:
            await unit.rollback()

    async def to_publish(
        self, queues: Sequence[str], *, front: int, limit: int, again_after_seconds: float
    ) -> Sequence[Row]:
        """Return jobs to publish to a broker: tenant, job_id, queue, seq, published.

        At most ``front`` of each queue's due jobs are published at a time; of a paused queue, none.
        """
        values = {
            "queues": self._job_store.list_of(queues),
            "front": front,
            "limit": limit,
            "again_after_seconds": again_after_seconds,
        }
        return await self._job_store.read("to_publish", values)

    async def mark_published(self, jobs: Iterable[Row]) -> None:
        """Record that rows of ``to_publish`` were published."""
        rows = list(jobs)
        if self._is_sqlite:
            named = [
                {
                    "tenant": job["tenant"],
                    "job_id": job["job_id"],
                    "seq": job["seq"],
                    "published": job["published"] + 1,
                }
                for job in rows
            ]
            await self._job_store.write("mark_published", {"jobs": json_text(named)})
            return
        values = self._job_store.named([(job["tenant"], job["job_id"]) for job in rows]) | {
            "seqs": array_literal([str(job["seq"]) for job in rows]),
            "published": array_literal([str(job["published"] + 1) for job in rows]),
        }
        await self._job_store.write("mark_published", values)

    async def reset_published(self) -> int:
        """Record that the broker has lost all messages; return how many jobs are affected."""
        rows = await self._job_store.write("reset_published", {})
        return len(rows) if self._is_sqlite else int(rows[0]["jobs"])

    async def unpublish(self, jobs: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
        """Have jobs (tenant, id) published again; return those that no other transaction locks."""
        rows = await self._job_store.write("unpublish", self._job_store.named(list(jobs)))
        return {(row["tenant"], row["job_id"]) for row in rows}

    async def overdue(
        self, queues: Sequence[str], *, seconds: float, limit: int
    ) -> list[tuple[str, str]]:
        """Return the first ``limit`` jobs (tenant, id) that have been due for so many seconds.

        Jobs of paused queues are left out.
        """
        found: list[Row] = []
        paused = await self.paused_queues()
        for queue in queues:
            if queue in paused:
                continue
            found += await self._job_store.read(
                "overdue", {"queue": queue, "seconds": seconds, "limit": limit}
            )
        found.sort(key=lambda row: -row["overdue_seconds"])
        return [(row["tenant"], row["job_id"]) for row in found[:limit]]

    async def publish_due_in(self, queues: Sequence[str]) -> float | None:
        """Return in how many seconds the next job becomes due; None if there is none."""
        return await self._job_store.due_in(queues, query="publish_due_in")

    async def still_to_do(self, jobs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], ToDo]:
        """Return those of the jobs (tenant, id) that are not finished."""
        rows = await self._job_store.read("still_to_do", {"jobs": named_as_json(jobs)})
        return {
            (row["tenant"], row["job_id"]): ToDo(row["queue"], row["free_in_seconds"])
            for row in rows
        }

    async def paused_queues(self) -> set[str]:
        """Return the queues whose jobs are not claimed."""
        return {row["queue"] for row in await self._job_store.read("paused_queues", {})}
