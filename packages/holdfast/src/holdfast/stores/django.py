"""Records through Django's own connection: ``transaction.atomic()`` is the transaction.

Django's connections belong to threads, so every piece of work runs in the thread of its request;
how it gets there is given from outside.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

import msgspec
from django.conf import settings as django_settings
from django.db import DatabaseError, InterfaceError, OperationalError, connections
from django.db.transaction import Atomic, get_connection

from holdfast.core.decision import HELD, Held
from holdfast.core.fingerprint import lock_number
from holdfast.core.idempotency_record import AuditEvent, Record, RecordId, RequestFingerprint
from holdfast.errors import (
    CommitUnknownError,
    ConfigurationError,
    NoTransactionError,
    StoreUnavailableError,
    SupersededError,
)
from holdfast.ports import Claimed, Found, Params, RecordQuery, Row
from holdfast.stores.migrations import (
    MIGRATION_LOCK,
    Migration,
    MigrationTable,
    apply_migrations,
    load_migrations,
    run_steps,
)
from holdfast.stores.notifier import LocalNotifier
from holdfast.stores.sql_loader import load_queries
from holdfast.stores.sqlite.rows import audit_values as sqlite_audit_values
from holdfast.stores.sqlite.rows import from_text, record_values, to_text

__all__ = ["DjangoStore"]

RunInThread = Callable[[Callable[[], Any]], Awaitable[Any]]

_DATABASES: Final = {"sqlite": "sqlite", "postgresql": "postgres"}
_SUPERSEDED_STATE: Final = "HF002"
_OUTAGES: Final = (OperationalError, InterfaceError)
# ``$1``, ``?`` and ``:name`` as our files have them; strings and casts are passed over.
_MARK: Final = re.compile(r"'(?:[^']|'')*'|::|\$(\d+)|(\?)|:([A-Za-z_]\w*)|(%)")

_encode_headers = msgspec.json.Encoder().encode
_decode_headers = msgspec.json.Decoder(dict[str, str]).decode


@lru_cache(maxsize=512)
def _spelled(sql: str) -> str:
    """Write a statement's parameters as Django's cursors take them."""

    def mark(match: re.Match[str]) -> str:
        number, question, name, percent = match.groups()
        if number:
            return f"%(p{number})s"
        if question:
            return "%s"
        if name:
            return f"%({name})s"
        return "%%" if percent else match.group(0)

    return _MARK.sub(mark, sql)


class DjangoStore:
    """The store of a Django project: its database, its connection, its transaction."""

    def __init__(
        self,
        run_in_thread: RunInThread,
        *,
        using: str = "default",
        migrations: Sequence[Migration] = (),
    ) -> None:
        """Use a database of the project's settings."""
        vendor = connections[using].vendor
        if vendor not in _DATABASES:
            raise ConfigurationError(f"{vendor} is not supported: use PostgreSQL or SQLite")
        if not django_settings.USE_TZ:
            raise ConfigurationError("Holdfast needs USE_TZ = True: instants have zones")
        self.name: str = vendor
        self.using = using
        self.is_sqlite = vendor == "sqlite"
        self.sql = load_queries(f"holdfast.stores.{_DATABASES[vendor]}")
        self._migrations = [
            *load_migrations("core", f"holdfast.stores.{_DATABASES[vendor]}.migrations"),
            *migrations,
        ]
        self._run = run_in_thread
        self._is_open = False

    async def open(self) -> None:
        """Bring the schema up to date."""
        if not self._is_open:
            await self._do(self._migrate)
            self._is_open = True

    async def close(self) -> None:
        """Let go; connections are Django's."""
        self._is_open = False

    async def ping(self) -> None:
        """Ask for one row."""
        await self.read("SELECT 1 AS one")

    async def find(self, record_id: RecordId, now: datetime) -> Record | None:
        """Look a key up outside any transaction."""
        found: Record | None = await self._do(lambda: self._find(record_id, now))
        return found

    async def claim(self, record_id: RecordId, now: datetime) -> Claimed | Found | Held:
        """Take the key: on PostgreSQL by an advisory lock, on SQLite by the one write lock."""

        def take() -> Claimed | Found | Held:
            unit = DjangoUnit(self)
            try:
                if not self.is_sqlite and not self._locked(record_id):
                    unit.undo()
                    return HELD
                record = self._find(record_id, now)
            except BaseException:
                unit.undo()
                raise
            if record is not None:
                unit.undo()
                return Found(record)
            return Claimed(unit)

        claim: Claimed | Found | Held = await self._do(take)
        return claim

    async def begin(self, *, idle_seconds: float | None = None) -> "DjangoUnit":  # noqa: ARG002
        """Open a transaction without a key."""
        unit: DjangoUnit = await self._do(lambda: DjangoUnit(self))
        return unit

    async def read(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Query outside any guarded request."""
        rows: Sequence[Row] = await self._do(lambda: self.fetch(sql, params))
        return rows

    async def write(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Run one statement, which commits by itself."""
        return await self.read(sql, params)

    def notifier(self) -> LocalNotifier:
        """Return a bell for this process; workers of others look once a second."""
        return LocalNotifier()

    async def sweep(self, now: datetime, limit: int) -> int:
        """Delete one small batch."""
        values = (self.instant(now), limit)
        gone: int = await self._do(lambda: self.run(self.sql["sweep_records"], values)[1])
        return gone

    async def records(self, query: RecordQuery) -> Sequence[Record]:
        """List records for operators."""
        after = query.after or (None, None, None, None)
        at = None if after[0] is None else self.instant(after[0])
        values: Any = (query.tenant, query.endpoint, query.key, at, *after[1:], query.limit)
        if self.is_sqlite:
            names = ("tenant", "endpoint", "key", "after_at")
            more = ("after_tenant", "after_endpoint", "after_key", "limit")
            values = dict(zip((*names, *more), values, strict=True))
        rows = await self._do(lambda: self.run(self.sql["list_records"], values)[0])
        return [_record(RecordId(row[0], row[1], row[2]), row[3:]) for row in rows]

    async def secret(self) -> bytes:
        """Return the database's own secret."""
        return bytes((await self.read(self.sql["read_secret"]))[0]["secret"])

    # -- in the request's thread ------------------------------------------------------------

    def instant(self, at: datetime) -> Any:
        """Write an instant as this database keeps it."""
        return to_text(at) if self.is_sqlite else at

    def run(self, sql: str, params: Any = ()) -> tuple[list[Any], int]:
        """Run a statement; returns its rows and how many it changed."""
        if isinstance(params, (tuple, list)) and "$1" in sql:
            params = {f"p{index}": value for index, value in enumerate(params, 1)}
        with connections[self.using].cursor() as cursor:
            cursor.execute(_spelled(sql), params or None)
            rows = cursor.fetchall() if cursor.description is not None else []
            return rows, max(cursor.rowcount, 0)

    def fetch(self, sql: str, params: Params = None) -> list[Row]:
        """Run a statement with named parameters and return its rows by their columns' names."""
        values = {
            name: self.instant(value) if isinstance(value, datetime) else value
            for name, value in (params or {}).items()
        }
        with connections[self.using].cursor() as cursor:
            cursor.execute(_spelled(sql), values or None)
            if cursor.description is None:
                return []
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    async def in_thread(self, work: Callable[[], Any]) -> Any:
        """Run something in the request's thread, telling outages as such."""
        return await self._do(work)

    async def _do(self, work: Callable[[], Any]) -> Any:
        try:
            return await self._run(work)
        except _OUTAGES as error:
            await self._run(self._forget_connection)
            raise StoreUnavailableError(f"the database does not answer: {error}") from error

    def _forget_connection(self) -> None:
        connection = connections[self.using]
        if not connection.in_atomic_block:
            with suppress(DatabaseError):
                connection.close_if_unusable_or_obsolete()

    def _find(self, record_id: RecordId, now: datetime) -> Record | None:
        rows, _ = self.run(self.sql["find_record"], (*record_id, self.instant(now)))
        return _record(record_id, rows[0]) if rows else None

    def _locked(self, record_id: RecordId) -> bool:
        rows, _ = self.run("SELECT pg_try_advisory_xact_lock($1)", (lock_number(*record_id),))
        return bool(rows[0][0])

    def _migrate(self) -> None:
        """Apply missing migrations. Processes that start at once wait for the lock."""
        unit = DjangoUnit(self)

        def execute(sql: str, values: tuple[Any, ...]) -> Sequence[Any]:
            if values:
                return self.run(sql, values)[0]
            with connections[self.using].cursor() as cursor:
                cursor.execute(sql)  # as it is: "%" and ":name" in a script are not parameters
                return cursor.fetchall() if cursor.description is not None else ()

        try:
            if not self.is_sqlite:
                self.run("SELECT pg_advisory_xact_lock($1)", (MIGRATION_LOCK,))
            run_steps(
                apply_migrations(self._migrations, MigrationTable(is_sqlite=self.is_sqlite)),
                execute,
            )
        except BaseException:
            unit.undo()
            raise
        unit.end()


class DjangoStatements:
    """Holdfast's own statements on Django's connection."""

    def __init__(self, store: DjangoStore) -> None:
        """Use the connection of the request's thread."""
        self._store = store

    async def execute(self, sql: str, params: Params = None) -> int:
        """Run a statement and return how many rows it changed."""

        def work() -> int:
            values = {
                name: self._store.instant(value) if isinstance(value, datetime) else value
                for name, value in (params or {}).items()
            }
            return self._store.run(sql, values)[1]

        changed: int = await self._store.in_thread(work)
        return changed

    async def fetch_all(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Return all rows of a query."""
        return await self._store.read(sql, params)

    async def fetch_one(self, sql: str, params: Params = None) -> Row | None:
        """Return the first row of a query, or None."""
        rows = await self.fetch_all(sql, params)
        return rows[0] if rows else None


class DjangoUnit:
    """One ``transaction.atomic()`` around the request, ended by us, in the request's thread."""

    superseded = False

    def __init__(self, store: DjangoStore) -> None:
        """Begin; on SQLite with the write lock, or two that read first could not both write."""
        self._store = store
        self._ended = False
        connection = get_connection(store.using)
        if connection.in_atomic_block:
            raise ConfigurationError(
                "a transaction is open already: put Holdfast's middleware before everything that "
                "begins one, and leave ATOMIC_REQUESTS off for guarded views"
            )
        self._atomic = Atomic(store.using, savepoint=False, durable=True)
        self._atomic.__enter__()
        if store.is_sqlite:
            try:
                store.run("UPDATE holdfast_migrations SET name = name WHERE 0")
            except OperationalError as error:
                if "no such table" not in str(error):
                    self.undo()
                    raise

    @property
    def transaction(self) -> Any:
        """Django's connection: what the ORM writes in."""
        return connections[self._store.using]

    @property
    def statements(self) -> DjangoStatements:
        """The same, for statements of Holdfast's own."""
        return DjangoStatements(self._store)

    async def touch(self) -> None:
        """Do nothing: a request holds it, no job."""

    async def commit(self, record: Record | None, audit: AuditEvent | None) -> None:
        """Write record and audit event beside the handler's rows, and commit all of it."""
        if self._ended:
            raise NoTransactionError("the transaction has ended: it was committed or rolled back")

        def finish() -> None:
            try:
                self._refuse_spoilt()
                self._save(record, audit)
            except BaseException:
                self.undo()
                raise
            try:
                self.end()
            except _OUTAGES as error:
                raise CommitUnknownError(str(error)) from error

        await self._store.in_thread(finish)

    async def rollback(self) -> None:
        """Undo everything."""
        if not self._ended:
            with suppress(StoreUnavailableError):
                await self._store.in_thread(self.undo)

    def undo(self) -> None:
        """Undo, in the request's thread."""
        if not self._ended:
            self._ended = True
            connection = connections[self._store.using]
            connection.set_rollback(True)
            with suppress(DatabaseError):
                self._atomic.__exit__(None, None, None)

    def end(self) -> None:
        """Commit, in the request's thread."""
        self._ended = True
        self._atomic.__exit__(None, None, None)

    def _refuse_spoilt(self) -> None:
        """COMMIT would undo such a transaction: to answer as if it had been kept were a lie."""
        if connections[self._store.using].needs_rollback:
            raise StoreUnavailableError(
                "a statement failed, the view went on, and everything is rolled back"
            )

    def _save(self, record: Record | None, audit: AuditEvent | None) -> None:
        store = self._store
        if store.is_sqlite:
            if (
                record is not None
                and store.run(store.sql["save_record"], record_values(record))[1] == 0
            ):
                raise SupersededError("another request with this key was committed first")
            if audit is not None:
                store.run(store.sql["save_audit_event"], sqlite_audit_values(audit))
        elif record is not None:
            about = (audit.id, audit.actor, audit.resource, audit.version) if audit else (None,) * 4
            try:
                store.run(store.sql["finish"], (*_values(record), *about))
            except DatabaseError as error:
                if getattr(error.__cause__, "sqlstate", None) == _SUPERSEDED_STATE:
                    raise SupersededError(
                        "another request with this key was committed first"
                    ) from None
                raise
        elif audit is not None:
            store.run(store.sql["save_audit_event"], _audit(audit))


def _values(record: Record) -> tuple[Any, ...]:
    headers = _encode_headers(record.headers).decode()
    answer = (record.status, record.body, headers)
    times = (record.created_at, record.expires_at)
    return (
        *record.id,
        *record.fingerprint,
        *answer,
        record.request_id,
        record.correlation_id,
        *times,
    )


def _audit(event: AuditEvent) -> tuple[Any, ...]:
    subject = (event.tenant, event.id, event.actor, event.endpoint, event.payload_hash)
    outcome = (event.status, event.resource, event.version)
    return (*subject, *outcome, event.request_id, event.correlation_id, event.created_at)


def _record(record_id: RecordId, row: Sequence[Any]) -> Record:
    headers = row[4] if isinstance(row[4], dict) else _decode_headers(row[4])
    created_at, expires_at = (
        from_text(value) if isinstance(value, str) else value for value in (row[8], row[9])
    )
    return Record(
        id=record_id,
        fingerprint=RequestFingerprint(row[0], row[1]),
        status=row[2],
        body=bytes(row[3]),
        headers=headers,
        request_id=row[5],
        correlation_id=row[6],
        audit_id=row[7],
        created_at=created_at,
        expires_at=expires_at,
    )
