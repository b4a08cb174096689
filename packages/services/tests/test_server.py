"""What all services share: error responses, health checks and the OpenAPI document."""

import asyncio
import logging
import time
from typing import Any
from uuid import uuid4

import pytest
from fastapi import FastAPI

from onceward.errors import ConfigurationError, StoreUnavailableError
from onceward.observability.noop import NullMetrics
from onceward.stores.sqlite.unit_of_work import SqliteTransaction
from onceward_services.app import create_app
from onceward_services.settings import load_settings

from .conftest import SECRET, Serve

PATH = "/api/v1/routes"
WALK = {"start": {"lat": 1, "lon": 2}, "minutes": 30}


async def test_an_unknown_path_is_a_problem(serve: Serve, sqlite_url: str) -> None:
    async with serve(sqlite_url) as client:
        response = await client.get("/nowhere", headers={"X-Request-ID": "abc"})
        assert response.status_code == 404
        assert response.headers["content-type"] == "application/problem+json"
        assert response.json()["code"] == "resource.not_found"
        assert response.json()["requestId"] == response.headers["x-request-id"] == "abc"


async def test_a_wrong_method_is_a_problem_that_names_the_right_one(
    serve: Serve, sqlite_url: str
) -> None:
    async with serve(sqlite_url) as client:
        response = await client.delete(PATH)
        assert (response.status_code, response.headers["allow"]) == (405, "POST")
        assert response.json()["code"] == "request.method_not_allowed"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/v1/missions/x", "DELETE, GET, PATCH, PUT"),
        ("DELETE", "/v1/projects", "GET, POST"),
        ("POST", "/api/v1/contacts/x", "DELETE, GET, PATCH, PUT"),
        ("PUT", "/tree/allocate", "POST"),
        ("POST", "/healthz", "GET, HEAD"),
    ],
)
async def test_a_wrong_method_names_all_the_right_ones(
    serve: Serve, sqlite_url: str, method: str, path: str, allowed: str
) -> None:
    async with serve(sqlite_url) as client:
        response = await client.request(method, path)
        assert (response.status_code, response.headers["allow"]) == (405, allowed)


