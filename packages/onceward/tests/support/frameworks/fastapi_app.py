"""The test app in FastAPI. Run as a module with the arguments URL and PORT."""

import asyncio
import sys
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, RedirectResponse

from onceward import SINGLE_TENANT, Onceward, Policy, ServiceError
from onceward.server.starlette import Tx
from packages.onceward.tests.support.frameworks.words import CREATE, LIMIT

onceward = Onceward(
    sys.argv[1], tenants=SINGLE_TENANT, policy=Policy().replace(max_body_bytes=LIMIT)
)
app = FastAPI()


@app.post("/orders")
@onceward.guard("orders.create")
async def create(request: Request, tx: Tx) -> Any:
    option = request.headers.get("x-do", "")
    item = (await request.json())["item"]
    if option == "sign-in":
        return RedirectResponse("/login", 302)
    await tx.execute("INSERT INTO orders (item) VALUES (:item)", {"item": item})
    row = await tx.fetch_one("SELECT count(*) AS n FROM orders")
    assert row is not None
    if option == "raise":
        raise RuntimeError("as asked")
    if option == "refuse":
        raise ServiceError(422, "order.refused", "as asked")
    if option == "fail":
        return JSONResponse({"oops": True}, 500)
    if option == "see-other":
        return RedirectResponse("/orders/a", 303)
    if option == "slow":
        await asyncio.sleep(0.4)
    if option == "enqueue":
        await onceward.enqueue("order.made", {"item": item}, resource_id=item)
    return JSONResponse({"item": item, "n": row["n"]}, 201, headers={"location": f"/orders/{item}"})


@app.post("/numbered", status_code=201)
@onceward.guard("orders.number", policy=Policy(ordering="strict"))
async def number(request: Request, tx: Tx) -> dict[str, str]:
    item = (await request.json())["item"]
    if request.headers.get("x-do") == "slow":
        await asyncio.sleep(0.2)
    await tx.execute("INSERT INTO orders (item) VALUES (:item)", {"item": item})
    return {"item": item}


@app.get("/orders")
async def count() -> dict[str, int]:
    orders = await onceward.store.read("SELECT count(*) AS n FROM orders")
    records = await onceward.store.read("SELECT count(*) AS n FROM onceward_idempotency_records")
    jobs = await onceward.store.read("SELECT count(*) AS n FROM onceward_jobs")
    return {"orders": orders[0]["n"], "records": records[0]["n"], "jobs": jobs[0]["n"]}


onceward.install(app)


async def _prepare() -> None:
    await onceward.store.open()
    await onceward.store.write(CREATE)
    await onceward.store.close()


if __name__ == "__main__":
    asyncio.run(_prepare())
    uvicorn.run(app, port=int(sys.argv[2]), log_level="critical")
