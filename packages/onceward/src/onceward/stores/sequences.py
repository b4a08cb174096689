"""The numbers of clients in a store: how far each stream has come, and which keys it has used."""

from collections.abc import Awaitable, Sequence
from datetime import datetime
from typing import Any, Final, TypeVar

from onceward.errors import OncewardError, StoreUnavailableError
from onceward.ports import Row, Store, Transaction
from onceward.stores.errors import aborted, is_aborted, unstorable_error
from onceward.stores.sql_loader import load_queries
from onceward_protocol.sequence import KNOWN_NUMBERS, Position, Stream

T = TypeVar("T")

# Distinguishes the lock of a stream from that of a record. No endpoint has this name.
_LOCK: Final = "onceward sequence"


class SequenceNumbers:
    """Statements about streams, in any store.

    ``on`` is a transaction. Without one, a statement runs by itself.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def has_locks(self) -> bool:
        """Whether ``try_lock`` is needed: on SQLite there is one writer at a time."""
        return self._store.name != "sqlite"

    async def try_lock(self, stream: Stream, on: Transaction | None = None) -> bool:
        """Lock a stream until the end of the transaction; return False if another one has it."""
        lock = self._store.table_names.lock_number(stream.tenant, _LOCK, stream.client_id)
        rows = await self._fetch("try_lock", {"lock": lock}, on)
        return bool(rows[0]["is_locked"])

    async def find(self, stream: Stream, number: int, on: Transaction | None = None) -> Position:
        """Return how far a stream has come, and which key has used this number."""
        name = "find_number_at_once" if self.has_locks else "find_number"
        rows = await self._fetch(name, {**_names(stream), "number": number}, on)
        return Position(rows[0]["last_number"] or 0, rows[0]["key_hash"])

    async def find_keys(
        self, stream: Stream, number: int, on: Transaction | None = None
    ) -> dict[int, str]:
        """Return the hashes of the keys that this number and those after it were used for."""
        rows = await self._fetch("find_numbers", {**_names(stream), "number": number}, on)
        return {row["number"]: row["key_hash"] for row in rows}

    async def find_number(
        self, stream: Stream, key_hash: str, on: Transaction | None = None
    ) -> int | None:
        """Return the number that a key was used for; None if it is not known."""
        rows = await self._fetch("find_key", {**_names(stream), "key_hash": key_hash}, on)
        number: int | None = rows[0]["number"]
        return number

    async def use(
        self, stream: Stream, before: int, hashes: Sequence[str], now: datetime, on: Transaction
    ) -> bool:
        """Use the numbers after ``before``, one for each key; forget those of long ago.

        Returns False if ``before`` is not the last number that was used: then the transaction must
        not commit.
        """
        last = before + len(hashes)
        values = {
            **_names(stream),
            "before": before,
            "last_number": last,
            "now": now,
            "forgotten": last - KNOWN_NUMBERS,
        }
        if self.has_locks:
            values |= {
                "numbers": [str(number) for number in range(before + 1, last + 1)],
                "hashes": list(hashes),
            }
            name = "begin_at_once" if before == 0 else "advance_at_once"
            return await self._execute(name, values, on) == len(hashes)
        if not await self._execute("begin_stream" if before == 0 else "advance_stream", values, on):
            return False
        for number, key_hash in enumerate(hashes, start=before + 1):
            numbered = {**_names(stream), "number": number, "key_hash": key_hash}
            await self._execute("save_number", numbered, on)
        if last > KNOWN_NUMBERS:
            await self._execute("forget_numbers", values, on)
        return True

    def _sql(self, name: str) -> str:
        return load_queries("onceward.stores", "sequences.sql", names=self._store.table_names)[name]

    async def _fetch(
        self, name: str, values: dict[str, Any], on: Transaction | None
    ) -> Sequence[Row]:
        read = self._store.read if on is None else on.fetch_all
        return await _translated(read(self._sql(name), values))

    async def _execute(self, name: str, values: dict[str, Any], on: Transaction) -> int:
        return await _translated(on.execute(self._sql(name), values))


def _names(stream: Stream) -> dict[str, Any]:
    return {"tenant": stream.tenant, "client_id": stream.client_id}


async def _translated(work: Awaitable[T]) -> T:
    """Translate an error of the driver, which is about one statement, as a commit does."""
    try:
        return await work
    except OncewardError:
        raise
    except Exception as error:
        if is_aborted(error):
            raise aborted() from error
        refused = unstorable_error(error)
        if refused is not None:
            raise refused from error
        raise StoreUnavailableError(
            f"the database refused a statement about a sequence: {error}", is_outage=False
        ) from error
