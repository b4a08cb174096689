"""The log of requests that did not run, for operators: replays, mismatches, refusals.

They leave no record, so that an operator could not find them by their request id. Written in
batches after the responses: a crash loses the last second of it, and a flood is cut off.
"""

import asyncio
import contextvars
import logging
import os
import socket
import threading
from collections import defaultdict
from contextlib import suppress
from hashlib import sha256
from typing import Any, Final, NamedTuple

import msgspec

from holdfast.core.idempotency_record import Record
from holdfast.core.mismatch import differing_parts
from holdfast.errors import StoreError
from holdfast.ids import new_uuid4
from holdfast.ports import Clock, Metrics, Outcome, Store
from holdfast.server.guarded_request import GuardedRequest
from holdfast.stores.sql_loader import load_queries

__all__ = ["LoggedRequest", "RequestLog"]

_FLUSH_SECONDS: Final = 1.0
# More than this within one second is counted, not logged.
_MOST_WAITING: Final = 5_000
_SWEEP_SECONDS: Final = 600.0
_SWEEP_ROWS: Final = 5_000
# One process writes at most this part of the largest table between two sweeps.
_SWEEP_SHARE: Final = 10
_COUNTS_SECONDS: Final = 3 * 3600.0
_MINUTE: Final = 60

_log = logging.getLogger("holdfast.request")


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
        keep_seconds: float = 7 * 86_400.0,
        most_rows: int = 1_000_000,
    ) -> None:
        """Keep rows for ``keep_seconds``, at most ``most_rows``; 0 seconds keeps nothing."""
        self._store = store
        self._clock = clock
        self._is_sqlite = store.name == "sqlite"
        self._keep_seconds = keep_seconds
        self._most_rows = most_rows
        # Apps without an event loop call from the threads of their requests.
        self._lock = threading.Lock()
        self._waiting: list[LoggedRequest] = []
        self._counts: defaultdict[tuple[int, str], float] = defaultdict(float)
        self._changed: set[tuple[int, str]] = set()
        self._dropped = 0
        self._sweep_at = 0.0
        # Rows since the last sweep: a flood is swept early, so that the table stays bounded.
        self._written = 0
        # Set every second: reading the clock for each request takes longer than counting it.
        self._minute = self._current_minute()
        # Different for each process that has ever written: a process id is used again.
        self.process = f"{socket.gethostname()}-{os.getpid()}-{new_uuid4()[:8]}"
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Write in a background task, unless nothing is to be kept."""
        if self._task is None and self._keep_seconds > 0:
            # Not in the context of the request that has opened the store, as in the sweeper.
            self._task = asyncio.create_task(self._forever(), context=contextvars.Context())

    async def stop(self) -> None:
        """Write what is left, and end the background task."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await self._flush()

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
    ) -> None:
        """Log a request; ``record`` is that of the first request with its key, if there is one."""
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
        )
        if record is not None:
            found = found._replace(
                original_request_id=record.request_id,
                expected_body_hash=record.fingerprint.body_hash,
                expected_request_hash=record.fingerprint.request_hash,
                differs=_differs(request, record) if outcome == "mismatched" else None,
            )
        self._add(found, "" if request.record_id is None else request.record_id.key)

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
    ) -> None:
        """Log a request that was refused before it was read as a whole."""
        row = LoggedRequest(0.0, tenant, endpoint, "", request_id, correlation_id, outcome, status)
        self._add(row, key)

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
        """Return metrics that count outcomes here, too."""
        return _CountingMetrics(self, metrics)

    def _current_minute(self) -> int:
        return int(self._clock.now().timestamp()) // _MINUTE * _MINUTE

    # -- in the background -----------------------------------------------------------------------

    async def _forever(self) -> None:
        while True:
            await asyncio.sleep(_FLUSH_SECONDS)
            self._minute = self._current_minute()
            await self._flush()
            is_full = self._written * _SWEEP_SHARE >= self._most_rows
            if is_full or self._clock.monotonic() >= self._sweep_at:
                self._written = 0
                self._sweep_at = self._clock.monotonic() + _SWEEP_SECONDS
                await self._sweep()

    async def _flush(self) -> None:
        """Write what has been collected; after an outage it is tried again."""
        with self._lock:
            rows, self._waiting = self._waiting, []
            changed, self._changed = self._changed, set()
            counts = [(minute, name, self._counts[minute, name]) for minute, name in changed]
            dropped, self._dropped = self._dropped, 0
        if dropped:
            _log.warning("%d requests were not logged: too many at once", dropped)
        try:
            if rows:
                await self._write("add_requests", rows=_json(rows))
                self._written += len(rows)
                rows = []
            if changed:
                await self._write("add_counts", rows=_json(counts), process=self.process)
                changed = set()
        except StoreError as error:
            _log.debug("the log of requests cannot be written: %s", error)
        except Exception:  # noqa: BLE001 - a defect here must not end the task
            _log.exception("the log of requests cannot be written")
            rows = []
        with self._lock:
            self._waiting[:0] = rows[: max(0, _MOST_WAITING - len(self._waiting))]
            self._changed |= changed

    async def _sweep(self) -> None:
        now = self._clock.now().timestamp()
        oldest = int(now - _COUNTS_SECONDS)
        with self._lock:
            for at in [at for at in self._counts if at[0] < oldest]:
                del self._counts[at]
                self._changed.discard(at)
        try:
            await self._write("sweep_counts", before=oldest)
            before = now - self._keep_seconds
            rows = await self._store.read(self._sql("oldest_kept"), {"most": self._most_rows})
            if rows:
                before = max(before, rows[0]["at"])
            values = {"before": before} | ({"limit": _SWEEP_ROWS} if self._is_sqlite else {})
            while await self._write("sweep_requests", **values) == _SWEEP_ROWS:
                pass  # SQLite: other writers come in between
        except StoreError as error:
            _log.debug("the log of requests cannot be swept: %s", error)

    async def _write(self, name: str, **values: Any) -> int:
        """Run one statement, which commits at once: a transaction would keep other writers waiting.

        Returns how many rows it has returned.
        """
        return len(await self._store.write(self._sql(name), values))

    def _sql(self, name: str) -> str:
        file = "request_log.sqlite.sql" if self._is_sqlite else "request_log.postgres.sql"
        return load_queries("holdfast.server", file, names=self._store.table_names)[name]


