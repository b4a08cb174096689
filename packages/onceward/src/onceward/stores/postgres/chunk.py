"""A transaction for several requests of one batch on PostgreSQL."""

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from onceward.core.idempotency_record import AuditEvent, Record, RecordId
from onceward.core.storable_text import check_storable
from onceward.errors import StoreUnavailableError, SupersededError
from onceward.ports import Found, KeyClaimed
from onceward.stores.base import ItemUnit
from onceward.stores.errors import aborted, is_aborted, statement_error, unavailable
from onceward.stores.postgres.session import UsedSession, outlives_statement
from onceward.stores.postgres.unit_of_work import PostgresTransaction, PostgresUnit
from onceward.stores.rows import audit_values, encode_headers, record_of

if TYPE_CHECKING:
    from onceward.stores.postgres.store import BasePostgresStore

__all__ = ["PostgresChunk"]

_ITEM: Final = "onceward_item"
_SET: Final = f"SAVEPOINT {_ITEM}"
_RELEASE: Final = f"RELEASE SAVEPOINT {_ITEM}"
_ROLL_BACK: Final = f"ROLLBACK TO SAVEPOINT {_ITEM}"


class _ChunkSession(UsedSession):
    """Also notes statements whose effect lasts until the end of the transaction."""

    __slots__ = ("has_failed", "is_lasting", "is_touched")

    def __init__(self) -> None:
        super().__init__()
        self.is_lasting = False
        # A statement of the current item has run, or may have.
        self.is_touched = False
        # One of them has failed, so that the transaction is aborted.
        self.has_failed = False

    def note_statement(self, sql: str) -> None:
        """Note a statement of the app."""
        super().note_statement(sql)
        self.is_touched = True
        if not self.is_lasting and outlives_statement(sql):
            self.is_lasting = True

    def note_failure(self) -> None:
        """Note that a statement of the app has failed."""
        self.has_failed = True

    def note_raw(self) -> None:
        """Raise: with the driver's connection, a handler could commit the other items.

        Its request becomes a 503, which is rolled back, and runs again alone.
        """
        raise StoreUnavailableError(
            "a handler that uses the driver's connection does not share a transaction",
            is_outage=False,
            is_for_callers=True,
        )


