"""Transactions on PostgreSQL: of one guarded request or job, and of several in one batch."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from onceward.errors import StoreUnavailableError, SupersededError
from onceward.ports import Found, KeyClaimed, Params, Row, TransactionT_co
from onceward.records import AuditEvent, Record, RecordId
from onceward.stores.base import BaseUnit, ItemUnit, ended
from onceward.stores.errors import (
    aborted,
    is_aborted,
    is_read_only,
    raise_commit_error,
    raise_unstorable,
    statement_error,
    unavailable,
)
from onceward.stores.postgres.connections import sending_commit
from onceward.stores.postgres.driver import NEVER, Driver
from onceward.stores.postgres.params import finish_statement, positional, rows_changed
from onceward.stores.postgres.session import UsedSession, outlives_statement
from onceward.stores.rows import (
    HAS_WRITTEN,
    audit_values,
    check_storable,
    finish_values,
    record_of,
    record_values,
    to_text,
)

if TYPE_CHECKING:
    from onceward.stores.postgres.store import BasePostgresStore


T = TypeVar("T")

# Larger bodies are sent as a parameter, in a separate round trip, not in hexadecimal digits.
_INLINE_BODY_BYTES: Final = 16 * 1024


_ITEM: Final = "onceward_item"
_SET: Final = f"SAVEPOINT {_ITEM}"
_RELEASE: Final = f"RELEASE SAVEPOINT {_ITEM}"
_ROLL_BACK: Final = f"ROLLBACK TO SAVEPOINT {_ITEM}"


class _Ended:
    """Replaces the connection of an ended unit, which may serve another request by now."""

    def __getattr__(self, _name: str) -> Any:
        raise ended()


_ENDED: Final = _Ended()


class PostgresTransaction:
    """The ``Transaction`` of a handler. ``connection`` is the driver's, for everything else."""

    def __init__(self, connection: Any, driver: Driver) -> None:
        self._on = connection
        self._driver = driver
        # The driver's connection, for Onceward.
        self.raw = driver.raw(connection)
        self.used = UsedSession()

    @property
    def connection(self) -> Any:
        """The driver's connection. Raises ``NoTransactionError`` after the end when it is used."""
        self.used.note_raw()
        return self.raw

    def end(self) -> None:
        """Refuse further statements: the connection may serve another request by now."""
        self._on = self.raw = _ENDED

    def execute(self, sql: str, params: Params = None) -> Coroutine[Any, Any, int]:
        return self._run("execute", sql, params, rows_changed)

    def fetch_all(self, sql: str, params: Params = None) -> Coroutine[Any, Any, Sequence[Row]]:
        return self._run("fetch", sql, params, _dicts)

    def fetch_one(self, sql: str, params: Params = None) -> Coroutine[Any, Any, Row | None]:
        return self._run("fetchrow", sql, params, _dict_or_none)

    async def _run(self, method: str, sql: str, params: Params, convert: Callable[[Any], T]) -> T:
        text, values = positional(sql, params)
        self.used.note_statement(sql)
        on, driver = self._on, self._driver
        try:
            on.deadline = driver.time.now + driver.deadlines.statement_seconds
            return convert(await getattr(on, method)(text, *values))
        except driver.outages as error:
            if is_read_only(error):
                on.is_read_only = True
            driver.translate_error(error)
        except driver.errors as error:
            self.used.note_failure()
            raise_unstorable(error)
            raise
        finally:
            on.deadline = NEVER


def _dicts(rows: Sequence[Any]) -> Sequence[Row]:
    return [dict(row) for row in rows]


def _dict_or_none(row: Any) -> Row | None:
    return None if row is None else dict(row)


class SharedPostgresTransaction(PostgresTransaction):
    """Shares its connection with ``keep_alive``: asyncpg runs one statement at a time."""

    def __init__(self, connection: Any, driver: Driver) -> None:
        super().__init__(connection, driver)
        self.lock = asyncio.Lock()

    async def _run(self, method: str, sql: str, params: Params, convert: Callable[[Any], T]) -> T:
        async with self.lock:
            return await super()._run(method, sql, params, convert)


