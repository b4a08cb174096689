"""Bugs of the server's batches: chunks, lanes, placeholders."""

import asyncio
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

from onceward.batch.run import BatchRun
from onceward.errors import InProgressError
from onceward.guard import request as guarded_request
from onceward.guard.chunk import RequestChunk
from onceward.guard.policy import Policy
from onceward.records import Response
from onceward.stores.base import ItemUnit
from onceward_lab.mutations.planting import Replacement, bug, untyped
from onceward_protocol.batch import Results

REQUEST = untyped(guarded_request)
_SKIPPED = 424


@bug
def chunk_responds_before_its_commit() -> list[Replacement]:
    right = RequestChunk.commit
    tasks: list[Any] = []

    async def commit(self: Any) -> bool:
        async def later() -> None:
            await asyncio.sleep(1.0)
            await right(self)

        self._is_closed = True
        for _, settled in self._held:
            settled.set_result(True)
        tasks.append(asyncio.ensure_future(later()))
        return True

    return [(RequestChunk, "commit", commit)]


@bug
def chunk_remembers_before_its_commit() -> list[Replacement]:
    # A request with the same key gets the response of a transaction that may be rolled back.
    right = RequestChunk._keep

    def keep(self: Any, request: Any, record: Any, audit: Any) -> None:
        right(self, request, record, audit)
        if record is not None:
            self._idempotency.remember(record, self._epoch)
            self._idempotency.in_flight.leave(record.id, record)

    return [(RequestChunk, "_keep", keep)]


@bug
def records_of_a_chunk_in_another_transaction() -> list[Replacement]:
    right = RequestChunk.commit

    async def commit(self: Any) -> bool:
        records, self._records = self._records, {}
        self._settle = lambda: None
        is_committed = await right(self)
        if is_committed:
            for record in records.values():
                another = await self.store.begin()
                await another.commit(record, None)
        del self._settle
        self._records = records
        self._settle()
        return is_committed

    return [(RequestChunk, "commit", commit)]


@bug
def chunk_that_needs_savepoints_is_committed() -> list[Replacement]:
    def is_broken(self: Any) -> bool:
        chunk = self._chunk
        return chunk is not None and chunk.is_broken and not chunk.needs_savepoints

    return [(RequestChunk, "is_broken", property(is_broken))]


@bug
def refused_item_not_rolled_back() -> list[Replacement]:
    right = RequestChunk.finish

    async def finish(self: Any, execution: Any, response: Any) -> Any:
        execution.writes_kept_on_error = True
        return await right(self, execution, response)

    return [(RequestChunk, "finish", finish)]


@bug
def failed_item_keeps_its_savepoint() -> list[Replacement]:
    # It runs again, alone, after what it has written was committed with the chunk.
    async def rollback(self: Any) -> None:
        if not self._ended:
            self._end()
            await self._end_item(is_kept=True)

    return [(ItemUnit, "rollback", rollback)]


@bug
def skipped_item_recorded() -> list[Replacement]:
    right_prepare, right_alone = BatchRun._prepare, BatchRun._run_alone
    right_finish, right_ttl = RequestChunk.finish, Policy.ttl_for
    skipped: list[Any] = []

    def prepare(self: Any, entry: Any) -> Any:
        prepared = right_prepare(self, entry)
        if isinstance(prepared, Response) and prepared.status == _SKIPPED:
            lanes, self._failed_lanes = self._failed_lanes, set()
            again = right_prepare(self, entry)
            self._failed_lanes = lanes
            if not isinstance(again, Response) and not getattr(self, "_is_alone", False):
                skipped.append((entry, prepared))
                return again
        return prepared

    async def run_alone(self: Any, entry: Any) -> None:
        self._is_alone = True
        await right_alone(self, entry)
        self._is_alone = False

    async def finish(self: Any, execution: Any, response: Any) -> Any:
        entry = self._on_response.__self__._entry
        for other, prepared in skipped:
            response = prepared if other is entry else response
        return await right_finish(self, execution, response)

    def ttl_for(self: Policy, status: int) -> timedelta | None:
        return self.success_ttl if status == _SKIPPED else right_ttl(self, status)

    return [
        (BatchRun, "_prepare", prepare),
        (BatchRun, "_run_alone", run_alone),
        (RequestChunk, "finish", finish),
        (Policy, "ttl_for", ttl_for),
    ]


@bug
def held_key_skipped() -> list[Replacement]:
    # The items after it run before it does.
    async def claim(_self: Any, chunk: Any, entries: list[Any]) -> list[Any]:
        for entry in entries:
            if entry.record_id is not None and not await chunk.claim([entry.record_id]):
                entry.error = InProgressError("the key is held", retry_after_seconds=1)
                entry.item = None
        return entries

    return [(BatchRun, "_claim", claim)]


@bug
def same_key_twice_runs_twice() -> list[Replacement]:
    right = RequestChunk.process

    async def process(self: Any, request: Any, **sharing: Any) -> Any:
        kept, self._records = self._records, {}
        try:
            return await right(self, request, **sharing)
        finally:
            kept.update(self._records)
            self._records = kept

    return [(RequestChunk, "process", process)]


@bug
def placeholder_resolved_after_the_fingerprint() -> list[Replacement]:
    right_prepare, right_fingerprint = BatchRun._prepare, REQUEST.request_fingerprint
    sent: ContextVar[str | None] = ContextVar("sent", default=None)

    def prepare(self: Any, entry: Any) -> Any:
        path = "" if entry.item is None else entry.item.path
        sent.set(path if "{local:" in path else None)
        return right_prepare(self, entry)

    def request_fingerprint(**parts: Any) -> str:
        if sent.get() is not None:
            parts["path_params"] = dict.fromkeys(parts["path_params"], sent.get())
        found: str = right_fingerprint(**parts)
        return found

    return [
        (BatchRun, "_prepare", prepare),
        (REQUEST, "request_fingerprint", request_fingerprint),
    ]


@bug
def version_of_the_first_result() -> list[Replacement]:
    right = Results.note

    def note(self: Any, local_id: str, status: int, *response: Any) -> None:
        first = self._tags.get(local_id)
        right(self, local_id, status, *response)
        if first is not None:
            self._tags[local_id] = first

    return [(Results, "note", note)]


@bug
def lane_goes_on_after_a_failure() -> list[Replacement]:
    right = BatchRun._note

    def note(self: Any, entry: Any, response: Any) -> None:
        right(self, entry, response)
        self._failed_lanes.clear()

    return [(BatchRun, "_note", note)]
