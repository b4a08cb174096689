"""The store in the sessions of an app: what its adapters have in common, in blocking style.

``SessionUnit`` is one transaction, ``SessionStore`` what the guard calls.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypedDict, TypeVar

from onceward.errors import StoreUnavailableError, SupersededError
from onceward.ports import HELD, Claimed, EpochReading, Found, Held, Params, Row, TransactionT_co
from onceward.records import AuditEvent, Record, RecordId
from onceward.stores.base import BaseStore, BaseUnit, ended
from onceward.stores.errors import SUPERSEDED
from onceward.stores.notifier import LocalNotifier
from onceward.stores.parts import MIGRATION_LOCK, MigrationTable
from onceward.stores.postgres.epoch import EpochReader, backend_of
from onceward.stores.postgres.params import finish_statement, instant_literal, text_literals
from onceward.stores.replication import STILL_RUNNING, CommitNotices
from onceward.stores.rows import (
    HAS_WRITTEN,
    audit_values,
    check_storable,
    finish_values,
    record_of,
    record_values,
)
from onceward.stores.sessions.messages import Messages, SessionLimits
from onceward.stores.sqlite.store import reading_of
from onceward.stores.table_names import TableNames
from onceward_protocol.storage.migrations import Migration, run_steps
from onceward_protocol.storage.private_files import create_database_file

T = TypeVar("T")

# Larger bodies are sent as a parameter, in a separate round trip, not in hexadecimal digits.
_INLINE_BODY_BYTES: Final = 16 * 1024

# onceward_claim returns its result as a number of rows. Claimed: whether it has an expired record.
_CLAIMED_ROWS: Final = {0: False, 3: True}
_HELD_ROWS: Final = 2


class SessionOptions(TypedDict, total=False):
    """Options of the stores in sessions of an app."""

    # How names of Onceward's tables begin: on SQLite ``onceward_`` by default. On PostgreSQL there
    # is a prefix only if it is given, or if the schema is ``public``.
    table_prefix: str | None
    # Where the tables are on PostgreSQL: ``onceward`` by default.
    schema: str | None
    # Those of other parts, such as the operator's.
    migrations: Sequence[Migration]
    # Limits of ``SessionLimits``, for PostgreSQL.
    claim_seconds: float
    # The same.
    statement_seconds: float
    # The same.
    commit_seconds: float


class Ran(NamedTuple):
    """Rows that a statement has returned, and how many it has changed."""

    rows: Sequence[Any]
    changed: int


class SessionUnit(BaseUnit, ABC, Generic[TransactionT_co]):
    """One guarded request or job. Only Onceward commits or ends its transaction.

    Methods without ``async`` block: ``run`` calls them where the store's connections are used.
    """

    def __init__(
        self, store: "SessionStore[Any]", record_id: RecordId | None, claimed_at: datetime | None
    ) -> None:
        self._store = store
        self.record_id = record_id
        self.claimed_at = claimed_at
        # True once it was committed or rolled back.
        self.has_ended = False
        # True from the end of the handler on: Onceward ends the transaction.
        self._may_end = False
        # True once COMMIT was sent with the record.
        self._is_committed = False
        # Rows that SQLite's connection has changed since it was opened, without those of this unit.
        self._changes_before = 0
        # True once the handler may use it: the key is claimed, or there is none.
        self.is_claimed = False
        # True if BEGIN and the claim shared a message.
        self.has_messages = False
        # Frees what the request has taken for this unit.
        self._on_free: Callable[[], None] | None = None
        # Called if the key was not claimed.
        self._on_leave: Callable[[], None] | None = None
        # True if another request has committed the key.
        self.superseded = False

    @property
    @abstractmethod
    def transaction(self) -> TransactionT_co:
        """The session or connection that handlers use."""

    @property
    @abstractmethod
    def connection(self) -> Any:
        """The connection with the transaction, for statements of Onceward."""

    @property
    def statements(self) -> "SessionUnit[TransactionT_co]":
        """The same transaction, for Onceward's statements."""
        return self

    async def execute(self, sql: str, params: Params = None) -> int:
        return await self.run(lambda: self._store.execute(self.connection, sql, params))

    async def fetch_all(self, sql: str, params: Params = None) -> Sequence[Row]:
        return await self.run(lambda: self._store.fetch(self.connection, sql, params))

    async def fetch_one(self, sql: str, params: Params = None) -> Row | None:
        rows = await self.fetch_all(sql, params)
        return rows[0] if rows else None

    def run(self, work: Callable[[], T]) -> Awaitable[T]:
        """Run a blocking function. Raises ``StoreUnavailableError``."""
        return self._store.run_in_unit(work)

    async def has_written(self) -> bool:
        return await self.run(self._has_written)

    async def commit(self, record: Record | None, audit: AuditEvent | None) -> None:
        if self.has_ended:
            raise ended()
        try:
            await self.run(partial(self._commit, record, audit))
        except BaseException:
            await self.rollback()
            raise
        self._free()

    async def rollback(self) -> None:
        if not self.has_ended:
            await self._store.run_to_end(self.undo)
        self._free()

    # -- blocking -------------------------------------------------------------------------

    @abstractmethod
    def start(self) -> Any:
        """Begin the transaction, or prepare the session that begins it, and guard it."""

    def confirm(self) -> None:
        self._store.messages.confirm(self.connection)

    def _commit(self, record: Record | None, audit: AuditEvent | None) -> None:
        store = self._store
        self._prepare_commit()
        connection = self.connection
        notices = None
        try:
            if (
                record is not None
                and len(record.body) <= _INLINE_BODY_BYTES
                and store.messages.can_finish(connection)
                and self._may_share_commit()
            ):
                statement = finish_statement(store.finish_function, record, audit)
                store.messages.finish_and_commit(connection, statement)
                self._is_committed = True
            else:
                notices = store.messages.notices_of(connection)
                store.save(connection, record, audit)
        except Exception as error:
            store.raise_record_error(connection, error)
            raise
        self._may_end = True
        try:
            self._end_transaction()
        except Exception as error:
            is_cut = notices is not None and notices.was_cut
            store.raise_commit_error(error, is_cut=is_cut)
            raise
        self._end()

    @abstractmethod
    def _may_share_commit(self) -> bool:
        """Check whether COMMIT may be sent with the record, if the driver can."""

    def _has_written(self) -> bool:
        if not self._store.is_sqlite:
            return bool(self._store.run(self.connection, HAS_WRITTEN).rows[0][0])
        return self._store.total_changes(self.connection) != self._changes_before

    @abstractmethod
    def _prepare_commit(self) -> None:
        """Write what the handler has left to write. Raises if it may not be committed."""

    @abstractmethod
    def _end_transaction(self) -> None:
        """Commit; after ``finish_and_commit``, only note the end."""

    @abstractmethod
    def _end(self) -> None:
        """Let the session go: the transaction has ended."""

    @abstractmethod
    def undo(self) -> None:
        """Roll back. Never raises. Idempotent."""

    def leave(self) -> None:
        """Let the next request have the connection that this one does not need."""
        if self._on_leave is not None:
            self._on_leave()

    def _free(self) -> None:
        if self.has_ended:
            free, self._on_free = self._on_free, None
            if free is not None:
                free()