class PostgresUnit(BaseUnit, Generic[TransactionT_co]):
    """Owns a connection with an open transaction until commit or rollback."""

    can_commit_after = True

    def __init__(
        self, store: "BasePostgresStore[Any]", connection: Any, *, is_kept_alive: bool = False
    ) -> None:
        self._store = store
        self._connections = store.connections
        # The connection, for statements of the store.
        self.connection = connection
        self._ended = False
        self._is_ending = False
        self.is_sync = store.driver.is_sync
        kind = SharedPostgresTransaction if is_kept_alive else PostgresTransaction
        self.statements: PostgresTransaction = kind(connection, store.driver)
        # What the handler gets. It depends on the driver.
        self.transaction: TransactionT_co = store.driver.handler_transaction(self.statements)

    @property
    def is_lost(self) -> bool:
        return not self._ended and bool(self.connection.is_closed())

    def outage_of(self, error: Exception) -> StoreUnavailableError | None:
        driver = self._store.driver
        is_of_driver = isinstance(error, (*driver.outages, *driver.errors))
        return unavailable(error) if is_of_driver and self.is_lost else None

    async def has_written(self) -> bool:
        row = await self.statements.fetch_one(HAS_WRITTEN)
        return row is None or bool(row["written"])

    async def keep_alive(self) -> None:
        """Run a query so that the transaction is not idle, unless a statement is running."""
        shared = self.statements
        if (
            not isinstance(shared, SharedPostgresTransaction)
            or self._is_ending
            or shared.lock.locked()
        ):
            return
        async with shared.lock:
            with suppress(Exception):  # the next statement fails
                await self.connection.execute("SELECT 1")

    def commit(self, record: Record | None, audit: AuditEvent | None) -> Coroutine[Any, Any, None]:
        """Write record and audit event and commit, in one round trip."""
        return self._commit(record, audit, None)

    async def commit_after(self, statement: str) -> None:
        """Run a statement without parameters and commit, in one round trip."""
        await self._commit(None, None, statement)

    async def _commit(
        self, record: Record | None, audit: AuditEvent | None, last_statement: str | None
    ) -> None:
        if self._ended:  # the connection may serve another request by now
            raise ended()
        if isinstance(self.statements, SharedPostgresTransaction):
            await self._stop_keep_alive()
        connections, connection, used = self._connections, self.connection, self.statements.used
        driver = connections.driver
        try:
            message = self._last_message(record, audit, last_statement)
            if message is None:
                await self._save_separately(record, audit)
                message = self._last_message(None, None, None)
            started = connections.commits.mark() if connections.waits_for_standby else None
            with sending_commit(connections, connection) as commit:
                tag = await connection.execute(message)
        except (*driver.errors, *driver.outages) as error:
            await self._fail()
            raise_commit_error(
                error, driver.outages, is_cleaned=used.is_used, is_cut=connection.was_cut
            )
        except BaseException:
            connection.terminate()
            await self._fail()
            raise
        self._ended = True
        self.statements.end()
        if used.may_have_names or used.is_raw:
            await connections.clean_and_release(connection, used, tag)
        else:
            connections.release(connection)
        if tag == "ROLLBACK":  # PostgreSQL rolls an aborted transaction back, without an error
            raise aborted()
        commit.raise_if_unknown()
        if started is not None and record is not None:  # so it has written WAL
            connections.commits.confirm(started)

    def _last_message(
        self, record: Record | None, audit: AuditEvent | None, last_statement: str | None
    ) -> str | None:
        """Return the message that commits; None if something must be sent before it."""
        used = self.statements.used
        if last_statement is not None:
            return used.ending(f"{last_statement};COMMIT")
        if record is None:
            # COMMIT of an aborted transaction is no error; a statement before it is.
            end = "SELECT 1;COMMIT" if used.is_used else "COMMIT"
            return used.ending(end) if audit is None else None
        if len(record.body) > _INLINE_BODY_BYTES:
            return None
        finish = finish_statement(self._store.finish_function, record, audit)
        return used.ending(f"{finish};COMMIT")

    async def _save_separately(self, record: Record | None, audit: AuditEvent | None) -> None:
        sql, connection = self._store.sql, self.connection
        if record is not None:
            await connection.execute(sql["finish"], *finish_values(record, audit))
        elif audit is not None:
            await connection.execute(
                sql["save_audit_event"], *audit_values(audit, audit.created_at)
            )

    async def rollback(self) -> None:
        if not self._ended:
            await self._fail()

    async def _stop_keep_alive(self) -> None:
        """Wait for a ``keep_alive`` under way, and refuse further ones."""
        is_first, self._is_ending = not self._is_ending, True
        if is_first and isinstance(self.statements, SharedPostgresTransaction):
            async with self.statements.lock:
                pass

    async def _fail(self) -> None:
        self._ended = True
        await self._stop_keep_alive()
        self.statements.end()
        await self._connections.undo(self.connection, self.statements.used)


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
        super().note_statement(sql)
        self.is_touched = True
        if not self.is_lasting and outlives_statement(sql):
            self.is_lasting = True

    def note_failure(self) -> None:
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
        await self._release_savepoint()
        return self._unit.statements

    async def begin_item(self) -> ItemUnit:
        """Set a savepoint, unless there is one already or the chunk has none."""
        if self._sets_savepoints and not self._has_savepoint:
            await self._send(_SET)
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
                saved = _columns([record_values(record) for record in records], 14)
                # Without the reason, which a request does not have.
                events = [audit_values(audit, to_text(audit.created_at))[:11] for audit in audits]
                row = await self._unit.connection.fetchrow(
                    self._store.sql["save_records"], *saved, *_columns(events, 11)
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
        await self._unit.rollback()

    async def _release_savepoint(self) -> None:
        """Release an empty savepoint: a rollback to it would free the locks taken after it."""
        if self._has_savepoint:
            self._has_savepoint = False
            await self._send(_RELEASE)

    async def _send(self, sql: str) -> None:
        try:
            await self._unit.connection.execute(sql)
        except BaseException as error:
            self.is_broken = True
            if isinstance(error, self._driver.outages):
                raise unavailable(error) from error
            raise


def _columns(rows: Sequence[Sequence[Any]], width: int) -> list[list[str | None]]:
    """Return rows by column, as text, for ``save_records``."""
    columns = zip(*rows, strict=True) if rows else [()] * width
    return [[_text(value) for value in column] for column in columns]


def _text(value: Any) -> str | None:
    if isinstance(value, bytes):
        return f"\\x{value.hex()}"
    return None if value is None else str(value)
