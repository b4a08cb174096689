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
from typing import Any, Final, TypeVar, Unpack

from onceward_protocol.extras import needs_extra

with needs_extra("django"):
    from django.conf import settings as django_settings
    from django.db import (
        DatabaseError,
        InterfaceError,
        InternalError,
        OperationalError,
        connections,
    )
    from django.db.backends.signals import connection_created
    from django.db.transaction import Atomic, get_connection

from onceward.errors import (
    AbortedTransactionError,
    CommitUnknownError,
    ConfigurationError,
    StoreUnavailableError,
    SupersededError,
)
from onceward.ports import Params, Row
from onceward.records import Record, RecordId
from onceward.stores.errors import (
    SUPERSEDED,
    SUPERSEDED_STATE,
    is_aborted,
    is_outage_state,
    is_read_only,
    is_sqlite_outage,
    state_of,
)
from onceward.stores.sessions.messages import CONFIRM, REPLACED, Messages, SessionLimits
from onceward.stores.sessions.store import Ran, SessionOptions, SessionStore, SessionUnit
from onceward.stores.sqlite.store import file_identity
from onceward.stores.statements import named_parameters, refuse_transaction_control

__all__ = ["DjangoStore", "DjangoUnit", "SessionOptions"]

T = TypeVar("T")

RunInThread = Callable[[Callable[[], Any]], Awaitable[Any]]

_ABORTED: Final = (
    "a statement failed in the guarded view, which went on and returned success, so everything was "
    "rolled back: put a statement whose error you handle into its own `with transaction.atomic():`"
)
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


