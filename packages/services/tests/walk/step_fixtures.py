"""Devices that report steps, App Check tokens, and a worker that settles days."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, time, timedelta
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import httpx
import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, generate_private_key
from jwt.algorithms import RSAAlgorithm

from onceward.ports import FaultPoints, Row
from onceward.sign_in.jwt_auth import mint_token
from packages.services.tests.conftest import SECRET

from .fixtures import Game, OpenGame, new_key, ok, text

AUDIENCE = "projects/42"
ISSUER = "https://firebaseappcheck.googleapis.com/42"
KID = "first"
PHONE = "com.apple.health"
WATCH = "com.example.watch"
TODAY = date(2026, 5, 22)
PARTY: dict[str, Any] = {"app_check_audience": AUDIENCE, "app_check_issuer": ISSUER}


@cache
def signing_key(name: str) -> RSAPrivateKey:
    """Return an RSA key by name, generated once."""
    assert name
    return generate_private_key(65_537, 2048)


def jwks(*names: str) -> str:
    keys = []
    for name in names or (KID,):
        jwk = RSAAlgorithm.to_jwk(signing_key(name).public_key(), as_dict=True)
        keys.append(jwk | {"kid": name, "use": "sig", "alg": "RS256"})
    return json.dumps({"keys": keys})


def days_ago(days: int) -> date:
    return TODAY - timedelta(days=days)


class Stepping:
    """A walk server whose walkers report steps."""

    def __init__(self, game: Game) -> None:
        self.game = game
        self.clock = game.clock
        self.client = game.client

    # -- sending -----------------------------------------------------------------------------------

    def claims(self, **changes: Any) -> dict[str, Any]:
        now = int(self.clock.now().timestamp())
        claims = {
            "iss": ISSUER,
            "aud": ["projects/other", AUDIENCE],
            "sub": "1:42:android:1",
            "jti": str(uuid4()),
            "iat": now,
            "exp": now + 3600,
        }
        return {name: value for name, value in (claims | changes).items() if value is not None}

    def token(self, **changes: Any) -> str:
        headers = {"kid": KID}
        return jwt.encode(
            self.claims(**changes), signing_key(KID), algorithm="RS256", headers=headers
        )

    def signed_in(self, walker: str, *roles: str) -> dict[str, str]:
        token = mint_token(
            SECRET, sub=walker, roles=roles, lifetime=timedelta(hours=1), now=self.clock.now()
        )
        return {"Authorization": f"Bearer {token}"}

    def body(
        self,
        day: date = TODAY,
        count: Any = 3000,
        *,
        key: str | None = None,
        hours: tuple[float, float] = (6, 11),
        **fields: Any,
    ) -> dict[str, Any]:
        midnight = datetime.combine(day, time(), UTC)
        start, end = (midnight + timedelta(hours=hour) for hour in hours)
        body = {
            "day": day.isoformat(),
            "count": count,
            "source": "HealthKit",
            "tz": "UTC",
            "sampleSpan": {"start": text(start), "end": text(end)},
            "sourceBundleId": PHONE,
            "idempotencyKey": key or new_key(),
            "clientSubmittedAt": text(self.clock.now()),
        }
        return {name: value for name, value in (body | fields).items() if value is not None}

    async def send(
        self, body: Mapping[str, Any], *, walker: str = "ada", token: str | None = "fresh"
    ) -> httpx.Response:
        """Send a report; the token goes into the header, None leaves it out."""
        headers = self.signed_in(walker)
        if token is not None:
            headers["X-Firebase-AppCheck"] = self.token() if token == "fresh" else token
        return await self.client.post("/step/ingest", json=body, headers=headers)

    async def report(
        self, day: date = TODAY, count: Any = 3000, *, walker: str = "ada", **fields: Any
    ) -> httpx.Response:
        return await self.send(self.body(day, count, **fields), walker=walker)

    async def walk(self, day: date = TODAY, count: int = 3000, **fields: Any) -> Any:
        """Report steps and check that they are accepted; returns the response."""
        return ok(await self.report(day, count, **fields))

    async def resolve(
        self, review_id: str, decision: str, *, key: str | None = None, **fields: Any
    ) -> httpx.Response:
        headers = self.signed_in("boss", "admin") | {"Idempotency-Key": key or new_key()}
        path = f"/admin/review-queue/{review_id}/resolve"
        return await self.client.post(path, json={"decision": decision} | fields, headers=headers)

    # -- working -----------------------------------------------------------------------------------

    async def work(
        self,
        *,
        faults: FaultPoints | None = None,
        seconds: float = 30,
        lease_seconds: float = 30,
        until: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        """Run a worker until no job of walk is due and ``until`` holds."""
        onceward = self.game.onceward
        worker = onceward.worker(queues=["walk"], faults=faults, lease_seconds=lease_seconds)
        await worker.start()
        pause_seconds = 0.01
        try:
            async with asyncio.timeout(seconds):
                while not (
                    await self.is_idle()
                    and worker.running == 0
                    and (until is None or await until())
                ):
                    await asyncio.sleep(pause_seconds)
                    # A lease takes a second to expire, so poll slowly.
                    pause_seconds = min(pause_seconds * 1.5, 0.1)
        finally:
            await worker.stop()

    async def is_idle(self) -> bool:
        due_in = await self.game.onceward.runtime.job_store.due_in(["walk"])
        # A leased job is due when its lease ends, after at least a second.
        return due_in is None or due_in > 60

    # -- looking -----------------------------------------------------------------------------------

    async def log(self, walker: str = "ada", query: str = "") -> Any:
        response = await self.client.get(f"/step/log{query}", headers=self.signed_in(walker))
        return ok(response)

    async def days(self, walker: str = "ada") -> dict[str, Any]:
        return {item["day"]: item for item in (await self.log(walker))["items"]}

    async def day(self, day: date = TODAY, walker: str = "ada") -> Any:
        return (await self.days(walker))[day.isoformat()]

    async def reviews(self, query: str = "") -> list[Any]:
        headers = self.signed_in("boss", "admin")
        page = ok(await self.client.get(f"/admin/review-queue{query}", headers=headers))
        return list(page["items"])

    async def attestations(self, walker: str = "ada") -> list[Row]:
        return await self.game.rows(
            "SELECT verdict, code, anti_cheat, token_id, day, summary, created_at"
            " FROM attestation_logs WHERE tenant = :tenant ORDER BY id",
            tenant=walker,
        )

    async def verdicts(self, walker: str = "ada") -> list[str]:
        return sorted(row["verdict"] for row in await self.attestations(walker))

    async def streak(self, walker: str = "ada") -> Row:
        rows = await self.game.rows(
            "SELECT current_length_days, last_attested_date, bonus_tier, decay_at,"
            " total_lifetime_steps FROM streak_states WHERE tenant = :tenant",
            tenant=walker,
        )
        return rows[0]

    async def energy(self, walker: str = "ada") -> int:
        return await self.game.balance_is_the_sum(walker)

    async def event_types(self, walker: str = "ada") -> list[str]:
        return [event["type"] for event in await self.game.device(walker).events()]


@asynccontextmanager
async def stepping(open_game: OpenGame, **settings: Any) -> AsyncIterator[Stepping]:
    """Open a server with test keys for App Check that settles days at once."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "jwks.json"
        path.write_text(jwks())
        usual = PARTY | {
            "app_check_jwks_file": path,
            "step_reconcile_delay_seconds": 0,
            "step_ingest_rate_limit": "10000/minute",
            "step_source_bundles": f"{PHONE},{WATCH}",
        }
        async with open_game(**(usual | settings)) as game:
            yield Stepping(game)
