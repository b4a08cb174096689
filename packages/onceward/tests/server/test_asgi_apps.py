"""Routers, mounts, Starlette and bare ASGI apps, and what is refused at start-up."""

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute

from onceward import SINGLE_TENANT, GuardConfig, Onceward, Policy, Principal, ServiceError
from onceward.batch.options import BatchOptions
from onceward.errors import (
    ConfigurationError,
    NoTransactionError,
    StreamingResponseError,
    UsageError,
)
from onceward.frameworks.starlette import Caller, Run, Tx
from onceward.guard.limits import Limits
from packages.onceward.tests.support.harness import Connection
from packages.onceward.tests.support.policies import ENVELOPE_WITH_STALENESS

KEY = {"Idempotency-Key": "key-1"}


@pytest.fixture
def onceward(tmp_path: Path) -> Onceward:
    return Onceward(
        f"sqlite:///{tmp_path}/apps.db",
        tenants=SINGLE_TENANT,
        config=GuardConfig(sweep_every_seconds=None),
    )


@asynccontextmanager
async def client_of(
    onceward: Onceward, app: Any, *, root_path: str = ""
) -> AsyncIterator[httpx.AsyncClient]:
    await onceward.open()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, root_path=root_path)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
            yield client
    finally:
        await onceward.close()


async def fresh(request: Request) -> Response:
    """Respond with a new id each time."""
    return JSONResponse({"id": str(uuid.uuid4())}, 201)


def guarded(onceward: Onceward, endpoint: str | None = None, policy: Policy | None = None) -> Any:
    async def handler(request: Request) -> Response:
        return await fresh(request)

    return onceward.guard(endpoint, policy=policy)(handler)


async def assert_guarded(client: httpx.AsyncClient, path: str, method: str = "POST") -> None:
    first = await client.request(method, path, headers=KEY)
    again = await client.request(method, path, headers=KEY)
    assert first.status_code == 201, first.text
    assert "idempotency-replayed" not in first.headers
    assert again.content == first.content
    assert again.headers["idempotency-replayed"] == "true"
    assert (await client.request(method, path)).status_code == 400


# -- kinds of apps -----------------------------------------------------------------------------


async def test_routers_with_prefixes(onceward: Onceward) -> None:
    app, outer, inner = FastAPI(), APIRouter(prefix="/a"), APIRouter(prefix="/b/{b}")
    onceward.install(app)
    inner.add_api_route("/c/{c}", guarded(onceward), methods=["POST"])
    inner.add_api_route("/open", fresh, methods=["POST"])
    outer.include_router(inner)
    app.include_router(outer, prefix="/v1")
    async with client_of(onceward, app) as client:
        await assert_guarded(client, "/v1/a/b/1/c/2")
        assert (await client.post("/v1/a/b/1/c/3", headers=KEY)).status_code == 409
        assert (await client.post("/v1/a/b/1/open")).status_code == 201
        assert [r.endpoint for r in onceward.runtime.routes.table().routes] == [
            "POST /v1/a/b/{b}/c/{c}"
        ]


async def test_a_mounted_app_renders_errors_as_the_outer_app_does(onceward: Onceward) -> None:
    app, sub = FastAPI(), FastAPI()

    @sub.post("/orders")
    @onceward.guard()
    async def order() -> None:
        raise ServiceError(409, "order.closed", "the shop is closed")

    app.mount("/shop", sub)
    onceward.install(app)
    async with client_of(onceward, app) as client:
        response = await client.post("/shop/orders", headers=KEY)
        assert response.status_code == 409
        assert response.json()["code"] == "order.closed"


async def test_a_mounted_app(onceward: Onceward) -> None:
    app, sub, deeper = FastAPI(), FastAPI(), Starlette()
    onceward.install(app)
    sub.add_api_route("/things/{name}", guarded(onceward), methods=["PUT"])
    sub.add_api_route("/open", fresh, methods=["POST"])
    deeper.router.routes.append(Route("/things", guarded(onceward), methods=["POST"]))
    sub.mount("/deep", deeper)
    app.mount("/sub", sub)
    async with client_of(onceward, app) as client:
        await assert_guarded(client, "/sub/things/a", "PUT")
        await assert_guarded(client, "/sub/deep/things")
        assert (await client.post("/sub/open")).status_code == 201