class PostgresChunk:
    """Owns a connection with an open transaction until commit or rollback."""

    def __init__(
        self, store: "BasePostgresStore[Any]", unit: PostgresUnit[Any], *, has_savepoints: bool
    ) -> None:
        self._store = store
        self._unit = unit
        self._driver = store.driver
        self._used = unit.statements.used = _ChunkSession()
        # A savepoint was set for the next item, or is left from a rollback to it.
        self._has_savepoint = False
        self._sets_savepoints = has_savepoints
        self.is_broken = False
        self.needs_savepoints = False

    @property
    def must_end(self) -> bool:
        """True after a SET, a temporary table and the like, which the next item would see."""
        return self._used.is_lasting

    async def claim(
        self, record_ids: Sequence[RecordId], now: datetime
    ) -> Sequence[KeyClaimed | Found]:
        """Try all locks in one statement, then look all keys up in another one.

        In two statements with separate snapshots: in one, the snapshot would be older than the
        locks, and a record committed in between would be missed. Records are returned when they
        are on the synchronous standby, too.
        """
        for record_id in record_ids:
            check_storable(*record_id)
        numbers = [self._store.table_names.lock_number(*record_id) for record_id in record_ids]
        try:
            await self._release_savepoint()
            count = await self._lock(numbers)
            rows = []
            if count:
                tenants, endpoints, keys = zip(*record_ids[:count], strict=True)
                rows = await self._unit.connection.fetch(
                    self._store.sql["find_records"], list(tenants), list(endpoints), list(keys)
                )
        except BaseException as error:
            self.is_broken = True
            if isinstance(error, self._driver.outages):
                self._driver.translate_error(error)
            if isinstance(error, self._driver.errors):
                raise statement_error(error) from error
            raise
        claims: list[KeyClaimed | Found] = [KeyClaimed() for _ in range(count)]
        for row in rows:
            place, *columns = tuple(row)
            record = record_of(record_ids[place - 1], columns)
            is_live = record.expires_at > now
            claims[place - 1] = Found(record) if is_live else KeyClaimed(after_expiry=True)
        if any(isinstance(claim, Found) for claim in claims):
            await self._store.connections.confirm_replicated()
        return claims

    async def _lock(self, numbers: Sequence[int]) -> int:
        """Lock the numbers up to the first that is held elsewhere; return how many."""
        connection, count = self._unit.connection, len(numbers)
        while count:
            await connection.execute(_SET)
            wanted = [str(number) for number in sorted(set(numbers[:count]))]
            rows = await connection.fetch(self._store.sql["try_locks"], wanted)
            held = {row[0] for row in rows if not row[1]}
            if not held:
                await connection.execute(_RELEASE)
                return count
            # Frees the locks behind the first that is held, too.
            await connection.execute(f"{_ROLL_BACK};{_RELEASE}")
            count = next(at for at, number in enumerate(numbers) if number in held)
        return 0

    async def statements(self) -> PostgresTransaction:
        """Return the transaction, outside the savepoints of items."""
        try:
            await self._release_savepoint()
        except BaseException as error:
            self.is_broken = True
            if isinstance(error, self._driver.outages):
                raise unavailable(error) from error
            raise
        return self._unit.statements

    async def begin_item(self) -> ItemUnit:
        """Set a savepoint, unless there is one already or the chunk has none."""
        if self._sets_savepoints and not self._has_savepoint:
            try:
                await self._unit.connection.execute(_SET)
            except BaseException as error:
                self.is_broken = True
                if isinstance(error, self._driver.outages):
                    raise unavailable(error) from error
                raise
        self._has_savepoint = self._used.is_touched = False
        statements = PostgresTransaction(self._unit.connection, self._driver)
        statements.used = self._used
        return ItemUnit(self.end_item, statements, self._driver.handler_transaction(statements))

    async def end_item(self, *, is_kept: bool) -> None:
        """Release the savepoint, or roll back to it; there is one for the next item then."""
        used = self._used
        if not self._sets_savepoints:
            if used.has_failed or (used.is_touched and not is_kept):
                self.is_broken = self.needs_savepoints = True
            return
        if not used.is_touched:  # nothing to keep or to undo: the next item has the same one
            self._has_savepoint = True
            return
        try:
            await self._unit.connection.execute(f"{_RELEASE};{_SET}" if is_kept else _ROLL_BACK)
            self._has_savepoint = True
        except self._driver.errors as error:
            if is_kept and is_aborted(error):
                await self.end_item(is_kept=False)
                raise aborted() from error
            self.is_broken = True
        except self._driver.outages:
            self.is_broken = True
        except BaseException:
            self.is_broken = True
            raise

    async def commit(self, records: Sequence[Record], audits: Sequence[AuditEvent]) -> None:
        """Write records and audit events in one statement, and commit."""
        try:
            if self._store.table_names.is_distributed:
                await self._unit.connection.execute(self._store.sql["two_phase_commit"])
            if records or audits:
                row = await self._unit.connection.fetchrow(
                    self._store.sql["save_records"], *_columns(records), *_audit_columns(audits)
                )
                if row[0] != len(records):
                    raise SupersededError(  # noqa: TRY301 - rolled back below
                        "another request with one of these keys was committed first"
                    )
        except BaseException as error:
            await self._unit.rollback()
            if isinstance(error, self._driver.outages):
                raise unavailable(error) from error
            if isinstance(error, self._driver.errors):
                raise statement_error(error) from error
            raise
        await self._unit.commit(None, None)

    async def rollback(self) -> None:
        """Roll everything back."""
        await self._unit.rollback()

    async def _release_savepoint(self) -> None:
        """Release an empty savepoint: a rollback to it would free the locks taken after it."""
        if self._has_savepoint:
            self._has_savepoint = False
            await self._unit.connection.execute(_RELEASE)


def _columns(records: Sequence[Record]) -> list[list[str | None]]:
    """Return the values of records by column, in the order of ``save_records``."""
    rows = [
        (
            *record.id,
            *record.fingerprint,
            str(record.status),
            f"\\x{record.body.hex()}",
            encode_headers(record),
            record.request_id,
            record.correlation_id,
            record.audit_id,
            record.created_at.isoformat(),
            record.expires_at.isoformat(),
            None if record.client_generated_at is None else record.client_generated_at.isoformat(),
        )
        for record in records
    ]
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(14)]


def _audit_columns(audits: Sequence[AuditEvent]) -> list[list[str | None]]:
    rows = [
        [
            value if value is None else str(value)
            for value in audit_values(audit, audit.created_at.isoformat())[:11]
        ]
        for audit in audits
    ]
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(11)]
