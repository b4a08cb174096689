"""The outbox's file: enqueues against raw commits and peers, and claims beside a million entries.

Durable means ``synchronous=FULL`` for everybody. "Raw" writes the very same row, by the same driver
into a file of the same kind, and knows nothing else: no validation, no order, no event.
"""

import statistics
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from holdfast.core.outbox_entry import Entry
from holdfast.ids import new_id
from holdfast.outbox import NewEntry, OutboxQueue
from holdfast.outbox.rows import instant, json_text
from holdfast.outbox.statements import statement
from holdfast_lab.bench.curves import Point, sizes

USER = "ada"
PASSPHRASE = b"k" * 32  # a key: nobody wants to measure how long stretching takes
BULK = 5_000
# So many commits by turns; a disk does about so many in a second.
_SLICE = 20
_USUAL_PER_SECOND = 2_000
CLAIMS = 400

Step = Callable[[], Any]


def new_entries(count: int) -> Iterator[NewEntry]:
    """Yield creations as a field app makes them."""
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
    folder: Path,
    *,
    rounds: int,
    seconds: float,
    warm_up: int = 150,
    step: Step = lambda: None,
) -> dict[str, Any]:
    """Return single enqueues, one commit each, plain and encrypted, and those of the peers."""
    found = {}
    for kind, key in (("plain", None), ("encrypted", PASSPHRASE)):
        contenders: dict[str, _Contender] = {
            "raw commits of the same row": _Raw(folder / f"raw-{kind}.db", key),
            "raw commits, a table without indexes": _Raw(
                folder / f"bare-{kind}.db", key, bare=True
            ),
            "Holdfast": _Ours(folder / f"ours-{kind}.db", key),
        }
        if key is None:
            contenders["persist-queue at FULL"] = _PersistQueue(folder / "persist")
            contenders["litequeue at FULL"] = _LiteQueue(folder / "lite.db")
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        for contender in contenders.values():
            contender.run(warm_up)
        for _ in range(rounds):
            for name, rate in _by_turns(contenders, seconds).items():
                rates[name].append(rate)
                step()
        for contender in contenders.values():
            contender.close()
        found[f"outbox_enqueue_{kind}"] = _table(rates)
    return found


def _by_turns(contenders: "dict[str, _Contender]", seconds: float) -> dict[str, float]:
    """Return each one's rate in a round of short slices: what else the machine does hits all."""
    took = dict.fromkeys(contenders, 0.0)
    names = list(contenders)
    slices = max(1, round(seconds * _USUAL_PER_SECOND / _SLICE))
    for number in range(slices):
        for name in names if number % 2 == 0 else reversed(names):
            took[name] += contenders[name].run(_SLICE)
    return {name: slices * _SLICE / seconds for name, seconds in took.items()}


def bulk(
    folder: Path, *, rounds: int, entries: int = BULK, step: Step = lambda: None
) -> dict[str, Any]:
    """Return rows per second of one commit with thousands of entries."""
    found = {}
    for kind, key in (("plain", None), ("encrypted", PASSPHRASE)):
        rates: dict[str, list[float]] = {"raw insert of the same rows": [], "Holdfast": []}
        raw = _Raw(folder / f"bulk-raw-{kind}.db", key)
        ours = _Ours(folder / f"bulk-ours-{kind}.db", key)
        for number in range(rounds + 1):
            news = list(new_entries(entries))
            rows = list(raw.rows(entries))
            names = list(rates)
            for name in names if number % 2 == 0 else reversed(names):
                rate = ours.many(news) if name == "Holdfast" else raw.many(rows)
                if number:  # the first round warms up
                    rates[name].append(rate)
                step()
        raw.close()
        ours.close()
        found[f"outbox_bulk_{kind}"] = _table(rates)
    return found


