"""Bugs of what operators do: paused queues and cancelled jobs."""

from typing import Any

from onceward.jobs import job_store
from onceward.jobs.admin import PausedQueues
from onceward.stores.table_names import TableNames
from onceward_lab.mutations.planting import Replacement, bug, untyped

JOB_STORE = untyped(job_store)


def _sql(names: set[str], before: str, after: str) -> list[Replacement]:
    """Change the text of some queries of the job store."""
    right = JOB_STORE._statements

    def statements(database: str, tables: TableNames, query: str) -> Any:
        found = right(database, tables, query)
        if query not in names:
            return found
        wrong = tuple(text.replace(before, after) for text in found)
        assert wrong != found
        return wrong

    return [(JOB_STORE, "_statements", statements)]


@bug
def jobs_of_paused_queues_claimed() -> list[Replacement]:
    paused = "NOT IN (SELECT queue FROM onceward_paused_queues)"
    return _sql({"claim", "claim_these"}, paused, "IS NOT NULL")


@bug
def cancelled_job_stays_in_its_queue() -> list[Replacement]:
    return _sql({"cancel"}, "DELETE FROM onceward_jobs", "UPDATE onceward_jobs SET merged = merged")


@bug
def queue_stays_paused() -> list[Replacement]:
    async def resume(_self: PausedQueues, _queue: str, *, actor: str, reason: str) -> bool:
        return bool(actor and reason)

    return [(PausedQueues, "resume", resume)]
