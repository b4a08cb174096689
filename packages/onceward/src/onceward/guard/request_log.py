"""The log of requests without a record, for operators: replays, mismatches, refusals, failures.

They leave no record, so that an operator could not find them by their request id. Written in
batches after the responses: a crash loses the last second of it, and a flood is cut off. Apps
without a console have no log, unless they ask for it.

The log gives way to requests. SQLite has one writer at a time: a batch is small, is written after
the requests that wait already, and never waits for another process. What cannot be written is
tried again every second; what does not fit into memory meanwhile is dropped and counted.
"""

import asyncio
import contextvars
import logging
import os
import re
import socket
import threading
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Final, NamedTuple

import msgspec

from onceward.errors import StoreError, StoreUnavailableError
from onceward.guard.erasures import erased_since
from onceward.guard.request import GuardedRequest
from onceward.observability.noop import NullMetrics
from onceward.ports import Clock, Metrics, Outcome, Store
from onceward.records import Record, Response
from onceward.stores.parts import REQUEST_LOG
from onceward.stores.sql_loader import load_queries
from onceward_protocol.error_codes import ERROR_HEADER, error_code
from onceward_protocol.fingerprint import request_fingerprint
from onceward_protocol.ids import new_uuid4

_KEEP_SECONDS: Final = 7 * 86_400.0
_FLUSH_SECONDS: Final = 1.0
# More than this within one second is counted, not logged.
_MOST_WAITING: Final = 5_000
# Rows of one statement: on SQLite, requests wait for so long.
_BATCH_ROWS: Final = 500
# How often a statement is tried while other processes write to SQLite.
_ATTEMPTS: Final = 10
_PAUSE_SECONDS: Final = 0.02
_STOP_SECONDS: Final = 5.0
_SWEEP_SECONDS: Final = 600.0
# One process writes at most this part of the largest table between two sweeps.
_SWEEP_SHARE: Final = 10
_COUNTS_SECONDS: Final = 3 * 3600.0
_MINUTE: Final = 60
# How much clocks of two machines may differ.
_CLOCK_MARGIN_SECONDS: Final = 60.0
_FIRST_ERROR: Final = 400
# A larger body is no message about an error.
_MAX_ERROR_BYTES: Final = 16 * 1024
_CODE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,99}")
_ERROR_HEADER: Final = ERROR_HEADER.lower().encode()

_log = logging.getLogger("onceward.request")


class LoggedRequest(NamedTuple):
    """One row, in the order of its columns."""

    at: float
    tenant: str
    endpoint: str
    key_hash: str
    request_id: str
    correlation_id: str
    outcome: Outcome
    status: int | None
    original_request_id: str | None = None
    expected_body_hash: str | None = None
    received_body_hash: str | None = None
    expected_request_hash: str | None = None
    received_request_hash: str | None = None
    differs: str | None = None
    code: str | None = None


