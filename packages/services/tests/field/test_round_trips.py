"""How many statements a write of field sends to PostgreSQL, besides those of the guard."""

from typing import Any
from uuid import uuid4

import pytest

from onceward.stores.postgres.unit_of_work import PostgresTransaction
from packages.services.tests.conftest import Serve


async def test_writes_take_one_or_two_round_trips(
    serve: Serve, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []

    def counted(method: Any) -> Any:
        async def run(self: Any, sql: str, *arguments: Any) -> Any:
            sent.append(sql)
            return await method(self, sql, *arguments)

        return run

    for name in ("execute", "fetch_one", "fetch_all"):
        monkeypatch.setattr(PostgresTransaction, name, counted(getattr(PostgresTransaction, name)))
    counts: list[tuple[str, int, int]] = []
    async with serve(postgres_url) as client:

        async def send(method: str, path: str, body: Any = None) -> Any:
            sent.clear()
            headers = {"idempotency-key": str(uuid4())}
            response = await client.request(method, f"/api/v1/{path}", json=body, headers=headers)
            counts.append((method, response.status_code, len(sent)))
            return response.json() if response.content else None

        made = await send("POST", "activities", {"title": "Visit"})
        await send("POST", "expenses", {"activity_id": made["id"]})
        await send("POST", "expenses", {"activity_id": str(uuid4())})
        await send("PATCH", f"activities/{made['id']}", {"title": "Call"})
        await send("DELETE", f"activities/{made['id']}")
    assert counts == [
        ("POST", 201, 1),
        ("POST", 201, 1),
        ("POST", 404, 1),
        ("PATCH", 200, 2),
        ("DELETE", 204, 2),
    ]
