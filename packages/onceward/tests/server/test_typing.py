"""Types that users see. mypy checks this file; ``assert_type`` fails there if a type differs."""

import inspect
from typing import Any, assert_type

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from onceward import GuardConfig, Onceward, Transaction, open_store
from onceward.app import _Options
from onceward.ports import Store
from onceward.stores.postgres import PostgresStore
from onceward.stores.postgres.store import Options, PostgresOptions
from onceward.stores.postgres.unit_of_work import PostgresTransaction
from onceward.stores.psycopg import (
    PsycopgStore,
    PsycopgSyncStore,
    PsycopgSyncTransaction,
    PsycopgTransaction,
)
from onceward.stores.sessions.sqlalchemy import SqlAlchemyStore, SqlAlchemySyncStore
from onceward.stores.sqlite import SqliteStore
from onceward.stores.sqlite.unit_of_work import SqliteTransaction


def transaction_has_the_type_of_the_store(
    *,
    engine: Engine,
    maker: sessionmaker[Session],
    scoped: scoped_session[Session],
    async_maker: async_sessionmaker[AsyncSession],
    async_engine: AsyncEngine,
    own: Store,
) -> None:
    """Never called: only its types count."""
    assert_type(Onceward("sqlite:///x.db").transaction, Transaction)
    assert_type(
        Onceward("postgresql://localhost/x", config=GuardConfig(memory_bytes=0)).transaction,
        Transaction,
    )
    assert_type(Onceward(open_store("sqlite:///x.db")).transaction, Transaction)
    assert_type(Onceward(SqliteStore("x.db")).transaction, SqliteTransaction)
    assert_type(Onceward(PostgresStore("postgresql:///x")).transaction, PostgresTransaction)
    assert_type(Onceward(PsycopgStore("postgresql:///x")).transaction, PsycopgTransaction)
    assert_type(Onceward(PsycopgSyncStore("postgresql:///x")).transaction, PsycopgSyncTransaction)
    assert_type(Onceward(SqlAlchemyStore(async_maker)).transaction, AsyncSession)
    assert_type(Onceward(SqlAlchemyStore(async_engine)).transaction, AsyncSession)
    assert_type(Onceward(SqlAlchemySyncStore(engine)).transaction, Session)
    assert_type(Onceward(SqlAlchemySyncStore(maker)).transaction, Session)
    assert_type(Onceward(SqlAlchemySyncStore(scoped)).transaction, Session)
    assert_type(Onceward(own).transaction, Any)
    of_any_store: Onceward = Onceward(SqlAlchemySyncStore(engine))
    assert_type(of_any_store.transaction, Any)


def mistakes_are_found() -> None:
    """Never called: mypy reports a ``type: ignore`` that is not needed."""
    Onceward("sqlite:///x.db").transaction.excute("SELECT 1")  # type: ignore[attr-defined]
    Onceward("sqlite:///x.db", memory=1)  # type: ignore[call-overload]
    PsycopgSyncStore("postgresql:///x", max_connection=5)  # type: ignore[call-arg]
    tx = Onceward(PsycopgSyncStore("postgresql:///x")).transaction
    changed: int = tx.execute("DELETE FROM orders")
    rows: int = tx.fetch_all("SELECT 1")  # type: ignore[assignment]
    assert changed < rows


def test_options_in_types_are_those_of_the_signatures() -> None:
    for function, options, others in (
        (Onceward.__init__, _Options, {"self", "store"}),
        (Options.__init__, PostgresOptions, {"self"}),
    ):
        parameters = set(inspect.signature(function).parameters) - others
        assert parameters == set(options.__annotations__)
