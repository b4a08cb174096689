"""The whole server in this process, on both databases, with a fake clock."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from onceward.sign_in.jwt_auth import mint_token
from onceward_services.app import create_app
from onceward_services.registry import SERVICES
from onceward_services.settings import load_settings
from onceward_testing.servers import RealPostgres
from packages.onceward.tests.support.citus import ON_CITUS
from packages.onceward.tests.support.reset_db import empty_postgres
from packages.onceward.tests.support.shared_validators import shared_validators
from packages.services.tests.support.services_database import migrate

SECRET = "a secret for tests, long enough for HS256"

Serve = Callable[..., Any]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("ONCEWARD_") or name == "ROUTES_IDEMPOTENCY_TTL_HOURS":
            monkeypatch.delenv(name)


@pytest.fixture(scope="package", autouse=True)
def _validators_made_once() -> Iterator[None]:
    with shared_validators():
        yield


@pytest.fixture(scope="session")
def services_database(postgres: RealPostgres) -> Iterator[str]:
    """One database with the tables of all services: creating one per test takes nearly a second."""
    postgres.start()
    url = postgres.create_database("services")
    asyncio.run(migrate(url))
    yield url
    postgres.start()
    postgres.drop_database(url)


@pytest.fixture
async def postgres_url(postgres: RealPostgres, services_database: str) -> str:
    postgres.start()  # a test before this one may have stopped it
    await empty_postgres(services_database)
    return services_database


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with the tables of all services: to create them takes half of a small test."""
    path = tmp_path_factory.mktemp("migrated") / "services.db"
    asyncio.run(migrate(f"sqlite:///{path}"))
    return path


@pytest.fixture
def sqlite_url(tmp_path: Path, migrated_file: Path) -> str:
    copy = shutil.copy(migrated_file, tmp_path / "services.db")
    return f"sqlite:///{copy}"


@pytest.fixture(params=["sqlite", "postgres", *ON_CITUS])
def database_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def serve(_no_settings_from_outside: None, request: pytest.FixtureRequest) -> Serve:
    """Return a function that runs the app: ``async with serve(database_url) as client``.

    The tests of one service get that one and another, as somebody else's: to build them all takes
    most of such a test. There is a console only with ``console_enabled=True``.
    """
    only = _services_of(request.path)

    @asynccontextmanager
    async def run(
        database_url: str, *, clock: Any = None, prepare: Any = None, **settings: Any
    ) -> AsyncIterator[httpx.AsyncClient]:
        app = create_app(
            load_settings(
                database_url=database_url,
                jwt_secret=SECRET,
                **{"console_enabled": False, **settings},
            ),
            clock=clock,
            only=only,
        )
        if prepare is not None:
            prepare(app)
        await app.state.onceward.open()
        transport = httpx.ASGITransport(app=app)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://onceward") as client:
                client.headers.update(signed_in("ada"))
                yield client
        finally:
            await app.state.onceward.close()
            await (
                app.state.onceward.runtime.config.limiter.close()
            )  # as the lifespan, which does not run here

    return run


def _services_of(tests: Path) -> list[str]:
    """Return which services to build for a file of tests; none means all of them."""
    names = {service.name for service in SERVICES}
    for name in (tests.parent.name, *tests.stem.split("_")[1:2]):
        if name in names:
            return [name, "walk" if name == "routes" else "routes"]
    return []


def signed_in(sub: str) -> dict[str, str]:
    token = mint_token(
        SECRET, sub=sub, org=None, roles=[], lifetime=timedelta(hours=1), now=datetime.now(UTC)
    )
    return {"Authorization": f"Bearer {token}"}
