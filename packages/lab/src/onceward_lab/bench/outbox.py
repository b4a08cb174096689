"""The outbox file: enqueues compared with raw commits and peers, and claims from a million entries.

All contenders use ``synchronous=FULL``. "Raw" writes the same row with the same driver into the
same kind of file, without validation, order and events.
"""

import statistics
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from onceward_lab.bench.curves import Point, sizes
from onceward_outbox import NewEntry, OutboxQueue, Released
from onceward_outbox.entry import Entry, instant, json_text, statement
from onceward_protocol.ids import new_id

USER = "ada"
PASSPHRASE = b"k" * 32  # a raw key, so that key derivation is not measured
BULK = 5_000
# Commits per slice, and commits per second of a usual disk.
_SLICE = 20
_USUAL_PER_SECOND = 2_000
CLAIMS = 400

Step = Callable[[], Any]


def new_entries(count: int) -> Iterator[NewEntry]:
    """Yield create operations of a field app."""
    for number in range(count):
        yield NewEntry(
            user_id=USER,
            operation="create",
            entity_type="activity",
            endpoint="/api/v1/activities",
            local_id=str(uuid.uuid4()),
            payload={"title": f"visit {number}", "minutes": 30, "note": "at the north gate " * 6},
            profile="field",
        )


def enqueue(
    directory: Path,
    *,
    rounds: int,
    seconds: float,
    warm_up: int = 150,
    step: Step = lambda: None,
) -> dict[str, Any]:
    """Measure single enqueues, one commit each, plain and encrypted, and those of the peers."""
    found = {}
    for kind, key in (("plain", None), ("encrypted", PASSPHRASE)):
        contenders: dict[str, _Contender] = {
            "raw commits of the same row": _Raw(directory / f"raw-{kind}.db", key),
            "raw commits, a table without indexes": _Raw(
                directory / f"bare-{kind}.db", key, bare=True
            ),
            "Onceward": _Ours(directory / f"ours-{kind}.db", key),
        }
        if key is None:
            contenders["persist-queue at FULL"] = _PersistQueue(directory / "persist")
            contenders["litequeue at FULL"] = _LiteQueue(directory / "lite.db")
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        for contender in contenders.values():
            contender.run(warm_up)
        for _ in range(rounds):
            for name, rate in _run_round(contenders, seconds).items():
                rates[name].append(rate)
                step()
        for contender in contenders.values():
            contender.close()
        found[f"outbox_enqueue_{kind}"] = _table(rates)
    return found


def _run_round(contenders: "dict[str, _Contender]", seconds: float) -> dict[str, float]:
    """Return the rates of one round of short alternating slices."""
    took = dict.fromkeys(contenders, 0.0)
    names = list(contenders)
    slices = max(1, round(seconds * _USUAL_PER_SECOND / _SLICE))
    for number in range(slices):
        for name in names if number % 2 == 0 else reversed(names):
            took[name] += contenders[name].run(_SLICE)
    return {name: slices * _SLICE / seconds for name, seconds in took.items()}


def bulk(
    directory: Path, *, rounds: int, entries: int = BULK, step: Step = lambda: None
) -> dict[str, Any]:
    """Measure one commit with thousands of entries, in rows per second."""
    found = {}
    for kind, key in (("plain", None), ("encrypted", PASSPHRASE)):
        rates: dict[str, list[float]] = {"raw insert of the same rows": [], "Onceward": []}
        raw = _Raw(directory / f"bulk-raw-{kind}.db", key)
        ours = _Ours(directory / f"bulk-ours-{kind}.db", key)
        for number in range(rounds + 1):
            entries_to_add = list(new_entries(entries))
            rows = list(raw.rows(entries))
            names = list(rates)
            for name in names if number % 2 == 0 else reversed(names):
                rate = ours.many(entries_to_add) if name == "Onceward" else raw.many(rows)
                if number:  # the first round warms up
                    rates[name].append(rate)
                step()
        raw.close()
        ours.close()
        found[f"outbox_bulk_{kind}"] = _table(rates)
    return found


