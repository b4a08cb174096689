"""Settings of a policy about key, fingerprint and response, and what a handler says about it."""

import logging
import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.testclient import TestClient

from onceward import SINGLE_TENANT, ErrorFormat, GuardConfig, Onceward, Policy
from onceward.errors import BodyInvalidError, ConfigurationError, UsageError
from onceward.guard.caches import Epoch, RecordLruCache
from onceward.guard.error_formats import ProblemFormat
from onceward.guard.limits import Limits
from onceward.guard.rate_limits import LimitsRateLimiter
from onceward.maintenance.record_removal import RecordRemoval
from onceward.observability.metrics import PrometheusMetrics
from onceward.ports import RecordQuery
from onceward_protocol.clock import SystemClock
from onceward_protocol.fingerprint import FingerprintInput, short_hash
from onceward_testing.samples import a_record
from packages.onceward.tests.support.harness import HeldClock, open_lab


@pytest.fixture
def database(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/lab.db"


# -- key header, fingerprint, replayed headers --------------------------------------------------


def test_openapi_names_the_own_key_header_and_the_limits(database: str) -> None:
    policy = Policy(key_header="X-Shop-Key", rate_limit="9/minute")
    onceward = Onceward(
        database,
        tenants=SINGLE_TENANT,
        policy=policy,
        config=GuardConfig(limiter=LimitsRateLimiter()),
    )
    operation = app_of(onceward, nothing).openapi()["paths"]["/orders"]["post"]
    assert [one["name"] for one in operation["parameters"]] == ["X-Shop-Key"]
    for status in ("200", "429"):
        assert {"RateLimit", "RateLimit-Policy"} <= set(operation["responses"][status]["headers"])


def test_openapi_documents_the_limits_of_bodies_and_tenants(database: str) -> None:
    limits = Limits(records_per_tenant=9)
    onceward = Onceward(database, tenants=SINGLE_TENANT, config=GuardConfig(limits=limits))
    responses = app_of(onceward, nothing).openapi()["paths"]["/orders"]["post"]["responses"]
    for status, code in (
        ("408", "request.timeout"),
        ("429", "quota.exceeded"),
        ("503", "server.overloaded"),
    ):
        assert f"`{code}`" in responses[status]["description"]


def test_openapi_documents_403_and_429_only_where_the_guard_sends_them(database: str) -> None:
    plain = Onceward(database, tenants=SINGLE_TENANT)
    responses = app_of(plain, nothing).openapi()["paths"]["/orders"]["post"]["responses"]
    assert {"403", "429"}.isdisjoint(responses)
    switched = Onceward(
        database, tenants=SINGLE_TENANT, config=GuardConfig(disabled=lambda _endpoint: False)
    )
    responses = app_of(switched, nothing).openapi()["paths"]["/orders"]["post"]["responses"]
    assert "`feature.disabled`" in responses["403"]["description"]
    assert "429" not in responses


def without_query(request: FingerprintInput) -> bytes:
    if request.header("x-trace") == "bad":
        raise BodyInvalidError("no")
    return request.body.lower() + (request.header("x-shop") or "").encode()


async def test_own_fingerprint_decides_about_query_headers_and_body(database: str) -> None:
    async with open_lab(database, Policy(fingerprint=without_query), memory_bytes=0) as lab:
        assert (await lab.send(json={"a": "X"}, path="/things?t=1")).status_code == 201
        again = await lab.send(json={"A": "x"}, path="/things?t=2")
        assert again.headers["idempotency-replayed"] == "true"
        for other in (
            {"json": {"a": "y"}},
            {"json": {"a": "x"}, "headers": {"X-Shop": "north"}},
            {"json": {"a": "x"}, "method": "PUT"},
        ):
            refused = await lab.send(**other)
            assert refused.status_code == (201 if "method" in other else 409)
        assert (await lab.send("k2", path="/shelves/a")).status_code == 201
        assert (await lab.send("k2", path="/shelves/b")).status_code == 409
        assert (await lab.send("k3", headers={"X-Trace": "bad"})).status_code == 400


@pytest.mark.parametrize("memory_bytes", [0, 1024 * 1024])
def test_replay_has_all_headers_of_the_handler_but_those_of_exchange_and_session(
    database: str, memory_bytes: int
) -> None:
    own = {
        "content-disposition": 'attachment; filename="a.csv"',
        "cache-control": "no-store",
        "retry-after": "5",
        "x-own": "1",
    }
    others = {
        "connection": "x-hop",
        "x-hop": "1",
        "keep-alive": "timeout=5",
        "set-cookie": "a=1",
        "date": "Thu, 01 Jan 2026 00:00:00 GMT",
        "server": "shop",
        "ratelimit": "limit=9",
        "x-ratelimit-remaining": "8",
        "onceward-error": "none",
    }

    async def handler(response: Response) -> dict[str, str]:
        response.headers.update(own | others)
        response.headers.append("vary", "accept")
        response.headers.append("vary", "accept-language")
        return {}

    onceward = Onceward(
        database, tenants=SINGLE_TENANT, config=GuardConfig(memory_bytes=memory_bytes)
    )
    with TestClient(app_of(onceward, handler)) as client:
        first, again = post(client), post(client)
    assert again.headers["idempotency-replayed"] == "true"
    assert {name: again.headers.get(name) for name in own} == own
    assert again.headers["vary"] == first.headers["vary"] == "accept, accept-language"
    assert set(first.headers) >= set(others)
    assert set(again.headers).isdisjoint(others)


def test_response_with_headers_that_are_too_large_is_refused(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = [70_000, 60_000]

    async def handler(response: Response) -> dict[str, str]:
        response.headers["x-large"] = "x" * sizes.pop(0)
        return {}

    with TestClient(app_of(Onceward(database, tenants=SINGLE_TENANT), handler)) as client:
        assert post(client).status_code == 500
        assert "headers of more than 65536 bytes" in caplog.text
        assert [post(client).status_code for _ in range(2)] == [200, 200]


def test_memory_counts_the_headers_of_records() -> None:
    cache, epoch = RecordLruCache(30_000), Epoch("1")
    for number in range(3):
        record = a_record(key=f"key-{number}")
        cache.put(msgspec.structs.replace(record, headers={"x-large": "x" * 12_000}), epoch)
    assert len(cache) == 2
    assert 24_000 < cache.size_bytes <= 30_000


async def test_only_the_headers_that_the_policy_names_are_replayed(database: str) -> None:
    async with open_lab(database, Policy(replay_headers=()), memory_bytes=0) as lab:
        first, again = await lab.send("key-0"), await lab.send("key-0")
        assert "x-not-stored" in first.headers
        assert "x-not-stored" not in again.headers
    policy = Policy(replay_headers=("X-Not-Stored", "Content-Language", "Vary"))
    async with open_lab(database, policy, memory_bytes=0) as lab:
        first, again = await lab.send(), await lab.send()
        assert again.headers["x-not-stored"] == first.headers["x-not-stored"]
        assert "content-language" not in again.headers


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replay_headers": ("Set-Cookie",)}, "Set-Cookie cannot be replayed"),
        ({"replay_headers": ("x y",)}, "is not the name of a header"),
        ({"replay_headers": "vary"}, "is a list of names"),
        ({"key_header": "X Key"}, "must be the name of a header"),
        ({"fingerprint": "sha256"}, "must be a function without await"),
        ({"sign_in_paths": ("login",)}, "sign_in_paths are paths"),
    ],
)
def test_unusable_settings_of_a_policy_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Policy(**settings)


