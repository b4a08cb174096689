"""The store of a Django project: ``transaction.atomic()`` is the transaction.

Django's connections belong to threads, so everything runs in the thread of its request, by a
function that the caller provides.
"""

import math
import re
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, Final

from onceward_protocol.extras import needs_extra

with needs_extra("django"):
    from django.conf import settings as django_settings
    from django.db import (
        DatabaseError,
        InterfaceError,
        InternalError,
        NotSupportedError,
        OperationalError,
        ProgrammingError,
        connections,
    )
    from django.db.backends.signals import connection_created
    from django.db.transaction import Atomic, get_connection

from onceward.core.decision import HELD, Held
from onceward.core.idempotency_record import AuditEvent, Record, RecordId
from onceward.core.storable_text import check_storable
from onceward.core.table_names import TableNames
from onceward.errors import (
    AbortedTransactionError,
    CommitUnknownError,
    ConfigurationError,
    NoTransactionError,
    StoreUnavailableError,
    SupersededError,
)
from onceward.ports import Claimed, EpochReading, Found, Params, RecordQuery, Row
from onceward.stores.migrations import MIGRATION_LOCK
from onceward.stores.notifier import LocalNotifier
from onceward.stores.parameters import named_parameters
from onceward.stores.parts import Schema
from onceward.stores.postgres.abandoned import STILL_RUNNING
from onceward.stores.postgres.epoch import EpochReader, backend_of
from onceward.stores.postgres.params import finish_statement, instant_literal, text_literals
from onceward.stores.psycopg_message import can_send_messages, send_message
from onceward.stores.replication import unconfirmed
from onceward.stores.rows import HAS_WRITTEN, audit_values, finish_values, listed_record, record_of
from onceward.stores.session_limits import CONFIRM, REPLACED, SessionLimits
from onceward.stores.sql_loader import load_queries
from onceward.stores.sqlite.epoch import file_identity, reading_of
from onceward.stores.sqlite.rows import is_outage as is_sqlite_outage
from onceward.stores.sqlite.rows import record_values, to_text
from onceward.stores.sqlstates import is_outage_state
from onceward.stores.transaction_control import refuse_transaction_control
from onceward_protocol.storage.migrations import Migration, run_steps
from onceward_protocol.storage.private_files import create_database_file

__all__ = ["DjangoStore"]

RunInThread = Callable[[Callable[[], Any]], Awaitable[Any]]

_DATABASES: Final = {"sqlite": "sqlite", "postgresql": "postgres"}
_SUPERSEDED_STATE: Final = "HF002"
_ABORTED_STATE: Final = "25P02"
_ABORTED: Final = (
    "a statement failed in the guarded view, which went on and returned success, so everything was "
    "rolled back: put a statement whose error you handle into its own `with transaction.atomic():`"
)
# Classes of errors after which a COMMIT may have happened: none, connection, operator, system.
_UNKNOWN_STATES: Final = frozenset({"", "08", "57", "58", "XX"})
# A write on a standby, or on a primary that was made one. Django has no class of errors for it.
_READ_ONLY_STATE: Final = "25006"
# onceward_claim returns its result as a number of rows. Claimed: whether it has an expired record.
_CLAIMED_ROWS: Final = {0: False, 3: True}
_HELD_ROWS: Final = 2
# A larger body is sent as a parameter: as a literal it takes twice the bytes.
_INLINE_BODY_BYTES: Final = 16 * 1024
# ``InternalError`` only if the server is read-only.
_OUTAGES: Final = (OperationalError, InterfaceError, InternalError)
# The attribute of Django's connections for how often they were renewed.
_RENEWALS: Final = "_onceward_renewals"
# Finds ``$1``, ``?`` and ``:name``; skips strings and casts.
_PARAMETER: Final = re.compile(r"'(?:[^']|'')*'|::|\$(\d+)|(\?)|:([A-Za-z_]\w*)|(%)")


