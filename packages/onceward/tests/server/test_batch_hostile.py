"""Items that try to get more than a single request would have got."""

import json
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from starlette.datastructures import MutableHeaders

from onceward import GuardConfig, Onceward, Principal
from onceward.guard.request import RequestHead
from packages.onceward.tests.support.batch_lab import item, open_batch_lab
from packages.onceward.tests.support.harness import by_header


@pytest.fixture
def sqlite(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/lab.db"


async def test_batch_at_the_default_limits(sqlite: str) -> None:
    async with open_batch_lab(sqlite) as lab:
        items = [item(f"k{at:03}") for at in range(200)]
        for at in range(4):
            items[at]["body"]["pad"] = ""
        missing = 1024 * 1024 - len(json.dumps({"items": items}))
        for at in range(4):
            items[at]["body"]["pad"] = "x" * (missing // 4 + (at < missing % 4))
        content = json.dumps({"items": items})
        assert len(content) == 1024 * 1024
        headers = {"Content-Type": "application/json"}
        longer = await lab.client.post("/batch", content=content + " ", headers=headers)
        assert (longer.status_code, longer.json()["code"]) == (413, "batch.too_large")
        more = await lab.post([*(item(f"m{at}") for at in range(201))])
        assert (more.status_code, more.json()["details"]) == (413, {"maxItems": 200})
        assert lab.runs == []
        response = await lab.client.post("/batch", content=content, headers=headers)
        assert [result["status"] for result in response.json()["results"]] == [201] * 200


@pytest.mark.parametrize("depth", [127, 129, 1100, 100_000])
async def test_nesting_is_the_error_of_its_item(sqlite: str, depth: int) -> None:
    async with open_batch_lab(sqlite) as lab:
        one = '{"method": "POST", "path": "/things", "key": "%s", "body": {"name": "%s", "x": %s}}'
        deep = "[" * (depth - 1) + '"]}"' + "]" * (depth - 1)
        items = [one % ("k0", "k0", 1), one % ("k1", "k1", deep), one % ("k2", "k2", '"]]"')]
        content = f'{{"items": [{",".join(items)}]}}'
        headers = {"Content-Type": "application/json"}
        response = await lab.client.post("/batch", content=content, headers=headers)
        found = [result["status"] for result in response.json()["results"]]
        assert found == [201, 201 if depth <= 128 else 400, 201]


@pytest.mark.parametrize(
    "headers", [{}, {"Content-Type": "text/plain"}, {"Content-Type": "multipart/form-data"}]
)
async def test_batch_without_a_json_content_type_is_refused(
    sqlite: str, headers: dict[str, str]
) -> None:
    """A page of another origin can send these with a user's cookies, without a preflight."""
    async with open_batch_lab(sqlite) as lab:
        content = json.dumps({"items": [item("k0")]})
        response = await lab.client.post("/batch", content=content, headers=headers)
        assert (response.status_code, response.json()["code"]) == (400, "request.invalid")
        assert lab.runs == []


async def test_batch_in_a_batch_is_refused_below_a_template_with_its_path(sqlite: str) -> None:
    async with open_batch_lab(sqlite) as lab:
        ran = []

        @lab.app.post("/{anything}")
        @lab.onceward.guard("anything")
        async def anything(anything: str) -> dict[str, str]:
            ran.append(anything)
            return {}

        inner = {"items": [item("k1")]}
        paths = ("/batch", "/%62atch", "/other")
        batch = [item(f"k{at}", path=path, body=inner) for at, path in enumerate(paths)]
        assert await lab.statuses(batch) == [400, 400, 200]
        assert ran == ["other"]


async def test_item_outside_the_prefix_of_a_mounted_app_is_refused(sqlite: str) -> None:
    async with open_batch_lab(sqlite) as lab:

        @lab.app.middleware("http")
        async def refuse(request: Request, call_next: Any) -> Any:
            if request.url.path == "/v1/things":
                return Response(status_code=403)
            return await call_next(request)

        outer = FastAPI()
        outer.mount("/v1", lab.app)
        transport = httpx.ASGITransport(app=outer)
        async with httpx.AsyncClient(transport=transport, base_url="http://lab") as client:
            paths = ("/things", "/v1/things", "/v1/v1/things", "/v1/batch", "/v1things")
            batch = [item(f"k{at}", path=path) for at, path in enumerate(paths)]
            response = await client.post("/v1/batch", json={"items": batch})
            found = [result["status"] for result in response.json()["results"]]
            assert found == [400, 403, 400, 400, 400]
        assert lab.runs == []


async def test_prefix_that_a_proxy_has_removed(sqlite: str) -> None:
    """Items have the paths of the client; the app sees them as it sees single requests."""
    async with open_batch_lab(sqlite) as lab:
        seen: list[str] = []

        @lab.app.middleware("http")
        async def see(request: Request, call_next: Any) -> Any:
            seen.append(request.scope["path"])
            return await call_next(request)

        transport = httpx.ASGITransport(app=lab.app, root_path="/api")
        async with httpx.AsyncClient(transport=transport, base_url="http://lab") as client:
            batch = [item("k0", path="/api/things"), item("k1", path="/api/batch")]
            response = await client.post("/batch", json={"items": batch})
            assert [result["status"] for result in response.json()["results"]] == [201, 400]
            assert seen == ["/batch", "/things"]
            alone = await client.post(
                "/things", json=batch[0]["body"], headers={"Idempotency-Key": "k0"}
            )
            assert alone.headers["idempotency-replayed"] == "true"
            assert alone.headers["onceward-batch"] == "/api/batch; items=200"


@pytest.mark.parametrize("is_in_place", [True, False])
async def test_tenant_is_read_after_middleware_has_changed_the_headers(
    sqlite: str, is_in_place: bool
) -> None:
    """Middleware that names the tenant, by the path of a request, counts for each item."""
    async with open_batch_lab(sqlite) as lab:

        class NamesTenant:
            def __init__(self, app: Any) -> None:
                self.app = app

            async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
                if scope["type"] == "http" and scope["path"].startswith("/things"):
                    if is_in_place:
                        scope["headers"].append((b"x-tenant", b"bob"))
                    else:
                        MutableHeaders(scope=scope)["x-tenant"] = "bob"
                await self.app(scope, receive, send)

        lab.app.add_middleware(NamesTenant)
        assert await lab.statuses([item("k0"), item("k1"), item("k2")]) == [201] * 3
        rows = await lab.onceward.store.read(
            lab.onceward.store.table_names.render("SELECT tenant FROM onceward_idempotency_records")
        )
        assert [row["tenant"] for row in rows] == ["bob"] * 3
        alone = await lab.single(item("k0"))
        assert alone.headers["idempotency-replayed"] == "true"


async def test_item_that_breaks_the_sign_in_is_its_own_error(sqlite: str) -> None:
    def identify(head: RequestHead) -> Principal:
        if head.header("if-match"):
            raise ZeroDivisionError
        return by_header(head)

    async with open_batch_lab(sqlite, identify=identify) as lab:
        poison = item("k1", headers={"If-Match": '"1"'})
        assert await lab.statuses([item("k0"), poison, item("k2")]) == [201, 500, 201]


async def test_headers_about_the_body_of_the_batch_are_not_those_of_items(sqlite: str) -> None:
    async with open_batch_lab(sqlite) as lab:
        seen: list[dict[str, str]] = []

        @lab.app.middleware("http")
        async def see(request: Request, call_next: Any) -> Any:
            seen.append(dict(request.headers))
            return await call_next(request)

        about_body = {
            "Content-Encoding": "identity",
            "Content-MD5": "x",
            "Digest": "x",
            "If-Match": '"1"',
            "Idempotency-Key": "of the batch",
            "X-Request-ID": "of-the-batch",
        }
        headers = {**about_body, "Cookie": "a=b", "Authorization": "Bearer x"}
        await lab.client.post("/batch", json={"items": [item("k0"), item("k1")]}, headers=headers)
        for found in seen[1:]:
            assert found["cookie"] == "a=b"
            assert found["authorization"] == "Bearer x"
            assert found["idempotency-key"] in ("k0", "k1")
            assert not {"content-encoding", "content-md5", "digest", "if-match"} & set(found)
            assert found.get("x-request-id") != "of-the-batch"


async def test_replay_is_decided_after_the_apps_own_sign_in(tmp_path: Path) -> None:
    """With ``identify`` for the app and ``principal`` for a guard, both sign each item in."""
    onceward: Any = Onceward(
        f"sqlite:///{tmp_path}/lab.db",
        identify=by_header,
        config=GuardConfig(sweep_every_seconds=None),
    )
    app = FastAPI()
    onceward.install(app, batch="/batch")
    revoked: set[str] = set()

    async def caller(request: Request) -> Principal:
        token = request.headers.get("authorization", "")
        if not token or token in revoked:
            raise HTTPException(401, "sign in")
        return Principal(token, token)

    async def may_write(request: Request) -> None:
        if (await request.json()).get("name") == "refused":
            raise HTTPException(403, "not this one")

    @app.post("/notes", status_code=201)
    @onceward.guard("notes", principal=caller)
    async def note(request: Request, _: Annotated[None, Depends(may_write)]) -> dict[str, str]:
        return {"by": onceward.execution.request.principal.tenant}

    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://lab") as client:

        async def send(token: str, **headers: str) -> list[dict[str, Any]]:
            batch = [item(f"k{at}", path="/notes", body={"name": name}) for at, name in named]
            given = {"Authorization": token, **headers}
            response = await client.post("/batch", json={"items": batch}, headers=given)
            assert response.status_code == 200, response.text
            found: list[dict[str, Any]] = response.json()["results"]
            return found

        named = list(enumerate(("a", "refused", "b")))
        first = await send("ann")
        assert [result["status"] for result in first] == [201, 403, 201]
        assert first[0]["body"] == {"by": "ann"}
        assert [result["replayed"] for result in await send("ann")] == [True, False, True]
        assert [result["replayed"] for result in await send("bo")] == [False] * 3
        revoked.add("ann")
        refused = await send("ann")
        assert [result["status"] for result in refused] == [401, 403, 401]
        assert not any(result["replayed"] for result in refused)
        headers = {"Authorization": "bo", "X-Tenant": "not-signed-in"}
        response = await client.post("/batch", json={"items": []}, headers=headers)
        assert response.status_code == 401
    await onceward.close()
