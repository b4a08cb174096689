"""Bugs of the server and of the store of idempotency records."""

import asyncio
from datetime import datetime, timedelta
from typing import Any

import msgspec

from onceward import app
from onceward.guard import idempotency
from onceward.guard import request as guarded_request
from onceward.guard.caches import CacheEpoch
from onceward.guard.execution import Execution
from onceward.guard.idempotency import Idempotency
from onceward.guard.policy import Policy
from onceward.records import RecordId
from onceward.stores import base
from onceward.stores.sqlite import store, unit_of_work
from onceward.stores.sqlite.store import SqliteStore
from onceward.stores.sqlite.unit_of_work import find_any
from onceward_lab.mutations.planting import Replacement, bug, untyped
from onceward_protocol.storage.sql_files import Queries

APP, BASE, IDEMPOTENCY, REQUEST, STORE, UNIT_OF_WORK = (
    untyped(module) for module in (app, base, idempotency, guarded_request, store, unit_of_work)
)


@bug
def record_outside_the_transaction() -> list[Replacement]:
    async def commit(self: Any, execution: Any, record: Any, audit: Any) -> None:
        await self.faults.reach("before_commit")
        await execution.unit.commit(None, audit)
        await self.faults.reach("after_commit")
        if record is not None:
            another = await self.store.begin()
            await another.commit(record, None)

    return [(Idempotency, "_commit", commit)]


@bug
def cache_ignores_the_epoch() -> list[Replacement]:
    right = CacheEpoch.learn

    def learn(self: Any, reading: Any) -> None:
        if self.current.value is None:
            right(self, reading)

    return [(CacheEpoch, "learn", learn)]


@bug
def response_before_the_commit() -> list[Replacement]:
    async def commit(self: Any, execution: Any, record: Any, audit: Any) -> None:
        open_unit = execution.unit

        async def later() -> None:
            await asyncio.sleep(1.0)
            await self.faults.reach("before_commit")
            await open_unit.commit(record, audit)

        execution.keep_alive = asyncio.ensure_future(later())
        await self.faults.reach("after_commit")

    class ExecutionWithTask(Execution):  # without __slots__: it stores the task
        pass

    return [(Idempotency, "_commit", commit), (IDEMPOTENCY, "Execution", ExecutionWithTask)]


@bug
def fingerprint_without_nested_keys() -> list[Replacement]:
    right = REQUEST.body_hash

    def body_hash(body: bytes, content_type: str | None, *, volatile: Any) -> Any:
        flat = {
            name: None if isinstance(value, dict | list) else value
            for name, value in msgspec.json.decode(body).items()
        }
        return right(msgspec.json.encode(flat), content_type, volatile=volatile)

    return [(REQUEST, "body_hash", body_hash)]


@bug
def volatile_fields_in_the_fingerprint() -> list[Replacement]:
    right = REQUEST.body_hash

    def body_hash(body: bytes, content_type: str | None, *, volatile: Any) -> Any:
        return right(body, content_type, volatile=frozenset())

    return [(REQUEST, "body_hash", body_hash)]


@bug
def sweep_of_live_records() -> list[Replacement]:
    right = SqliteStore.sweep

    async def sweep(self: SqliteStore, now: datetime, limit: int) -> int:
        return await right(self, now + timedelta(days=7), limit)

    return [(SqliteStore, "sweep", sweep)]


@bug
def replay_of_another_tenants_record() -> list[Replacement]:
    def find(db: Any, sql: Queries, record_id: RecordId) -> Any:
        row = db.execute(
            "SELECT tenant FROM onceward_idempotency_records"
            " WHERE endpoint = ? AND idempotency_key = ?",
            (record_id.endpoint, record_id.key),
        ).fetchone()
        return None if row is None else find_any(db, sql, record_id._replace(tenant=row[0]))

    return [(STORE, "find_any", find)]


@bug
def server_errors_recorded_as_final() -> list[Replacement]:
    right = Policy.ttl_for

    def ttl_for(self: Policy, status: int) -> timedelta | None:
        return self.success_ttl if status >= 500 else right(self, status)

    return [(Policy, "ttl_for", ttl_for)]


@bug
def stale_actions_accepted() -> list[Replacement]:
    return [(IDEMPOTENCY, "stale_error", lambda _request, _now: None)]


@bug
def rejected_writes_kept() -> list[Replacement]:
    right = Idempotency.finish

    async def finish(self: Any, execution: Any, response: Any) -> Any:
        execution.writes_kept_on_error = True
        return await right(self, execution, response)

    return [(Idempotency, "finish", finish)]


@bug
def job_enqueued_after_the_commit() -> list[Replacement]:
    async def enqueue(
        self: Any, execution: Execution, job_type: str, payload: Any, **options: Any
    ) -> Any:
        async def later() -> None:
            await asyncio.sleep(0.5)
            request = execution.request
            cause = APP.Cause(
                request.principal.tenant,
                request.principal.actor,
                request.request_id,
                request.correlation_id,
            )
            job = APP.new_job(
                job_type,
                payload,
                cause=cause,
                max_payload_bytes=self.config.max_payload_bytes,
                **options,
            )
            own = await self.store.begin()
            await self.job_store.enqueue(own.statements, job)
            await own.commit(None, None)
            self.notifier.notify()

        execution.after_commit(lambda: tasks.append(asyncio.ensure_future(later())))

    tasks: list[Any] = []
    return [(APP.Runtime, "enqueue", enqueue)]


@bug
def second_process_not_noticed() -> list[Replacement]:
    right = BASE.load_queries
    condition = " WHERE onceward_idempotency_records.expires_at <= excluded.created_at"

    def load(package: str, *args: Any, **options: Any) -> Queries:
        found: Queries = right(package, *args, **options)
        if "save_record" not in found:
            return found
        wrong = found["save_record"].replace(condition, "")
        assert wrong != found["save_record"]
        return Queries(package, found | {"save_record": wrong})

    return [(UNIT_OF_WORK, "exists", lambda *_: False), (BASE, "load_queries", load)]


@bug
def errors_returned_without_rollback() -> list[Replacement]:
    async def abort(self: Any, execution: Any) -> None:
        if not execution.ended:
            await execution.unit.commit(None, None)
            self._end(execution, None)

    return [(Idempotency, "abort", abort)]
