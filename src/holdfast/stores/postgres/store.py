"""Records on PostgreSQL. A guarded request costs no round trip that a bare one would not."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Final, NoReturn

import asyncpg
import msgspec

from holdfast.core.decision import HELD, Held
from holdfast.core.fingerprint import lock_number
from holdfast.core.record import AuditEvent, Record, RecordId, RequestMark
from holdfast.errors import (
    CommitUnknownError,
    ConfigurationError,
    NoTransactionError,
    StoreUnavailableError,
    SupersededError,
)
from holdfast.ports import Claimed, Found, Params, RecordQuery, Row
from holdfast.stores.migrations import Migration, check_known, load_migrations
from holdfast.stores.postgres.literals import (
    bytes_literal,
    instant_literal,
    int_literal,
    text_literal,
)
from holdfast.stores.postgres.params import positional
from holdfast.stores.postgres.pool import ConnectionPool
from holdfast.stores.queries import load_queries

__all__ = ["PostgresStore", "PostgresTransaction"]

_SQL = load_queries("holdfast.stores.postgres")
_FIND: Final = _SQL["find_record"]

# What holdfast_claim says by its number of rows: ours (and whether an expired record is there).
_OURS: Final = {"SELECT 0": False, "SELECT 3": True}
_HELD_TAG: Final = "SELECT 2"
_SUPERSEDED_STATE: Final = "HF002"
_MIGRATION_LOCK: Final = 0x686F6C64  # "hold"

# COMMIT undoes such a transaction; to answer as if it had been kept would be a lie.
_SPOILT: Final = "a statement failed, the handler went on, and PostgreSQL rolled everything back"

# Above this a body is sent as a parameter, in a round trip of its own, not as twice its size in
# hex.
_INLINE_BODY_BYTES: Final = 16 * 1024

_encode_headers = msgspec.json.Encoder().encode
_decode_headers = msgspec.json.Decoder(dict[str, str]).decode


def _outages() -> tuple[type[BaseException], ...]:
    """Return what asyncpg raises when the server, not the statement, is the trouble."""
    return (
        OSError,
        TimeoutError,
        asyncpg.InterfaceError,
        # "cannot switch to state": the server died while the connection was idle.
        asyncpg.InternalClientError,
        asyncpg.PostgresConnectionError,
        asyncpg.CannotConnectNowError,
        asyncpg.AdminShutdownError,
        asyncpg.CrashShutdownError,
        asyncpg.TooManyConnectionsError,
        asyncpg.ReadOnlySQLTransactionError,
    )


OUTAGES: Final = _outages()


class PostgresStore:
    """The store for many processes.

    BEGIN and the claim share one message; so do the record, the audit event and COMMIT. Both are
    sent as plain text with hexadecimal values (see ``literals``), because asyncpg cannot pipeline.
    """

    name = "postgresql"

    def __init__(
        self,
        url: str,
        *,
        migrations: Sequence[Migration] = (),
        min_connections: int = 1,
        max_connections: int = 16,
        acquire_seconds: float = 10.0,
        connect_seconds: float = 5.0,
    ) -> None:
        """Take the address; nothing is connected before ``open``."""
        self._url = url
        self._min = min_connections
        self._max = max_connections
        self._acquire_seconds = acquire_seconds
        self._connect_seconds = connect_seconds
        self._pool: ConnectionPool | None = None
        self._migrations = [
            *load_migrations("core", "holdfast.stores.postgres.migrations"),
            *migrations,
        ]

    async def open(self) -> None:
        """Connect and bring the schema up to date."""
        if self._pool is not None:
            return
        pool = ConnectionPool(self._connect, most=self._max)
        try:
            await pool.fill(self._min)
        except OUTAGES as error:
            if isinstance(error, ValueError):  # asyncpg: the URL, not the server
                raise ConfigurationError(f"cannot connect to PostgreSQL: {error}") from error
            raise _unavailable(error) from error
        except (asyncpg.PostgresError, ValueError) as error:
            raise ConfigurationError(f"cannot connect to PostgreSQL: {error}") from error
        self._pool = pool
        try:
            await self._migrate()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Wait for what is running, then disconnect."""
        if self._pool is not None:
            try:
                await self._pool.close(timeout_seconds=10)
            finally:
                self._pool = None  # not before: what is running still has to give back

    async def ping(self) -> None:
        """Ask for one row."""
        await self.read("SELECT 1 AS one")

    async def find(self, record_id: RecordId, now: datetime) -> Record | None:
        """Look a key up outside any transaction."""
        connection = await self._acquire()
        try:
            row = await connection.fetchrow(_FIND, *record_id, now)
        except OUTAGES as error:
            raise _unavailable(error) from error
        finally:
            self._release(connection)
        return None if row is None else _record(record_id, row)

    async def claim(self, record_id: RecordId, now: datetime) -> Claimed | Found | Held:
        """Begin, lock and look up in one round trip. Never waits for another holder."""
        tenant, endpoint, key = record_id
        connection = await self._acquire()
        try:
            tag = await connection.execute(
                f"BEGIN;SELECT holdfast_claim({lock_number(tenant, endpoint, key)},"
                f"{text_literal(tenant)},{text_literal(endpoint)},{text_literal(key)},"
                f"{instant_literal(now)})"
            )
            if tag in _OURS:
                return Claimed(PostgresUnit(self, connection), after_expiry=_OURS[tag])
            row = None
            if tag != _HELD_TAG:
                row = await connection.fetchrow(_FIND, *record_id, now)
            await connection.execute("ROLLBACK")
        except BaseException as error:  # or cancelled: the connection is in an unknown state
            await self._undo(connection)
            if isinstance(error, (asyncpg.PostgresError, *OUTAGES)):
                raise _unavailable(error) from error
            raise
        self._release(connection)
        # No row although there was one: swept in between, so it was past its time just now.
        return Found(_record(record_id, row)) if row is not None else HELD

    async def begin(self) -> "PostgresUnit":
        """Open a transaction without a key."""
        connection = await self._acquire()
        try:
            await connection.execute("BEGIN")
        except BaseException as error:
            await self._undo(connection)
            if isinstance(error, OUTAGES):
                raise _unavailable(error) from error
            raise
        return PostgresUnit(self, connection)

    async def read(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Query outside any guarded request."""
        connection = await self._acquire()
        try:
            text, values = positional(sql, params)
            return [dict(row) for row in await connection.fetch(text, *values)]
        except OUTAGES as error:
            _raise_told(error)
        finally:
            self._release(connection)

    async def sweep(self, now: datetime, limit: int) -> int:
        """Delete one small batch."""
        connection = await self._acquire()
        try:
            tag: str = await connection.execute(_SQL["sweep_records"], now, limit)
        except OUTAGES as error:
            raise _unavailable(error) from error
        finally:
            self._release(connection)
        return rows_of(tag)

    async def records(self, query: RecordQuery) -> Sequence[Record]:
        """List records for operators."""
        after = query.after or (None, None, None, None)
        connection = await self._acquire()
        try:
            rows = await connection.fetch(
                _SQL["list_records"], query.tenant, query.endpoint, query.key, *after, query.limit
            )
        except OUTAGES as error:
            raise _unavailable(error) from error
        finally:
            self._release(connection)
        return [_record(RecordId(row[0], row[1], row[2]), tuple(row)[3:]) for row in rows]

    async def secret(self) -> bytes:
        """Return the database's own secret."""
        return bytes((await self.read(_SQL["read_secret"]))[0]["secret"])

    # -- connections ----------------------------------------------------------------------

    async def _acquire(self) -> Any:
        if self._pool is None:
            raise StoreUnavailableError("the store is not open")
        try:
            return await self._pool.acquire(self._acquire_seconds)
        except OUTAGES as error:
            raise _unavailable(error) from error
        except asyncpg.PostgresError as error:
            raise _unavailable(error) from error

    def _release(self, connection: Any) -> None:
        if self._pool is not None:
            self._pool.release(connection)

    async def _connect(self) -> Any:
        return await asyncpg.connect(
            self._url,
            timeout=self._connect_seconds,
            server_settings={"application_name": "holdfast"},
        )

    async def _undo(self, connection: Any) -> None:
        """Roll back and give the connection back; cut it off where that does not work."""
        try:
            await asyncio.wait_for(connection.execute("ROLLBACK"), timeout=5)
        except BaseException as error:
            with suppress(asyncpg.InterfaceError):  # gone already: asyncpg lets go by itself
                connection.terminate()
            self._release(connection)
            if not isinstance(error, Exception):
                raise
        else:
            self._release(connection)

    async def _migrate(self) -> None:
        """Apply what is missing. The lock makes several starters take turns."""
        connection = await self._acquire()
        try:
            async with connection.transaction():
                await connection.execute("SELECT pg_advisory_xact_lock($1)", _MIGRATION_LOCK)
                await connection.execute(
                    "CREATE TABLE IF NOT EXISTS holdfast_migrations (room text NOT NULL,"
                    " number integer NOT NULL, name text NOT NULL,"
                    " applied_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (room, number))"
                )
                rows = await connection.fetch("SELECT room, number FROM holdfast_migrations")
                applied = {(row[0], row[1]) for row in rows}
                check_known(applied, self._migrations)
                for migration in self._migrations:
                    if (migration.room, migration.number) not in applied:
                        await connection.execute(migration.sql)
                        await connection.execute(
                            "INSERT INTO holdfast_migrations (room, number, name)"
                            " VALUES ($1, $2, $3)",
                            migration.room,
                            migration.number,
                            migration.name,
                        )
        except OUTAGES as error:
            raise _unavailable(error) from error
        finally:
            self._release(connection)


class _Ended:
    """Stands where the connection was: by now it may serve another request."""

    def __getattr__(self, _name: str) -> Any:
        raise NoTransactionError("the transaction has ended: it was committed or rolled back")


_ENDED: Final = _Ended()


class PostgresTransaction:
    """What a handler writes in on PostgreSQL. ``connection`` is asyncpg's own, for the rest."""

    def __init__(self, connection: Any) -> None:
        """Wrap the connection the unit holds."""
        self.connection = connection

    async def execute(self, sql: str, params: Params = None) -> int:
        """Run a statement and return how many rows it changed."""
        text, values = positional(sql, params)
        try:
            return rows_of(await self.connection.execute(text, *values))
        except OUTAGES as error:
            _raise_told(error)

    async def fetch_all(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Return all rows of a query."""
        text, values = positional(sql, params)
        try:
            return [dict(row) for row in await self.connection.fetch(text, *values)]
        except OUTAGES as error:
            _raise_told(error)

    async def fetch_one(self, sql: str, params: Params = None) -> Row | None:
        """Return the first row of a query, or None."""
        text, values = positional(sql, params)
        try:
            row = await self.connection.fetchrow(text, *values)
        except OUTAGES as error:
            _raise_told(error)
        return None if row is None else dict(row)


class PostgresUnit:
    """One guarded request's transaction, open since the claim."""

    superseded = False

    def __init__(self, store: PostgresStore, connection: Any) -> None:
        """Own the connection until the end."""
        self._store = store
        self._connection = connection
        self._ended = False
        self.transaction = PostgresTransaction(connection)

    async def commit(self, record: Record | None, audit: AuditEvent | None) -> None:
        """Write record and audit event and commit, in one round trip."""
        if self._ended:  # the connection may serve another request by now
            raise NoTransactionError("the transaction has ended: it was committed or rolled back")
        connection = self._connection
        try:
            if record is None:
                if audit is not None:
                    await connection.execute(_SQL["save_audit_event"], *_audit_values(audit))
                tag = await connection.execute("COMMIT")
            elif len(record.body) <= _INLINE_BODY_BYTES:
                tag = await connection.execute(f"{_finish_statement(record, audit)};COMMIT")
            else:
                await connection.execute(_SQL["finish"], *_finish_values(record, audit))
                tag = await connection.execute("COMMIT")
        except asyncpg.PostgresError as error:
            await self._fail()
            if error.sqlstate == _SUPERSEDED_STATE:
                raise SupersededError("another request with this key was committed first") from None
            _raise_not_committed(error)
        except OUTAGES as error:
            await self._fail()
            raise CommitUnknownError(str(error)) from error
        except BaseException:
            await self._fail()
            raise
        self._ended = True
        self.transaction.connection = _ENDED
        self._store._release(connection)  # noqa: SLF001 - one room
        if tag == "ROLLBACK":
            raise StoreUnavailableError(_SPOILT)

    async def rollback(self) -> None:
        """Undo everything."""
        if not self._ended:
            await self._fail()

    async def _fail(self) -> None:
        self._ended = True
        self.transaction.connection = _ENDED
        await self._store._undo(self._connection)  # noqa: SLF001


def rows_of(tag: str) -> int:
    """Read the number of rows off a command tag: ``INSERT 0 3``, ``UPDATE 2``, ``BEGIN``."""
    last = tag.rpartition(" ")[2]
    return int(last) if last.isdigit() else 0


def _finish_statement(record: Record, audit: AuditEvent | None) -> str:
    tenant, endpoint, key = record.id
    text = text_literal
    audited = (
        f"{text(audit.id)},{text(audit.actor)},{text(audit.resource)},{int_literal(audit.version)}"
        if audit is not None
        else "NULL,NULL,NULL,NULL"
    )
    return (
        f"SELECT holdfast_finish({text(tenant)},{text(endpoint)},{text(key)},"
        f"{text(record.mark.body_hash)},{text(record.mark.fingerprint)},"
        f"{int_literal(record.status)},{bytes_literal(record.body)},"
        f"{text(_encode_headers(record.headers).decode())},"
        f"{text(record.request_id)},{text(record.correlation_id)},"
        f"{instant_literal(record.created_at)},{instant_literal(record.expires_at)},{audited})"
    )


def _finish_values(record: Record, audit: AuditEvent | None) -> tuple[Any, ...]:
    return (
        *record.id,
        *record.mark,
        record.status,
        record.body,
        _encode_headers(record.headers).decode(),
        record.request_id,
        record.correlation_id,
        record.created_at,
        record.expires_at,
        audit.id if audit else None,
        audit.actor if audit else None,
        audit.resource if audit else None,
        audit.version if audit else None,
    )


def _audit_values(event: AuditEvent) -> tuple[Any, ...]:
    return (
        event.tenant,
        event.id,
        event.actor,
        event.endpoint,
        event.payload_hash,
        event.status,
        event.resource,
        event.version,
        event.request_id,
        event.correlation_id,
        event.created_at,
    )


def _record(record_id: RecordId, row: Any) -> Record:
    return Record(
        id=record_id,
        mark=RequestMark(row[0], row[1]),
        status=row[2],
        body=row[3],
        headers=_decode_headers(row[4]),
        request_id=row[5],
        correlation_id=row[6],
        audit_id=row[7],
        created_at=row[8],
        expires_at=row[9],
    )


def _unavailable(error: BaseException) -> StoreUnavailableError:
    reason = str(error) or type(error).__name__
    return StoreUnavailableError(f"PostgreSQL does not answer: {reason}")


def _raise_not_committed(error: asyncpg.PostgresError) -> NoReturn:
    if isinstance(error, OUTAGES):
        raise CommitUnknownError(str(error)) from error
    if isinstance(error, asyncpg.InFailedSQLTransactionError):
        raise StoreUnavailableError(_SPOILT) from error
    raise error


def _raise_told(error: BaseException) -> NoReturn:
    """Raise an outage as such; what the statement's author got wrong is raised as it came.

    asyncpg says ``InterfaceError`` for both: to a value of the wrong type, or to two statements
    at once on one connection, "try again" would be the wrong answer, for ever.
    """
    is_mistake = isinstance(error, ValueError) or "another operation is in progress" in str(error)
    if is_mistake and isinstance(error, asyncpg.InterfaceError):
        raise error
    raise _unavailable(error) from error
