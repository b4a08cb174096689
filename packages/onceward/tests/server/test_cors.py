"""``CORS_HEADERS`` with Starlette's CORS middleware around a guarded app."""

from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from onceward import CORS_HEADERS, Onceward, Principal
from onceward.frameworks.openapi import _ERROR_HEADERS, _LIMIT_HEADERS, _RESPONSE_HEADERS

ORIGIN = "https://app.example.com"
# A browser gives them to every app.
SAFE = {"cache-control", "content-language", "content-length", "content-type", "expires", "vary"}


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    onceward = Onceward(
        f"sqlite:///{tmp_path}/app.db", principal=lambda: Principal("acme", actor="ada")
    )

    @app.post("/orders", status_code=201)
    @onceward.guard()
    async def make(body: dict[str, str]) -> dict[str, str]:
        return body

    onceward.install(app)
    app.add_middleware(
        CORSMiddleware, allow_origins=[ORIGIN], allow_methods=["POST"], **CORS_HEADERS
    )
    transport = httpx.ASGITransport(app)
    await onceward.open()
    async with httpx.AsyncClient(
        transport=transport, base_url="http://test", headers={"Origin": ORIGIN}
    ) as made:
        yield made
    await onceward.close()


async def test_a_browser_may_send_every_header_that_the_guard_reads(
    client: httpx.AsyncClient,
) -> None:
    asked = {"Access-Control-Request-Method": "POST"}
    for name in CORS_HEADERS["allow_headers"]:
        response = await client.options(
            "/orders", headers={**asked, "Access-Control-Request-Headers": name.lower()}
        )
        assert response.status_code == 200, (name, response.text)
    response = await client.options(
        "/orders", headers={**asked, "Access-Control-Request-Headers": "x-other"}
    )
    assert response.status_code == 400


async def test_a_browser_may_read_every_header_of_a_guarded_response(
    client: httpx.AsyncClient,
) -> None:
    key = {"Idempotency-Key": str(uuid4())}
    first = await client.post("/orders", json={"item": "boots"}, headers=key)
    again = await client.post("/orders", json={"item": "boots"}, headers=key)
    other = await client.post("/orders", json={"item": "hats"}, headers=key)
    without = await client.post("/orders", json={"item": "hats"})
    responses = (first, again, other, without)
    assert [each.status_code for each in responses] == [201, 201, 409, 400]
    for response in responses:
        assert response.headers["access-control-allow-origin"] == ORIGIN
        exposed = response.headers["access-control-expose-headers"].lower().split(", ")
        sent = {name for name in response.headers if not name.startswith("access-control-")}
        assert sent <= SAFE | set(exposed)
    assert again.headers["idempotency-replayed"] == "true"


def test_every_documented_header_is_exposed() -> None:
    exposed = {name.lower() for name in CORS_HEADERS["expose_headers"]}
    documented = {*_RESPONSE_HEADERS, *_ERROR_HEADERS, *_LIMIT_HEADERS, "Retry-After", "Link"}
    assert {name.lower() for name in documented} <= exposed
