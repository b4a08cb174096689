"""Bugs of the jobs: store, executor, relay."""

import re
from typing import Any

from onceward import app
from onceward.jobs import job_store
from onceward.jobs.executor import JobExecutor
from onceward.jobs.job_store import JobStore
from onceward.ports import Finished
from onceward.stores.table_names import TableNames
from onceward_lab.mutations.planting import Replacement, bug, untyped

JOB_STORE, APP = untyped(job_store), untyped(app)


def _sql(name: str, change: Any) -> list[Replacement]:
    """Change the statements of one query of the job store."""
    right = JOB_STORE._statements

    def statements(database: str, names: TableNames, query: str) -> Any:
        found = right(database, names, query)
        if query != name:
            return found
        wrong = tuple(change(found))
        assert wrong != found
        return wrong

    return [(JOB_STORE, "_statements", statements)]


@bug
def lease_not_fenced() -> list[Replacement]:
    def unfenced(statements: Any) -> Any:
        return [
            text.replace("AND lease = :lease AND worker = :worker", "")
            .replace("AND visible_at > NOW_MS", "")
            .replace(f"AND visible_at > {JOB_STORE._SQLITE_NOW}", "")
            for text in statements
        ]

    return _sql("complete_one", unfenced)


@bug
def marker_not_written() -> list[Replacement]:
    return _sql("complete_one", lambda s: [s[-1].replace("AND changes() = 1", "")])


@bug
def marker_in_another_transaction() -> list[Replacement]:
    async def complete(self: Any, result: str | None) -> Any:
        config, context, job = self._config, self.context, self.job
        self._is_committing = True
        unit = context.open_unit
        if unit is not None:
            context.seal()
            await unit.commit(None, None)
        await self._reach("job_before_commit")
        unit = await config.job_store.store.begin()
        await config.job_store.complete_within(unit, job, result, worker=config.worker_name)
        await unit.commit(None, None)
        await self._reach("job_after_commit")
        config.engine.notify()
        return "done", Finished()

    return [(JobExecutor, "_complete", complete)]


@bug
def coalesced_into_a_running_job() -> list[Replacement]:
    right = JOB_STORE._statements

    def statements(database: str, names: TableNames, query: str) -> Any:
        found = right(database, names, query)
        if query not in {"claim", "claim_these"}:
            return found
        wrong = tuple(text.replace("waiting_key = NULL,", "") for text in found)
        assert wrong != found
        return wrong

    return [(JOB_STORE, "_statements", statements)]


@bug
def order_of_jobs_ignored() -> list[Replacement]:
    right = APP.Runtime.enqueue

    async def enqueue(self: Any, *args: Any, **options: Any) -> Any:
        return await right(self, *args, **options | {"order": None})

    return [(APP.Runtime, "enqueue", enqueue)]


@bug
def next_in_line_not_released() -> list[Replacement]:
    async def release_next(_self: JobStore, _tx: Any, _job: Any) -> None:
        return

    return [(JobStore, "_release_next", release_next)]


@bug
def dead_letters_not_written() -> list[Replacement]:
    return _sql("dead_letter", lambda s: [re.sub(r"AND EXISTS \(.*\)", "", s[-1])])


@bug
def rows_deleted_when_published() -> list[Replacement]:
    def delete(_statements: Any) -> Any:
        numbers = "SELECT json_extract(value, '$.seq') FROM json_each(:jobs)"
        return [f"DELETE FROM onceward_jobs WHERE seq IN ({numbers})"]

    return _sql("mark_published", delete)


@bug
def failed_jobs_forgotten() -> list[Replacement]:
    async def fail(self: Any, reason: str, error: str, **_options: Any) -> Any:
        await self._roll_back()
        config = self._config
        await config.job_store.remove_completed(self.job, worker=config.worker_name)
        return "retried", Finished()

    return [(JobExecutor, "_fail", fail)]


@bug
def effects_kept_without_the_marker() -> list[Replacement]:
    # "The lease is lost, but the work is done."
    async def complete_within(
        self: JobStore, unit: Any, job: Any, result: str | None, *, worker: str
    ) -> None:
        values = JOB_STORE._of(job.lease, worker) | {"result": result}
        await self.run(unit.statements, "complete_one", values)
        await self._release_next(unit.statements, job)

    return [(JobStore, "complete_within", complete_within)]