class RequestLog:
    """Collects what happens and writes it in batches, in the background.

    ``note`` and ``count`` never wait for the database and never raise. Threads may call them.
    Several processes may write at once.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        keep_seconds: float | None = None,
        most_rows: int = 1_000_000,
    ) -> None:
        """Keep rows for ``keep_seconds``, or 7 days, and at most ``most_rows``; 0 keeps none."""
        # How long rows are kept; 0: there is no log.
        self.keep_seconds = _KEEP_SECONDS if keep_seconds is None else keep_seconds
        self._is_enabled = False
        self._store = store
        self._clock = clock
        self._is_sqlite = store.name == "sqlite"
        self._most_rows = most_rows
        # Apps without an event loop call from the threads of their requests.
        self._lock = threading.Lock()
        self._waiting: list[LoggedRequest] = []
        self._counts: defaultdict[tuple[int, str], float] = defaultdict(float)
        self._changed: set[tuple[int, str]] = set()
        self._dropped = 0
        # Tenants of rows that were written, with the time of the first row, until it is known that
        # they were not erased meanwhile.
        self._unchecked: dict[str, float] = {}
        self._sweep_at = 0.0
        # Rows since the last sweep: a flood is swept early, so that the table stays bounded.
        self._written = 0
        # Set every second: reading the clock for each request takes longer than counting it.
        self._minute = self._current_minute()
        # Different for each process that has ever written: a process id is used again.
        self.process = f"{socket.gethostname()}-{os.getpid()}-{new_uuid4()[:8]}"
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    def enable(self) -> None:
        """Have ``start`` start the log, in tables that the next ``open`` of the store creates.

        Without it, nothing is collected or written.
        """
        self._is_enabled = self.keep_seconds > 0
        if self._is_enabled:
            self._store.schema.want(REQUEST_LOG)

    def start(self) -> None:
        """Write in a background task, if the log is enabled. Idempotent."""
        if self._task is None and self._is_enabled:
            # Not in the context of the request that has opened the store, as in the sweeper.
            self._stopping = asyncio.Event()  # of this event loop
            self._task = asyncio.create_task(
                self._run(self._stopping), context=contextvars.Context()
            )

    async def stop(self) -> None:
        """Write what is left, if that does not take long, and end the background task."""
        task, self._task = self._task, None  # from here on, nothing is collected
        if task is None:
            return
        self._stopping.set()
        _, running = await asyncio.wait([task], timeout=_STOP_SECONDS)
        for each in running:
            each.cancel()
            await asyncio.wait([each])
        if task.cancelled() and not running:  # at the end of ``asyncio.run``
            with suppress(Exception):
                async with asyncio.timeout(_STOP_SECONDS):
                    await self._flush()
        self._drop(len(self._waiting))
        self._report_dropped()

    # -- called while requests are served --------------------------------------------------------

    def count(self, name: str, number: float = 1) -> None:
        """Add to a number of the current minute."""
        if self._task is None:
            return
        at = self._minute, name
        with self._lock:
            self._counts[at] += number
            self._changed.add(at)

    def note(
        self,
        request: GuardedRequest,
        outcome: Outcome,
        status: int | None,
        record: Record | None = None,
        *,
        code: str | None = None,
    ) -> None:
        """Log a request; ``record`` is that of the first request with its key, if there is one.

        Without ``code``, the error code of a replay is that of the record.
        """
        if self._task is None:
            return
        if code is None and record is not None:
            code = code_of(record.response())
        found = LoggedRequest(
            at=0.0,
            tenant=request.principal.tenant,
            endpoint=request.endpoint,
            key_hash="",
            request_id=request.request_id,
            correlation_id=request.correlation_id,
            outcome=outcome,
            status=status,
            received_body_hash=request.fingerprint.body_hash,
            received_request_hash=request.fingerprint.request_hash,
            code=code,
        )
        if record is not None:
            found = found._replace(
                original_request_id=record.request_id,
                expected_body_hash=record.fingerprint.body_hash,
                expected_request_hash=record.fingerprint.request_hash,
                differs=_differs(request, record) if outcome == "mismatched" else None,
            )
        self._add(found, "" if request.record_id is None else request.record_id.key)

    def note_response(self, request: GuardedRequest, outcome: Outcome, response: Response) -> None:
        if self._task is not None:
            self.note(request, outcome, response.status, code=code_of(response))

    def add(
        self,
        *,
        tenant: str,
        endpoint: str,
        key: str,
        request_id: str,
        correlation_id: str,
        outcome: Outcome,
        status: int,
        code: str | None = None,
    ) -> None:
        """Log a request that was refused before its handler ran."""
        row = LoggedRequest(0.0, tenant, endpoint, "", request_id, correlation_id, outcome, status)
        self._add(row._replace(code=code), key)

    def _add(self, row: LoggedRequest, key: str) -> None:
        if self._task is None:
            return
        if len(self._waiting) >= _MOST_WAITING:
            with self._lock:
                self._dropped += 1
            return
        at = self._clock.now().timestamp()
        found = row._replace(at=at, key_hash=_hash(key) if key else "")
        with self._lock:
            self._waiting.append(found)

    def counting(self, metrics: Metrics) -> Metrics:
        return _CountingMetrics(self, metrics)

    def _current_minute(self) -> int:
        return int(self._clock.now().timestamp()) // _MINUTE * _MINUTE

    # -- in the background -----------------------------------------------------------------------

    async def _run(self, stopping: asyncio.Event) -> None:
        is_last = False
        while not is_last:
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), _FLUSH_SECONDS)
            is_last = stopping.is_set()  # not later: what is collected meanwhile is written, too
            self._minute = self._current_minute()
            try:
                await self._flush()
                if self._is_sweep_due():
                    await self._sweep()
            except StoreError as error:  # tried again
                _log.debug("the log of requests cannot be written: %s", error)
            except Exception:  # noqa: BLE001 - a defect here must not end the task
                _log.exception("the log of requests cannot be written")

    async def _flush(self) -> None:
        """Write what has been collected. Rows that may have been written are not written again."""
        self._report_dropped()
        await self._delete_erased()
        left = len(self._waiting)
        while left > 0:
            batch = self._waiting[: min(left, _BATCH_ROWS)]
            left -= len(batch)
            firsts = {row.tenant: row.at for row in reversed(batch)}
            erased = await self._erased_among(firsts)
            kept = [row for row in batch if row.at > erased.get(row.tenant, 0.0)]
            self._unchecked = firsts | self._unchecked
            try:
                if kept:
                    await self._write("add_requests", rows=_json(kept))
            except StoreUnavailableError:
                raise
            except BaseException:
                self._drop(len(batch))
                raise
            self._written += len(kept)
            with self._lock:
                del self._waiting[: len(batch)]
            await self._delete_erased()
        with self._lock:
            changed = {at: self._counts[at] for at in self._changed}
        if changed:
            counts = [(minute, name, number) for (minute, name), number in changed.items()]
            await self._write("add_counts", rows=_json(counts), process=self.process)
            with self._lock:
                self._changed -= {
                    at for at, number in changed.items() if self._counts[at] == number
                }

    async def _erased_among(self, firsts: Mapping[str, float]) -> dict[str, float]:
        """Return which tenants were erased, and up to which time their rows must not be kept.

        ``firsts`` has the time of the first row of each. The clock of the process that erases may
        differ from this one.
        """
        if not firsts:
            return {}
        since = max(0.0, min(firsts.values()) - _CLOCK_MARGIN_SECONDS)
        erased = await erased_since(self._store, list(firsts), datetime.fromtimestamp(since, UTC))
        return {name: at.timestamp() + _CLOCK_MARGIN_SECONDS for name, at in erased.items()}

    async def _delete_erased(self) -> None:
        """Delete rows of tenants that were erased while the rows were written.

        An erasure that has not ended before this look deletes the rows itself.
        """
        for tenant, until in (await self._erased_among(self._unchecked)).items():
            await self._write("delete_requests", tenant=tenant, until=until)
        self._unchecked.clear()

    def _drop(self, number: int) -> None:
        """Forget the oldest rows in memory."""
        with self._lock:
            del self._waiting[:number]
            self._dropped += number

    def _report_dropped(self) -> None:
        with self._lock:
            dropped, self._dropped = self._dropped, 0
        if dropped:
            self.count("not logged", dropped)
            _log.warning("%d requests were not logged: too many, or the store was busy", dropped)

    def _is_sweep_due(self) -> bool:
        is_full = self._written * _SWEEP_SHARE >= self._most_rows
        return is_full or self._clock.monotonic() >= self._sweep_at

    async def _sweep(self) -> None:
        self._written = 0
        self._sweep_at = self._clock.monotonic() + _SWEEP_SECONDS
        now = self._clock.now().timestamp()
        oldest = int(now - _COUNTS_SECONDS)
        with self._lock:
            for at in [at for at in self._counts if at[0] < oldest]:
                del self._counts[at]
                self._changed.discard(at)
        await self._write("sweep_counts", before=oldest)
        before = now - self.keep_seconds
        rows = await self._store.read(self._sql("oldest_kept"), {"most": self._most_rows})
        if rows:
            before = max(before, rows[0]["at"])
        values = {"before": before} | ({"limit": _BATCH_ROWS} if self._is_sqlite else {})
        while await self._write("sweep_requests", **values) == _BATCH_ROWS:
            pass  # SQLite: other writers come in between

    async def _write(self, name: str, **values: Any) -> int:
        """Run one statement, which commits at once: a transaction would keep other writers waiting.

        Returns how many rows it has returned.
        """
        sql, store = self._sql(name), self._store
        if not store.is_one_writer:
            return len(await store.write(sql, values))
        for _ in range(_ATTEMPTS - 1):
            with suppress(StoreUnavailableError):
                return len(await store.write_unless_busy(sql, values))
            await asyncio.sleep(_PAUSE_SECONDS)
        return len(await store.write_unless_busy(sql, values))

    def _sql(self, name: str) -> str:
        file = "request_log.sqlite.sql" if self._is_sqlite else "request_log.postgres.sql"
        return load_queries("onceward.guard", file, names=self._store.table_names)[name]


class _CountingMetrics:
    """Passes everything on to the metrics of the app, and counts it for operators."""

    def __init__(self, log: RequestLog, metrics: Metrics) -> None:
        self._log = log
        self._metrics = metrics
        self.expired = metrics.expired
        self.swept = metrics.swept

    def outcome(self, endpoint: str, outcome: Outcome) -> None:
        self._log.count(outcome)
        self._metrics.outcome(endpoint, outcome)

    def waited(self, endpoint: str, seconds: float) -> None:
        self._log.count("waited")
        self._metrics.waited(endpoint, seconds)

    def store_time(self, operation: str, seconds: float) -> None:
        self._log.count("store calls")
        self._log.count("store seconds", seconds)
        self._metrics.store_time(operation, seconds)


def _differs(request: GuardedRequest, record: Record) -> str | None:
    """Return the parts of a request that differ from the one that its key was used for first.

    The record has two hashes and nothing else of the first request. So each guess is hashed and
    compared: the parts of the second request, with one of them replaced.
    """
    stored, query = record.fingerprint, request.query
    if request.policy.fingerprint is not None:
        return None
    parts = ["body"] if stored.body_hash != request.fingerprint.body_hash else []

    def fits(query: bytes) -> bool:
        return stored.request_hash == request_fingerprint(
            method=request.method,
            endpoint=request.endpoint,
            path_params=request.path_params,
            query=query,
            body_hash=stored.body_hash,
        )

    if not fits(query):
        is_query = not request.path_params or (query and fits(b""))
        parts.append("query" if is_query else "path or query")
    return ", ".join(parts) or None


def code_of(response: Response) -> str | None:
    """Return the error code of a response, as its header or body says; None if it has none.

    Only what looks like a code: the log must not contain other parts of a body.
    """
    if response.status < _FIRST_ERROR or len(response.body) > _MAX_ERROR_BYTES:
        return None
    named = (value for name, value in response.headers if name == _ERROR_HEADER)
    header = next(named, b"").decode("latin-1")
    code = error_code(header, response.body)
    return code if code is not None and _CODE.fullmatch(code) else None


def _hash(key: str) -> str:
    return sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def _json(rows: list[Any]) -> str:
    return msgspec.json.encode(rows).decode()


# -- reports of the guard ------------------------------------------------------------------------


class Reports:
    """Reports at once."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.log: RequestLog | None = None
        # False without a reader: then the most frequent reports are not made.
        self.are_read = type(metrics) is not NullMetrics
        # Not methods: each would be one call more for each request.
        self.outcome = metrics.outcome
        self.expired = metrics.expired

    def log_requests(self, log: RequestLog) -> None:
        """Log requests that do not run, and count all of them, for operators. Idempotent."""
        if self.log is None:
            self.log = log
            self.are_read = True
            self.metrics = log.counting(self.metrics)
            self.outcome, self.expired = self.metrics.outcome, self.metrics.expired

    def note(
        self,
        request: GuardedRequest,
        outcome: Outcome,
        status: int | None,
        record: Record | None = None,
        code: str | None = None,
    ) -> None:
        """Log a request; ``record`` is that of the first request with its key, if there is one."""
        if self.log is not None:
            self.log.note(request, outcome, status, record, code=code)

    def note_response(self, request: GuardedRequest, outcome: Outcome, response: Response) -> None:
        """Log a request whose handler ran, and whose response is not stored."""
        if self.log is not None:
            self.log.note_response(request, outcome, response)


class DeferredReports:
    """Keeps reports until a chunk is committed: until then its requests may run again."""

    def __init__(self, reports: Reports) -> None:
        self.are_read = reports.are_read
        self._reports = reports
        # Names of methods and their arguments.
        self._waiting: list[tuple[str, tuple[Any, ...]]] = []

    def outcome(self, *report: Any) -> None:
        self._waiting.append(("outcome", report))

    def expired(self, *report: Any) -> None:
        self._waiting.append(("expired", report))

    def note(self, *report: Any) -> None:
        self._waiting.append(("note", report))

    def note_response(self, *report: Any) -> None:
        self._waiting.append(("note_response", report))

    def report(self) -> None:
        for name, report in self._waiting:
            getattr(self._reports, name)(*report)


def report_committed(
    reports: Reports | DeferredReports,
    request: GuardedRequest,
    response: Response,
    record: Record | None,
) -> None:
    """Report a request whose writes were committed."""
    if response.status < _FIRST_ERROR:
        reports.outcome(request.endpoint, "fresh")
        return
    reports.outcome(request.endpoint, "refused")
    if record is None:
        reports.note_response(request, "refused", response)