class _CountingMetrics:
    """Passes everything on to the metrics of the app, and counts it for operators."""

    def __init__(self, log: RequestLog, metrics: Metrics) -> None:
        self._log = log
        self._metrics = metrics
        self.expired = metrics.expired
        self.swept = metrics.swept

    def outcome(self, endpoint: str, outcome: Outcome) -> None:
        """Count the outcome of a guarded request."""
        self._log.count(outcome)
        self._metrics.outcome(endpoint, outcome)

    def waited(self, endpoint: str, seconds: float) -> None:
        """Count a duplicate that waited for the first request."""
        self._log.count("waited")
        self._metrics.waited(endpoint, seconds)

    def store_time(self, operation: str, seconds: float) -> None:
        """Add up the time of calls to the store."""
        self._log.count("store calls")
        self._log.count("store seconds", seconds)
        self._metrics.store_time(operation, seconds)


def _differs(request: GuardedRequest, record: Record) -> str | None:
    if request.policy.fingerprint is not None:
        return None
    parts = differing_parts(
        record.fingerprint,
        method=request.method,
        endpoint=request.endpoint,
        path_params=request.path_params,
        query=request.query,
        body_hash=request.fingerprint.body_hash,
    )
    return ", ".join(parts) or None


def _hash(key: str) -> str:
    return sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def _json(rows: list[Any]) -> str:
    return msgspec.json.encode(rows).decode()
