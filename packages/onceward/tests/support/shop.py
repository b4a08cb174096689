"""A small guarded app, started as a process by the acceptance tests.

python -m packages.onceward.tests.support.shop   with SHOP_DATABASE, SHOP_PORT, … in the environment
"""

import asyncio
import os
import signal
import uuid
from datetime import timedelta
from typing import Any

import uvicorn
from fastapi import BackgroundTasks, FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from onceward import GuardConfig, Onceward, Policy, open_store
from onceward.guard.request import Principal, RequestHead
from onceward.stores.redis import RedisRecords

CREATE = "CREATE TABLE IF NOT EXISTS orders (id text PRIMARY KEY, item text, note text)"


class Order(BaseModel):
    item: str
    note: str = ""
    think_seconds: float = 0
    linger_seconds: float = 0
    then: str = "succeed"


class KillAt:
    """Kill this process with SIGKILL when it reaches a point for the n-th time."""

    def __init__(self, point: str) -> None:
        self._point = point

    async def reach(self, point: str) -> None:
        if point == self._point:
            os.kill(os.getpid(), signal.SIGKILL)
            await asyncio.sleep(60)


def by_header(head: RequestHead) -> Principal:
    tenant = head.header("x-tenant") or "everyone"
    return Principal(tenant, tenant)


def make_app(
    database: str,
    *,
    redis: str | None = None,
    kill_at: str | None = None,
    policy: Policy | None = None,
    memory_bytes: int = 1024 * 1024,
    **options: Any,
) -> tuple[FastAPI, Onceward]:
    store = open_store(database)
    cache = None
    if redis:
        # The time-out of 0.1 s would make a busy machine an outage of Redis.
        cache = RedisRecords(redis, environment="test", secret=store.secret, timeout_seconds=5)
    onceward = Onceward(
        store,
        policy=policy or Policy(wait=timedelta(seconds=10)),
        identify=by_header,
        config=GuardConfig(
            cache=cache,
            faults=KillAt(kill_at) if kill_at else None,
            memory_bytes=memory_bytes,
            sweep_every_seconds=None,
            **options,
        ),
    )
    app = FastAPI()
    onceward.install(app)

    # What ran in this process, including requests that were rolled back.
    app.state.runs = []
    app.state.background = []

    @app.post("/orders", status_code=201)
    @onceward.guard("orders.create")
    async def create(order: Order, background: BackgroundTasks):
        app.state.runs.append(order.item)
        await asyncio.sleep(order.think_seconds)
        new = str(uuid.uuid4())
        await onceward.transaction.execute(
            "INSERT INTO orders (id, item, note) VALUES (:id, :item, :note)",
            {"id": new, "item": order.item, "note": order.note},
        )
        await asyncio.sleep(order.linger_seconds)
        background.add_task(app.state.background.append, order.item)
        if order.then == "refuse":
            raise HTTPException(422, "refused")
        if order.then == "fail":
            raise HTTPException(503, "failed")
        if order.then == "raise":
            raise RuntimeError("broken handler")
        return {"id": new, "item": order.item}

    @app.post("/stock/{shelf}/moves")
    @onceward.guard()
    async def move(shelf: str):
        return {"shelf": shelf}

    @app.post("/stream")
    @onceward.guard()
    async def stream():
        async def parts():
            yield b"one"
            yield b"two"

        return StreamingResponse(parts())

    @app.get("/orders")
    async def orders():
        return await onceward.store.read("SELECT id, item, note FROM orders ORDER BY id")

    return app, onceward


async def serve() -> None:
    app, onceward = make_app(
        os.environ["SHOP_DATABASE"],
        redis=os.environ.get("SHOP_REDIS"),
        kill_at=os.environ.get("SHOP_KILL_AT"),
        memory_bytes=int(os.environ.get("SHOP_MEMORY_BYTES", str(1024 * 1024))),
    )
    config = uvicorn.Config(
        app, port=int(os.environ["SHOP_PORT"]), log_level="error", access_log=False
    )
    await onceward.open()
    unit = await onceward.store.begin()
    await unit.transaction.execute(CREATE)
    await unit.commit(None, None)
    await uvicorn.Server(config).serve()


if __name__ == "__main__":
    asyncio.run(serve())
