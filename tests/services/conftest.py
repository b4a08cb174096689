"""The whole server in this process, on both databases, with a clock that tests can hold."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from holdfast import open_store
from holdfast.server.jwt_auth import mint_token
from holdfast.services.app import create_app
from holdfast.services.catalogue import SERVICES, rooms
from holdfast.services.settings import load_settings
from holdfast.testing.servers import RealPostgres

SECRET = "a secret for tests, long enough for HS256"

Serve = Callable[..., Any]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("HOLDFAST_") or name == "ROUTES_IDEMPOTENCY_TTL_HOURS":
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def services_database(postgres: RealPostgres) -> Iterator[str]:
    """One database with everyone's tables: to make one for each test takes most of a second."""
    postgres.start()
    url = postgres.create_database("services")
    asyncio.run(_migrate(url))
    yield url
    postgres.start()
    postgres.drop_database(url)


async def _migrate(url: str) -> None:
    store = open_store(url, rooms=rooms())
    await store.open()
    await store.close()


@pytest.fixture
async def postgres_url(postgres: RealPostgres, services_database: str) -> str:
    """Empty every table, whatever the test before has left behind."""
    postgres.start()  # a test before this one may have stopped it
    connection = await asyncpg.connect(services_database)
    try:
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        tables = await connection.fetch(
            "SELECT quote_ident(tablename) AS name FROM pg_tables WHERE schemaname = 'public'"
            " AND tablename NOT IN ('holdfast_migrations', 'holdfast_secret')"
        )
        await connection.execute(";".join(f"DELETE FROM {table['name']}" for table in tables))
    finally:
        await connection.close()
    return services_database


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/services.db"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/services.db"


@pytest.fixture
def serve(_no_settings_from_outside: None, request: pytest.FixtureRequest) -> Serve:
    """Give a function that runs the app: ``async with serve(database_url) as client``.

    The tests of one service get that one and the smallest, as somebody else's: to build them all
    takes most of such a test.
    """
    folder = request.path.parent.name
    only = [folder, "routes"] if folder in {service.name for service in SERVICES} else []

    @asynccontextmanager
    async def run(
        database_url: str, *, clock: Any = None, prepare: Any = None, **settings: Any
    ) -> AsyncIterator[httpx.AsyncClient]:
        app = create_app(
            load_settings(database_url=database_url, jwt_secret=SECRET, **settings),
            clock=clock,
            only=only,
        )
        if prepare is not None:
            prepare(app)
        await app.state.holdfast.open()
        transport = httpx.ASGITransport(app=app)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://holdfast") as client:
                client.headers.update(signed_in("ada"))
                yield client
        finally:
            await app.state.holdfast.close()

    return run


def signed_in(sub: str) -> dict[str, str]:
    token = mint_token(
        SECRET, sub=sub, org=None, roles=[], lifetime=timedelta(hours=1), now=datetime.now(UTC)
    )
    return {"Authorization": f"Bearer {token}"}