async def test_a_starlette_app_with_a_mount(onceward: Onceward) -> None:
    routes = [
        Mount("/m", routes=[Route("/n/{id:int}", guarded(onceward), methods=["DELETE"])]),
        Route("/things", fresh, methods=["PUT"]),
    ]
    app = Starlette(routes=routes)
    onceward.install(app)
    async with client_of(onceward, app) as client:
        await assert_guarded(client, "/m/n/5", "DELETE")
        assert (await client.put("/things")).status_code == 201


async def bare_app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
    message = await receive()
    assert message["type"] == "http.request"
    if "onceward" in scope:
        await scope["onceward"].transaction.execute("CREATE TABLE IF NOT EXISTS t (x text)")
    body = str(uuid.uuid4()).encode()
    await send({"type": "http.response.start", "status": 201, "headers": []})
    await send({"type": "http.response.body", "body": body})


async def test_method_in_lower_case_is_guarded(onceward: Onceward) -> None:
    onceward.guard_path("POST", "/things")
    app = onceward.wrap(bare_app)
    await onceward.open()
    for replayed in (False, True):
        connection = Connection(method="post")
        connection.feed(b"{}")
        await connection.run(app)
        names = [name for name, _ in connection.sent[0]["headers"]]
        assert (connection.status, b"idempotency-replayed" in names) == (201, replayed)
    await onceward.close()


async def test_a_bare_app_is_opened_and_closed_by_its_lifespan(onceward: Onceward) -> None:
    app = onceward.wrap(bare_app)
    connection = Connection()
    connection.scope = {"type": "lifespan"}
    connection.to_app.put_nowait({"type": "lifespan.startup"})
    connection.to_app.put_nowait({"type": "lifespan.shutdown"})
    await connection.run(app)
    kinds = [m["type"] for m in connection.sent]
    assert kinds == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert not onceward.runtime._is_open


async def test_handlers_get_transaction_caller_and_execution_as_dependencies(
    onceward: Onceward,
) -> None:
    app = FastAPI()
    onceward.install(app)

    @app.post("/things")
    @onceward.guard()
    async def create(tx: Tx, caller: Caller, run: Run) -> dict[str, str]:
        assert tx is run.transaction is onceward.transaction
        assert run is onceward.execution
        run.describe(resource="thing:1", version=3)
        return {"tenant": caller.tenant}

    async with client_of(onceward, app) as client:
        assert (await client.post("/things", headers=KEY)).json() == {"tenant": "everyone"}
        [event] = await onceward.store.read(
            onceward.store.table_names.render("SELECT resource, version FROM onceward_audit_events")
        )
        assert dict(event) == {"resource": "thing:1", "version": 3}


async def test_a_handler_that_is_not_guarded_has_no_execution(onceward: Onceward) -> None:
    app, bare = FastAPI(), FastAPI()
    onceward.install(app)

    @app.post("/open")
    async def create(run: Run) -> None:
        raise AssertionError

    @bare.post("/open")
    async def open_route(tx: Tx) -> None:
        raise AssertionError

    with pytest.raises(NoTransactionError, match="guard"):
        _ = onceward.transaction
    for served, message in [
        (app, r"POST /open .* not guarded"),
        (bare, r"onceward.install\(app\)"),
    ]:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(served), base_url="http://app"
        ) as client:
            with pytest.raises(NoTransactionError, match=message):
                await client.post("/open")


# -- every path to a handler is guarded ----------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "path"),
    [
        ("/things", "/things%0A"),
        ("/things/{name}", "/things/a%0A"),
        ("/things/{name}", "/things/a%0Ab"),
        ("/things/{name}", "/things/%C3%A4%20%23"),
        ("/things/{id:uuid}", "/things/7f0f5bd04c0a4b2e9b0e0d6d3f9c9a10"),
        ("/things/{id:uuid}", "/things/7F0F5BD0-4c0a-4b2e-9b0e-0d6d3f9c9a10"),
        ("/things/{n:int}", "/things/007"),
        ("/things/{n:float}", "/things/1.50"),
        ("/things/{rest:path}", "/things/a/b/c"),
        ("/things/{rest:path}", "/things/"),
        ("/a.b+c", "/a.b+c"),
    ],
)
async def test_every_path_that_reaches_the_handler_is_guarded(
    onceward: Onceward, template: str, path: str
) -> None:
    app = Starlette(routes=[Route(template, guarded(onceward), methods=["POST"])])
    onceward.install(app)
    async with client_of(onceward, app) as client:
        bare = await client.post(path)
        assert bare.status_code in {400, 404}, "the handler ran without its guard"
        if bare.status_code == 400:
            await assert_guarded(client, path)


