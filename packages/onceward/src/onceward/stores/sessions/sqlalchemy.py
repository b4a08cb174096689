"""The stores for an app that has its own SQLAlchemy 2 engine: a session is the transaction."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, Final, TypeVar, Unpack

from onceward_protocol.extras import needs_extra

with needs_extra("sqlalchemy"):
    from sqlalchemy import Connection, Engine
    from sqlalchemy import exc as sa_errors
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
    from sqlalchemy.orm import Session, scoped_session, sessionmaker
    from sqlalchemy.util import await_only, greenlet_spawn

from onceward.errors import ConfigurationError, StoreUnavailableError, UsageError
from onceward.ports import Notifier
from onceward.records import RecordId
from onceward.stores.notifier import LocalNotifier
from onceward.stores.sessions.gate import ConnectionGate, ThreadGate, Visit, current_visit
from onceward.stores.sessions.messages import REPLACED, Messages
from onceward.stores.sessions.sqlalchemy_engine import (
    SqlAlchemySessions,
    refuse_connection,
    translating_outages,
    unavailable,
)
from onceward.stores.sessions.sqlalchemy_unit import (
    OUTAGE,
    Given,
    SqlAlchemyUnit,
    end_transaction,
    guard_sessions,
    guarded_class,
    has_unflushed_changes,
    listen_to_driver_calls,
)
from onceward.stores.sessions.store import SessionOptions
from onceward.stores.threads import StoreThreads, request_thread

__all__ = ["SessionOptions", "SqlAlchemyStore", "SqlAlchemySyncStore", "SqlAlchemyUnit"]

T = TypeVar("T")

# If the engine's pool has no limit.
_MOST_CONNECTIONS: Final = 32
_CLOSE_SECONDS: Final = 10.0


class SqlAlchemyStore(SqlAlchemySessions[AsyncSession]):
    """The store for an app that has its own SQLAlchemy 2 engine, on asyncpg or aiosqlite.

    ::

        engine = create_async_engine("postgresql+asyncpg://…")
        sessions = async_sessionmaker(engine, expire_on_commit=False)
        onceward = Onceward(SqlAlchemyStore(sessions), principal=…)

    A guarded handler gets an ``AsyncSession`` of that maker. It may add, flush, query, use
    savepoints and roll back. It must not commit, because the record commits with its rows: that
    raises ``UsageError``. The store does not change or dispose of the engine.

    On SQLite a session begins with ``BEGIN IMMEDIATE``, at its first statement. A deferred
    transaction that reads first and writes later fails if another has written in between, and the
    driver's default lets a savepoint commit by itself. Writers of this process wait for each other
    before that statement, without a connection; for other processes they wait as long as the
    engine's ``connect_args={"timeout": …}`` allows (5 seconds by default).
    """

    flush_hint = "await session.flush()"
    close_hint = "without `async with` and without close()"
    is_async = True
    has_sessions = True

    def __init__(
        self,
        sessions: async_sessionmaker[AsyncSession] | AsyncEngine,
        **options: Unpack[SessionOptions],
    ) -> None:
        """``sessions`` is the app's session maker, or its engine. ``open`` connects."""
        self._sessions = _session_maker(sessions)
        session = self._sessions()
        bind = session.get_bind()
        refuse_connection(bind)
        super().__init__(bind.engine, {"sqlite": "aiosqlite", "postgresql": "asyncpg"}, **options)
        self._session_class = guarded_class(type(session.sync_session))
        self._run_blocking = greenlet_spawn
        self._turn = _GreenletTurn()
        self._ending_tasks: set[asyncio.Task[Any]] = set()
        # The event loop and the engine's pool when it was last opened.
        self._opened_with: tuple[asyncio.AbstractEventLoop, Any] | None = None

    def _new_messages(self) -> Messages:
        from onceward.stores.sessions.asyncpg_messages import (  # noqa: PLC0415 - of one driver
            AsyncpgMessages,
        )

        return AsyncpgMessages(self.limits)

    def _start(self) -> None:
        self._refuse_pool_of_another_loop()
        self._turn = _GreenletTurn()  # a lock belongs to one event loop
        super()._start()
        listen_to_driver_calls(self.engine)

    async def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._stop_listening()
        if self._ending_tasks:
            await asyncio.wait(self._ending_tasks)

    # -- in SQLAlchemy's greenlet -------------------------------------------------------------

    async def run_to_end(self, work: Callable[[], T]) -> T:
        task = asyncio.ensure_future(self.run_in_unit(work))
        self._ending_tasks.add(task)
        task.add_done_callback(self._ending_tasks.discard)
        return await asyncio.shield(task)

    async def _new_unit(
        self, record_id: RecordId | None, now: datetime | None, session: AsyncSession | None = None
    ) -> SqlAlchemyUnit[AsyncSession]:
        """Return a unit for ``session``, which the request closes, or for a new one."""
        self._refuse_closed()
        is_shared = session is not None
        given = self.new_session() if session is None else session
        free = leave = None
        if record_id is not None:
            visit = current_visit()
            if visit is None:
                visit = Visit()
                free = visit.leave
            self._gate.before_claim(visit)
            await self._gate.admit(visit)
            leave = visit.leave_without_connection
        return SqlAlchemyUnit(
            self,
            record_id,
            now,
            partial(Given, given.sync_session, given, is_shared),
            free=free,
            leave=leave,
        )

    def run_script(self, connection: Connection, sql: str) -> Sequence[Any]:
        driver: Any = connection.connection.driver_connection
        if not sql.startswith("SELECT"):
            await_only(driver.execute(sql))
            return ()
        return [tuple(row) for row in await_only(driver.fetch(sql))]

    def _on_connect(self, adapted: Any, pooled: Any) -> None:
        from onceward.stores.sessions.asyncpg_messages import notices_of  # noqa: PLC0415

        def fetch_row(sql: str) -> Any:
            return adapted.run_async(lambda driver: driver.fetchrow(sql))

        if self.is_replaced(fetch_row, lambda: notices_of(pooled)):
            adapted.driver_connection.terminate()
            raise ConnectionError(REPLACED)

    @property
    def gate(self) -> ConnectionGate:
        return self._gate

    # -- sessions outside a guarded handler ---------------------------------------------------

    def new_session(self) -> AsyncSession:
        """Return a session for a request. It can be given to ``claim`` or ``begin`` later."""
        return self._sessions(sync_session_class=self._session_class)

    async def release_session(self, session: AsyncSession) -> bool:
        """End the session's transaction and return its connection, before the claim.

        What it has loaded stays loaded and what it has not flushed stays pending, to be flushed in
        the guarded transaction. Returns False if it had written something, which is rolled back.
        """
        if not session.in_transaction():
            return True
        return await self.run_to_end(lambda: end_transaction(session.sync_session))

    async def close_session(self, session: AsyncSession) -> None:
        """Roll back what was not committed and return the connection. Never raises."""
        session.sync_session.info.pop(OUTAGE, None)
        with suppress(Exception):
            if session.in_transaction():
                await self.run_to_end(session.sync_session.close)
            else:  # it holds no connection
                session.sync_session.close()

    def outage_of(self, session: AsyncSession, error: Exception) -> StoreUnavailableError | None:
        """Return the client's error, if a method of the session raised ``error`` in an outage."""
        noted = session.sync_session.info.get(OUTAGE) is error or hasattr(error, OUTAGE)
        return unavailable(error) if noted else None

    # -- the event loop -----------------------------------------------------------------------

    def _refuse_pool_of_another_loop(self) -> None:
        """Raise ``ConfigurationError`` for asyncpg's connections of a loop that has ended."""
        loop, pool = asyncio.get_running_loop(), self.engine.pool
        before, self._opened_with = self._opened_with, (loop, pool)
        if self.is_sqlite or before is None or before[0] is loop or before[1] is not pool:
            return
        idle: Callable[[], int] | None = getattr(pool, "checkedin", None)
        if idle is not None and idle() > 0:
            self._opened_with = before
            raise ConfigurationError(
                "the engine's connections belong to another event loop: in tests, use "
                "`with TestClient(app)` and dispose of the engine in the lifespan, or create the "
                "engine with poolclass=NullPool"
            )


