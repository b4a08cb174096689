"""GuardContract on every front, and on PostgreSQL for each way to run a handler."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from onceward.frameworks.fastapi_direct import DirectRoute
from onceward.stores.table_names import TableNames
from onceward_testing.guard_batch_contract import GuardBatchContract
from onceward_testing.guard_contract import AsgiContract, ChunkedBodyContract, GuardContract
from onceward_testing.guard_harness import Caller, Rows
from onceward_testing.servers import RealPostgres
from packages.onceward.tests.server import guard_fronts as fronts
from packages.onceward.tests.server import served_fronts


class TestFastApiWithEarlyClaim(GuardContract, GuardBatchContract, AsgiContract):
    new_app = staticmethod(fronts.fastapi_early)


class TestFastApiWithDirectRoutes(GuardContract, GuardBatchContract, AsgiContract):
    new_app = staticmethod(fronts.fastapi_direct)

    def test_handlers_are_called_directly(
        self, caller: Caller, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        called: list[str] = []
        run = DirectRoute.run

        async def noted(self: DirectRoute, request: Any, *rest: Any) -> Any:
            called.append(request.execution.request.endpoint)
            return await run(self, request, *rest)

        monkeypatch.setattr(DirectRoute, "run", noted)
        assert caller.send().status == caller.send(path="/shelves/a").status == 201
        assert called == ["orders.create", "shelves.fill"]


class TestFastApiWithLateClaim(GuardContract, GuardBatchContract, AsgiContract):
    new_app = staticmethod(fronts.fastapi_late)


class TestStarlette(GuardContract, GuardBatchContract, AsgiContract):
    new_app = staticmethod(fronts.starlette)


class TestPlainAsgi(GuardContract, GuardBatchContract, AsgiContract):
    new_app = staticmethod(fronts.plain_asgi)


class TestPlainWsgi(GuardContract, GuardBatchContract, ChunkedBodyContract):
    new_app = staticmethod(fronts.plain_wsgi)
    collects_streams = True  # every response of a WSGI app is an iterable


class TestFlask(GuardContract, GuardBatchContract, ChunkedBodyContract):
    new_app = staticmethod(fronts.flask_front)


class TestFlaskOnSqlAlchemy(TestFlask):
    new_app = staticmethod(fronts.flask_on_sqlalchemy)


class TestDjango(GuardContract, GuardBatchContract):
    new_app = staticmethod(fronts.DjangoFront)


class OnPostgres:
    @pytest.fixture(scope="class")
    @classmethod
    def new_url(cls, postgres: RealPostgres) -> Iterator[str]:
        postgres.start()
        url = postgres.create_database("guard")
        yield url
        postgres.drop_database(url)

    @pytest.fixture(scope="class")
    @classmethod
    def rows(cls, url: str) -> Iterator[Rows]:
        names = TableNames.chosen(None, None, is_sqlite=False)
        with psycopg.connect(url, autocommit=True, row_factory=dict_row) as connection:

            def read(sql: str, **params: Any) -> list[dict[str, Any]]:
                sql = names.render(sql.replace(":tenant", "%(tenant)s"))
                return connection.execute(sql, params).fetchall()

            yield read


class TestFastApiOnPostgres(OnPostgres, TestFastApiWithDirectRoutes):
    pass


class TestFastApiWithLateClaimOnPostgres(OnPostgres, TestFastApiWithLateClaim):
    pass


class TestFlaskOnPostgres(OnPostgres, TestFlask):
    pass


class TestDjangoOnPostgres(OnPostgres, TestDjango):
    pass


class TestFastApiOnUvicorn(GuardContract, GuardBatchContract, AsgiContract):
    new_app = staticmethod(served_fronts.fastapi_on_uvicorn)


class TestFlaskOnWerkzeug(GuardContract, GuardBatchContract):
    new_app = staticmethod(served_fronts.flask_on_werkzeug)


class TestDjangoOnWerkzeug(OnPostgres, GuardContract, GuardBatchContract):
    new_app = staticmethod(served_fronts.django_on_werkzeug)