@pytest.mark.parametrize("path", ["/api/things", "/api-things"])
async def test_below_a_root_path_every_route_is_guarded(onceward: Onceward, path: str) -> None:
    app = Starlette(
        routes=[
            Route("/things", guarded(onceward), methods=["POST"]),
            Route("/api-things", guarded(onceward), methods=["POST"]),
        ]
    )
    onceward.install(app)
    async with client_of(onceward, app, root_path="/api") as client:
        await assert_guarded(client, path)


async def test_a_route_added_after_the_first_request_is_guarded(onceward: Onceward) -> None:
    app = FastAPI()
    onceward.install(app)
    app.add_api_route("/things", guarded(onceward), methods=["POST"])
    async with client_of(onceward, app) as client:
        await assert_guarded(client, "/things")
        app.add_api_route("/late", guarded(onceward), methods=["POST"])
        await assert_guarded(client, "/late")


async def test_the_first_matching_route_decides_whether_a_request_is_guarded(
    onceward: Onceward,
) -> None:
    """The first matching route is served; a guarded one after it is never reached."""
    app = FastAPI()
    onceward.install(app)
    app.add_api_route("/things/search", fresh, methods=["POST"])
    app.add_api_route("/things/{name}", guarded(onceward, "template"), methods=["POST"])
    app.add_api_route("/things/late", guarded(onceward, "fixed"), methods=["POST"])
    app.add_api_route("/open/{name}", fresh, methods=["POST"])
    app.add_api_route("/open/late", guarded(onceward), methods=["POST"])
    async with client_of(onceward, app) as client:
        assert (await client.post("/things/search")).status_code == 201
        assert (await client.post("/open/late")).status_code == 201
        await assert_guarded(client, "/things/late")
        [record] = await onceward.store.read(
            onceward.store.table_names.render("SELECT endpoint FROM onceward_idempotency_records")
        )
        assert record["endpoint"] == "template"


# -- refused at start-up ------------------------------------------------------------------------


async def test_a_guard_without_a_route_is_refused(onceward: Onceward) -> None:
    app = FastAPI()
    onceward.install(app)
    guarded(onceward)
    with pytest.raises(ConfigurationError, match=r"handler is guarded but no route"):
        await onceward.open()


async def test_a_guard_above_the_route_decorator_is_refused(onceward: Onceward) -> None:
    app = FastAPI()
    onceward.install(app)

    def wrapped(handler: Any) -> Any:
        async def other() -> None:
            await handler()

        return other

    @onceward.guard()
    @wrapped
    async def create() -> None:
        """Have no route at all."""

    with pytest.raises(ConfigurationError, match="below the route decorator"):
        await onceward.open()


@pytest.mark.parametrize("kind", ["fastapi", "starlette", "path"])
async def test_a_guard_on_a_get_is_refused(onceward: Onceward, kind: str) -> None:
    if kind == "path":
        onceward.guard_path("GET", "/things")
    else:
        app: Any = FastAPI() if kind == "fastapi" else Starlette()
        onceward.install(app)
        app.router.routes.append(Route("/things", guarded(onceward), methods=["GET"]))
    with pytest.raises(ConfigurationError, match="must not write"):
        await onceward.open()


async def test_an_unknown_path_converter_is_refused(onceward: Onceward) -> None:
    onceward.guard_path("POST", "/things/{id:colour}")
    with pytest.raises(ConfigurationError, match="colour"):
        await onceward.open()


async def test_a_route_that_streams_is_refused(onceward: Onceward) -> None:
    app = FastAPI()
    onceward.install(app)
    app.add_api_route(
        "/things", guarded(onceward), methods=["POST"], response_class=StreamingResponse
    )
    with pytest.raises(StreamingResponseError, match="/things is guarded and streams"):
        await onceward.open()


