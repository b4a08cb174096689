"""Statements of handlers that begin or end the transaction are refused on every store."""

import inspect
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from onceward.errors import NoTransactionError, UsageError
from onceward.stores.sessions.sqlalchemy import SqlAlchemyStore, SqlAlchemySyncStore
from onceward.stores.sessions.sqlalchemy_unit import listen_to_driver_calls
from onceward.stores.statements import refuse_transaction_control
from onceward_testing.samples import NOW, a_record, claimed, commit

REFUSED = (
    *("COMMIT", " commit ;", "COMMIT AND CHAIN", "END", "ABORT", "BEGIN", "START TRANSACTION"),
    *("ROLLBACK", "ROLLBACK -- TO", "rollback work and chain", "PREPARE TRANSACTION 'to'"),
    *("/* x */ commit", "-- done\nEND", "/* a /* b */ c */ COMMIT", "/* /* */ COMMIT", ";;BEGIN"),
    *("SELECT 1; COMMIT", "SELECT ';'; ROLLBACK", "SELECT $a$ ; $a$ ; END", "SELECT 1 --;\n;END"),
    "CREATE TRIGGER a AFTER INSERT ON b BEGIN SELECT 1; END; COMMIT",
)
ALLOWED = (
    *("SAVEPOINT a", "ROLLBACK TO a", "ROLLBACK TO SAVEPOINT a", "ROLLBACK WORK TO a", "RELEASE a"),
    *("SELECT 'a; COMMIT'", 'SELECT "COMMIT"', "SELECT 1 /* ; COMMIT */", "SELECT 1 -- ; COMMIT"),
    *("SELECT CASE WHEN 1 THEN 2 END", "PREPARE a AS SELECT 1", "DO $$ BEGIN NULL; END $$"),
    *("SELECT E'\\'; COMMIT'", "SELECT commit_at FROM end_of_day", "", "--"),
    "CREATE TRIGGER a AFTER INSERT ON b BEGIN SELECT 1; SELECT 2; END",
    "CREATE FUNCTION a() RETURNS int BEGIN ATOMIC SELECT 1; SELECT 2; END; SELECT 3",
)


@pytest.mark.parametrize("sql", REFUSED)
def test_transaction_control_is_refused(sql: str) -> None:
    with pytest.raises(UsageError, match="must not begin or end the transaction"):
        refuse_transaction_control(sql)


@pytest.mark.parametrize("sql", ALLOWED)
def test_savepoints_and_quoted_text_are_allowed(sql: str) -> None:
    refuse_transaction_control(sql)


def test_engine_at_the_address_of_a_collected_one_is_listened_to() -> None:
    """A part of an engine may outlive it, in a connection that is still open."""
    kept = []
    for _ in range(200):
        engine = create_engine("sqlite://")
        listen_to_driver_calls(engine)
        assert len(engine.dialect.dispatch.do_execute) == 1
        kept.append(engine.dialect)
        del engine


# -- sessions of SQLAlchemy -----------------------------------------------------------------------