# -- no_store and store_for ---------------------------------------------------------------------


def app_of(onceward: Onceward[Any], handler: Any) -> FastAPI:
    app = FastAPI()
    onceward.install(app)
    app.post("/orders")(onceward.guard()(handler))
    return app


async def nothing() -> dict[str, str]:
    return {}


def post(client: TestClient, **headers: str) -> Any:
    return client.post("/orders", json={}, headers={"Idempotency-Key": "k", **headers})


def test_no_store_frees_the_key_and_store_for_sets_the_ttl(database: str) -> None:
    clock = HeldClock()
    clock.monotonic = lambda: 0.0  # type: ignore[method-assign]
    onceward = Onceward(
        database, tenants=SINGLE_TENANT, config=GuardConfig(clock=clock, memory_bytes=0)
    )
    runs: list[str] = []

    async def handler(request: Request) -> Response:
        runs.append(do := request.headers["x-do"])
        execution = onceward.execution
        if "write" in do:
            await onceward.transaction.execute("CREATE TABLE IF NOT EXISTS t (a)")
            await onceward.transaction.execute("INSERT INTO t VALUES (1)")
        if "no_store" in do:
            execution.no_store()
        if "keep" in do:
            execution.keep_writes_on_error()
        if "hour" in do:
            execution.store_for(timedelta(hours=1))
            with pytest.raises(UsageError, match="must be positive"):
                execution.store_for(timedelta(0))
        return Response(status_code=404 if "404" in do else 200)

    with TestClient(app_of(onceward, handler)) as client:
        for do, status in (
            ("no_store", 200),
            ("no_store 404", 404),
            ("no_store write", 500),
            ("no_store write keep", 200),
        ):
            assert post(client, **{"X-Do": do}).status_code == status
        assert len(runs) == 4
        assert post(client, **{"X-Do": "hour"}).status_code == 200
        clock.pass_by(minutes=59)
        assert post(client, **{"X-Do": "late"}).headers["idempotency-replayed"] == "true"
        clock.pass_by(minutes=1)
        post(client, **{"X-Do": "expired"})
        assert runs[-2:] == ["hour", "expired"]
        url = database.removeprefix("sqlite:///")
        with closing(sqlite3.connect(url)) as db:
            assert db.execute("SELECT count(*) FROM t").fetchone() == (1,)


