"""A shop with a console that has a page of its own. Run: ``uvicorn examples.console_shop:app``."""

import os
import secrets
import sqlite3
from contextlib import closing

from fastapi import FastAPI

from onceward import Onceward
from onceward.fastapi import Caller
from onceward.sign_in.jwt_auth import JwtIdentify
from onceward_operator.console import Page, PageRequest, Shown, TokenAccess, console

with closing(sqlite3.connect("shop.db")) as database:
    database.execute(
        "CREATE TABLE IF NOT EXISTS parcels (tenant TEXT NOT NULL, item TEXT NOT NULL)"
    )

SECRET = os.environ.get("SHOP_JWT_SECRET") or secrets.token_urlsafe(48)  # of this process only
identify = JwtIdentify(secret=SECRET)
app = FastAPI()
onceward = Onceward("sqlite:///shop.db", identify=identify)
onceward.install(app)


@app.post("/parcels", status_code=201)
@onceward.guard()
async def send(item: str, caller: Caller) -> dict[str, str]:
    """Send a parcel, once."""
    parcel = {"tenant": caller.tenant, "item": item}
    await onceward.transaction.execute("INSERT INTO parcels VALUES (:tenant, :item)", parcel)
    return {"sent": item}


async def parcels(request: PageRequest) -> Shown:
    """Show the parcels of the tenant that is looked at; without one, those of all."""
    rows = await request.store.read(
        "SELECT tenant, item FROM parcels WHERE :all OR tenant = :tenant LIMIT 50",
        {"all": request.is_of_all_tenants, "tenant": str(request.tenant)},
    )
    return Shown("parcels.html", {"parcels": rows})


app.mount(
    "/console",
    console(
        onceward,
        access=TokenAccess(identify, operators={"ada"}),
        pages=[Page("parcels", parcels, title="Parcels", group="Shop", templates="examples")],
    ),
)
