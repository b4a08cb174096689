"""Handlers that are called directly respond as those called by FastAPI, and only where they can."""

import json
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from datetime import date
from enum import Enum
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import fastapi
import httpx
import pytest
from fastapi import (
    APIRouter,
    BackgroundTasks,
    Body,
    Cookie,
    Depends,
    FastAPI,
    Header,
    HTTPException,
    Query,
    Request,
    Response,
)
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, field_validator
from starlette.middleware.base import BaseHTTPMiddleware

from onceward import SINGLE_TENANT, Onceward
from onceward.batch.options import BatchOptions, ItemReport
from onceward.fastapi import Caller, Run, Tx
from onceward.frameworks import fastapi_direct
from onceward.frameworks.fastapi_direct import DirectRoute


class Colour(Enum):
    RED = "red"


class Part(BaseModel):
    name: str = "bolt"
    size: int | None = None

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if value == "screw":
            raise ValueError("no screws")
        return value


class Made(BaseModel):
    name: str
    day: date
    price: float = 1e16


class TeapotError(Exception):
    """Has a handler of its own."""


order: list[str] = []


async def first(x_token: Annotated[str, Header()] = "none") -> str:
    order.append(f"first {x_token}")
    if x_token == "forbidden":
        raise HTTPException(403, "not you", headers={"x-why": "token"})
    return x_token


def second(response: Response, token: Annotated[str, Depends(first)], page: int = 1) -> str:
    order.append(f"second {token} {page}")
    response.headers["x-second"] = str(page)
    response.set_cookie("seen", "yes")
    return token * 2


def build(url: str, *, direct: bool, batch: BatchOptions | None = None) -> tuple[FastAPI, Onceward]:  # noqa: C901
    """Build an app with a route for each way to write one."""
    onceward = Onceward(url, tenants=SINGLE_TENANT)
    app = FastAPI()
    onceward.install(app, direct=direct, batch=batch)
    included = APIRouter(prefix="/in/{where}", dependencies=[Depends(first)])

    @app.exception_handler(TeapotError)
    async def brew(request: Request, error: TeapotError) -> Response:
        body = (await request.body()).decode()
        return JSONResponse({"error": str(error), "body": body, "path": request.url.path}, 418)

    @app.post("/plain")
    @onceward.guard()
    async def plain(part: Part, tx: Tx, caller: Caller, run: Run) -> Any:
        assert (tx, caller) == (run.transaction, run.request.principal)
        if part.size == 418:
            raise TeapotError(part.name)
        if part.size == 500:
            raise RuntimeError
        return {"é": [part.name, 1.5, None, {"_sa": 1, "ok": True}], "part": part}

    @app.post("/dict", status_code=201)
    @onceward.guard()
    async def give_dict(part: Part) -> Any:
        return {"name": part.name, "sizes": [part.size, 1e22, -0.0], "_sa_x": 1}

    @app.post("/model", status_code=202, response_model_exclude_unset=True)
    @onceward.guard()
    async def give_model(part: Annotated[Part, Body(embed=True)], response: Response) -> Made:
        response.headers["Location"] = "/made/1"
        if part.size:
            response.status_code = part.size
        return Made.model_validate({"name": part.name, "day": "2026-01-02"})

    @app.post("/wrong-model", response_model=Made)
    @onceward.guard()
    async def give_wrong_model(part: Part) -> Any:
        return {"name": part.name, "day": "2026-01-02" if part.size else "never"}

    @app.post("/sync/{number}/{day}")
    @onceward.guard()
    def work(
        number: int, day: date, colour: Colour, ids: Annotated[list[UUID] | None, Query()] = None
    ) -> Any:
        return [number, day, colour, ids]

    @app.post("/scalars/{number}/{day}")
    @onceward.guard()
    def scalars(
        number: int, day: date, colour: Colour, request: Request, x_token: Annotated[str, Header()]
    ) -> Any:
        return [number, day, colour, x_token, str(request.url_for("give_dict"))]

    @app.put("/depends/{number:int}")
    @onceward.guard()
    async def depend(
        number: int,
        token: Annotated[str, Depends(second)],
        request: Request,
        seen: Annotated[str | None, Cookie()] = None,
        part: Part | None = None,
    ) -> Any:
        keys = {"endpoint", "path_params", "route", "router", "app"}
        found = {key: type(request.scope[key]).__name__ for key in keys}
        sent = await request.json() if part else None
        url = str(request.url_for("depend", number=number))
        return found | {"token": token, "seen": seen, "sent": sent, "n": number, "url": url}

    @app.delete("/nothing", status_code=204)
    @onceward.guard()
    async def nothing(x_mode: Annotated[list[str] | None, Header()] = None) -> None:
        assert x_mode != ["fail"]

    @app.post("/classes", response_class=HTMLResponse)
    @onceward.guard()
    async def classes(part: Part) -> Any:
        if part.size == 1:
            return PlainTextResponse(part.name, 203, {"X-Own": "1"})
        return f"<p>{part.name}</p>"

    @included.patch("/place")
    @onceward.guard()
    async def place(where: str, part: Part, request: Request) -> dict[str, Any]:
        return {"where": where, "route": request.scope["route"].path, "part": part.model_dump()}

    app.include_router(included, dependencies=[Depends(second)])
    return app, onceward