@pytest.mark.parametrize("memory_bytes", [0, 1024 * 1024])
async def test_swept_record_is_treated_as_absent(database: str, memory_bytes: int) -> None:
    clock = HeldClock()
    policy = Policy(success_ttl=timedelta(hours=1))
    async with open_lab(database, policy, clock=clock, memory_bytes=memory_bytes) as lab:
        first = await lab.send()
        assert await lab.onceward.runtime.sweeper.sweep() == 0
        clock.pass_by(hours=1)
        assert await lab.onceward.runtime.sweeper.sweep() == 1
        assert await lab.records() == []
        second = await lab.send(json={"item": "hat"})
        assert (second.status_code, second.content != first.content) == (201, True)
        assert len(await lab.records()) == 1


# -- damaged records ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        "response_headers = 'not json'",
        'response_headers = \'{"etag": "\\u2603"}\'',
        "response_status = 9999",
        "created_at = 'yesterday'",
        "response_body = 'text'",
    ],
)
async def test_a_damaged_record_is_one_error_of_its_key_only(
    database: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_lab(database, memory_bytes=0) as lab:
        await lab.send("the-key")
        with closing(sqlite3.connect(database.removeprefix("sqlite:///"))) as db, db:
            db.execute("PRAGMA ignore_check_constraints = ON")
            db.execute(f"UPDATE onceward_idempotency_records SET {damage}")
        for _ in range(6):  # more than open the breaker
            refused = await lab.send("the-key")
            assert refused.status_code == 500
            assert refused.json()["code"] == "idempotency.record_unreadable"
            assert refused.json()["detail"].startswith("the stored response of this key cannot")
        # An operator sees it and can remove it.
        [listed] = await lab.onceward.store.records(RecordQuery())
        assert (listed.id.key, listed.status, list(listed.headers)) == (
            "the-key",
            0,
            ["unreadable"],
        )
        removal = RecordRemoval(lab.onceward.store, SystemClock())
        assert await removal.remove(listed.id, actor="op", reason="damaged") is not None
        assert (await lab.send("the-key")).status_code == 201
        assert len(lab.runs) == await lab.effects() == 2
        [line, *_] = [
            r for r in caplog.records if r.getMessage() == "a stored record cannot be read"
        ]
        assert (line.key_hash, line.exc_info) == (short_hash("the-key"), None)  # type: ignore[attr-defined]


# -- limits, logs, metrics ----------------------------------------------------------------------


async def test_limited_endpoint_sends_what_is_left_in_every_response(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "onceward.request")
    metrics = PrometheusMetrics()
    policy = Policy(rate_limit="3/minute;100/2 hours")
    async with open_lab(database, policy, limiter=LimitsRateLimiter(), metrics=metrics) as lab:
        responses = [await lab.send(), await lab.send(), await lab.send(""), await lab.send("k2")]
        assert [r.status_code for r in responses] == [201, 201, 400, 429]
        for left, response in zip((2, 1, 0, 0), responses, strict=True):
            assert response.headers["ratelimit-policy"] == (
                '"3-per-minute";q=3;w=60, "100-per-2-hour";q=100;w=7200'
            )
            state = response.headers["ratelimit"]
            assert state.startswith(f'"3-per-minute";r={left};t=')
        assert responses[3].headers["retry-after"] in ("59", "60")
        refused = [r for r in caplog.records if r.getMessage() == "request refused"]
        fields: list[Any] = [record.__dict__ for record in refused]
        assert [(f["status"], f["code"]) for f in fields] == [
            (400, "idempotency.key_invalid"),
            (429, "rate.limited"),
        ]
        assert {(f["tenant"], f["endpoint"]) for f in fields} == {("ada", "POST /things")}
        assert [f["key_hash"] for f in fields] == [short_hash(""), short_hash("k2")]
        series = metrics.exposition()[0].decode()
        assert 'onceward_requests_total{endpoint="POST /things",outcome="limited"} 1.0' in series


# -- switched off -------------------------------------------------------------------------------


def test_patterns_name_disabled_endpoints(database: str) -> None:
    onceward = Onceward(
        database, tenants=SINGLE_TENANT, config=GuardConfig(disabled=["POST /ord*"])
    )
    with TestClient(app_of(onceward, nothing)) as client:
        assert post(client).status_code == 403
    wrongs: list[Any] = ["orders", [""], [1]]
    for wrong in wrongs:
        with pytest.raises(ConfigurationError, match="must be a list of endpoints"):
            Onceward(database, tenants=SINGLE_TENANT, config=GuardConfig(disabled=wrong))


# -- help pages, OpenAPI ------------------------------------------------------------------------


def test_problem_format_links_to_a_page_about_the_error(database: str) -> None:
    pages = ProblemFormat("https://shop.example/errors#{code}")
    onceward = Onceward(database, tenants=SINGLE_TENANT, config=GuardConfig(error_format=pages))
    with TestClient(app_of(onceward, nothing)) as client:
        refused = client.post("/orders", json={})
        page = "https://shop.example/errors#idempotency.key_required"
        assert refused.headers["link"] == f'<{page}>; rel="help"'
        assert refused.headers["content-type"] == "application/problem+json"
        assert refused.json()["type"] == page
        assert set(refused.json()) == {
            "type", "title", "status", "detail", "code", "details", "requestId",
        }  # fmt: skip
        document = client.get("/openapi.json").json()
    content = document["paths"]["/orders"]["post"]["responses"]["400"]["content"]
    assert list(content) == ["application/problem+json"]
    with pytest.raises(ConfigurationError, match="help_url must be an address"):
        ProblemFormat('javascript:"x"')


@pytest.mark.parametrize("error_format", list(ErrorFormat))
def test_openapi_documents_fastapis_own_422(database: str, error_format: ErrorFormat) -> None:
    onceward = Onceward(database, tenants=SINGLE_TENANT, policy=Policy(error_format=error_format))

    async def handler(amount: int) -> dict[str, int]:
        return {"amount": amount}

    with TestClient(app_of(onceward, handler)) as client:
        sent = client.post("/orders?amount=x", headers={"Idempotency-Key": "k"})
        document = client.get("/openapi.json").json()
    assert (sent.status_code, list(sent.json())) == (422, ["detail"])
    content = document["paths"]["/orders"]["post"]["responses"]["422"]["content"]
    of_fastapi = {"$ref": "#/components/schemas/HTTPValidationError"}
    if error_format is ErrorFormat.PROBLEM:
        assert content["application/json"]["schema"] == of_fastapi
        assert "application/problem+json" in content
    else:
        assert of_fastapi in content["application/json"]["schema"]["anyOf"]


@pytest.mark.parametrize("handling", ["default", "debug", "own"])
def test_500_of_an_unguarded_route_has_the_request_id(
    database: str, handling: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = FastAPI(debug=handling == "debug")
    Onceward(database, tenants=SINGLE_TENANT).install(app)

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("broken")

    if handling == "own":
        app.add_exception_handler(Exception, lambda *_: Response("own", 500))
    with TestClient(app, raise_server_exceptions=False) as client:
        failed = client.get("/broken", headers={"X-Request-ID": "r-1"})
    assert (failed.status_code, failed.headers["x-request-id"]) == (500, "r-1")
    [line] = [r for r in caplog.records if r.name == "onceward.request"]
    assert (line.exc_info is not None, line.__dict__["request_id"]) == (True, "r-1")
    assert line.__dict__["endpoint"] == "GET /broken"
