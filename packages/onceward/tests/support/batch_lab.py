"""A guarded app with a batch endpoint, whose handler does what the field ``do`` of a body says."""

import asyncio
import sqlite3
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg
import httpx
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.background import BackgroundTask

from onceward import Onceward, Policy, open_store
from onceward.batch.options import BatchOptions
from onceward.errors import ServiceError
from packages.onceward.tests.support.harness import by_header
from packages.onceward.tests.support.options import with_config

CREATE = (
    "CREATE TABLE IF NOT EXISTS effects (id text PRIMARY KEY, name text, version integer)",
    "CREATE TABLE IF NOT EXISTS logs (name text)",
    "CREATE TABLE IF NOT EXISTS parents (id text PRIMARY KEY)",
    (
        "CREATE TABLE IF NOT EXISTS children (id text PRIMARY KEY, parent text"
        " REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED)"
    ),
)

Item = dict[str, Any]


def item(key: str, do: str = "", **fields: Any) -> Item:
    """Return one item of a batch."""
    return {
        "method": "POST",
        "path": "/things",
        "key": key,
        "body": {"name": key, "do": do},
        **fields,
    }


class BatchLab:
    """One app on one database."""

    def __init__(
        self,
        database: str,
        *,
        policy: Policy | None = None,
        batch: str | BatchOptions = "/batch",
        around: Callable[[Any], Any] = lambda store: store,
        **options: Any,
    ) -> None:
        self.database = database
        self.onceward = Onceward(
            around(open_store(database)),
            policy=policy or Policy(),
            **with_config(**{"identify": by_header, "sweep_every_seconds": None, **options}),
        )
        self.app = FastAPI()
        self.onceward.install(self.app, batch=batch)
        # What ran, including work that was rolled back.
        self.runs: list[str] = []
        self.background: list[str] = []
        self.started = asyncio.Event()
        self.gate = asyncio.Event()
        create = self.onceward.guard("things.create")(self._handler(self.act))
        self.app.add_api_route("/things", create, methods=["POST"])
        change = self.onceward.guard("things.change")(self._handler(self.change))
        self.app.add_api_route("/things/{thing}", change, methods=["PATCH"])
        self.app.add_api_route("/open", self._open, methods=["POST"])
        turn = self.onceward.guard("files.turn")(self._handler(self._turn))
        self.app.add_api_route("/files", turn, methods=["POST"])
        self.client = self.new_client()

    def new_client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://lab", timeout=60)

    async def post(self, items: Any, **headers: str) -> httpx.Response:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post("/batch", json={"items": items}, headers=names)

    async def results(self, items: Any, **headers: str) -> list[dict[str, Any]]:
        response = await self.post(items, **headers)
        assert response.status_code == 200, response.text
        found: list[dict[str, Any]] = response.json()["results"]
        return found

    async def statuses(self, items: Any, **headers: str) -> list[int]:
        return [result["status"] for result in await self.results(items, **headers)]

    async def single(self, one: Item, **headers: str) -> httpx.Response:
        given = {"Idempotency-Key": one["key"], **one.get("headers", {}), **headers}
        return await self.client.request(
            one["method"], one["path"], json=one["body"], headers=given
        )

    async def names(self) -> list[str]:
        rows = await self.onceward.store.read("SELECT name FROM effects ORDER BY name")
        return [row["name"] for row in rows]

    async def count(self, table: str) -> int:
        store = self.onceward.store
        rows = await store.read(store.table_names.render(f"SELECT count(*) AS n FROM {table}"))
        return int(rows[0]["n"])

    async def set_savepoints(self) -> None:
        """Have a request undone, after which those of its endpoint have savepoints."""
        assert await self.statuses([item("undone-1"), item("undone-2", "422")]) == [201, 422]
        self.runs.clear()
        self.background.clear()

    def _handler(self, act: Callable[[Request], Any]) -> Any:
        async def handle(request: Request) -> Response:
            response: Response = await act(request)
            return response

        return handle

    async def _open(self) -> dict[str, str]:
        self.runs.append("open")
        return {}

    async def _turn(self, request: Request) -> Response:
        return Response((await request.body())[::-1], media_type="text/plain")

    async def change(self, request: Request) -> Response:
        thing = request.path_params["thing"]
        wanted = request.headers.get("if-match", "").strip('"')
        tx = self.onceward.execution.statements
        changed = await tx.execute(
            "UPDATE effects SET version = version + 1 WHERE id = :id AND version = :version",
            {"id": thing, "version": int(wanted or 0)},
        )
        if not changed:
            raise ServiceError(409, "concurrency.version_mismatch", "the version differs")
        version = int(wanted) + 1
        fields = {"id": thing, "version": version, **(await request.json())}
        return JSONResponse(fields, 200, {"ETag": f'"{version}"'})

    async def act(self, request: Request) -> Response:  # noqa: C901, PLR0912 - one branch per word
        body = await request.json()
        name, words = str(body.get("name")), str(body.get("do", "")).split()
        self.runs.append(name)
        tx, new = self.onceward.execution.statements, str(uuid.uuid4())
        values = {"id": new, "name": name}
        if "busy" in words and self.runs.count(name) == 1:
            return JSONResponse({"detail": "busy"}, 503)
        if "early" in words:
            return JSONResponse({"detail": "refused before it writes"}, 422)
        if "callback" in words:
            self.onceward.execution.after_commit(lambda: self.gate.missing)  # type: ignore[attr-defined]
        if "slow" in words:
            await asyncio.sleep(60)
        if "own" in words:
            await self.write_elsewhere(name)
        await tx.execute("INSERT INTO effects (id, name, version) VALUES (:id, :name, 1)", values)
        if "job" in words:
            await self.onceward.enqueue("mail", {"to": name})
        self.started.set()
        if "wait" in words:
            await self.gate.wait()
        if "raw" in words:
            await self.onceward.transaction.connection.execute("COMMIT")  # the misuse under test
        if "set" in words:
            await tx.execute("SELECT set_config('lab.leak', 'yes', true)")
        if "leak" in words:
            row = await tx.fetch_one("SELECT current_setting('lab.leak', true) AS found")
            return JSONResponse({"leak": None if row is None else row["found"]})
        if "orphan" in words:
            await tx.execute("INSERT INTO children (id, parent) VALUES (:id, 'nowhere')", values)
        if "savepoints" in words:
            for at in range(2):
                await tx.execute(f"SAVEPOINT own{at}")
                await tx.execute("INSERT INTO logs (name) VALUES (:name)", values)
                await tx.execute(f"RELEASE SAVEPOINT own{at}")
        if "cancel" in words:
            await tx.execute("SET LOCAL statement_timeout = '20ms'")
            await tx.execute("SELECT pg_sleep(30)")
        if "or-rollback" in words:
            with suppress(Exception):  # SQLite ends the whole transaction
                await tx.execute("INSERT OR ROLLBACK INTO effects (id) VALUES (:id)", values)
        if "swallow" in words:
            with suppress(Exception):  # the misuse under test
                await tx.execute("INSERT INTO nowhere VALUES (1)")
        if "raise" in words:
            raise RuntimeError("broken handler")
        if "keep" in words:
            self.onceward.execution.keep_writes_on_error()
        after = BackgroundTask(self.background.append, name)
        status = next((int(word) for word in words if word.isdigit()), 201)
        fields = {"id": new, "version": 1, "got": body.get("parent")}
        return JSONResponse(fields, status, {"ETag": '"1"'}, background=after)

    async def write_elsewhere(self, name: str) -> None:
        """Write through another connection, which waits for a row or a lock of the transaction."""
        if self.database.startswith("sqlite"):
            path = self.database.removeprefix("sqlite:///")

            def write() -> None:
                with sqlite3.connect(path, timeout=30) as db:
                    db.execute("INSERT INTO logs (name) VALUES (?)", (name,))

            await asyncio.to_thread(write)
            return
        connection = await asyncpg.connect(self.database)
        try:
            async with connection.transaction():
                await connection.execute("LOCK TABLE effects IN EXCLUSIVE MODE")
                await connection.execute("INSERT INTO logs (name) VALUES ($1)", name)
        finally:
            await connection.close()


@asynccontextmanager
async def open_batch_lab(database: str, **options: Any) -> AsyncIterator[BatchLab]:
    lab = BatchLab(database, **options)
    await lab.onceward.open()
    try:
        unit = await lab.onceward.store.begin()
        for statement in CREATE:
            await unit.statements.execute(statement)
        await unit.commit(None, None)
        yield lab
    finally:
        await lab.client.aclose()
        await lab.onceward.close()