JSON = {"content-type": "application/json"}
BODIES = [
    b"{}",
    b'{"name":"nut","size":3}',
    b'{"name":"screw"}',
    b'{"size":"wide","name":[1]}',
    b'{"size":418}',
    b'{"size":500}',
    b'{"size":204}',
    b'{"size":1}',
    b'{"part":{"name":"nut"}}',
    b'{"part":{"size":203}}',
    b'{"part":3}',
    b"[]",
    b"7",
    b"",
    b'{"n',
]
PATHS = [
    ("POST", "/plain"),
    ("POST", "/dict"),
    ("POST", "/model"),
    ("POST", "/wrong-model"),
    ("POST", "/sync/3/2026-01-02?colour=red&ids=01970000-0000-4000-8000-000000000000"),
    ("POST", "/sync/x/tomorrow?colour=blue&ids=a&ids=b"),
    ("POST", "/scalars/3/2026-01-02?colour=red"),
    ("POST", "/scalars/x/tomorrow?colour=blue"),
    ("PUT", "/depends/7?page=2"),
    ("PUT", "/depends/7?page=x"),
    ("DELETE", "/nothing"),
    ("POST", "/classes"),
    ("PATCH", "/in/a%2Fb/place"),
    ("PATCH", "/in/%C3%BC/place?page=2"),
]
HEADERS: list[dict[str, str]] = [
    {},
    {"x-token": "t", "cookie": "seen=1", "x-mode": "a"},
    {"x-token": "forbidden", "x-mode": "fail"},
]


def requests() -> Iterator[tuple[str, str, bytes, dict[str, str]]]:
    for method, path in PATHS:
        for number, body in enumerate(BODIES):
            yield method, path, body, JSON | HEADERS[number % 3]
        for content_type in ("text/plain", "application/vnd.api+json; a=b", "application/x-json"):
            yield method, path, b'{"name":"nut"}', {"content-type": content_type} | HEADERS[1]
        yield method, path, b"{}", HEADERS[2] | JSON