@pytest.mark.parametrize("fault", ["no route", "streams"])
async def test_a_configuration_error_fails_the_lifespan_startup(
    onceward: Onceward, fault: str
) -> None:
    app = FastAPI()
    onceward.install(app)
    if fault == "no route":
        guarded(onceward)
    else:
        app.add_api_route(
            "/things", guarded(onceward), methods=["POST"], response_class=StreamingResponse
        )
    connection = Connection()
    connection.scope = {"type": "lifespan", "app": app, "state": {}}
    connection.to_app.put_nowait({"type": "lifespan.startup"})
    with pytest.raises(UsageError, match="guarded"):
        await connection.run(app)
    assert [m["type"] for m in connection.sent] == ["lifespan.startup.failed"]
    assert "guarded" in connection.sent[0]["message"]


def test_two_guards_with_one_name_are_refused(onceward: Onceward) -> None:
    app = FastAPI()
    onceward.install(app)
    app.add_api_route("/orders", guarded(onceward, "create"), methods=["POST", "PUT"])
    assert [route.method for route in onceward.runtime.routes.table().routes] == ["POST", "PUT"]
    app.add_api_route("/refunds", guarded(onceward, "create"), methods=["POST"])
    with pytest.raises(ConfigurationError, match=r"'create': POST /orders and POST /refunds"):
        onceward.runtime.routes.table()


class Things(HTTPEndpoint):
    """An endpoint of Starlette as a class."""

    async def post(self, request: Request) -> Response:
        return await fresh(request)


async def test_named_guard_does_not_replay_across_its_routes(onceward: Onceward) -> None:
    app = FastAPI()
    onceward.install(app)
    create = guarded(onceward, "create")
    app.add_api_route("/cars", create, methods=["POST", "PUT"])
    app.add_api_route("/bikes", create, methods=["POST"])
    async with client_of(onceward, app) as client:
        await assert_guarded(client, "/cars")
        refused = await client.post("/bikes", headers=KEY)
        assert (refused.status_code, refused.json()["code"]) == (
            409,
            "idempotency.payload_mismatch",
        )
        assert (await client.put("/cars", headers=KEY)).status_code == 409
        other = {"Idempotency-Key": "key-2"}
        first, again = [await client.post("/bikes", headers=other) for _ in range(2)]
        assert (first.content, again.headers["Idempotency-Replayed"]) == (again.content, "true")


async def test_key_belongs_to_one_path_and_method_of_guards_without_a_name(
    onceward: Onceward,
) -> None:
    app = FastAPI()
    onceward.install(app)
    for path in ("/cars", "/bikes"):
        app.add_api_route(path, guarded(onceward), methods=["POST", "PUT", "DELETE"])
    async with client_of(onceward, app) as client:
        responses = [
            await client.request(method, path, headers=KEY)
            for method, path in [
                ("POST", "/cars"),
                ("PUT", "/cars"),
                ("DELETE", "/cars"),
                ("POST", "/bikes"),
            ]
        ]
        assert [response.status_code for response in responses] == [201] * 4
        assert len({response.content for response in responses}) == 4


async def test_endpoint_classes_are_guarded_as_a_whole_and_by_method(onceward: Onceward) -> None:
    @onceward.guard("whole")
    class Whole(HTTPEndpoint):
        async def get(self, request: Request) -> Response:
            return JSONResponse({"read": True})

        async def post(self, request: Request) -> Response:
            return await fresh(request)

    class Child(Whole):
        async def put(self, request: Request) -> Response:
            return await fresh(request)

    class ByMethod(HTTPEndpoint):
        @onceward.guard("by-method")
        async def post(self, request: Request) -> Response:
            return await fresh(request)

        async def put(self, request: Request) -> Response:
            return await fresh(request)

    app = Starlette(
        routes=[
            Route("/whole", Whole),
            Route("/child", Child),
            Mount("/by", routes=[Route("/method", ByMethod)]),
            Route("/by/method", guarded(onceward, "hidden"), methods=["PATCH"]),
        ]
    )
    onceward.install(app)
    async with client_of(onceward, app) as client:
        assert (await client.get("/whole")).json() == {"read": True}
        await assert_guarded(client, "/whole")
        await assert_guarded(client, "/by/method")
        assert (await client.put("/by/method")).status_code == 201
        assert (await client.patch("/by/method")).status_code == 405  # of the first route
        assert (await client.delete("/whole", headers=KEY)).status_code == 405
        # The name of the class is that of the subclass, too: a key is used on one path.
        assert (await client.post("/child", headers=KEY)).status_code == 409