class SessionAdapter(BaseStore[TransactionT_co]):
    """Adapter of a library for ``SessionStore``. Methods without ``async`` block."""

    # How the driver sends Onceward's statements, and within what time.
    messages: Messages

    @property
    @abstractmethod
    def sqlite_path(self) -> str | None:
        """The file of the database; None on PostgreSQL, or if its URL is an SQLite URI."""

    @abstractmethod
    def run_in_unit(self, work: Callable[[], T], *, is_claim: bool = False) -> Awaitable[T]:
        """Run a function on behalf of a unit. Raises ``StoreUnavailableError`` in an outage.

        A claim may have a time limit of its own.
        """

    def run_to_end(self, work: Callable[[], T]) -> Awaitable[T]:
        """Do the same, to the end even if the caller is cancelled; a thread does so anyway."""
        return self.run_in_unit(work)

    def _run_apart(self, work: Callable[[], T]) -> Awaitable[T]:
        """Run a function that takes a connection of its own."""
        return self.run_in_unit(work)

    @abstractmethod
    async def _new_unit(
        self, record_id: RecordId | None, now: datetime | None, session: Any = None
    ) -> SessionUnit[TransactionT_co]:
        """Return a unit for a request that may take a connection now."""

    @abstractmethod
    def reading(self) -> AbstractContextManager[Any]:
        """Lend a connection for a statement that needs no transaction."""

    @abstractmethod
    def writing(self) -> AbstractContextManager[Any]:
        """Lend a connection for a statement that commits at the end of the block."""

    def migrating(self) -> AbstractContextManager[Any]:
        """Lend a connection with a transaction, which commits at the end of the block."""
        return self.writing()

    @abstractmethod
    def run(self, connection: Any, sql: str, values: Any = ()) -> Ran:
        """Run one of Onceward's statements, with ``?`` or ``$1`` for its values."""

    @abstractmethod
    def run_script(self, connection: Any, sql: str) -> Sequence[Any]:
        """Run a statement of a migration as it is: "%" and "$1" in it are no parameters."""

    @abstractmethod
    def execute(self, connection: Any, sql: str, params: Params) -> int:
        """Run a statement with named parameters and return how many rows it changed."""

    @abstractmethod
    def fetch(self, connection: Any, sql: str, params: Params) -> list[Row]:
        """Run a statement with named parameters and return its rows, if it has any."""

    @abstractmethod
    def total_changes(self, connection: Any) -> int:
        """Return how many rows SQLite's connection has changed since it was opened."""

    @abstractmethod
    def raise_record_error(self, connection: Any, error: Exception) -> None:
        """Raise why a record was not saved; return if the error is the one to raise."""

    @abstractmethod
    def raise_commit_error(self, error: Exception, *, is_cut: bool) -> None:
        """Raise why a COMMIT has failed; return if the error is the one to raise."""

    @abstractmethod
    def _confirm(self, connection: Any) -> None:
        """Commit what was read, so that a synchronous standby has it too, or raise."""

    @abstractmethod
    async def close(self) -> None:
        """Wait for transactions that are ending. The app closes its connections."""

    def _start(self) -> None:
        """Prepare for the running event loop."""

    @abstractmethod
    async def _listen(self) -> None:
        """Begin to look at connections: the schema is there."""

    @abstractmethod
    def _find_first(
        self, unit: SessionUnit[Any], record_id: RecordId, now: datetime
    ) -> Record | None:
        """Look the key up on SQLite before the unit writes."""


