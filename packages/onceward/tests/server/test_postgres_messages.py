"""How many messages a guarded request sends to PostgreSQL: each costs more than the guard."""

import asyncio

import httpx
from fastapi import FastAPI
from pydantic import BaseModel

from onceward import SINGLE_TENANT, GuardConfig, Onceward
from onceward.stores.postgres import PostgresStore

KEY = "6b3f7d5e-0e0a-4c55-9d6c-0b1c1f2d3e4f"


class Boots(BaseModel):
    id: str


async def test_messages_of_a_first_request_a_replay_and_a_refusal(postgres_url: str) -> None:
    sent: list[str] = []
    store = PostgresStore(postgres_url, max_connections=1)
    onceward = Onceward(store, tenants=SINGLE_TENANT, config=GuardConfig(memory_bytes=0))
    app = FastAPI()
    onceward.install(app)

    @app.post("/boots", status_code=201)
    @onceward.guard()
    async def create(boots: Boots) -> Boots:
        await onceward.transaction.execute("INSERT INTO boots VALUES (:id)", {"id": boots.id})
        return boots

    async def post(boots: str) -> tuple[int, list[str]]:
        sent.clear()
        response = await client.post("/boots", json={"id": boots}, headers={"Idempotency-Key": KEY})
        await asyncio.sleep(0)  # the logger runs in the next iteration of the loop
        return response.status_code, [text.split("(")[0] for text in sent]

    await onceward.open()
    try:
        await store.write("CREATE TABLE boots (id text PRIMARY KEY)")
        connection = await store.connections.acquire()
        connection.add_query_logger(lambda query: sent.append(query.query))
        store.connections.release(connection)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            claim = 'BEGIN;SELECT "onceward".claim'
            assert await post("a") == (
                201,
                [claim, "INSERT INTO boots VALUES ", 'SELECT "onceward".save_record'],
            )
            find = store.sql["find_record"].split("(")[0]
            assert await post("a") == (201, [claim, find, "ROLLBACK"])
            assert await post("b") == (409, [claim, find, "ROLLBACK"])
    finally:
        await onceward.close()