def claims(
    directory: Path,
    *,
    small: int = 1_000,
    large: int = 1_000_000,
    rounds: int = 5,
    count: int = CLAIMS,
) -> tuple[dict[str, float], list[Point]]:
    """Measure ``next_eligible`` and ``claim`` with few and with many entries, in turns.

    Returns the comparison at full size, and the claims while the large queue grows.
    """
    queues = {size: _opened(directory / f"claims-{size}.db") for size in (small, large)}
    _fill(queues[small], small)
    points: list[Point] = []
    filled = 0
    for size in sizes(small, large):
        _fill(queues[large], size - filled)
        filled = size
        points.append(_point(size, queues[small], queues[large], min(200, small // 2)))
    lookups: dict[int, list[float]] = {size: [] for size in queues}
    claim_times: dict[int, list[float]] = {size: [] for size in queues}
    for queue in queues.values():
        _claims(queue, count // rounds)
    for number in range(rounds):
        order = (small, large) if number % 2 == 0 else (large, small)
        for size in order:
            looked, took = _claims(queues[size], count // rounds)
            lookups[size].append(looked)
            claim_times[size].append(took)
    for queue in queues.values():
        queue.close()
    found: dict[str, float] = {"small": small, "large": large}
    for name, times in (("next_eligible", lookups), ("claim", claim_times)):
        few, many = statistics.median(times[small]), statistics.median(times[large])
        found[f"{name}_small_us"] = round(few * 1e6, 1)
        found[f"{name}_large_us"] = round(many * 1e6, 1)
        found[f"{name}_ratio"] = round(many / few, 3)
    return found, points


def _point(size: int, few: OutboxQueue, many: OutboxQueue, count: int) -> Point:
    """Claim in both in turns."""
    each = max(1, count // 4)
    _claims(many, each)  # warms up pages and query plans
    times = [(_claims(few, each)[1], _claims(many, each)[1]) for _ in range(4)]
    return Point(
        size,
        statistics.median(mine for _, mine in times) * 1e6,
        statistics.median(mine / other for other, mine in times),
    )


def _claims(queue: OutboxQueue, count: int) -> tuple[float, float]:
    """Return the median seconds of ``next_eligible`` and of a claim with its commit."""
    lookups, claim_times = [], []
    claimed = []
    for _ in range(count):
        began = time.perf_counter()
        queue.next_eligible(USER)
        looked = time.perf_counter()
        claim = queue.claim(USER)
        claim_times.append(time.perf_counter() - looked)
        lookups.append(looked - began)
        assert claim is not None
        claimed.append(claim)
    with queue.transaction():
        for claim in claimed:
            queue.record(claim, Released())
    return statistics.median(lookups), statistics.median(claim_times)


def _opened(path: Path) -> OutboxQueue:
    queue = OutboxQueue.open(path)
    queue.add_user(USER)
    return queue


def _fill(queue: OutboxQueue, more: int) -> None:
    """Add entries: one through the API, the others as copies of its row, which is faster."""
    first = queue.enqueue(next(new_entries(1)))
    if more == 1:
        return
    columns = statement("insert_entry").partition("(")[2].partition(")")[0]
    more_rows = _MORE.format(columns=columns, values=_values(columns))
    with queue.transaction() as connection:
        (usual,) = connection.execute("PRAGMA cache_size").fetchone()
        connection.execute("PRAGMA cache_size=-400000")
        connection.execute(more_rows, {"more": more - 1, "first": first.id})
    with queue.transaction() as connection:
        connection.execute(f"PRAGMA cache_size={usual}")


_MORE = """
WITH RECURSIVE count(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM count WHERE n < :more)
INSERT INTO offline_sync_queue ({columns})
SELECT {values} FROM count, (SELECT * FROM offline_sync_queue WHERE id = :first)
"""
# Increasing ids, like UUID version 7, and random ones.
_GROWING = "printf('%s%08x', substr(id, 1, 28), n)"
_RANDOM = "lower(hex(randomblob(16)))"
_CHANGED = {
    "id": _GROWING,
    "local_id": _RANDOM,
    "idempotency_key": _RANDOM,
    "lane": f"entity_type || '/' || {_RANDOM}",
    "sequence_number": "sequence_number + n",
    "enqueued_ms": "enqueued_ms + n",
}


def _values(columns: str) -> str:
    """Return the SQL expression for each column: copied from the first entry, or changed."""
    return ", ".join(_CHANGED.get(name.strip(), name) for name in columns.split(","))


class _Contender(ABC):
    """Stores prepared items, one durable commit each."""

    def prepare(self, count: int) -> Iterator[Any]:
        """Return the items to store; not part of the measured time."""
        return new_entries(count)

    @abstractmethod
    def put(self, item: Any) -> None:
        """Store one item."""

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    def run(self, count: int) -> float:
        """Store ``count`` items; returns the seconds."""
        items = list(self.prepare(count))
        began = time.perf_counter()
        for item in items:
            self.put(item)
        return time.perf_counter() - began


class _Ours(_Contender):
    def __init__(self, path: Path, key: bytes | None) -> None:
        self.queue = OutboxQueue.open(path, passphrase=key)
        self.queue.add_user(USER)

    def put(self, item: Any) -> None:
        self.queue.enqueue(item)

    def many(self, entries_to_add: Iterable[NewEntry]) -> float:
        began = time.perf_counter()
        done = len(self.queue.enqueue_many(entries_to_add))
        return done / (time.perf_counter() - began)

    def close(self) -> None:
        self.queue.close()


class _Raw(_Contender):
    """The same row into the same kind of file, or into a table without indexes (``bare``)."""

    def __init__(self, path: Path, key: bytes | None, *, bare: bool = False) -> None:
        self._queue = OutboxQueue.open(path, passphrase=key)
        self._queue.add_user(USER)
        pattern = self._queue.enqueue(next(new_entries(1)))
        # The connection of the outbox, so that driver, pragmas and cipher are the same.
        with self._queue.transaction() as connection:
            self._connection: Any = connection
            self._sql = statement("insert_entry")
            if bare:
                columns = self._sql.partition("(")[2].partition(")")[0]
                connection.execute(f"CREATE TABLE bare ({columns})")
                self._sql = self._sql.replace("offline_sync_queue", "bare")
        self._pattern = pattern
        self._next = pattern.sequence_number

    def rows(self, count: int) -> Iterator[tuple[Any, ...]]:
        for _ in range(count):
            self._next += 1
            yield _row(self._pattern, self._next, new_id(datetime.now(UTC)), str(uuid.uuid4()))

    prepare = rows

    def put(self, item: Any) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.execute(self._sql, item)
        self._connection.execute("COMMIT")

    def many(self, rows: list[tuple[Any, ...]]) -> float:
        began = time.perf_counter()
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany(self._sql, rows)
        self._connection.execute("COMMIT")
        return len(rows) / (time.perf_counter() - began)

    def close(self) -> None:
        self._queue.close()


def _row(entry: Entry, number: int, entry_id: str, local_id: str) -> tuple[Any, ...]:
    """Return a copy of the row of an entry, as the outbox would write it."""
    values = {
        "id": entry_id,
        "user_id": entry.user_id,
        "operation": entry.operation.value,
        "entity_type": entry.entity_type,
        "local_id": local_id,
        "endpoint": entry.endpoint,
        "payload": entry.payload,
        "idempotency_key": str(uuid.uuid4()),
        "status": entry.status.value,
        "max_attempts": entry.max_attempts,
        "sequence_number": number,
        "dependency_ids": json_text(entry.dependency_ids),
        "created_at": instant(entry.created_at),
        "priority": entry.priority,
        "client_generated_at": instant(entry.client_generated_at),
        "profile": entry.profile,
        "payload_version": 0,
        "lane": f"{entry.entity_type}/{local_id}",
        "turn": True,
        "waiting_for": 0,
        "enqueued_ms": number,
    }
    return tuple(values.get(column) for column in _columns())


@cache
def _columns() -> tuple[str, ...]:
    names = statement("insert_entry").partition("(")[2].partition(")")[0]
    return tuple(name.strip() for name in names.split(","))


class _PersistQueue(_Contender):
    def __init__(self, path: Path) -> None:
        import persistqueue

        self._queue = persistqueue.SQLiteQueue(str(path), auto_commit=True)
        connections: set[Any] = {self._queue._putter, self._queue._getter}  # noqa: SLF001
        for connection in connections:
            connection.execute("PRAGMA synchronous = FULL")

    def put(self, item: Any) -> None:
        self._queue.put(_as_dict(item))

    def close(self) -> None:
        self._queue.close()


class _LiteQueue(_Contender):
    def __init__(self, path: Path) -> None:
        import litequeue  # type: ignore[import-untyped]

        self._queue = litequeue.LiteQueue(str(path))
        self._queue.conn.execute("PRAGMA synchronous = FULL")

    def put(self, item: Any) -> None:
        self._queue.put(msgspec.json.encode(_as_dict(item)).decode())

    def close(self) -> None:
        self._queue.conn.close()


def _as_dict(new: NewEntry) -> dict[str, Any]:
    """Return the row that an app would store of the same action in a generic queue."""
    return {
        "id": new.local_id,
        "operation": new.operation,
        "endpoint": new.endpoint,
        "payload": new.payload,
    }


def _table(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Return the ratio of each contender to the first, round by round."""
    base = next(iter(rates.values()))
    found = {}
    for name, values in rates.items():
        ratios = [mine / other for mine, other in zip(values, base, strict=True)]
        found[name] = {
            "ratio": round(statistics.median(ratios), 3),
            "ratio_of_medians": round(statistics.median(values) / statistics.median(base), 3),
            "least": round(min(ratios), 3),
            "most": round(max(ratios), 3),
            "per_second": round(statistics.median(values), 1),
        }
    return found