async def test_responses_are_those_of_fastapi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = set()
    run = DirectRoute.run

    async def counted(self: DirectRoute, request: Any, *rest: Any) -> Any:
        called.add(request.execution.request.endpoint)
        return await run(self, request, *rest)

    monkeypatch.setattr(DirectRoute, "run", counted)
    async with AsyncExitStack() as stack:
        clients = []
        for name in ("direct", "fastapi"):
            app, onceward = build(f"sqlite:///{tmp_path}/{name}.db", direct=name == "direct")
            await onceward.open()
            stack.push_async_callback(onceward.close)
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
            clients.append(httpx.AsyncClient(transport=transport, base_url="http://test"))
        for number, (method, path, body, headers) in enumerate(requests()):
            given = {**headers, "Idempotency-Key": f"k-{number}", "X-Request-ID": f"r-{number}"}
            found = []
            for client in clients:
                order.clear()
                response = await client.request(method, path, content=body, headers=given)
                found.append(
                    (response.status_code, response.headers.raw, response.content, list(order))
                )
            assert found[0] == found[1], (method, path, body, headers)
        assert called == {route.endpoint for route in onceward.runtime.routes.table().routes}
        for client in clients:
            await client.aclose()


async def test_items_of_a_batch_respond_as_by_fastapi(tmp_path: Path) -> None:
    """Every request as an item of a chunk: without ASGI messages, and through the whole app."""
    items = []
    for number, (method, path, body, headers) in enumerate(requests()):
        if headers["content-type"] != "application/json" or body[:1] not in (b"{", b"["):
            continue
        with suppress(ValueError):
            content = json.loads(body)
            items.append({"method": method, "path": path, "key": f"k-{number}", "body": content})
    found = []
    for name in ("direct", "fastapi"):
        is_direct = name == "direct"
        url = f"sqlite:///{tmp_path}/{name}.db"
        app, onceward = build(url, direct=is_direct, batch=BatchOptions(direct=is_direct))
        await onceward.open()
        results = []
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for at in range(0, len(items), 40):
                # The second time they are replays.
                for _ in range(2):
                    response = await client.post("/batch", json={"items": items[at : at + 40]})
                    results += response.json()["results"]
        await onceward.close()
        for result in results:
            for header in ("x-request-id", "x-correlation-id", "x-original-request-id"):
                result["headers"].pop(header, None)
            if isinstance(result["body"], dict):  # of an error
                result["body"].pop("requestId", None)
        found.append(results)
    assert len(found[0]) == 2 * len(items)
    for ours, theirs in zip(*found, strict=True):
        assert ours == theirs
    assert {result["status"] for result in found[0]} >= {200, 204, 418, 422, 500}


@pytest.mark.parametrize("version", ["0.131.9", "0.163.0", "1.0.0rc1"])
async def test_version_of_fastapi_that_was_not_tested_calls_routes_itself_and_says_so_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
) -> None:
    monkeypatch.setattr("fastapi.__version__", version)
    fastapi_direct._is_tested.cache_clear()
    monkeypatch.delattr(DirectRoute, "run")  # not called
    for name in ("one", "two"):
        app, onceward = build(f"sqlite:///{tmp_path}/{name}.db", direct=True)
        await onceward.open()
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            response = await client.post("/dict", json={}, headers={"Idempotency-Key": "k"})
        await onceward.close()
        assert (response.status_code, response.json()["name"]) == (201, "bolt")
    (line,) = [record for record in caplog.records if "called by" in record.getMessage()]
    assert (line.levelname, f"FastAPI {version}" in line.getMessage()) == ("WARNING", True)
    fastapi_direct._is_tested.cache_clear()


def test_installed_version_of_fastapi_is_one_that_was_tested() -> None:
    assert fastapi_direct._is_tested(fastapi.__version__)


class OwnRoute(APIRoute):
    def get_route_handler(self) -> Any:
        handle = super().get_route_handler()

        async def handle_and_mark(request: Request) -> Response:
            response = await handle(request)
            response.headers["x-own-route"] = "yes"
            return response

        return handle_and_mark


async def dependency_with_yield() -> Any:
    yield 1


