"""The apps with a batch endpoint that are under load: one insert, and the services."""

import os
import uuid
from typing import Any

from fastapi import FastAPI

from onceward import SINGLE_TENANT, Onceward, open_store
from onceward.batch.options import BatchOptions
from onceward_lab.bench.apps import CONNECTIONS, INSERT, Order

__all__ = ["batching", "batching_by_fastapi", "services"]


def batching(*, direct: bool = True) -> FastAPI:
    """One insert; its handler is called directly, in single requests and in batches."""
    url = os.environ["BENCH_DATABASE"]
    options: dict[str, Any] = {}
    if url.startswith("postgresql"):
        options = {"min_connections": CONNECTIONS, "max_connections": CONNECTIONS}
    onceward = Onceward(open_store(url, **options), tenants=SINGLE_TENANT)
    app = FastAPI()
    onceward.install(app, batch=BatchOptions(direct=None if direct else False), direct=direct)

    @app.post("/orders", status_code=201)
    @onceward.guard()
    async def create(order: Order) -> dict[str, str]:
        new = str(uuid.uuid4())
        values = {"id": new, "item": order.item, "quantity": order.quantity}
        await onceward.transaction.execute(INSERT, values)
        return {"id": new, "item": order.item}

    return app


def batching_by_fastapi() -> FastAPI:
    """Return the same app without the direct caller."""
    return batching(direct=False)


def services() -> FastAPI:
    """Return the services, without rate limits and jobs."""
    from onceward_services.app import create_app
    from onceward_services.settings import load_settings

    settings = load_settings(
        database_url=os.environ["BENCH_DATABASE"], field_rate_limit="0", run_jobs=False
    )
    return create_app(settings, only=("field",))
