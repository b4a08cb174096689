"""Serves one app of the CPU table: ``python -P cpu_server.py APP PORT``.

A script of its own that imports nothing of this package, so that it can also serve the ``onceward``
of another checkout, which then comes first in ``PYTHONPATH``. The apps respond alike; each has one
layer more than the one before it: sockets, HTTP, FastAPI, the guard, a database.
"""

import asyncio
import os
import sqlite3
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI
from pydantic import BaseModel

from onceward import SINGLE_TENANT, Onceward, open_store
from onceward.ports import Claimed, EpochReading
from onceward.stores.table_names import DEFAULT_NAMES

CONNECTIONS = 16
CREATE = (
    "CREATE TABLE IF NOT EXISTS orders "
    "(id text PRIMARY KEY, item text NOT NULL, quantity integer NOT NULL)"
)
INSERT = "INSERT INTO orders (id, item, quantity) VALUES (:id, :item, :quantity)"
INSERT_NUMBERED = "INSERT INTO orders (id, item, quantity) VALUES ($1, $2, $3)"
BODY = b'{"id":"%s","item":"a pair of walking boots, size 42, brown"}' % str(uuid.uuid4()).encode()
RESPONSE = (
    b"HTTP/1.1 201 Created\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-length: %d\r\ncontent-type: application/json\r\n\r\n%s" % (len(BODY), BODY)
)


class Order(BaseModel):
    item: str
    quantity: int


class Constant(asyncio.Protocol):
    """Responds to each piece of data: the load generator sends a request in one piece."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, _data: bytes) -> None:
        self._transport.write(RESPONSE)


async def serve_constant(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Constant, "127.0.0.1", port)
    await server.serve_forever()


async def http(scope: Any, receive: Any, send: Any) -> None:
    """Read the body and respond, without a framework."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(BODY))]
    await send({"type": "http.response.start", "status": 201, "headers": headers})
    await send({"type": "http.response.body", "body": BODY})


def plain() -> FastAPI:
    app = FastAPI()

    @app.post("/orders", status_code=201)
    async def create(order: Order):
        new = str(uuid.uuid4())
        return {"id": new, "item": order.item}

    return app


class NoSchema:
    """The schema of a store without tables."""

    is_complete = True

    def want(self, *_parts: Any) -> None:
        """Do nothing."""

    def has(self, _part: Any) -> bool:
        return True


class NoDatabase:
    """A store that keeps nothing: what is left is the cost of the guard."""

    name = "sqlite"
    table_names = DEFAULT_NAMES
    schema = NoSchema()
    superseded = False
    # The defaults of ``stores.base``, which this script does not import: older trees have none.
    has_sessions = has_thread_sessions = is_gated = is_one_writer = False
    runs_in_request_thread = knows_durability = can_commit_after = is_sync = is_lost = False
    chunk_items, max_chunks = 0, 1
    gate = thread_gate = None

    async def ping(self) -> None:
        """Do nothing."""

    open = close = rollback = keep_alive = ping

    async def claim(self, record_id: Any, now: Any) -> Claimed:  # noqa: ARG002
        return Claimed(self)  # type: ignore[arg-type]

    @property
    def transaction(self) -> Any:
        return self

    statements = transaction

    async def execute(self, sql: str, params: Any = None) -> int:  # noqa: ARG002
        return 1

    async def commit(self, record: Any, audit: Any) -> None:
        """Do nothing."""

    def report_epochs(self, report: Callable[[EpochReading], None]) -> None:
        self._report = report

    async def read_epoch(self) -> EpochReading:
        reading = EpochReading("none")
        self._report(reading)
        return reading

    async def read(self, sql: str, params: Any = None) -> Sequence[Any]:  # noqa: ARG002
        return [{"cache_epoch": "none"}]

    write = read

    async def begin(self, *, idle_seconds: float | None = None) -> Any:  # noqa: ARG002
        return self

    async def has_written(self) -> bool:
        return True

    async def find(self, record_id: Any, now: Any) -> None:  # noqa: ARG002
        return None

    async def sweep(self, now: Any, limit: int) -> int:  # noqa: ARG002
        return 0

    async def records(self, query: Any) -> Sequence[Any]:  # noqa: ARG002
        return []

    async def secret(self) -> bytes:
        return b"0" * 32

    def notifier(self) -> Any:
        return self


def guarded(store: Any, **options: Any) -> FastAPI:
    """Return the app; older versions of the library know no ``options``."""
    onceward = Onceward(store, tenants=SINGLE_TENANT)
    app = FastAPI()
    onceward.install(app, **options)

    @app.post("/orders", status_code=201)
    @onceward.guard()
    async def create(order: Order):
        new = str(uuid.uuid4())
        await onceward.transaction.execute(
            INSERT, {"id": new, "item": order.item, "quantity": order.quantity}
        )
        return {"id": new, "item": order.item}

    return app


def guarded_postgres(**options: Any) -> FastAPI:
    url = os.environ["BENCH_DATABASE"]
    store = open_store(url, min_connections=CONNECTIONS, max_connections=CONNECTIONS)
    return guarded(store, **options)


def guarded_postgres_by_fastapi() -> FastAPI:
    """Return the same app without the direct caller."""
    return guarded_postgres(direct=False)


def guarded_sqlite() -> FastAPI:
    url = os.environ["BENCH_DATABASE"]
    os.umask(0o077)
    with sqlite3.connect(url.removeprefix("sqlite:///")) as db:
        db.execute(CREATE)
    db.close()
    return guarded(open_store(url))


def bare_postgres() -> FastAPI:
    import asyncpg

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        url = os.environ["BENCH_DATABASE"]
        pool = asyncpg.create_pool(url, min_size=CONNECTIONS, max_size=CONNECTIONS)
        async with pool as app.state.pool:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/orders", status_code=201)
    async def create(order: Order):
        new = str(uuid.uuid4())
        async with app.state.pool.acquire() as connection, connection.transaction():
            await connection.execute(INSERT_NUMBERED, new, order.item, order.quantity)
        return {"id": new, "item": order.item}

    return app


APPS: dict[str, Callable[[], Any]] = {
    "http": lambda: http,
    "fastapi": plain,
    "guard": lambda: guarded(NoDatabase()),
    "guarded_postgres": guarded_postgres,
    "guarded_postgres_by_fastapi": guarded_postgres_by_fastapi,
    "guarded_sqlite": guarded_sqlite,
    "bare_postgres": bare_postgres,
}


def main(name: str, port: int) -> None:
    if name == "sockets":
        uvloop.run(serve_constant(port))
    else:
        uvicorn.run(APPS[name](), port=port, access_log=False, log_level="warning")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
