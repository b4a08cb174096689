"""The app in Flask: ``python -m packages.onceward.tests.support.frameworks.flask_app URL PORT``."""

import asyncio
import sys
import time
from typing import Any

from flask import Flask, request
from werkzeug.serving import make_server

from onceward import SINGLE_TENANT, Onceward, Policy, ServiceError, open_store
from onceward.flask import FlaskGuard
from packages.onceward.tests.support.frameworks.words import CREATE, LIMIT

app = Flask(__name__)
onceward = Onceward(
    sys.argv[1], tenants=SINGLE_TENANT, policy=Policy().replace(max_body_bytes=LIMIT)
)
guard = FlaskGuard(onceward, app)


@app.post("/orders")
@guard("orders.create")
def create() -> Any:
    option = request.headers.get("x-do", "")
    item = request.get_json()["item"]
    tx = guard.transaction
    if option == "sign-in":
        return "", 302, {"location": "/login"}
    tx.execute("INSERT INTO orders (item) VALUES (:item)", {"item": item})
    row = tx.fetch_one("SELECT count(*) AS n FROM orders")
    assert row is not None
    if option == "raise":
        raise RuntimeError("as asked")
    if option == "refuse":
        raise ServiceError(422, "order.refused", "as asked")
    if option == "fail":
        return {"oops": True}, 500
    if option == "see-other":
        return "", 303, {"location": "/orders/a"}
    if option == "slow":
        time.sleep(0.4)
    if option == "enqueue":
        guard.enqueue("order.made", {"item": item}, resource_id=item)
    return {"item": item, "n": row["n"]}, 201, {"location": f"/orders/{item}"}


@app.post("/numbered")
@guard("orders.number", policy=Policy(ordering="strict"))
def number() -> Any:
    item = request.get_json()["item"]
    if request.headers.get("x-do") == "slow":
        time.sleep(0.2)
    guard.transaction.execute("INSERT INTO orders (item) VALUES (:item)", {"item": item})
    return {"item": item}, 201


@app.get("/orders")
def count() -> Any:
    async def read() -> dict[str, int]:
        store = open_store(sys.argv[1])
        await store.open()
        found = {}
        for name, table in (
            ("orders", "orders"),
            ("records", "onceward_idempotency_records"),
            ("jobs", "onceward_jobs"),
        ):
            found[name] = (await store.read(f"SELECT count(*) AS n FROM {table}"))[0]["n"]
        await store.close()
        return found

    return asyncio.run(read())


async def _prepare() -> None:
    store = open_store(sys.argv[1])
    await store.open()
    await store.write(CREATE)
    await store.close()


if __name__ == "__main__":
    asyncio.run(_prepare())
    make_server("127.0.0.1", int(sys.argv[2]), app, threaded=True).serve_forever()
