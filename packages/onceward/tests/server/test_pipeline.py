"""Gates, deadlines, nested apps and references in the fronts of the pipeline."""

import gc
import threading
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse
from flask import Flask
from starlette.routing import Mount

from onceward import SINGLE_TENANT, ErrorFormat, Onceward, Policy, Principal, ServiceError
from onceward.fastapi import Tx
from onceward.flask import FlaskGuard
from onceward.frameworks import wsgi
from onceward.frameworks.wsgi import WsgiGuard
from onceward.guard.execution import Exchange, Execution, executing
from onceward.guard.request import RequestHead, parse_request
from onceward.guard.route_table import Match

KEY = {"Idempotency-Key": "key-1"}


@pytest.fixture
def database(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/lab.db"


def flask_app(onceward: Onceward, request: pytest.FixtureRequest) -> Flask:
    app = Flask(__name__)
    guard = FlaskGuard(onceward, app)
    request.addfinalizer(guard.close)

    @app.post("/orders")
    @guard("orders.create")
    def create() -> Any:
        return {"is_guarded": guard.execution is not None}, 201

    return app


def test_sync_request_ends_its_visits_at_the_gates_of_tasks_and_of_threads(
    database: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: set[str] = set()
    monkeypatch.setattr(wsgi, "end_visit", lambda: ended.add(threading.current_thread().name))
    client = flask_app(Onceward(database, tenants=SINGLE_TENANT), request).test_client()
    assert client.post("/orders", headers=KEY).status_code == 201
    assert ended == {"onceward-loop", threading.current_thread().name}


def test_view_below_the_guard_of_another_app_is_guarded(
    database: str, request: pytest.FixtureRequest
) -> None:
    onceward = Onceward(database, tenants=SINGLE_TENANT)
    app = flask_app(onceward, request)
    head = RequestHead("POST", "/outer", b"", [])
    policy = Policy(key_required=False)
    outer: Any = parse_request(head, b"", Match("outer", policy, {}), Principal("t", "a"))
    with executing(Execution(outer, unit=None)):  # type: ignore[arg-type]
        refused = app.test_client().post("/orders")
        assert refused.status_code == 400, "without a key it would have run unguarded"
        assert app.test_client().post("/orders", headers=KEY).status_code == 201


def test_sync_request_is_freed_without_the_garbage_collector(
    database: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Any]] = []

    class Watched(Exchange):
        __slots__ = ("__weakref__",)

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(weakref.ref(self))

    monkeypatch.setattr(wsgi, "Exchange", Watched)
    client = flask_app(Onceward(database, tenants=SINGLE_TENANT), request).test_client()
    client.post("/orders", headers=KEY)
    gc.disable()
    try:
        made.clear()
        client.post("/orders", headers=KEY)
        for _ in range(100):  # the loop of the other thread ends its task
            if made[0]() is None:
                break
            threading.Event().wait(0.02)
        assert made[0]() is None
    finally:
        gc.enable()


def test_slow_body_of_a_wsgi_request_is_408_and_does_not_run(database: str) -> None:
    runs: list[bytes] = []

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        runs.append(environ["wsgi.input"].read())
        start_response("201 Created", [])
        return [b""]

    onceward = Onceward(database, tenants=SINGLE_TENANT)
    onceward.guard_path("POST", "/orders", policy=Policy(body_deadline=timedelta(milliseconds=20)))
    guard = WsgiGuard(app, onceward)

    class Slow:
        def read(self, size: int) -> bytes:
            threading.Event().wait(1.0)
            return b"x" * size

    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/orders",
        "CONTENT_LENGTH": "2",
        "HTTP_IDEMPOTENCY_KEY": "key-1",
        "wsgi.input": Slow(),
    }
    statuses: list[str] = []
    try:
        guard(environ, lambda status, _headers: statuses.append(status))
    finally:
        guard.close()
    assert ([status[:3] for status in statuses], runs) == (["408"], [])


async def send(app: Any, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(path, json={}, headers=KEY)


async def test_mounted_app_with_the_same_onceward_is_in_the_request_of_the_outer_one(
    database: str,
) -> None:
    def who() -> Principal:
        return Principal(tenant="t", actor="a")

    onceward = Onceward(database, principal=who)
    inner = FastAPI()

    @inner.post("/orders", status_code=201)
    @onceward.guard("orders.create")
    async def create(tx: Tx) -> dict[str, int]:
        await tx.execute("CREATE TABLE IF NOT EXISTS t (x text)")
        return {}

    middleware = onceward.runtime.middleware(inner)

    class Inner:
        routes = inner.routes

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await middleware(scope, receive, send)

    app = FastAPI()
    app.router.routes.append(Mount("/inner", app=Inner()))
    onceward.install(app)
    async with app.router.lifespan_context(app):
        first, again = await send(app, "/inner/orders"), await send(app, "/inner/orders")
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.headers["idempotency-replayed"] == "true"


async def test_error_format_that_is_set_inside_the_guard_counts(database: str) -> None:
    onceward = Onceward(database, tenants=SINGLE_TENANT)
    app = FastAPI()

    @app.post("/open")
    async def fail(request: Request) -> PlainTextResponse:
        request.scope["onceward.error_format"] = ErrorFormat.ENVELOPE
        raise ServiceError(422, "TOO_FEW", "too few")

    onceward.install(app)
    async with app.router.lifespan_context(app):
        refused = await send(app, "/open")
    assert (refused.status_code, refused.json()["error"]) == (422, "TOO_FEW")
