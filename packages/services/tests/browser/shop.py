"""An app on the database of the server, with requests and jobs in every state.

Its tenants, keys, bodies and errors contain what an attacker would store.
"""

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
from fastapi import Body, FastAPI, HTTPException

from onceward import GuardConfig, JobContext, NonRetryableError, Onceward
from onceward.sign_in.jwt_auth import JwtIdentify, mint_token
from packages.services.tests.browser.services_rows import (
    DELIVERY,
    REVIEWS,
    WEBHOOK,
    add_services_rows,
)

__all__ = ["ATTACK", "ENDPOINT", "HOSTILE", "SECRET", "Shop", "token"]

SECRET = "a secret of tests, long enough for HS256"
ENDPOINT = "POST /charges/{customer}"
# Printable, for names; and with control characters and a change of direction, for contents.
ATTACK = (
    "\"'><script>attacked()</script><img src=x onerror=attacked()><a href=javascript:attacked()>"
)
HOSTILE = f"{ATTACK}{{{{7*7}}}} \x1b[31m\x07 \u202eevil\u202c \u200b"


def token(sub: str, *roles: str) -> str:
    return mint_token(
        SECRET, sub=sub, roles=roles, lifetime=timedelta(hours=1), now=datetime.now(UTC)
    )


@dataclass
class Shop:
    """``charge`` sends a guarded request; ``ids`` are those of what ``fill`` has made."""

    url: str
    ids: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.onceward: Onceward[Any] = Onceward(
            self.url,
            identify=JwtIdentify(secret=SECRET),
            config=GuardConfig(request_log_seconds=3600),
        )
        self.app = FastAPI()
        self.started, self.ended = asyncio.Event(), asyncio.Event()
        self.onceward.install(self.app)

        @self.app.post("/charges/{customer}", status_code=201)
        @self.onceward.guard()
        async def charge(customer: str, charged: Any = Body()) -> Any:  # noqa: B008 - FastAPI
            if charged.get("amount") == "0.00":
                raise HTTPException(403, "nothing to charge")
            for job_type in charged.get("jobs", ()):
                payload = {"customer": customer, "note": charged.get("note")}
                delay = 3600.0 if job_type == "reminder" else 0.0
                await self.onceward.enqueue(
                    job_type, payload, resource_id=customer, delay_seconds=delay
                )
            return {"customer": customer, **charged}

        @self.onceward.jobs.handler("receipt", queue="receipts")
        async def send_receipt(job: JobContext) -> dict[str, str]:
            return {"sent to": job.payload["customer"]}

        @self.onceward.jobs.handler("payout", queue="payouts")
        async def pay(job: JobContext) -> None:
            raise NonRetryableError(job.payload["note"] or "the bank refused the account")

        @self.onceward.jobs.handler("report", queue="reports")
        async def report(_job: JobContext) -> None:
            self.started.set()
            await self.ended.wait()

        @self.onceward.jobs.handler("reminder", queue="reminders")
        async def remind(_job: JobContext) -> None: ...

    async def open(self) -> None:
        await self.onceward.open()
        self.worker = self.onceward.worker(lease_seconds=3600, shutdown_seconds=5)
        await self.worker.start()

    async def close(self) -> None:
        self.ended.set()
        await self.worker.stop()
        await self.onceward.close()

    async def charge(
        self, sub: str, customer: str, *, key: str | None = None, trace: str = "", **body: Any
    ) -> httpx.Response:
        headers = {
            "authorization": f"Bearer {token(sub)}",
            "idempotency-key": key or str(uuid.uuid4()),
        }
        if trace:
            headers["x-correlation-id"] = trace
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop.test") as client:
            return await client.post(f"/charges/{customer}", json=body, headers=headers)

    async def fill(self) -> None:
        """Make records, a replay, a mismatch, jobs in all states, and what attackers store."""
        key = "3f0c9a51-77c5-4b1e-9c50-1c6f3f5d9a10"
        mine: dict[str, Any] = {"key": key, "trace": "order-4711"}
        first = await self.charge("bob", "bob", amount="12.50", jobs=["receipt"], **mine)
        again = await self.charge("bob", "bob", amount="12.50", jobs=["receipt"], **mine)
        other = await self.charge("bob", "bob", amount="25.00", **mine)
        assert [r.status_code for r in (first, again, other)] == [201, 201, 409], other.text
        self.ids |= {"endpoint": ENDPOINT, "key": key, "first": first.headers["x-request-id"]}
        self.ids |= {"replay": again.headers["x-request-id"]}
        self.ids |= {"mismatch": other.headers["x-request-id"]}
        # A retry whose client sent no correlation id, and two refusals.
        await self.charge("bob", "bob", key=key, amount="12.50", jobs=["receipt"])
        invalid = await self.charge("bob", "bob", key="two words", amount="12.50")
        refused = await self.charge("bob", "bob", amount="0.00")
        assert [r.status_code for r in (invalid, refused)] == [400, 403], refused.text
        self.ids |= {"invalid": invalid.headers["x-request-id"]}
        self.ids |= {"refused": refused.headers["x-request-id"]}
        for customer in ("carol", "dan", "erin"):
            await self.charge("bob", customer, amount="8.00", jobs=["payout", "reminder"])
        await self.charge("erin", "erin", amount="3.20", jobs=["report"])
        attack = await self.charge(
            ATTACK, "mallory", note=HOSTILE, jobs=["payout", "reminder", "receipt"]
        )
        large = await self.charge(ATTACK, "large", note="<b>" * 330_000)
        assert (attack.status_code, large.status_code) == (201, 201), attack.text[:300]
        self.ids |= {"attack": attack.headers["x-request-id"]}
        self.ids |= {"attack trace": attack.headers["x-correlation-id"]}
        self.ids |= {"large": large.headers["x-request-id"]}
        await self.until(lambda rows: rows >= 4, "SELECT job_id FROM onceward_dead_letters")
        # The log of requests is written every second.
        await self.until(lambda rows: rows >= 5, "SELECT at FROM onceward_request_log")
        await self.started.wait()
        self.ids |= {"job": await self.dead_job("carol")}
        await add_services_rows(self.onceward.store, HOSTILE)
        self.ids |= {"webhook": WEBHOOK, "delivery": DELIVERY, "review": REVIEWS["wanda"]}

    async def dead_job(self, customer: str) -> str:
        sql = "SELECT job_id FROM onceward_dead_letters WHERE resource_id = :customer"
        rows = await self.onceward.store.read(sql, {"customer": customer})
        return str(rows[0]["job_id"])

    async def until(self, enough: Callable[[int], bool], sql: str) -> None:
        async with asyncio.timeout(60):
            store = self.onceward.store
            while not enough(len(await store.read(store.table_names.render(sql)))):
                await asyncio.sleep(0.05)