class SessionStore(SessionAdapter[TransactionT_co]):
    """A store in the connections of an app. Methods without ``async`` block."""

    def __init__(
        self,
        database: str,
        *,
        table_prefix: str | None = None,
        schema: str | None = None,
        migrations: Sequence[Migration] = (),
        **limits: float,
    ) -> None:
        is_sqlite = database == "sqlite"
        names = TableNames.chosen(table_prefix, schema, is_sqlite=is_sqlite)
        super().__init__(database, names, migrations)
        # How long the database may be silent; for PostgreSQL.
        self.limits = SessionLimits(**limits)
        self._epochs = EpochReader()
        self._is_open = False

    # -- the store --------------------------------------------------------------------------

    async def open(self) -> None:
        """Migrate the schema, in one transaction of the app's database. Idempotent."""
        if self._is_open:
            if not self.schema.is_complete:
                await self._migrate()
            return
        self._start()
        self._is_open = True
        create_database_file(self.sqlite_path, of_app=True)
        try:
            await self._migrate()
            await self._listen()
        except BaseException:
            await self.close()
            raise

    async def find(self, record_id: RecordId, now: datetime) -> Record | None:
        check_storable(*record_id)

        def find(connection: Any) -> Record | None:
            record = self.find_on(connection, record_id, now)
            if record is not None:
                self._confirm(connection)
            return record

        return await self._read(find)

    async def claim(
        self, record_id: RecordId, now: datetime, *, session: Any = None
    ) -> Claimed | Found | Held:
        """Claim the key: with an advisory lock on PostgreSQL, by the first commit on SQLite.

        ``session`` is one of ``new_session``, if the store has it; its transaction must have been
        ended by ``release_session``.
        """
        check_storable(*record_id)
        unit = await self._new_unit(record_id, now, session)
        try:
            claim = await self.run_in_unit(
                partial(self._claim, unit, record_id, now), is_claim=True
            )
        except BaseException:
            await unit.rollback()
            raise
        unit.is_claimed = isinstance(claim, Claimed)
        if not unit.is_claimed:
            await unit.rollback()
            unit.leave()
        return claim

    async def begin(
        self,
        *,
        idle_seconds: float | None = None,  # noqa: ARG002
        session: Any = None,
    ) -> SessionUnit[TransactionT_co]:
        """Open a transaction without a key.

        ``idle_seconds`` is ignored: a session runs one statement at a time and belongs to the
        app, so it could not be kept alive.
        """
        unit = await self._new_unit(None, None, session)
        try:
            unit.is_claimed = True
            await unit.run(partial(self._begin, unit))
        except BaseException:
            await unit.rollback()
            raise
        return unit

    async def read(self, sql: str, params: Params = None) -> Sequence[Row]:
        return await self._read(lambda connection: self.fetch(connection, sql, params))

    async def write(self, sql: str, params: Params = None) -> Sequence[Row]:
        return await self._write(lambda connection: self.fetch(connection, sql, params))

    async def sweep(self, now: datetime, limit: int) -> int:
        def delete(connection: Any) -> int:
            ran = self.run(connection, self.sql["sweep_records"], (self.instant(now), limit))
            return int(ran.rows[0][0]) if ran.rows else ran.changed

        return await self._write(delete)

    async def _list(self, sql: str, values: Any) -> Sequence[Any]:
        return await self._read(lambda connection: self.run(connection, sql, values).rows)

    async def _read(self, work: Callable[[Any], T]) -> T:
        def read() -> T:
            with self.reading() as connection:
                return work(connection)

        return await self._run_apart(read)

    async def _write(self, work: Callable[[Any], T]) -> T:
        def write() -> T:
            with self.writing() as connection:
                return work(connection)

        return await self._run_apart(write)

    def notifier(self) -> Any:
        """Return a notifier for this process; workers of others poll once a second."""
        return LocalNotifier()

    def report_epochs(self, report: Callable[[EpochReading], None]) -> None:
        self._epochs.report_to(report)

    async def read_epoch(self) -> EpochReading:
        if self.is_sqlite:
            return reading_of(self.sqlite_path, await self._cache_epoch())
        return await self._read(
            lambda connection: self._epochs.read_blocking(
                self.table_names, lambda sql: self.run(connection, sql).rows[0], (Exception,)
            )
        )

    # -- blocking -----------------------------------------------------------------------------

    def is_replaced(
        self, fetch_row: Callable[[str], Any], notices: Callable[[], CommitNotices | None]
    ) -> bool:
        """Read the epoch on a new connection; return whether its server was replaced.

        ``notices`` returns those of the connection, which get the process id of its backend.
        """

        def read(sql: str) -> Any:
            row = fetch_row(sql)
            noted = None if row is None else notices()
            if noted is not None:
                noted.backend = backend_of(row)
            return row

        return self._epochs.read_blocking(self.table_names, read, (Exception,)).is_replaced

    def find_on(self, connection: Any, record_id: RecordId, now: datetime) -> Record | None:
        rows = self.run(connection, self.sql["find_record"], (*record_id, self.instant(now))).rows
        return record_of(record_id, rows[0]) if rows else None

    def _claim(
        self, unit: SessionUnit[Any], record_id: RecordId, now: datetime
    ) -> Claimed | Found | Held:
        if self.is_sqlite:
            record = self._find_first(unit, record_id, now)
            return Claimed(unit) if record is None else Found(record)
        if self.limits.abandoned.is_full:
            self._refuse_abandoned()
        connection = unit.start()
        try:
            rows = self._send_claim(unit, connection, record_id, now)
        except Exception:
            self._claim_failed(connection)
            raise
        if rows in _CLAIMED_ROWS:
            return Claimed(unit, after_expiry=_CLAIMED_ROWS[rows])
        record = None if rows == _HELD_ROWS else self.find_on(connection, record_id, now)
        if record is not None:
            unit.confirm()
        # No record although there was one: it expired and was swept in between.
        return HELD if record is None else Found(record)

    def _send_claim(
        self, unit: SessionUnit[Any], connection: Any, record_id: RecordId, now: datetime
    ) -> int:
        """Lock and look up, in two statements of a function; return the number of its rows."""
        number = self.table_names.lock_number(*record_id)
        literals = ",".join(text_literals(record_id))
        call = f"SELECT {self.claim_function}({number},{literals},{instant_literal(now)})"
        rows = self.messages.begin_and_claim(connection, call)
        if rows is not None:
            unit.has_messages = True
            return rows
        values = (number, *record_id, now)
        sql = f"SELECT {self.claim_function}($1,$2,$3,$4,$5)"
        with self.messages.claiming(connection):
            found = self.run(connection, sql, values).rows
        self.messages.refuse_autocommit(connection)
        return len(found)

    def _claim_failed(self, connection: Any) -> None:
        """Look whether the connection was lost."""

    def _begin(self, unit: SessionUnit[Any]) -> None:
        if not self.is_sqlite and self.limits.abandoned.is_full:
            self._refuse_abandoned()
        unit.start()

    def _refuse_abandoned(self) -> None:
        """Raise while too many commits that were cut are still waiting on the server."""
        self.limits.abandoned.check_blocking(self._still_running)

    def _still_running(self, backends: list[int]) -> Sequence[Any]:
        with self.reading() as connection:
            return self.run(connection, STILL_RUNNING, (backends,)).rows

    def save(self, connection: Any, record: Record | None, audit: AuditEvent | None) -> None:
        if self.is_sqlite:
            if record is not None:
                saved = self.run(connection, self.sql["save_record"], record_values(record))
                if saved.changed == 0:
                    raise SupersededError(SUPERSEDED)
            if audit is not None:
                self._save_audit(connection, audit)
        elif record is not None:
            self.run(connection, self.sql["finish"], finish_values(record, audit))
        elif audit is not None:
            self._save_audit(connection, audit)
        else:
            # Without a statement, COMMIT would roll an aborted transaction back without an error.
            self.run(connection, "SELECT 1")

    def _save_audit(self, connection: Any, audit: AuditEvent) -> None:
        values = audit_values(audit, self.instant(audit.created_at))
        self.run(connection, self.sql["save_audit_event"], values)

    # -- the schema ---------------------------------------------------------------------------

    async def _migrate(self) -> None:
        await self._run_apart(self.migrate)

    def migrate(self) -> None:
        """Apply missing migrations. Processes that start at once wait for the lock."""
        with self.migrating() as connection:
            migration = self._apply_migrations(connection)
        self.schema.committed(migration)
        self._use_names(migration.names)

    def _apply_migrations(self, connection: Any) -> MigrationTable:
        if not self.is_sqlite:
            self.run(connection, "SELECT pg_advisory_xact_lock($1)", (MIGRATION_LOCK,))
            self.messages.refuse_autocommit(connection)

        migration = self.schema.migration()
        run_steps(migration.apply(), partial(self._run_migration, connection))
        return migration

    def _run_migration(self, connection: Any, sql: str, values: tuple[Any, ...]) -> Sequence[Any]:
        if values or self.is_sqlite:
            return self.run(connection, sql, values).rows
        return self.run_script(connection, sql)

    def _refuse_closed(self) -> None:
        if not self._is_open:
            raise StoreUnavailableError("the store is not open")
