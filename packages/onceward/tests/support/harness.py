"""A guarded app whose handler does what the header ``X-Do`` says, and a store that can be broken.

The header is no part of the fingerprint: the same request can fail the first time and succeed
the second.
"""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.background import BackgroundTask

from onceward import Onceward, Policy, open_store
from onceward.errors import NotAuthenticatedError
from onceward.guard.request import Principal, RequestHead
from packages.onceward.tests.support.options import with_config

CREATE = "CREATE TABLE IF NOT EXISTS effects (id text PRIMARY KEY, name text)"


Commit = Callable[[Any, Any, Any], Awaitable[None]]


class HeldClock:
    """A wall clock that tests set. The monotonic clock also runs by itself, so that waits end."""

    def __init__(self, now: datetime = datetime(2026, 3, 1, 12, tzinfo=UTC)) -> None:
        self.instant = now
        self._passed = 0.0

    def now(self) -> datetime:
        return self.instant

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time() + self._passed

    def pass_by(self, **span: float) -> None:
        self.instant += timedelta(**span)
        self._passed += timedelta(**span).total_seconds()


def by_header(head: RequestHead) -> Principal:
    """Take the tenant from a header; ``not-signed-in`` is not authenticated."""
    tenant = head.header("x-tenant") or "ada"
    if tenant == "not-signed-in":
        raise NotAuthenticatedError("sign in first")
    return Principal(tenant, f"{tenant}'s phone")