@pytest.fixture(params=["sqlite+aiosqlite", "sqlite", "postgresql+asyncpg", "postgresql+psycopg"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param.startswith("sqlite"):
        return f"{request.param}:///{tmp_path / 'app.db'}"
    made: str = request.getfixturevalue("clean_postgres_url")
    return made.replace("postgresql", request.param, 1)


@pytest.fixture
async def store(url: str) -> AsyncIterator[Any]:
    if url.startswith(("sqlite+", "postgresql+asyncpg")):
        engine: Any = create_async_engine(url)
        store: Any = SqlAlchemyStore(engine)
    else:
        engine = create_engine(url)
        store = SqlAlchemySyncStore(engine)
    await store.open()
    await store.write("CREATE TABLE tea (name text)")
    yield store
    await store.close()
    await result_of(engine.dispose())


async def result_of(call: Any) -> Any:
    return await call if inspect.isawaitable(call) else call


async def add_tea(session: Any) -> None:
    await result_of(session.execute(text("INSERT INTO tea VALUES ('green')")))


async def teas(store: Any) -> int:
    return len(await store.read("SELECT name FROM tea"))


async def test_sessions_refuse_control_statements(store: Any) -> None:
    record = a_record()
    unit = await claimed(store, record.id)
    session = unit.transaction
    await add_tea(session)
    connection = await result_of(session.connection())
    for sql in ("COMMIT", "END", "/* x */ commit", "ROLLBACK", "ABORT", "SELECT 1; COMMIT"):
        with pytest.raises(UsageError, match="must not begin or end the transaction"):
            await result_of(session.execute(text(sql)))
        with pytest.raises(UsageError, match="must not begin or end the transaction"):
            await result_of(connection.exec_driver_sql(sql))
    nested = await result_of(session.begin_nested())
    await add_tea(session)
    await result_of(nested.rollback())
    nested = await result_of(session.begin_nested())
    await result_of(nested.commit())
    await unit.commit(record, None)
    assert await teas(store) == 1


async def test_session_without_a_key_refuses_control_statements(store: Any) -> None:
    """``job.begin()`` uses it. After a rollback of the handler it has another connection."""
    unit = await store.begin()
    session = unit.transaction
    for _ in range(2):
        await add_tea(session)
        with pytest.raises(UsageError):
            await result_of(session.execute(text("COMMIT")))
        await result_of(session.rollback())
    await unit.rollback()
    assert await teas(store) == 0


ENDS: list[Callable[[Any], Any]] = [
    lambda connection: connection.commit(),
    lambda connection: connection.rollback(),
    lambda connection: connection.get_transaction().commit(),
    lambda connection: connection.get_transaction().rollback(),
]


@pytest.mark.parametrize("goes_on", [False, True])
async def test_connection_of_a_session_cannot_end_the_transaction(
    store: Any, goes_on: bool
) -> None:
    for number, end in enumerate(ENDS):
        record = a_record(f"key-{number}")
        unit = await claimed(store, record.id)
        session = unit.transaction
        await add_tea(session)
        connection = await result_of(session.connection())
        seen: list[Exception] = []
        try:
            await result_of(end(connection))
            if goes_on:
                await add_tea(session)
        except Exception as error:  # noqa: BLE001 - a handler that ignores it
            seen.append(error)
        with pytest.raises(UsageError, match="must not begin or end the transaction"):
            await unit.commit(record, None)
        assert all(isinstance(error, UsageError) for error in seen)
        assert await teas(store) == 0
        assert await store.find(record.id, NOW) is None
        await commit(store, record)


@pytest.mark.parametrize("url", ["sqlite", "postgresql+psycopg"], indirect=True)
async def test_pooled_connection_of_a_session_cannot_commit(store: Any) -> None:
    record = a_record()
    unit = await claimed(store, record.id)
    await add_tea(unit.transaction)
    with pytest.raises(UsageError, match="must not begin or end the transaction"):
        unit.transaction.connection().connection.commit()
    with pytest.raises(UsageError, match="must not begin or end the transaction"):
        await unit.commit(record, None)
    assert await teas(store) == 0


@pytest.mark.parametrize("url", ["sqlite", "postgresql+psycopg"], indirect=True)
async def test_connection_that_was_replaced_runs_no_statement(store: Any) -> None:
    """The handler's statements would run, and could be committed, without the claim."""
    record = a_record()
    unit = await claimed(store, record.id)
    connection = unit.transaction.connection()
    connection.invalidate()
    connection.rollback()
    with pytest.raises(UsageError, match="must not begin or end the transaction"):
        connection.exec_driver_sql("INSERT INTO tea VALUES ('green')")
    with pytest.raises(UsageError, match="must not begin or end the transaction"):
        await unit.commit(record, None)
    assert await teas(store) == 0
    await commit(store, record)


@pytest.mark.parametrize("url", ["sqlite", "postgresql+psycopg"], indirect=True)
async def test_two_stores_of_one_engine_note_a_statement_once(
    store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A statement noted twice would delay the rollback, which runs in another thread."""
    unit = await store.begin()
    other = SqlAlchemySyncStore(unit.transaction.get_bind().engine)
    await other.open()
    await add_tea(unit.transaction)
    await unit.rollback()
    await other.close()
    # The second store has logged what the database guarantees.
    assert [text for text in caplog.messages if not text.startswith("PostgreSQL has ")] == []
    assert await teas(store) == 0


async def test_the_apps_own_connections_may_commit(store: Any) -> None:
    """Also on the connection that a guarded session has returned to the pool."""
    record = a_record()
    unit = await claimed(store, record.id)
    await add_tea(unit.transaction)
    engine = unit.transaction.get_bind().engine
    await unit.commit(record, None)
    if isinstance(store, SqlAlchemyStore):
        session = store.new_session()
        await add_tea(session)
        await session.commit()
        await session.close()
    else:
        with engine.connect() as connection:
            connection.execute(text("INSERT INTO tea VALUES ('black')"))
            connection.execute(text("COMMIT"))
    assert await teas(store) == 2


async def test_statement_refused_by_a_listener_of_the_app_delays_no_rollback(
    store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class RefusedError(Exception):
        pass

    def refuse(*arguments: Any) -> None:
        if arguments[2] == "SELECT 'refused'":
            raise RefusedError

    unit = await store.begin()
    engine = unit.transaction.get_bind().engine
    event.listen(engine, "before_cursor_execute", refuse)
    await add_tea(unit.transaction)
    with pytest.raises(RefusedError):
        await result_of(unit.transaction.execute(text("SELECT 'refused'")))
    with pytest.raises(UsageError):
        await result_of(unit.transaction.execute(text("COMMIT")))
    await unit.rollback()
    assert await teas(store) == 0
    assert "Current Checked out connections: 0" in engine.pool.status()
    assert caplog.messages == []


# -- what COMMIT must not leave behind ------------------------------------------------------------


class Base(DeclarativeBase):
    pass


class Tea(Base):
    __tablename__ = "tea"

    name: Mapped[str] = mapped_column(primary_key=True)


async def test_rows_that_a_listener_to_a_flush_has_added_commit_with_the_record(store: Any) -> None:
    """The record must not share a message with COMMIT then: they are flushed after it."""
    record = a_record()
    unit = await claimed(store, record.id)
    session = getattr(unit.transaction, "sync_session", unit.transaction)

    def add_black(flushed: Any, _context: Any) -> None:
        if not seen:
            seen.append(True)
            flushed.add(Tea(name="black"))

    seen: list[bool] = []
    event.listen(session, "after_flush_postexec", add_black)
    session.add(Tea(name="green"))
    await unit.commit(record, None)
    assert await teas(store) == 2
    assert await store.find(record.id, NOW) == record


async def test_session_refuses_statements_after_the_end_of_its_unit(store: Any) -> None:
    unit = await claimed(store, a_record().id)
    session = unit.transaction
    await add_tea(session)
    await unit.rollback()
    with pytest.raises(NoTransactionError):
        await add_tea(session)
    assert await teas(store) == 0