class _GreenletTurn:
    """A lock for code in SQLAlchemy's greenlet. For one event loop; waits without a limit."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self.release = self._lock.release

    def acquire(self, *, timeout: float) -> bool:  # noqa: ARG002
        """Wait for it. The time limit is that of the request."""
        return bool(await_only(self._lock.acquire()))


class SqlAlchemySyncStore(SqlAlchemySessions[Session]):
    """The store for an app that has its own sync SQLAlchemy 2 engine, on psycopg 3 or SQLite.

    ::

        onceward = Onceward(SqlAlchemySyncStore(engine), principal=…)  # or a sessionmaker
        onceward = Onceward(SqlAlchemySyncStore(db.session))    # Flask-SQLAlchemy

    A guarded handler gets a ``Session`` of that engine or maker. If a ``scoped_session`` is given,
    it is the session that this has in the request's thread. The handler may add, flush, query, use
    savepoints and roll back. It must not commit, because the record commits with its rows: that
    raises ``UsageError``. The store does not change or dispose of the engine.

    A session is used in the thread of its request. In frameworks that are asynchronous (FastAPI),
    claim and commit run in a thread of the store, before and after the handler.

    On SQLite a session begins with ``BEGIN IMMEDIATE``, at its first statement: see
    ``SqlAlchemyStore``. Writers of this process wait for each other without a connection.
    """

    flush_hint = "session.flush()"
    close_hint = "without `with`, close() and remove()"
    is_async = False
    # Sync frameworks need no event loop for this store.
    runs_in_request_thread = True
    has_thread_sessions = True

    def __init__(
        self,
        sessions: Engine | sessionmaker[Any] | scoped_session[Any],
        **options: Unpack[SessionOptions],
    ) -> None:
        """Take the app's engine, session maker or scoped session. ``open`` connects."""
        super().__init__(
            _engine_of(sessions), {"sqlite": "pysqlite", "postgresql": "psycopg"}, **options
        )
        self._scoped = sessions if isinstance(sessions, scoped_session) else None
        self._sessions = (
            sessions if isinstance(sessions, sessionmaker) else sessionmaker(self.engine)
        )
        guard_sessions(self._sessions)
        if self._scoped is not None:
            guard_sessions(self._scoped.session_factory)
        self._turn = threading.Lock()
        self._app_begins = False
        self._threads = StoreThreads(
            self.max_connections or _MOST_CONNECTIONS,
            wait_seconds=self._wait_seconds,
            on_wait=self._pool_waited,
        )
        self._run_blocking = self._threads.run
        self._thread_gate = ThreadGate(self.max_connections, self._wait_seconds, self._pool_waited)

    def _new_messages(self) -> Messages:
        from onceward.stores.sessions.psycopg_messages import (  # noqa: PLC0415 - of one driver
            PsycopgMessages,
        )

        return PsycopgMessages(self.limits, _raw_of)

    @property
    def gate(self) -> ConnectionGate | None:
        """Limits how many guarded requests of an async framework use the pool at once."""
        return self._gate if request_thread.get(None) is None else None

    @property
    def thread_gate(self) -> ThreadGate:
        """Limits how many guarded requests of a sync framework use the pool at once."""
        return self._thread_gate

    def _start(self) -> None:
        self._threads.open()
        super()._start()
        listen_to_driver_calls(self.engine)

    async def close(self) -> None:
        if self._is_open:
            self._is_open = False
            await self._threads.close(_CLOSE_SECONDS)
            self._stop_listening()

    async def release_connection(self) -> None:
        """Return the connection with which the scoped session of this request has only read."""
        if self._scoped is not None and request_thread.get(None) is not None:
            await self._threads.run(self._release_connection)

    def notifier(self) -> Notifier:
        """Return a notifier: on SQLite for this process only; workers of others poll."""
        if self.is_sqlite:
            return LocalNotifier()
        from onceward.stores.psycopg.notifier import (  # noqa: PLC0415 - psycopg is optional
            SyncPostgresNotifier,
        )

        return SyncPostgresNotifier(self._detached, channel=self.table_names.channel)

    # -- in threads ---------------------------------------------------------------------------

    async def _run_apart(self, work: Callable[[], T]) -> T:
        with translating_outages():
            return await self._threads.run_with_slot(work)

    async def _new_unit(
        self, record_id: RecordId | None, now: datetime | None, _session: Any = None
    ) -> SqlAlchemyUnit[Session]:
        thread = request_thread.get(None)
        visit = None
        if record_id is not None:
            if self._scoped is not None and thread is None:
                raise ConfigurationError(
                    "a scoped_session belongs to the thread of a request, and an async framework "
                    "has none: give SqlAlchemySyncStore the engine or a sessionmaker, and write in "
                    "onceward.transaction"
                )
            visit = current_visit()
        self._refuse_closed()
        if visit is not None and thread is None:
            self._gate.before_claim(visit)
            await self._gate.admit(visit)
        has_slot = thread is None and await self._threads.take_slot()
        return SqlAlchemyUnit(
            self,
            record_id,
            now,
            partial(self._session_for, visit, is_in_request_thread=not has_slot),
            free=self._threads.free_slot if has_slot else None,
            leave=None if visit is None else visit.leave_without_connection,
            has_slot=has_slot,
        )

    def _session_for(self, visit: Visit | None, *, is_in_request_thread: bool) -> Given:
        if self._scoped is not None and is_in_request_thread:
            session: Session = self._scoped()
            refuse_connection(session.get_bind())  # a test may have bound it to one since
            self._end_earlier_transaction(session)
            given = Given(session, session, is_shared=True, is_kept=True)
        else:
            own: Session = self._sessions()
            refuse_connection(own.bind)
            given = Given(own, own)
        # Without a slot, the transaction of the request's session has ended by now.
        if visit is not None and is_in_request_thread:
            self._thread_gate.before_claim(visit)
            self._thread_gate.admit(visit)
        return given

    def _end_earlier_transaction(self, session: Session) -> None:
        """End what ran in the app's session before the guarded handler, if that only read.

        The guarded transaction begins with the claim.
        """
        if has_unflushed_changes(session) or (
            session.in_transaction() and self._has_written(session)
        ):
            raise UsageError(
                "the session has uncommitted changes from before the guarded handler, which would "
                "be lost if this request is a replay: commit them there, or make them in the "
                "handler"
            )
        session.rollback()

    def _release_connection(self) -> None:
        assert self._scoped is not None  # noqa: S101 - the caller has checked
        if not self._scoped.registry.has():
            return
        session: Session = self._scoped()
        refuse_connection(session.get_bind())
        if not session.in_transaction() or has_unflushed_changes(session):
            return
        # A session in a state that refuses statements is refused by the claim.
        with suppress(sa_errors.InvalidRequestError):
            if not self._has_written(session):
                session.rollback()

    def _has_written(self, session: Session) -> bool:
        connection = session.connection()
        if self.is_sqlite:
            driver: Any = connection.connection.driver_connection
            return bool(driver.in_transaction) and not self._app_begins
        try:
            assigned = self.run(connection, "SELECT txid_current_if_assigned()").rows[0][0]
        except sa_errors.DBAPIError:  # aborted, so nothing of it would be committed
            return False
        return assigned is not None

    def run_script(self, connection: Connection, sql: str) -> Sequence[Any]:
        cursor = _raw_of(connection).execute(sql, prepare=False)
        return () if cursor.description is None else list(cursor)

    def _on_connect(self, driver: Any, _pooled: Any) -> None:
        from onceward.stores.sessions.psycopg_messages import limits_of  # noqa: PLC0415

        def fetch_row(sql: str) -> Any:
            return driver.execute(sql, prepare=False).fetchone()

        before, driver.autocommit = driver.autocommit, True
        try:
            if self.is_replaced(fetch_row, lambda: limits_of(driver)):
                driver.close()
                raise ConnectionError(REPLACED)
        finally:
            if not driver.closed:
                driver.autocommit = before

    def _look_at_sqlite(self) -> None:
        super()._look_at_sqlite()
        with self.reading() as connection:
            driver: Any = connection.connection.driver_connection
            self._app_begins = bool(driver.in_transaction)

    def _detached(self) -> Any:
        """Open a connection that the engine's pool does not count."""
        pooled = self.engine.raw_connection()
        driver: Any = pooled.driver_connection
        pooled.detach()
        driver.autocommit = True
        return driver


