"""The shop of the README. Run: ``uvicorn examples.shop:app``."""

import sqlite3
from contextlib import closing

from fastapi import FastAPI

from holdfast import SINGLE_TENANT, Holdfast

with closing(sqlite3.connect("shop.db")) as database:
    database.execute("CREATE TABLE IF NOT EXISTS orders (item TEXT NOT NULL)")

app = FastAPI()
holdfast = Holdfast("sqlite:///shop.db", tenants=SINGLE_TENANT)
holdfast.install(app)


@app.post("/orders", status_code=201)
@holdfast.guard()
async def order(item: str) -> dict[str, str]:
    """Take an order, once."""
    await holdfast.transaction.execute("INSERT INTO orders VALUES (:item)", {"item": item})
    return {"ordered": item}