class BreakableStore:
    """A real store that counts its calls and can be made to fail."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.calls: Counter[str] = Counter()
        # Raised by claim, begin and find, as long as it is set.
        self.down: Exception | None = None
        # Called in place of the next commits, with the real unit, the record and the audit event.
        self.commits: list[Commit] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def _call(self, name: str, *args: Any) -> Any:
        self.calls[name] += 1
        if self.down is not None:
            await asyncio.sleep(0.01)  # as long as a refused connection takes
            raise self.down
        return await getattr(self.inner, name)(*args)

    async def find(self, *args: Any) -> Any:
        return await self._call("find", *args)

    async def claim(self, *args: Any) -> Any:
        claim = await self._call("claim", *args)
        unit = getattr(claim, "unit", None)
        return claim if unit is None else type(claim)(BreakableUnit(self, unit))

    async def begin(self, *, idle_seconds: float | None = None) -> Any:
        return BreakableUnit(self, await self._call("begin"))


class BreakableUnit:
    """A real unit whose commit can be broken."""

    def __init__(self, store: BreakableStore, inner: Any) -> None:
        self._store = store
        self._inner = inner
        self._ended = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def commit(self, record: Any, audit: Any) -> None:
        self._store.calls["commit"] += 1
        self._ended = True
        if self._store.commits:
            await self._store.commits.pop(0)(self._inner, record, audit)
        else:
            await self._inner.commit(record, audit)

    async def rollback(self) -> None:
        if not self._ended:
            self._store.calls["rollback"] += 1
            await self._inner.rollback()


class Lab:
    """One app on one database, with helpers to send requests and read what was stored."""

    def __init__(self, database: str, policy: Policy | None = None, **options: Any) -> None:
        self.store = BreakableStore(open_store(database))
        self.onceward = Onceward(
            self.store,
            policy=policy or Policy(),
            **with_config(**{"identify": by_header, "sweep_every_seconds": None, **options}),
        )
        self.app = FastAPI()
        self.onceward.install(self.app)
        # What ran in this process, including work that was rolled back.
        self.runs: list[str] = []
        self.background: list[str] = []
        self.started = asyncio.Event()
        self.gate = asyncio.Event()
        for path in ("/things", "/others", "/shelves/{shelf}"):
            self.app.add_api_route(
                path, self.onceward.guard()(self._handler()), methods=["POST", "PUT", "DELETE"]
            )
        self.app.add_api_route("/things", self._look, methods=["GET"])
        self.client = self.new_client()

    def new_client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://lab", timeout=20)

    async def send(
        self, key: str | None = "key-1", *, do: str = "", path: str = "/things", **more: Any
    ) -> httpx.Response:
        headers = {"X-Do": do, **more.pop("headers", {})}
        if key is not None:
            headers["Idempotency-Key"] = key
        if "content" not in more and "files" not in more:
            more.setdefault("json", {"item": "boots"})
        return await self.client.request(more.pop("method", "POST"), path, headers=headers, **more)

    def send_soon(self, *args: Any, **more: Any) -> "asyncio.Task[httpx.Response]":
        return asyncio.create_task(self.send(*args, **more))

    async def effects(self) -> int:
        return int((await self.onceward.store.read("SELECT count(*) AS n FROM effects"))[0]["n"])

    async def records(self) -> list[Any]:
        return list(
            await self.read(
                "SELECT tenant, endpoint, idempotency_key, response_status, audit_id"
                " FROM onceward_idempotency_records ORDER BY 1, 2, 3"
            )
        )

    async def audits(self) -> list[Any]:
        return list(await self.read("SELECT * FROM onceward_audit_events ORDER BY id"))

    async def read(self, sql: str, params: Any = None) -> Any:
        """Run a query with the tables of the library named as in SQLite."""
        store = self.onceward.store
        return await store.read(store.table_names.render(sql), params)

    def _handler(self) -> Any:
        async def act(request: Request) -> Response:
            return await self.act(request)

        return act

    async def _look(self) -> dict[str, int]:
        return {"effects": await self.effects()}

    async def act(self, request: Request) -> Response:
        words = request.headers.get("x-do", "").split()
        self.runs.append(" ".join(words))
        new = str(uuid.uuid4())
        if "quiet" not in words:
            await self.onceward.transaction.execute(
                "INSERT INTO effects (id, name) VALUES (:id, :name)", {"id": new, "name": "effect"}
            )
        self.started.set()
        if "wait" in words:
            await self.gate.wait()
        if "raise" in words:
            raise RuntimeError("broken handler")
        if "keep" in words:
            self.onceward.execution.keep_writes_on_error()
        if "stream" in words:
            return StreamingResponse(_parts())
        status = next((int(word) for word in words if word.isdigit()), 201)
        after = BackgroundTask(self.background.append, new)
        if status == 204:
            return Response(status_code=204, headers={"ETag": '"7"'}, background=after)
        size = next((int(word[5:]) for word in words if word.startswith("size=")), 0)
        return JSONResponse(
            {"id": new, "pad": "x" * size},
            status,
            {"Location": f"/things/{new}", "ETag": '"7"', "X-Not-Stored": new},
            background=after,
        )


async def _parts() -> AsyncIterator[bytes]:
    yield b"one"
    yield b"two"


class Connection:
    """One HTTP exchange as ASGI messages, sent and received one by one."""

    def __init__(
        self, path: str = "/things", *, method: str = "POST", headers: dict[str, str] | None = None
    ) -> None:
        given = {"content-type": "application/json", "idempotency-key": "key-1", **(headers or {})}
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(k.lower().encode(), v.encode()) for k, v in given.items()],
        }
        self.to_app: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: list[dict[str, Any]] = []

    def feed(self, body: bytes, *, more: bool = False) -> None:
        self.to_app.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def hang_up(self) -> None:
        self.to_app.put_nowait({"type": "http.disconnect"})

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    def run(self, app: Any) -> "asyncio.Task[None]":
        return asyncio.ensure_future(app(self.scope, self.to_app.get, self.send))

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.sent[1:])


@asynccontextmanager
async def open_lab(
    database: str, policy: Policy | None = None, **options: Any
) -> AsyncIterator[Lab]:
    lab = Lab(database, policy, **options)
    await lab.onceward.open()
    try:
        unit = await lab.store.inner.begin()
        await unit.transaction.execute(CREATE)
        await unit.commit(None, None)
        yield lab
    finally:
        await lab.client.aclose()
        await lab.onceward.close()


async def fresh_database(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> str:
    """Return the URL of an empty database; on PostgreSQL one per module, as creating is slow."""
    if kind == "sqlite":
        return f"sqlite:///{tmp_path}/lab.db"
    request.getfixturevalue("postgres").start()
    url = str(request.getfixturevalue("module_database"))
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid();"
        )
        await connection.execute(
            "DROP SCHEMA IF EXISTS onceward, public CASCADE; CREATE SCHEMA public"
        )
    finally:
        await connection.close()
    return url
