"""The shop of the README. Run: ``uvicorn examples.shop:app``."""

import sqlite3
from contextlib import closing
from typing import Annotated

from fastapi import FastAPI, Header, HTTPException

from onceward import Onceward
from onceward.fastapi import principal_from

with closing(sqlite3.connect("shop.db")) as database:
    database.execute("CREATE TABLE IF NOT EXISTS orders (item TEXT NOT NULL)")

CUSTOMERS = {"token-1": "ada", "token-2": "bob"}


async def customer(x_token: Annotated[str, Header()]) -> str:
    """Sign in: your own dependency goes here."""
    if x_token not in CUSTOMERS:
        raise HTTPException(401, "unknown token")
    return CUSTOMERS[x_token]


app = FastAPI()
onceward = Onceward("sqlite:///shop.db", principal=principal_from(customer))
onceward.install(app)


@app.post("/orders", status_code=201)
@onceward.guard()
async def order(item: str) -> dict[str, str]:
    """Take an order, once."""
    await onceward.transaction.execute("INSERT INTO orders VALUES (:item)", {"item": item})
    return {"ordered": item}