async def test_guarded_websocket_get_method_and_generator_are_refused(onceward: Onceward) -> None:
    class Reads(HTTPEndpoint):
        @onceward.guard("reads")
        async def get(self, request: Request) -> Response:
            return await fresh(request)

    app = Starlette(routes=[Route("/reads", Reads)])
    onceward.install(app)
    with pytest.raises(ConfigurationError, match="GET /reads is guarded, but a GET must not"):
        onceward.runtime.routes.table()
    app.router.routes[:] = [WebSocketRoute("/socket", guarded(onceward, "socket"))]
    with pytest.raises(ConfigurationError, match="/socket is guarded, but it is no HTTP route"):
        onceward.runtime.routes.table()

    async def streams() -> AsyncIterator[int]:
        yield 1

    async def principal() -> Principal:
        return Principal("a", "b")

    for dependency in (None, principal):
        with pytest.raises(StreamingResponseError, match="streams is guarded and has a yield"):
            onceward.guard("streams", principal=dependency)(streams)


class Fresh:
    """An endpoint of FastAPI as an object."""

    async def __call__(self) -> dict[str, str]:
        return {"id": str(uuid.uuid4())}


@pytest.mark.parametrize("is_late", [False, True])
async def test_callable_object_is_guarded(onceward: Onceward, is_late: bool) -> None:
    async def principal() -> Principal:
        return Principal("a", "b")

    app = FastAPI()
    onceward.install(app)
    guard = onceward.guard("object", principal=principal if is_late else None)
    app.add_api_route("/things", guard(Fresh()), methods=["POST"], status_code=201)
    async with client_of(onceward, app) as client:
        await assert_guarded(client, "/things")


@pytest.mark.parametrize("kind", ["fastapi", "sync", "starlette", "class", "principal"])
async def test_a_guard_without_install_does_not_run_the_handler(
    onceward: Onceward, kind: str
) -> None:
    app: Any = FastAPI() if kind in {"fastapi", "sync", "principal"} else Starlette()
    handler: Any = fresh

    def blocking(request: Request) -> str:
        return "ran"

    async def principal() -> Principal:
        return Principal("a", "b")

    if kind == "class":
        handler = Things
    elif kind == "sync":
        handler = blocking
    marked = onceward.guard(principal=principal if kind == "principal" else None)(handler)
    if isinstance(app, FastAPI):
        app.add_api_route("/things", marked, methods=["POST"])
    else:
        app.router.routes.append(Route("/things", marked, methods=["POST"]))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://app"
    ) as client:
        with pytest.raises(ConfigurationError, match=r"write onceward.install\(app\)"):
            await client.post("/things", headers=KEY)
        app.middleware_stack = None  # as before the first request
        onceward.install(app)
        first, again = [await client.post("/things", headers=KEY) for _ in range(2)]
        assert first.status_code in {200, 201}
        assert again.headers["idempotency-replayed"] == "true"
        assert again.content == first.content
    if kind == "sync":
        assert marked.__wrapped__(None) == "ran"
    await onceward.close()


# -- documented -------------------------------------------------------------------------------


