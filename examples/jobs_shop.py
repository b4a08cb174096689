"""A shop whose orders are packed by a job. Run: ``uvicorn examples.jobs_shop:app``."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Annotated
from uuid import uuid4

from fastapi import FastAPI, Header, HTTPException

from onceward import JobContext, Onceward
from onceward.fastapi import Tx, principal_from

with closing(sqlite3.connect("jobs_shop.db")) as database:
    database.execute("CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY, item TEXT)")
    database.execute("CREATE TABLE IF NOT EXISTS parcels (order_id TEXT, label TEXT)")

CUSTOMERS = {"token-1": "ada", "token-2": "bob"}


async def customer(x_token: Annotated[str, Header()]) -> str:
    """Sign in: your own dependency goes here."""
    if x_token not in CUSTOMERS:
        raise HTTPException(401, "unknown token")
    return CUSTOMERS[x_token]


onceward = Onceward("sqlite:///jobs_shop.db", principal=principal_from(customer))


@asynccontextmanager
async def _lifespan(_app: FastAPI) -> AsyncIterator[None]:
    """Run jobs as long as the app runs. ``stop`` waits for running jobs."""
    worker = onceward.worker()
    await worker.start()
    yield
    await worker.stop()


app = FastAPI(lifespan=_lifespan)
onceward.install(app)


@app.post("/orders", status_code=201)
@onceward.guard("orders.create")
async def order(item: str, tx: Tx) -> dict[str, str]:
    """Write the order and enqueue its job in one transaction."""
    new = {"id": str(uuid4()), "item": item}
    await tx.execute("INSERT INTO orders VALUES (:id, :item)", new)
    await onceward.enqueue("parcel.pack", {"order_id": new["id"]}, resource_id=new["id"])
    return new


@app.get("/parcels")
async def parcels() -> list[dict[str, str]]:
    """List the parcels."""
    return [dict(row) for row in await onceward.store.read("SELECT order_id, label FROM parcels")]


@onceward.jobs.handler("parcel.pack")
async def pack(job: JobContext) -> None:
    """Pack an order. The parcel and the completion of the job commit together."""
    label = await job.step("label", _request_label)
    await job.transaction.execute(
        "INSERT INTO parcels VALUES (:order_id, :label)", {**job.payload, "label": label}
    )


async def _request_label(key: str) -> str:
    """Stand-in for a request to a carrier, which recognizes retries by the key."""
    return f"label-{key[:8]}"