async def test_a_trailing_slash_is_not_redirected(serve: Serve, sqlite_url: str) -> None:
    async with serve(sqlite_url) as client:
        assert (await client.post(f"{PATH}/", json=WALK)).status_code in {404, 405}


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_unhandled_exception_is_a_500_without_details(
    serve: Serve, sqlite_url: str, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    async def fail(*_args: object) -> Any:
        raise RuntimeError("the password is hunter2")

    def break_it(app: FastAPI) -> None:
        store: Any = app.state.onceward.store
        store.read = store.claim = fail

    async with serve(sqlite_url, prepare=break_it) as client:
        path = PATH if method == "POST" else f"{PATH}/{uuid4()}"
        headers = {"Idempotency-Key": str(uuid4())}
        with caplog.at_level(logging.ERROR, "onceward.request"):
            response = await client.request(method, path, json=WALK, headers=headers)
        assert response.status_code == 500
        assert response.json()["code"] == "server.internal"
        assert response.json()["requestId"] == response.headers["x-request-id"] != ""
        assert "hunter2" not in response.text
        logged = [record for record in caplog.records if record.exc_info]
        assert logged[0].__dict__["request_id"] == response.headers["x-request-id"]


async def test_a_store_that_is_down_is_503_for_reading_too(serve: Serve, sqlite_url: str) -> None:
    async def down(*_args: object) -> Any:
        raise StoreUnavailableError("away")

    def break_it(app: FastAPI) -> None:
        store: Any = app.state.onceward.store
        store.read = store.ping = down

    async with serve(sqlite_url, prepare=break_it) as client:
        response = await client.get(f"{PATH}/{uuid4()}")
        assert response.status_code == 503
        assert response.json()["code"] == "idempotency.store_unavailable"
        assert "retry-after" in response.headers
        ready = await client.get("/readyz")
        assert ready.status_code == 503
        assert ready.json() == {"status": "unavailable", "reason": "the store does not respond"}
        assert (await client.get("/healthz")).json() == {"status": "ok"}


async def test_reads_and_metrics_ask_the_breaker_of_a_store_that_hangs(
    serve: Serve, sqlite_url: str
) -> None:
    calls: list[str] = []
    is_hanging = True

    async def hang(*arguments: Any) -> Any:
        calls.append(str(arguments[:1]))
        if not is_hanging:
            return []
        await asyncio.sleep(0.2)
        raise StoreUnavailableError("no response within 0.2 seconds")

    def break_it(app: FastAPI) -> None:
        store: Any = app.state.onceward.store
        store.read = hang

    async with serve(sqlite_url, prepare=break_it) as client:
        for _ in range(5):
            assert (await client.get(f"{PATH}/{uuid4()}")).status_code == 503
        before = len(calls)
        began = time.monotonic()
        for path in (f"{PATH}/{uuid4()}", "/api/v1/contacts", "/tree/state", "/metrics"):
            response = await client.get(path)
            assert response.status_code == (200 if path == "/metrics" else 503), path
            assert ("retry-after" in response.headers) == (path != "/metrics")
        assert time.monotonic() - began < 0.2
        assert len(calls) == before
        is_hanging = False
        await asyncio.sleep(1.1)
        assert (await client.get(f"{PATH}/{uuid4()}")).status_code == 404
        assert len(calls) > before


async def test_metrics_of_a_store_that_hangs_respond_within_3_seconds(
    serve: Serve, sqlite_url: str
) -> None:
    async def hang(*_args: object) -> Any:
        await asyncio.sleep(60)

    def break_it(app: FastAPI) -> None:
        store: Any = app.state.onceward.store
        store.read = hang

    async with serve(sqlite_url, prepare=break_it) as client:
        began = time.monotonic()
        assert (await client.get("/metrics")).status_code == 200
        assert time.monotonic() - began < 3


@pytest.mark.parametrize("where", ["claim", "transaction", "read"])
async def test_reason_of_a_store_outage_is_only_logged(
    serve: Serve, sqlite_url: str, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    why = "PostgreSQL does not answer: [Errno 111] Connect call failed ('10.0.0.7', 5432)"

    async def down(*_args: object) -> Any:
        raise StoreUnavailableError(why)

    def break_it(app: FastAPI) -> None:
        store: Any = app.state.onceward.store
        if where == "transaction":
            monkeypatch.setattr(SqliteTransaction, "fetch_all", down)
            monkeypatch.setattr(SqliteTransaction, "execute", down)
        else:
            setattr(store, where, down)

    with pytest.MonkeyPatch.context() as monkeypatch:
        async with serve(sqlite_url, prepare=break_it) as client:
            method, path = ("GET", f"{PATH}/{uuid4()}") if where == "read" else ("POST", PATH)
            headers = {"Idempotency-Key": str(uuid4())}
            with caplog.at_level(logging.WARNING, "onceward.request"):
                response = await client.request(method, path, json=WALK, headers=headers)
    assert (response.status_code, response.json()["code"]) == (503, "idempotency.store_unavailable")
    assert response.json()["detail"] == "the store is unavailable; try again shortly"
    for inside in ("PostgreSQL", "Errno", "10.0.0.7", "5432"):
        assert inside not in response.text
    [logged] = [
        record
        for record in caplog.records
        if record.name == "onceward.request" and why in record.getMessage()
    ]
    assert logged.levelno == logging.WARNING
    assert logged.__dict__["request_id"] == response.headers["x-request-id"]


async def test_health_checks_and_metrics_need_no_authentication(
    serve: Serve, database_url: str
) -> None:
    async with serve(database_url) as client:
        del client.headers["Authorization"]
        assert (await client.get("/healthz")).json() == {"status": "ok"}
        assert (await client.get("/readyz")).json()["status"] == "ok"
        assert (await client.get("/docs")).status_code == 200


async def test_metrics_count_outcomes_and_show_no_key(serve: Serve, sqlite_url: str) -> None:
    key = str(uuid4())
    async with serve(sqlite_url) as client:
        for _ in range(3):
            await client.post(PATH, json=WALK, headers={"Idempotency-Key": key})
        metrics = await client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        requests = 'onceward_requests_total{endpoint="POST /api/v1/routes",outcome='
        assert f'{requests}"fresh"}} 1.0' in metrics.text
        assert f'{requests}"replayed"}} 2.0' in metrics.text
        assert key not in metrics.text


async def test_other_metrics_have_no_metrics_endpoint(sqlite_url: str) -> None:
    settings = load_settings(database_url=sqlite_url, jwt_secret=SECRET)
    app = create_app(settings, metrics=NullMetrics())
    assert "/metrics" not in app.openapi()["paths"]


async def test_each_request_is_logged_with_its_ids_and_without_its_body(
    serve: Serve, sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(sqlite_url) as client:
        with caplog.at_level(logging.INFO, "onceward.request"):
            response = await client.post(PATH, json=WALK, headers={"X-Correlation-ID": "chain"})
    facts = next(r.__dict__ for r in caplog.records if r.getMessage() == "request")
    assert (facts["method"], facts["path"], facts["status"]) == ("POST", PATH, 202)
    assert facts["request_id"] == response.headers["x-request-id"]
    assert facts["correlation_id"] == "chain"


def test_every_operation_documents_its_errors_and_none_has_the_frameworks_own(
    sqlite_url: str,
) -> None:
    app = create_app(load_settings(database_url=sqlite_url, jwt_secret=SECRET))
    document = app.openapi()
    submit = document["paths"][PATH]["post"]
    assert {"202", "400", "401", "409", "413", "422", "429", "503"} <= set(submit["responses"])
    look = document["paths"][PATH + "/{request_id}"]["get"]
    assert {"200", "401", "404", "503", "default"} == set(look["responses"])
    for operation in (submit, look):
        assert operation["security"] == [{"HTTPBearer": []}]
        for status, response in operation["responses"].items():
            if not status.startswith("2"):
                assert list(response["content"]) == ["application/problem+json"]
    assert "HTTPValidationError" not in document["components"]["schemas"]
    assert "OncewardProblem" in document["components"]["schemas"]


def test_invalid_redis_url_is_reported(sqlite_url: str) -> None:
    settings = load_settings(database_url=sqlite_url, jwt_secret=SECRET, redis_url="http://x")
    with pytest.raises(ConfigurationError, match="Redis"):
        create_app(settings)


async def test_a_path_that_ends_in_a_newline_is_not_the_route(
    serve: Serve, sqlite_url: str
) -> None:
    async with serve(sqlite_url) as client:
        for path in ("/healthz%0a", "/metrics%0a", "/api/v1/routes%0a"):
            assert (await client.get(path)).status_code == 404
        assert (await client.head("/healthz")).status_code == 200
        assert (await client.head("/readyz")).status_code == 200


async def test_disabled_endpoint_and_pages_about_errors(serve: Serve, sqlite_url: str) -> None:
    settings = {
        "disabled_endpoints": "POST /api/v1/r*, tree.allocate",
        "error_help_url": "https://help.example/#{code}",
    }
    async with serve(sqlite_url, **settings) as client:
        headers = {"Idempotency-Key": str(uuid4())}
        refused = await client.post(PATH, json=WALK, headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (403, "feature.disabled")
        assert refused.json()["type"] == "https://help.example/#feature.disabled"
        assert refused.headers["link"] == '<https://help.example/#feature.disabled>; rel="help"'
        walk = await client.post("/tree/allocate", json={}, headers=headers)
        assert (walk.status_code, walk.json()["error"]) == (403, "FEATURE_DISABLED")
        missing = await client.get("/nowhere")
        assert missing.json()["type"] == "https://help.example/#resource.not_found"


def test_a_disabled_endpoint_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"there is no endpoint 'tree\.alocate'; there are"
    ):
        create_app(load_settings(jwt_secret=SECRET, disabled_endpoints="tree.alocate"))