def test_openapi_describes_guarded_operations_and_no_others(tmp_path: Path) -> None:
    limits = Limits(records_per_tenant=9)
    onceward = Onceward(
        f"sqlite:///{tmp_path}/apps.db", tenants=SINGLE_TENANT, config=GuardConfig(limits=limits)
    )
    app, router = FastAPI(), APIRouter(prefix="/v1")
    onceward.install(app)
    for method in ("POST", "PUT"):
        router.add_api_route("/things/{name}", guarded(onceward), methods=[method])
    router.add_api_route(
        "/steps", guarded(onceward, policy=ENVELOPE_WITH_STALENESS), methods=["POST"]
    )
    in_body = ENVELOPE_WITH_STALENESS.replace(key_field="idempotencyKey")
    router.add_api_route("/ingest", guarded(onceward, policy=in_body), methods=["POST"])
    ietf = Policy(ietf_statuses=True, key_required=False)
    router.add_api_route("/ietf", guarded(onceward, policy=ietf), methods=["POST"])
    for method in ("POST", "GET"):
        router.add_api_route("/open", fresh, methods=[method])
    app.include_router(router)
    document = app.openapi()
    assert app.openapi() is document

    def key_of(path: str, method: str = "post") -> Any:
        parameters = document["paths"][path][method].get("parameters", [])
        found = [p for p in parameters if p["name"] == "Idempotency-Key"]
        assert len(found) <= 1
        return found[0] if found else None

    for method in ("post", "put"):
        operation = document["paths"]["/v1/things/{name}"][method]
        key = key_of("/v1/things/{name}", method)
        assert (key["in"], key["required"]) == ("header", True)
        assert key["schema"]["maxLength"] == 128
        assert set(operation["responses"]) >= {"200", "400", "401", "409", "413", "429", "503"}
        assert "Idempotency-Replayed" in operation["responses"]["200"]["headers"]
        for status in ("409", "429", "503"):
            assert "Retry-After" in operation["responses"][status]["headers"]
        conflict = operation["responses"]["409"]
        assert "idempotency.payload_mismatch" in conflict["description"]
        assert "idempotency.in_progress" in conflict["description"]
        assert list(conflict["content"]) == ["application/problem+json"]

    steps = document["paths"]["/v1/steps"]["post"]["responses"]
    assert key_of("/v1/steps")["schema"]["maxLength"] == 36
    assert "STALE_ACTION" in steps["422"]["description"]
    assert "IDEMPOTENCY_CONFLICT" in steps["409"]["description"]
    assert key_of("/v1/ingest") is None, "there the key is in the body"
    assert key_of("/v1/ietf")["required"] is False
    mismatch = document["paths"]["/v1/ietf"]["post"]["responses"]["422"]["description"]
    assert "idempotency.payload_mismatch" in mismatch

    for method in ("post", "get"):
        plain = document["paths"]["/v1/open"][method]
        assert key_of("/v1/open", method) is None
        assert set(plain["responses"]) == {"200"}
        assert "headers" not in plain["responses"]["200"]
    assert {"OncewardProblem", "OncewardEnvelope"} <= set(document["components"]["schemas"])


def test_openapi_describes_the_batch_endpoint(tmp_path: Path) -> None:
    onceward = Onceward(f"sqlite:///{tmp_path}/apps.db", tenants=SINGLE_TENANT)
    app = FastAPI()
    onceward.install(app, batch=BatchOptions("/v1/batch", max_items=9))
    app.add_api_route("/things/{name}", guarded(onceward), methods=["POST"])
    document = app.openapi()
    operation = document["paths"]["/v1/batch"]["post"]
    assert set(operation["responses"]) == {"200", "400", "401", "408", "413", "503"}
    assert "batch.too_large" in operation["responses"]["413"]["description"]
    assert "security" not in operation
    schemas = document["components"]["schemas"]
    for content in (operation["requestBody"]["content"], operation["responses"]["200"]["content"]):
        name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
        assert schemas[name]["type"] == "object"
    assert schemas["OncewardBatch"]["properties"]["items"]["maxItems"] == 9
    # Every member that the endpoint reads is in the schema.
    item: dict[str, Any] = {
        "method": "POST",
        "path": "/things/a",
        "key": "k1",
        "body": {},
        "headers": {},
    }
    item |= {"lane": "a", "local_id": str(uuid.uuid4()), "client_id": "phone", "sequence": 1}
    assert set(item) == set(schemas["OncewardBatchItem"]["properties"])
    with TestClient(app) as client:
        found = client.post("/v1/batch", json={"items": [item]}).json()
    assert set(found) == set(schemas["OncewardBatchResults"]["properties"])
    (result,) = found["results"]
    assert result["status"] == 201
    assert set(result) == set(schemas["OncewardBatchResult"]["properties"])
    plain = FastAPI()
    Onceward(f"sqlite:///{tmp_path}/apps.db", tenants=SINGLE_TENANT).install(plain)
    assert "OncewardBatch" not in str(plain.openapi())