def claims(
    folder: Path,
    *,
    small: int = 1_000,
    large: int = 1_000_000,
    rounds: int = 5,
    count: int = CLAIMS,
) -> tuple[dict[str, float], list[Point]]:
    """Return how long it takes to look for the next entry and to claim it, few and many queued.

    Few and many by turns, when all are there and while the large queue grows.
    """
    queues = {size: _opened(folder / f"claims-{size}.db") for size in (small, large)}
    _fill(queues[small], small)
    points: list[Point] = []
    there = 0
    for size in sizes(small, large):
        _fill(queues[large], size - there)
        there = size
        points.append(_point(size, queues[small], queues[large], min(200, small // 2)))
    looks: dict[int, list[float]] = {size: [] for size in queues}
    takes: dict[int, list[float]] = {size: [] for size in queues}
    for queue in queues.values():
        _claims(queue, count // rounds)
    for number in range(rounds):
        sizes_by_turns = (small, large) if number % 2 == 0 else (large, small)
        for size in sizes_by_turns:
            looked, took = _claims(queues[size], count // rounds)
            looks[size].append(looked)
            takes[size].append(took)
    for queue in queues.values():
        queue.close()
    found: dict[str, float] = {"small": small, "large": large}
    for name, times in (("next_eligible", looks), ("claim", takes)):
        few, many = statistics.median(times[small]), statistics.median(times[large])
        found[f"{name}_small_us"] = round(few * 1e6, 1)
        found[f"{name}_large_us"] = round(many * 1e6, 1)
        found[f"{name}_ratio"] = round(many / few, 3)
    return found, points


def _point(size: int, few: OutboxQueue, many: OutboxQueue, count: int) -> Point:
    """Claim in both by turns."""
    each = max(1, count // 4)
    _claims(many, each)  # pages and plans warm up
    times = [(_claims(few, each)[1], _claims(many, each)[1]) for _ in range(4)]
    return Point(
        size,
        statistics.median(mine for _, mine in times) * 1e6,
        statistics.median(mine / other for other, mine in times),
    )


def _claims(queue: OutboxQueue, count: int) -> tuple[float, float]:
    """Return the median seconds of a look and of a claim with its commit."""
    looks, takes = [], []
    claimed = []
    for _ in range(count):
        began = time.perf_counter()
        queue.next_eligible(USER)
        looked = time.perf_counter()
        claim = queue.claim(USER)
        takes.append(time.perf_counter() - looked)
        looks.append(looked - began)
        assert claim is not None
        claimed.append(claim)
    with queue.transaction():
        for claim in claimed:
            queue.release(claim)
    return statistics.median(looks), statistics.median(takes)


def _opened(path: Path) -> OutboxQueue:
    queue = OutboxQueue.open(path)
    queue.add_user(USER)
    return queue


def _fill(queue: OutboxQueue, more: int) -> None:
    """Add so many entries: one as an app does, and the rest as rows like it, which is quicker."""
    first = queue.enqueue(next(new_entries(1)))
    if more == 1:
        return
    columns = statement("insert_entry").partition("(")[2].partition(")")[0]
    more_rows = _MORE.format(columns=columns, values=_in_turn(columns))
    with queue.transaction() as connection:
        (usual,) = connection.execute("PRAGMA cache_size").fetchone()
        connection.execute("PRAGMA cache_size=-400000")
        connection.execute(more_rows, (more - 1, first.id))
    with queue.transaction() as connection:
        connection.execute(f"PRAGMA cache_size={usual}")


_MORE = """
WITH RECURSIVE count(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM count WHERE n < ?1)
INSERT INTO offline_sync_queue ({columns})
SELECT {values} FROM count, (SELECT * FROM offline_sync_queue WHERE id = ?2)
"""
# Ids that grow, as a UUID of version 7 does, and others that are random.
_GROWING = "printf('%s%08x', substr(id, 1, 28), n)"
_RANDOM = "lower(hex(randomblob(16)))"
_OTHERWISE = {
    "id": _GROWING,
    "local_id": _RANDOM,
    "idempotency_key": _RANDOM,
    "lane": f"entity_type || '/' || {_RANDOM}",
    "sequence_number": "sequence_number + n",
    "enqueued_ms": "enqueued_ms + n",
}


def _in_turn(columns: str) -> str:
    """Return what stands in each column: as in the first entry, or otherwise."""
    return ", ".join(_OTHERWISE.get(name.strip(), name) for name in columns.split(","))


class _Contender(ABC):
    """Something that makes one durable row at a time, of what was prepared before."""

    def prepare(self, count: int) -> Iterator[Any]:
        """Return what to put: made outside the time that is taken."""
        return new_entries(count)

    @abstractmethod
    def put(self, item: Any) -> None:
        """Keep one."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the file."""

    def run(self, count: int) -> float:
        """Return how many seconds so many take."""
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

    def many(self, news: Iterable[NewEntry]) -> float:
        began = time.perf_counter()
        done = len(self.queue.enqueue_many(news))
        return done / (time.perf_counter() - began)

    def close(self) -> None:
        self.queue.close()


class _Raw(_Contender):
    """The same row into the same kind of file, or into a table that has no index but its rowid."""

    def __init__(self, path: Path, key: bytes | None, *, bare: bool = False) -> None:
        self._queue = OutboxQueue.open(path, passphrase=key)
        self._queue.add_user(USER)
        pattern = self._queue.enqueue(next(new_entries(1)))
        # The outbox's own connection, so that driver, pragmas and cipher are the same.
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
    """Return the row of an entry like this one, as the outbox would write it."""
    return (
        entry_id,
        entry.user_id,
        entry.operation.value,
        entry.entity_type,
        local_id,
        None,
        entry.endpoint,
        entry.payload,
        None,
        str(uuid.uuid4()),
        entry.status.value,
        entry.max_attempts,
        number,
        json_text(entry.dependency_ids),
        instant(entry.created_at),
        None,
        entry.priority,
        instant(entry.client_generated_at),
        entry.profile,
        None,
        None,
        0,
        None,
        None,
        f"{entry.entity_type}/{local_id}",
        True,
        0,
        number,
    )


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
    """Return what an app would keep of the same action in a queue that knows nothing of HTTP."""
    return {
        "id": new.local_id,
        "operation": new.operation,
        "endpoint": new.endpoint,
        "payload": new.payload,
    }


def _table(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Return each one's share of the first, round by round."""
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