# -- engines --------------------------------------------------------------------------------------


def _raw_of(connection: Connection) -> Any:
    """Return psycopg's connection of one of SQLAlchemy."""
    return connection.connection.dbapi_connection


def _session_maker(given: Any) -> async_sessionmaker[AsyncSession]:
    """Return the session maker of an engine. Raises ``ConfigurationError`` for anything else."""
    if isinstance(given, async_sessionmaker):
        return given
    if isinstance(given, AsyncEngine):
        return async_sessionmaker(given, expire_on_commit=False)
    kind = type(given).__name__
    if isinstance(given, str):
        raise ConfigurationError(
            "SqlAlchemyStore takes an engine, not a URL: write create_async_engine(url), or use "
            "open_store(url)"
        )
    if isinstance(given, Engine | Session | sessionmaker | scoped_session):
        raise ConfigurationError(
            f"SqlAlchemyStore takes an asynchronous engine, not a synchronous {kind}: "
            "write create_async_engine(…), or use SqlAlchemySyncStore"
        )
    raise ConfigurationError(
        f"SqlAlchemyStore takes an async_sessionmaker or an AsyncEngine, not a {kind}"
    )


def _engine_of(sessions: Engine | sessionmaker[Any] | scoped_session[Any]) -> Engine:
    if isinstance(sessions, Engine):
        return sessions
    if not isinstance(sessions, sessionmaker | scoped_session):
        if isinstance(getattr(sessions, "session", None), scoped_session):
            raise ConfigurationError(
                "SqlAlchemySyncStore needs the session of Flask-SQLAlchemy: pass db.session"
            )
        raise ConfigurationError(
            "SqlAlchemySyncStore needs an Engine, a sessionmaker or a scoped_session, not "
            f"{type(sessions).__name__}; for an async engine use SqlAlchemyStore"
        )
    maker = sessions.session_factory if isinstance(sessions, scoped_session) else sessions
    try:
        bind = maker().get_bind()
    except RuntimeError as error:  # Flask-SQLAlchemy: working outside of application context
        raise ConfigurationError(
            "db.session has no engine here: create the store inside `with app.app_context():`"
        ) from error
    except sa_errors.UnboundExecutionError as error:
        raise ConfigurationError(
            "the sessions have no engine: create the sessionmaker with bind=engine"
        ) from error
    refuse_connection(bind)
    engine: Engine = bind.engine
    return engine
