"""``Onceward(error_format=…)``: every error of an app in the app's own shape."""

from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from onceward import SINGLE_TENANT, ErrorFormat, GuardConfig, Onceward, Policy, ServiceError
from onceward.guard.error_formats import ErrorInfo

KEY = {"Idempotency-Key": "key-1"}


def own(error: ErrorInfo) -> dict[str, Any]:
    return {"fault": {"code": error.code, "text": error.message, "id": error.request_id}}


async def test_every_error_of_a_fastapi_app_has_the_shape_of_the_app(tmp_path: Path) -> None:
    onceward = Onceward(
        f"sqlite:///{tmp_path}/own.db",
        tenants=SINGLE_TENANT,
        config=GuardConfig(sweep_every_seconds=None, error_format=own),
    )
    app = FastAPI()
    onceward.install(app)

    @app.post("/guarded")
    @onceward.guard(policy=Policy(name="another"))
    async def guarded() -> None:
        raise ServiceError(409, "order.closed", "closed")

    @app.post("/enveloped")
    @onceward.guard(policy=Policy(error_format=ErrorFormat.ENVELOPE))
    async def enveloped() -> None:
        """The policy's own format wins."""

    @app.get("/open")
    async def not_guarded() -> None:
        raise ServiceError(404, "order.unknown", "unknown")

    await onceward.open()
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
        without_key = await client.post("/guarded")
        first = await client.post("/guarded", headers=KEY)
        replayed = await client.post("/guarded", headers=KEY)
        open_route = await client.get("/open")
        assert (await client.post("/enveloped")).json()["error"] == "IDEMPOTENCY_KEY_REQUIRED"
        document = (await client.get("/openapi.json")).json()
    await onceward.close()
    assert without_key.json()["fault"]["code"] == "idempotency.key_required"
    assert without_key.headers["content-type"] == "application/json"
    assert (first.status_code, first.json()["fault"]["code"]) == (409, "order.closed")
    assert first.json()["fault"]["id"] == first.headers["x-request-id"]
    assert replayed.content == first.content
    assert replayed.headers["idempotency-replayed"] == "true"
    assert open_route.json()["fault"]["code"] == "order.unknown"
    content = document["paths"]["/guarded"]["post"]["responses"]["409"]["content"]
    assert content == {"application/json": {"schema": {"type": "object"}}}