async def test_routes_that_are_not_simple_are_called_by_fastapi(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    onceward = Onceward(f"sqlite:///{tmp_path}/app.db", tenants=SINGLE_TENANT)
    app = FastAPI()
    onceward.install(app)
    own = APIRouter(route_class=OwnRoute)
    done: list[str] = []

    @own.post("/own-class")
    @onceward.guard()
    async def own_class() -> str:
        return "own"

    @app.post("/yield")
    @onceward.guard()
    async def with_yield(one: Annotated[int, Depends(dependency_with_yield)]) -> int:
        return one

    @app.post("/tasks")
    @onceward.guard()
    async def with_tasks(tasks: BackgroundTasks) -> int:
        tasks.add_task(done.append, "task")
        return 1

    app.mount("/mounted", FastAPI())

    @app.post("/mounted/{name}")
    @onceward.guard()
    async def never_reached(name: str) -> str:
        return name

    @app.post("/mounts/{name}")
    @onceward.guard()
    async def beside_the_mount(name: str) -> str:
        return name

    app.include_router(own)
    caplog.set_level(logging.DEBUG, "onceward.request")
    await onceward.open()
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        found = {}
        for number, path in enumerate(
            ("/own-class", "/yield", "/tasks", "/mounted/a", "/mounts/a")
        ):
            found[path] = await client.post(
                path,
                headers={"Idempotency-Key": f"k-{number}"},
            )
        app.dependency_overrides[dependency_with_yield] = lambda: 2
        replaced = await client.post("/yield", headers={"Idempotency-Key": "k-9"})
    await onceward.close()
    assert found["/own-class"].headers["x-own-route"] == "yes"
    assert (found["/yield"].json(), replaced.json()) == (1, 2)
    assert done == ["task"]
    assert (found["/mounted/a"].status_code, found["/mounts/a"].status_code) == (404, 200)
    reasons = [record.getMessage() for record in caplog.records if "called by" in record.message]
    assert reasons == [
        "/own-class is called by FastAPI: OwnRoute overrides get_route_handler",
        "/yield is called by FastAPI: a dependency has a yield",
        "/tasks is called by FastAPI: it uses background tasks or a websocket",
        "/mounted/{name} is called by FastAPI: the app mounted at '/mounted' comes before it",
    ]


async def send_items(app: FastAPI, onceward: Onceward, count: int) -> list[dict[str, Any]]:
    await onceward.open()
    transport = httpx.ASGITransport(app=app)
    items = [
        {"method": "POST", "path": "/things", "key": f"k-{number}", "body": {"size": number}}
        for number in range(count)
    ]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.post("/batch", json={"items": items})
    await onceward.close()
    results: list[dict[str, Any]] = response.json()["results"]
    return results


@pytest.mark.parametrize("direct", [None, True, False])
async def test_items_pass_by_middleware_only_where_the_app_says_so(
    tmp_path: Path, direct: bool | None
) -> None:
    reports: list[ItemReport] = []
    seen: list[str] = []
    onceward = Onceward(f"sqlite:///{tmp_path}/app.db", tenants=SINGLE_TENANT)
    app = FastAPI()
    onceward.install(app, batch=BatchOptions(direct=direct, on_item=reports.append))

    @app.post("/things", status_code=201)
    @onceward.guard()
    async def create(part: Part) -> Any:
        if part.size == 1:
            raise HTTPException(409, "taken")
        return {"size": part.size}

    async def note(request: Request, call_next: Any) -> Any:
        seen.append(request.url.path)
        return await call_next(request)

    app.add_middleware(BaseHTTPMiddleware, dispatch=note)
    results = await send_items(app, onceward, 3)
    assert [result["status"] for result in results] == [201, 409, 201]
    assert [result["body"] for result in results] == [
        {"size": 0},
        {"detail": "taken"},
        {"size": 2},
    ]
    items = ["/things"] * 3
    assert seen == ["/batch"] + ([] if direct else items)
    assert [report.path for report in reports] == (items if direct else [])
    assert [report.status for report in reports] == ([201, 409, 201] if direct else [])
    assert all(report.exchange is not None and report.exchange.request for report in reports)