class DjangoStore(SessionStore[Any]):
    """Uses a database of the project's settings, with Django's connection and transaction."""

    # Its methods never wait for an event loop, so requests need none.
    runs_in_request_thread = True

    def __init__(
        self,
        run_in_thread: RunInThread,
        *,
        using: str = "default",
        **options: Unpack[SessionOptions],
    ) -> None:
        """Use the database with the alias ``using`` in Django's settings.

        The limits of ``options`` are for PostgreSQL with psycopg 3.
        """
        vendor = connections[using].vendor
        if vendor not in {"sqlite", "postgresql"}:
            raise ConfigurationError(f"{vendor} is not supported: use PostgreSQL or SQLite")
        if not django_settings.USE_TZ:
            raise ConfigurationError("Onceward needs USE_TZ = True")
        super().__init__(vendor, **options)
        # The alias in ``settings.DATABASES``.
        self.using = using
        self.messages = _messages_of(using, self.limits)
        self._run = run_in_thread
        # Counts read-only servers: connections from before one are closed at their next use.
        self._renewals = 0
        # ``file`` is the SQLite file of this thread's connection.
        self._opened = threading.local()

    @property
    def sqlite_path(self) -> str | None:
        name = str(connections[self.using].settings_dict["NAME"])
        return name if self.is_sqlite and not name.startswith("file:") else None

    async def _listen(self) -> None:
        await self._run_apart(self.leave_replaced_file)
        connection_created.connect(self._on_connect)

    async def close(self) -> None:
        """Mark the store as closed. Django closes its connections."""
        self._is_open = False
        connection_created.disconnect(self._on_connect)

    # -- in the request's thread ------------------------------------------------------------

    async def run_in_unit(self, work: Callable[[], T], *, is_claim: bool = False) -> T:
        limited: Callable[[], Any] = work
        if self.messages.has_limits:
            limits = self.limits
            seconds = limits.claim_seconds if is_claim else limits.statement_seconds
            limited = partial(self._run_in_time, work, seconds)
        try:
            found: T = await self._run(limited)
        except _OUTAGES as error:
            if isinstance(error, InternalError) and not is_read_only(error):
                raise
            await self._run(partial(self._forget_connection, error))
            raise StoreUnavailableError(
                f"the database is unavailable: {error}", is_outage=_is_outage(error)
            ) from error
        return found

    async def run_to_end(self, work: Callable[[], T]) -> T | None:  # type: ignore[override]
        """Do the same for a rollback: what cannot be reached has rolled back."""
        with suppress(StoreUnavailableError):
            return await self.run_in_unit(work)
        return None

    def _run_in_time(self, work: Callable[[], Any], seconds: float) -> Any:
        """Run a function with a time limit for connecting, and for each response."""
        connection = connections[self.using]
        with self.messages.waiting(seconds):
            self.leave_old_connection(connection)
            # Django connects when it is asked for a cursor, and again after some errors.
            connection.get_connection_params = partial(
                _connection_params, connection, self.limits.claim_seconds
            )
            try:
                if connection.connection is None:
                    connection.ensure_connection()
                self.messages.notices_of(connection)
                return work()
            finally:
                connection.__dict__.pop("get_connection_params", None)

    def _forget_connection(self, error: BaseException) -> None:
        connection = connections[self.using]
        if is_read_only(error):
            self.renew()
            if not connection.in_atomic_block:
                connection.close()
        elif not connection.in_atomic_block:
            with suppress(DatabaseError):
                connection.close_if_unusable_or_obsolete()

    def renew(self) -> None:
        """Close the connections of all threads at their next use: the server is read-only."""
        self._renewals += 1

    def leave_old_connection(self, connection: Any) -> None:
        """Close a connection from before the last ``renew``; Django opens another one."""
        known = connection.__dict__
        if known.get(_RENEWALS, 0) != self._renewals and not connection.in_atomic_block:
            connection.close()
            known[_RENEWALS] = self._renewals

    def leave_replaced_file(self) -> None:
        """Close a connection to an SQLite file that was replaced; Django opens the new one."""
        connection, found = connections[self.using], file_identity(self.sqlite_path)
        opened = getattr(self._opened, "file", None)
        if found is None or connection.in_atomic_block:
            return
        if opened is None:  # opened before this store
            self._opened.file = found
        elif opened != found:
            connection.close()

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
                    return cursor.fetchone()
                finally:
                    if not connection.get_autocommit():
                        connection.connection.rollback()

        if self.is_replaced(fetch_row, partial(self.messages.notices_of, connection)):
            connection.close()
            raise OperationalError(REPLACED)

    # -- statements ---------------------------------------------------------------------------

    @contextmanager
    def reading(self) -> Iterator[Any]:
        if self.is_sqlite:
            self.leave_replaced_file()
        yield connections[self.using]

    @contextmanager
    def writing(self) -> Iterator[Any]:
        """Do the same; what the statement commits at once is on the standby, too."""
        connection, seconds = connections[self.using], self.limits.statement_seconds
        with self.messages.committing(connection, is_read=True, seconds=seconds):
            yield connection

    @contextmanager
    def migrating(self) -> Iterator[Any]:
        unit = DjangoUnit(self, None, None)
        unit.start()
        try:
            yield unit.transaction
        except BaseException:
            unit.undo()
            raise
        unit.end()

    def run(self, connection: Any, sql: str, values: Any = ()) -> Ran:
        if isinstance(values, (tuple, list)) and "$1" in sql:
            values = {f"p{index}": value for index, value in enumerate(values, 1)}
        with connection.cursor() as cursor:
            cursor.execute(_with_django_parameters(sql), values or None)
            rows = cursor.fetchall() if cursor.description is not None else []
            return Ran(rows, max(cursor.rowcount, 0))

    def execute(self, connection: Any, sql: str, params: Params) -> int:
        return self.run(connection, sql, _named(params, self.instant)).changed

    def fetch(self, connection: Any, sql: str, params: Params) -> list[Row]:
        with connection.cursor() as cursor:
            cursor.execute(_with_django_parameters(sql), _named(params, self.instant) or None)
            if cursor.description is None:
                return []
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def total_changes(self, connection: Any) -> int:
        return int(connection.connection.total_changes)

    def run_script(self, connection: Any, sql: str) -> Sequence[Any]:
        with connection.cursor() as cursor:
            cursor.execute(sql)
            rows: Sequence[Any] = cursor.fetchall() if cursor.description is not None else ()
            return rows

    def _run_migration(self, connection: Any, sql: str, values: tuple[Any, ...]) -> Sequence[Any]:
        if not values:
            return self.run_script(connection, sql)
        # It records a migration, so there was one to apply. In a test, the transaction of the
        # migrations is inside that of the test.
        if any(is_from_test_case(block) for block in connection.atomic_blocks):
            raise ConfigurationError(
                "Onceward's tables are missing in the test database, and a table made in a "
                "TestCase is gone after it: add 'onceward.django' to INSTALLED_APPS, and "
                "migrate creates them"
            )
        return self.run(connection, sql, values).rows

    def _confirm(self, connection: Any) -> None:
        if not self.is_sqlite:
            with self.messages.committing(connection, is_read=True):
                self.run(connection, CONFIRM)

    async def _new_unit(
        self, record_id: RecordId | None, now: datetime | None, _session: Any = None
    ) -> "DjangoUnit":
        return DjangoUnit(self, record_id, now)

    def _find_first(
        self, unit: SessionUnit[Any], record_id: RecordId, now: datetime
    ) -> Record | None:
        """Look the key up with the write lock."""
        self.leave_replaced_file()
        return self.find_on(unit.start(), record_id, now)

    def raise_record_error(self, connection: Any, error: Exception) -> None:  # noqa: ARG002
        if state_of(error) == SUPERSEDED_STATE:
            raise SupersededError(SUPERSEDED) from None
        if is_aborted(error):
            raise AbortedTransactionError(_ABORTED) from error
        if is_read_only(error):
            self.renew()

    def raise_commit_error(self, error: Exception, *, is_cut: bool) -> None:
        if isinstance(error, _OUTAGES):
            raise CommitUnknownError(str(error), is_cut=is_cut) from error