@lru_cache(maxsize=512)
def _with_django_parameters(sql: str) -> str:
    """Convert the parameters of a statement to the format of Django's cursors."""

    def replace(match: re.Match[str]) -> str:
        number, placeholder, name, percent = match.groups()
        if number:
            return f"%(p{number})s"
        if placeholder:
            return "%s"
        if name:
            return f"%({name})s"
        return "%%" if percent else match.group(0)

    return _PARAMETER.sub(replace, sql)


class DjangoStore:
    """Uses a database of the project's settings, with Django's connection and transaction."""

    # Its methods never wait for an event loop, so requests need none.
    runs_in_request_thread = True

    def __init__(
        self,
        run_in_thread: RunInThread,
        *,
        using: str = "default",
        table_prefix: str | None = None,
        schema: str | None = None,
        migrations: Sequence[Migration] = (),
        **limits: float,
    ) -> None:
        """Use the database with the alias ``using`` in Django's settings.

        On SQLite, names of Onceward's tables begin with ``table_prefix`` (default: ``onceward_``).
        On PostgreSQL they are in ``schema`` (default: ``onceward``), with a prefix only if it is
        given or the schema is ``public``. ``limits`` are those of ``SessionLimits``,
        for PostgreSQL with psycopg 3.
        """
        # How long the database may be silent.
        self.limits = SessionLimits(**limits)
        vendor = connections[using].vendor
        if vendor not in _DATABASES:
            raise ConfigurationError(f"{vendor} is not supported: use PostgreSQL or SQLite")
        if not django_settings.USE_TZ:
            raise ConfigurationError("Onceward needs USE_TZ = True")
        # The name in logs and in ``/readyz``.
        self.name: str = vendor
        # The alias in ``settings.DATABASES``.
        self.using = using
        # True on SQLite.
        self.is_sqlite = vendor == "sqlite"
        # The module of time limits; None on SQLite, and with psycopg 2.
        self._driver: Any = None
        if not self.is_sqlite and connections[using].Database.__name__ == "psycopg":
            self._driver = import_module("onceward.stores.psycopg_limits")
        self._package = f"onceward.stores.{_DATABASES[vendor]}"
        names = TableNames.chosen(table_prefix, schema, is_sqlite=self.is_sqlite)
        # The parts of the schema that are wanted, and those that the database has.
        self.schema = Schema(names, is_sqlite=self.is_sqlite, migrations=migrations)
        self._use_names(names)
        self._run = run_in_thread
        self._epochs = EpochReader()
        # Counts read-only servers: connections from before one are closed at their next use.
        self._renewals = 0
        # ``file`` is the SQLite file of this thread's connection.
        self._opened = threading.local()
        self._is_open = False

    async def open(self) -> None:
        """Migrate the schema. Idempotent."""
        if self._is_open:
            if not self.schema.is_complete:
                await self.in_thread(self.migrate)
        else:
            create_database_file(self.sqlite_path, of_app=True)
            await self.in_thread(self.migrate)
            await self.in_thread(self._leave_replaced_file)
            self._is_open = True
            connection_created.connect(self._on_connect)

    async def close(self) -> None:
        """Mark the store as closed. Django closes its connections."""
        self._is_open = False
        connection_created.disconnect(self._on_connect)

    async def ping(self) -> None:
        """Run a query."""
        await self.read("SELECT 1 AS one")

    async def find(self, record_id: RecordId, now: datetime) -> Record | None:
        """Look a key up outside any transaction."""
        check_storable(*record_id)

        def find() -> Record | None:
            record = self._find(record_id, now)
            if record is not None and not self.is_sqlite:
                self._confirm()
            return record

        found: Record | None = await self.in_thread(find)
        return found

    async def claim(self, record_id: RecordId, now: datetime) -> Claimed | Found | Held:
        """Claim the key: with an advisory lock on PostgreSQL, with the write lock on SQLite."""
        check_storable(*record_id)

        def take() -> Claimed | Found | Held:
            if self.is_sqlite:
                self._leave_replaced_file()
            elif self.limits.abandoned.is_full:
                self.limits.abandoned.check_blocking(self._still_running)
            unit = DjangoUnit(self)
            after_expiry = False
            try:
                rows = 1 if self.is_sqlite else self._claim_in_time(unit, record_id, now)
                if rows in _CLAIMED_ROWS:
                    after_expiry = _CLAIMED_ROWS[rows]
                    return Claimed(unit, after_expiry=after_expiry)
                record = None if rows == _HELD_ROWS else self._find(record_id, now)
                if record is None and self.is_sqlite:
                    return Claimed(unit)
                if record is not None and not self.is_sqlite:
                    unit.confirm()
            except BaseException:
                unit.undo()
                raise
            unit.undo()
            # No record although there was one: it expired and was swept in between.
            return HELD if record is None else Found(record)

        claim: Claimed | Found | Held = await self.in_thread(take, self.limits.claim_seconds)
        return claim

    async def begin(self, *, idle_seconds: float | None = None) -> "DjangoUnit":  # noqa: ARG002
        """Open a transaction without a key."""

        def begin() -> DjangoUnit:
            if self.limits.abandoned.is_full:
                self.limits.abandoned.check_blocking(self._still_running)
            return DjangoUnit(self)

        unit: DjangoUnit = await self.in_thread(begin, self.limits.claim_seconds)
        return unit

    async def read(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Run a query outside any guarded request."""
        rows: Sequence[Row] = await self.in_thread(lambda: self.fetch(sql, params))
        return rows

    async def write(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Run one statement, which commits at once."""

        def write() -> list[Row]:
            with self._confirming(self.limits.statement_seconds):
                return self.fetch(sql, params)

        rows: Sequence[Row] = await self.in_thread(write)
        return rows

    @property
    def sqlite_path(self) -> str | None:
        """The file in Django's settings; None on PostgreSQL, or if it is an SQLite URI."""
        name = str(connections[self.using].settings_dict["NAME"])
        return name if self.is_sqlite and not name.startswith("file:") else None

    def notifier(self) -> LocalNotifier:
        """Return a notifier for this process; workers of others poll once a second."""
        return LocalNotifier()

    async def sweep(self, now: datetime, limit: int) -> int:
        """Delete one batch of expired records."""
        values = (self.instant(now), limit)
        rows, changed = await self.in_thread(lambda: self.run(self.sql["sweep_records"], values))
        return int(rows[0][0]) if rows else changed

    async def records(self, query: RecordQuery) -> Sequence[Record]:
        """List records for operators."""
        after = query.after or (None, None, None, None)
        at = None if after[0] is None else self.instant(after[0])
        values: Any = (query.only_tenant, query.endpoint, query.key, at, *after[1:], query.limit)
        if self.is_sqlite:
            names = ("tenant", "endpoint", "key", "after_at")
            more = ("after_tenant", "after_endpoint", "after_key", "limit")
            values = dict(zip((*names, *more), values, strict=True))
        rows = await self.in_thread(lambda: self.run(self.sql["list_records"], values)[0])
        return [listed_record(row) for row in rows]

    async def secret(self) -> bytes:
        """Return the secret of this database."""
        return bytes((await self.read(self.sql["read_secret"]))[0]["secret"])

    def report_epochs(self, report: Callable[[EpochReading], None]) -> None:
        """Report the epoch of each new connection of Django."""
        self._epochs.report_to(report)

    async def read_epoch(self) -> EpochReading:
        """Read the epoch on Django's connection."""
        if self.is_sqlite:
            sql = load_queries("onceward.stores", "records.sql", names=self.table_names)
            await self.in_thread(self._leave_replaced_file)
            rows = await self.read(sql["read_cache_epoch"])
            return reading_of(self.sqlite_path, str(rows[0]["cache_epoch"]))
        reading: EpochReading = await self.in_thread(
            lambda: self._epochs.read_blocking(
                self.table_names,
                lambda sql: self.run(sql)[0][0],
                (ProgrammingError, NotSupportedError),
            )
        )
        return reading

    # -- in the request's thread ------------------------------------------------------------

    def instant(self, at: datetime) -> Any:
        """Convert an instant to what this database stores."""
        return to_text(at) if self.is_sqlite else at

    def run(self, sql: str, params: Any = ()) -> tuple[list[Any], int]:
        """Run a statement; return its rows and how many it changed."""
        if isinstance(params, (tuple, list)) and "$1" in sql:
            params = {f"p{index}": value for index, value in enumerate(params, 1)}
        with connections[self.using].cursor() as cursor:
            cursor.execute(_with_django_parameters(sql), params or None)
            rows = cursor.fetchall() if cursor.description is not None else []
            return rows, max(cursor.rowcount, 0)

    def values(self, params: Params) -> dict[str, Any]:
        """Convert parameters to types that this database stores."""
        return {
            name: self.instant(value) if isinstance(value, datetime) else value
            for name, value in named_parameters(params).items()
        }

    def fetch(self, sql: str, params: Params = None) -> list[Row]:
        """Run a statement with named parameters and return its rows as mappings."""
        with connections[self.using].cursor() as cursor:
            cursor.execute(_with_django_parameters(sql), self.values(params) or None)
            if cursor.description is None:
                return []
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    async def in_thread(self, work: Callable[[], Any], seconds: float | None = None) -> Any:
        """Run a function in the request's thread. Raises outages as ``StoreUnavailableError``.

        ``seconds`` limits each response of PostgreSQL, by default as for statements.
        """
        limited = work
        if self._driver is not None:
            limited = partial(self._run_in_time, work, seconds or self.limits.statement_seconds)
        try:
            return await self._run(limited)
        except _OUTAGES as error:
            if isinstance(error, InternalError) and not is_read_only(error):
                raise
            await self._run(partial(self._forget_connection, error))
            raise StoreUnavailableError(
                f"the database is unavailable: {error}", is_outage=_is_outage(error)
            ) from error

    def _run_in_time(self, work: Callable[[], Any], seconds: float) -> Any:
        """Run a function with a time limit for connecting, and for each response."""
        connection = connections[self.using]
        with self._driver.thread_limit(seconds):
            self._leave_old_connection(connection)
            # Django connects when it is asked for a cursor, and again after some errors.
            connection.get_connection_params = partial(
                _connection_params, connection, self.limits.claim_seconds
            )
            try:
                if connection.connection is None:
                    connection.ensure_connection()
                self._driver.limits_of(connection.connection)
                return work()
            finally:
                connection.__dict__.pop("get_connection_params", None)

    @contextmanager
    def _confirming(self, seconds: float) -> Iterator[None]:
        """Raise if a statement that commits at once warns that the standby may not have it."""
        limits = self.limits_of(connections[self.using])
        if limits is None:
            yield
            return
        before = limits.seconds
        limits.begin_commit(seconds)
        try:
            yield
        finally:
            limits.seconds = before
        if limits.notices.has_warned:
            raise unconfirmed("the standby did not confirm it")

    def _confirm(self) -> None:
        """Commit something that waits for a synchronous standby; raise if that may lack it."""
        limits = self.limits_of(connections[self.using])
        try:
            with self._confirming(self.limits.commit_seconds):
                self.run(CONFIRM)
        except OperationalError:
            if limits is not None:
                limits.note_cut(self.limits.abandoned)
            raise

    def _still_running(self, backends: list[int]) -> list[Any]:
        return self.run(STILL_RUNNING, (backends,))[0]

    def renew(self) -> None:
        """Close the connections of all threads at their next use: the server is read-only."""
        self._renewals += 1

    def _leave_old_connection(self, connection: Any) -> None:
        """Close a connection from before the last ``renew``; Django opens another one."""
        known = connection.__dict__
        if known.get(_RENEWALS, 0) != self._renewals and not connection.in_atomic_block:
            connection.close()
            known[_RENEWALS] = self._renewals

    def limits_of(self, connection: Any) -> Any:
        """Return the limits of a connection; None on SQLite, and with psycopg 2."""
        return None if self._driver is None else self._driver.limits_of(connection.connection)

    def _on_connect(self, *, connection: Any, **_signal: Any) -> None:
        """Read the epoch on a new connection of Django, below its log of queries."""
        if connection.alias != self.using:
            return
        if self.is_sqlite:
            self._opened.file = file_identity(self.sqlite_path)
            return

        def fetch_row(sql: str) -> Any:
            with connection.connection.cursor() as cursor:
                try:
                    cursor.execute(sql)
                    row = cursor.fetchone()
                    limits = self.limits_of(connection)
                    if limits is not None and row is not None:
                        limits.backend = backend_of(row)
                    return row
                finally:
                    if not connection.get_autocommit():
                        connection.connection.rollback()

        reading = self._epochs.read_blocking(self.table_names, fetch_row, (Exception,))
        if reading.is_replaced:
            connection.close()
            raise OperationalError(REPLACED)

    def _leave_replaced_file(self) -> None:
        """Close a connection to an SQLite file that was replaced; Django opens the new one."""
        connection, found = connections[self.using], file_identity(self.sqlite_path)
        opened = getattr(self._opened, "file", None)
        if found is None or connection.in_atomic_block:
            return
        if opened is None:  # opened before this store
            self._opened.file = found
        elif opened != found:
            connection.close()

    def _forget_connection(self, error: BaseException) -> None:
        connection = connections[self.using]
        if is_read_only(error):
            self.renew()
            if not connection.in_atomic_block:
                connection.close()
        elif not connection.in_atomic_block:
            with suppress(DatabaseError):
                connection.close_if_unusable_or_obsolete()

    def _find(self, record_id: RecordId, now: datetime) -> Record | None:
        rows, _ = self.run(self.sql["find_record"], (*record_id, self.instant(now)))
        return record_of(record_id, rows[0]) if rows else None

    def _claim_in_time(self, unit: "DjangoUnit", record_id: RecordId, now: datetime) -> int:
        limits = unit.limits
        if limits is None:
            return self._claim_on_postgres(unit, record_id, now)
        limits.seconds = self.limits.claim_seconds
        rows = self._claim_on_postgres(unit, record_id, now)
        limits.seconds = self.limits.statement_seconds
        return rows

    def _claim_on_postgres(self, unit: "DjangoUnit", record_id: RecordId, now: datetime) -> int:
        """Begin, lock and look up; return the number of rows of ``onceward_claim``."""
        lock = self.table_names.lock_number(*record_id)
        if not unit.has_messages:
            values = (lock, *record_id, now)
            call = f"SELECT {self._claim_function}($1, $2, $3, $4, $5)"
            return len(self.run(call, values)[0])
        tenant, endpoint, key = text_literals(record_id)
        at = instant_literal(now)
        result = send_message(
            unit.transaction,
            f"BEGIN;SELECT {self._claim_function}({lock},{tenant},{endpoint},{key},{at})",
        )
        rows: int = result.ntuples
        return rows

    def migrate(self) -> None:
        """Apply missing migrations. Processes that start at once wait for the lock."""
        in_test = is_in_test_case(get_connection(self.using))
        unit = DjangoUnit(self)

        def execute(sql: str, values: tuple[Any, ...]) -> Sequence[Any]:
            if values and in_test:  # records a migration, so there was one to apply
                raise ConfigurationError(
                    "Onceward's tables are missing in the test database, and a table made in a "
                    "TestCase is gone after it: add 'onceward.django' to INSTALLED_APPS, and "
                    "migrate creates them"
                )
            if values:
                return self.run(sql, values)[0]
            with connections[self.using].cursor() as cursor:
                cursor.execute(sql)  # as it is: "%" and ":name" in a script are not parameters
                return cursor.fetchall() if cursor.description is not None else ()

        migration = self.schema.migration()
        try:
            if not self.is_sqlite:
                self.run("SELECT pg_advisory_xact_lock($1)", (MIGRATION_LOCK,))
            run_steps(migration.apply(), execute)
        except BaseException:
            unit.undo()
            raise
        unit.end()
        self.schema.committed(migration)
        self._use_names(migration.names)

    def _use_names(self, names: TableNames) -> None:
        self.table_names = names
        self.sql = load_queries(self._package, names=names)
        self._claim_function = names.table("claim")
        self.finish_function = names.table("save_record")


def is_in_test_case(connection: Any) -> bool:
    """Return whether the innermost transaction is the one of Django's ``TestCase``."""
    blocks = connection.atomic_blocks
    return bool(blocks) and blocks[-1]._from_testcase  # noqa: SLF001 - as Atomic itself does


class DjangoStatements:
    """Onceward's statements on Django's connection."""

    def __init__(self, store: DjangoStore) -> None:
        self._store = store

    async def execute(self, sql: str, params: Params = None) -> int:
        """Run a statement and return how many rows it changed."""
        values = self._store.values(params)
        changed: int = await self._store.in_thread(lambda: self._store.run(sql, values)[1])
        return changed

    async def fetch_all(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Return all rows of a query."""
        return await self._store.read(sql, params)

    async def fetch_one(self, sql: str, params: Params = None) -> Row | None:
        """Return the first row of a query, or None."""
        rows = await self.fetch_all(sql, params)
        return rows[0] if rows else None


class DjangoUnit:
    """One ``transaction.atomic()`` around the request, in the request's thread."""

    superseded = False

    def __init__(self, store: DjangoStore) -> None:
        """Begin; on SQLite with the write lock, so that a read cannot go stale before a write."""
        self._store = store
        self._ended = False
        self._is_read_only = False
        # Django's connection of this thread, which the ORM uses.
        self.transaction = connection = get_connection(store.using)
        in_test = is_in_test_case(connection)
        if connection.in_atomic_block and not in_test:
            raise ConfigurationError(
                "a transaction is open already, but the guard begins and commits its own. If "
                "ATOMIC_REQUESTS is on, guard the class instead of its methods, or add "
                '@method_decorator(transaction.non_atomic_requests, name="dispatch") to it; '
                "otherwise move transaction.atomic() into the view"
            )
        # A savepoint only where Django's TestCase has begun a transaction around each test.
        self._atomic = Atomic(store.using, savepoint=True, durable=True)
        self._atomic.__enter__()
        # Until the end, for statements of the view too.
        self.limits = store.limits_of(connection)
        if self.limits is not None:
            self.limits.seconds = store.limits.statement_seconds
        # Before ``undo`` can remove it. Django's own BEGIN has been sent.
        connection.execute_wrappers.append(_refuse_control)
        # BEGIN and the claim, and the record and COMMIT, then share one message each.
        self.has_messages = not store.is_sqlite and can_send_messages(connection)
        if store.is_sqlite:
            try:
                migrations = store.table_names.table("migrations")
                store.run(f"UPDATE {migrations} SET name = name WHERE 0")  # noqa: S608
            except OperationalError as error:
                if "no such table" not in str(error):
                    self.undo()
                    raise
                if not in_test:
                    # There is no table to lock yet. The read that showed it would be stale as soon
                    # as another process has created one: begin again, with the lock.
                    connection.connection.execute("ROLLBACK")
                    connection.connection.execute("BEGIN IMMEDIATE")
            # Rows that the connection has changed since it was opened, without those of the view.
            self._changes_before = self.transaction.connection.total_changes

    @property
    def statements(self) -> DjangoStatements:
        """The same transaction, for Onceward's statements."""
        return DjangoStatements(self._store)

    async def has_written(self) -> bool:
        """Return whether the view has written."""
        found: bool = await self._store.in_thread(self._has_written)
        return found

    def _has_written(self) -> bool:
        connection = self.transaction
        if connection.needs_rollback:
            return True
        if self._store.is_sqlite:
            return bool(connection.connection.total_changes != self._changes_before)
        return bool(self._store.run(HAS_WRITTEN)[0][0][0])

    async def keep_alive(self) -> None:
        """Do nothing: requests, not jobs, use this store."""

    async def commit(self, record: Record | None, audit: AuditEvent | None) -> None:
        """Write record and audit event, and commit them with the handler's rows."""
        if self._ended:
            raise NoTransactionError("the transaction has ended: it was committed or rolled back")

        def save_and_commit() -> None:
            try:
                self._refuse_aborted()
                self._save(record, audit)
            except BaseException:
                self.undo()
                raise
            try:
                self.end()
                self._check_commit()
            except _OUTAGES as error:
                raise CommitUnknownError(str(error), is_cut=self._note_cut()) from error

        await self._store.in_thread(save_and_commit)

    async def rollback(self) -> None:
        """Roll back."""
        if not self._ended:
            with suppress(StoreUnavailableError):
                await self._store.in_thread(self.undo)

    def undo(self) -> None:
        """Roll back, in the request's thread."""
        if not self._ended:
            self._stop_refusing()
            self.transaction.set_rollback(True)
            raw = self.transaction.connection
            if self.limits is not None and raw is not None and raw.closed:
                self.transaction.close()  # else Django would connect again, to set autocommit
            with suppress(DatabaseError):
                self._atomic.__exit__(None, None, None)
            self._end_limits()
            if self._is_read_only:
                self._store.renew()
                if not self.transaction.in_atomic_block:
                    self.transaction.close()

    def end(self) -> None:
        """Commit, in the request's thread."""
        self._stop_refusing()
        if self.limits is not None:
            self.limits.begin_commit(self._store.limits.commit_seconds)
        try:
            self._atomic.__exit__(None, None, None)
        finally:
            self._end_limits()

    def confirm(self) -> None:
        """Commit what the claim has read, so that a synchronous standby has it too.

        Raises ``StoreUnavailableError`` if it may not have it.
        """
        if self.limits is not None:
            self.limits.begin_commit(self._store.limits.commit_seconds)
        try:
            if self.has_messages:
                send_message(self.transaction, f"{CONFIRM};COMMIT")
            else:
                self._store.run(CONFIRM)
                self.end()
        except OperationalError:
            self._note_cut()
            raise
        if self.limits is not None and self.limits.notices.has_warned:
            raise unconfirmed("the standby did not confirm it")

    @property
    def is_lost(self) -> bool:
        """Whether the connection was lost in the view."""
        raw = self.transaction.connection
        return not self._ended and (raw is None or bool(getattr(raw, "closed", False)))

    def outage_of(self, error: Exception) -> StoreUnavailableError | None:
        """Return the client's error, if a statement of the view failed in an outage."""
        is_internal = isinstance(error, InternalError) and not is_read_only(error)
        if not isinstance(error, _OUTAGES) or is_internal or not _is_outage(error):
            return None
        if not self.transaction.errors_occurred and not self.is_lost:  # of another database
            return None
        self._is_read_only = is_read_only(error)
        outage = StoreUnavailableError(f"the database is unavailable: {error}")
        outage.__cause__ = error
        return outage

    def _note_cut(self) -> bool:
        """Return whether COMMIT was cut. If so, the server still works on it: count it."""
        return self.limits is not None and bool(self.limits.note_cut(self._store.limits.abandoned))

    def _check_commit(self) -> None:
        if self.limits is not None:
            self.limits.check_commit()

    def _end_limits(self) -> None:
        if self.limits is not None:
            self.limits.seconds = None

    def _stop_refusing(self) -> None:
        self._ended = True
        with suppress(ValueError):  # the view has replaced the list
            self.transaction.execute_wrappers.remove(_refuse_control)

    def _refuse_aborted(self) -> None:
        """Raise if a statement has failed: COMMIT would roll back without an error."""
        if self.transaction.needs_rollback:
            raise AbortedTransactionError(_ABORTED)

    def _save(self, record: Record | None, audit: AuditEvent | None) -> None:
        store = self._store
        if store.is_sqlite:
            if (
                record is not None
                and store.run(store.sql["save_record"], record_values(record))[1] == 0
            ):
                raise SupersededError("another request with this key was committed first")
            if audit is not None:
                self._save_audit(audit)
        elif record is not None:
            try:
                self._finish_on_postgres(record, audit)
            except DatabaseError as error:
                state = _state_of(error)
                if state == _SUPERSEDED_STATE:
                    raise SupersededError(
                        "another request with this key was committed first"
                    ) from None
                if state == _ABORTED_STATE:
                    raise AbortedTransactionError(_ABORTED) from error
                self._is_read_only = state == _READ_ONLY_STATE
                raise
        elif audit is not None:
            self._save_audit(audit)

    def _finish_on_postgres(self, record: Record, audit: AuditEvent | None) -> None:
        """Write the record; where one message can do it, also commit."""
        store = self._store
        if not self.has_messages or len(record.body) > _INLINE_BODY_BYTES:
            store.run(store.sql["finish"], finish_values(record, audit))
            return
        self.limits.begin_commit(store.limits.commit_seconds)
        try:
            result = send_message(
                self.transaction, f"{finish_statement(store.finish_function, record, audit)};COMMIT"
            )
        except _OUTAGES as error:
            if _state_of(error)[:2] in _UNKNOWN_STATES:
                raise CommitUnknownError(str(error), is_cut=self._note_cut()) from error
            raise
        if result.command_status != b"COMMIT":
            raise StoreUnavailableError("the database rolled the transaction back")
        self._check_commit()

    def _save_audit(self, audit: AuditEvent) -> None:
        store = self._store
        values = audit_values(audit, store.instant(audit.created_at))
        store.run(store.sql["save_audit_event"], values)


def _connection_params(connection: Any, seconds: float) -> dict[str, Any]:
    """Return the parameters of a connection, with a time limit unless the project has set one."""
    parameters: dict[str, Any] = type(connection).get_connection_params(connection)
    return {"connect_timeout": math.ceil(seconds), **parameters}


def _refuse_control(execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
    """Raise ``UsageError`` for COMMIT, ROLLBACK and the like; Django's wrapper of ``execute``."""
    if not isinstance(sql, str) and hasattr(sql, "as_string"):  # of psycopg.sql
        refuse_transaction_control(sql.as_string(context["connection"].connection))
    elif isinstance(sql, str):
        refuse_transaction_control(sql)
    return execute(sql, params, many, context)


def _is_outage(error: BaseException) -> bool:
    """Check whether an error is about the database or its file, not about a statement."""
    cause = error.__cause__
    if isinstance(cause, sqlite3.OperationalError):
        return is_sqlite_outage(cause)
    state = _state_of(error)
    return not state or is_outage_state(state)


def is_read_only(error: BaseException) -> bool:
    """Check whether a statement has reached a server that does not accept writes."""
    return _state_of(error) == _READ_ONLY_STATE


def _state_of(error: BaseException) -> str:
    """Return the SQLSTATE of an error of Django, or an empty text."""
    return getattr(error.__cause__, "sqlstate", None) or ""