def _messages_of(using: str, limits: SessionLimits) -> Messages:
    if connections[using].Database.__name__ != "psycopg":
        return Messages()
    from onceward.stores.psycopg.messages import (  # noqa: PLC0415 - of one driver
        begin_statement,
        send,
    )
    from onceward.stores.sessions.psycopg_messages import PsycopgMessages  # noqa: PLC0415

    class DjangoMessages(PsycopgMessages):
        """Raises Django's errors."""

        def send(self, connection: Any, raw: Any, statements: str) -> Any:
            with connection.wrap_database_errors:
                return send(raw, statements)

        def begin_of(self, raw: Any) -> str | None:
            return "BEGIN" if begin_statement(raw) == "BEGIN" else None

    return DjangoMessages(limits, lambda connection: connection.connection)


def _named(params: Params, instant: Callable[[datetime], Any]) -> dict[str, Any]:
    return {
        name: instant(value) if isinstance(value, datetime) else value
        for name, value in named_parameters(params).items()
    }


class DjangoUnit(SessionUnit[Any]):
    """One ``transaction.atomic()`` around the request, in the request's thread."""

    _store: DjangoStore

    def __init__(
        self, store: DjangoStore, record_id: RecordId | None, claimed_at: datetime | None
    ) -> None:
        super().__init__(store, record_id, claimed_at)
        self._atomic: Any = None
        self._transaction: Any = None

    @property
    def transaction(self) -> Any:
        """Django's connection of this thread, which the ORM uses."""
        return self._transaction

    connection = transaction

    def start(self) -> Any:
        """Begin; on SQLite with the write lock, so that a read cannot go stale before a write."""
        store = self._store
        connection = get_connection(store.using)
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
        with store.messages.connecting():
            self._atomic.__enter__()
        self._transaction = connection
        # Until the end, for statements of the view too.
        store.messages.limit(connection)
        # Before ``undo`` can remove it. Django's own BEGIN has been sent.
        connection.execute_wrappers.append(_refuse_control)
        if store.is_sqlite:
            self._lock(connection, in_test=in_test)
            # Rows that the connection has changed since it was opened, without those of the view.
            self._changes_before = store.total_changes(connection)
        return connection

    def _lock(self, connection: Any, *, in_test: bool) -> None:
        store = self._store
        try:
            migrations = store.table_names.table("migrations")
            store.run(connection, f"UPDATE {migrations} SET name = name WHERE 0")  # noqa: S608
        except OperationalError as error:
            if "no such table" not in str(error):
                self.undo()
                raise
            if not in_test:
                # There is no table to lock yet. The read that showed it would be stale as soon
                # as another process has created one: begin again, with the lock.
                connection.connection.execute("ROLLBACK")
                connection.connection.execute("BEGIN IMMEDIATE")

    def _has_written(self) -> bool:
        return self.transaction.needs_rollback or super()._has_written()

    @property
    def is_lost(self) -> bool:
        raw = self.transaction.connection
        return not self.has_ended and (raw is None or bool(getattr(raw, "closed", False)))

    def outage_of(self, error: Exception) -> StoreUnavailableError | None:
        """Return the client's error, if a statement of the view failed in an outage."""
        is_internal = isinstance(error, InternalError) and not is_read_only(error)
        if not isinstance(error, _OUTAGES) or is_internal or not _is_outage(error):
            return None
        if not self.transaction.errors_occurred and not self.is_lost:  # of another database
            return None
        if is_read_only(error):
            self._store.renew()
        outage = StoreUnavailableError(f"the database is unavailable: {error}")
        outage.__cause__ = error
        return outage

    def confirm(self) -> None:
        """Commit what the claim has read, so that a synchronous standby has it too, or raise."""
        if self.has_messages:
            super().confirm()
            return
        with self._store.messages.committing(self.transaction, is_read=True):
            self._store.run(self.transaction, CONFIRM)
            self.end()

    def _prepare_commit(self) -> None:
        """Raise if a statement has failed: COMMIT would roll back without an error."""
        if self._transaction.needs_rollback:
            raise AbortedTransactionError(_ABORTED)

    def _may_share_commit(self) -> bool:
        return self.has_messages

    def _end_transaction(self) -> None:
        if self._is_committed:
            self.end()
            return
        with self._store.messages.committing(self._transaction):
            self.end()

    def _end(self) -> None:
        """Do nothing: ``end`` has."""

    def end(self) -> None:
        """Commit."""
        self._stop_refusing()
        try:
            self._atomic.__exit__(None, None, None)
        finally:
            self._end_limit()

    def undo(self) -> None:
        connection = self.transaction
        if self.has_ended or connection is None:
            self.has_ended = True
            return
        self._stop_refusing()
        connection.set_rollback(True)
        if connection.connection is not None and self._store.messages.is_closed(connection):
            connection.close()  # else Django would connect again, to set autocommit
        with suppress(DatabaseError):
            self._atomic.__exit__(None, None, None)
        self._end_limit()
        self._store.leave_old_connection(connection)

    def _end_limit(self) -> None:
        if self._transaction.connection is not None:
            self._store.messages.unlimit(self._transaction)

    def _stop_refusing(self) -> None:
        self.has_ended = True
        with suppress(ValueError):  # the view has replaced the list
            self._transaction.execute_wrappers.remove(_refuse_control)


def is_in_test_case(connection: Any) -> bool:
    """Return whether the innermost transaction is the one of Django's ``TestCase``."""
    blocks = connection.atomic_blocks
    return bool(blocks) and is_from_test_case(blocks[-1])


def is_from_test_case(block: Any) -> bool:
    """Return whether a transaction is the one of Django's ``TestCase``."""
    return bool(block._from_testcase)  # noqa: SLF001 - as Atomic itself does


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
    state = state_of(error)
    return not state or is_outage_state(state)
