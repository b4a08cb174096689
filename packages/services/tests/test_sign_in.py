"""Sign-in of all services: issuers, audiences, overlapping secrets, revoked tokens."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from onceward.sign_in.jwt_auth import mint_token
from onceward_services.app import create_app
from onceward_services.settings import load_settings

from .conftest import SECRET, Serve

READS = ("/api/v1/routes/x", "/tree/state", "/api/v1/contacts", "/v1/projects")
WRITES = ("/api/v1/routes", "/quest/start", "/api/v1/contacts", "/v1/projects")


def signed(secret: str = SECRET, **claims: Any) -> dict[str, str]:
    lifetime, now = timedelta(hours=1), datetime.now(UTC)
    token = mint_token(secret, sub="ada", org="acme", lifetime=lifetime, now=now, **claims)
    return {"Authorization": f"Bearer {token}"}


async def test_every_service_refuses_tokens_of_other_issuers_and_audiences(
    serve: Serve, sqlite_url: str
) -> None:
    party = {"jwt_issuer": "https://a,https://b", "jwt_audience": "shop,till"}
    async with serve(sqlite_url, **party) as client:
        for issuer, audience in (("https://a", "shop"), ("https://b", ["x", "till"])):
            headers = signed(iss=issuer, aud=audience)
            for path in READS:
                assert (await client.get(path, headers=headers)).status_code != 401, path
            for path in WRITES:
                response = await client.post(path, headers=headers, json={})
                assert response.status_code != 401, path
        for refused in (
            {},
            {"iss": "https://a"},
            {"aud": "shop"},
            {"iss": "https://c", "aud": "shop"},
            {"iss": "https://a", "aud": "other"},
        ):
            headers = signed(**refused)
            for path in READS:
                assert (await client.get(path, headers=headers)).status_code == 401, path
            for path in WRITES:
                response = await client.post(path, headers=headers, json={})
                assert response.status_code == 401, path


async def test_tokens_of_both_secrets_are_accepted_while_one_replaces_the_other(
    sqlite_url: str, tmp_path: Path
) -> None:
    new, old, other = "n" * 32, "o" * 32, "x" * 32
    settings = load_settings(database_url=sqlite_url, jwt_secret=f"{new},{old}", home=tmp_path)
    statuses = await statuses_of(create_app(settings), *(signed(one) for one in (new, old, other)))
    assert statuses == [200, 200, 401]


async def test_an_app_can_refuse_revoked_tokens(sqlite_url: str) -> None:
    settings = load_settings(database_url=sqlite_url, jwt_secret=SECRET)
    app = create_app(settings, is_revoked={"stolen"}.__contains__)
    headers = [signed(jti=name) for name in ("mine", "stolen")]
    assert await statuses_of(app, *headers, signed()) == [200, 401, 401]


async def statuses_of(app: Any, *signatures: dict[str, str]) -> list[int]:
    await app.state.onceward.open()
    transport = httpx.ASGITransport(app=app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://onceward") as client:
            return [
                (await client.get("/api/v1/contacts", headers=headers)).status_code
                for headers in signatures
            ]
    finally:
        await app.state.onceward.close()


@pytest.mark.parametrize(("environment", "status"), [("production", 503), ("staging", 401)])
async def test_production_accepts_no_app_check_token_of_the_development_key(
    serve: Serve, sqlite_url: str, tmp_path: Path, environment: str, status: int
) -> None:
    home = tmp_path / "home"
    async with serve(sqlite_url, environment=environment, home=home) as client:
        response = await client.post(
            "/step/ingest",
            json={
                "day": "2026-01-01",
                "count": 10,
                "source": "HealthKit",
                "tz": "UTC",
                "sampleSpan": {"start": "2026-01-01T08:00:00Z", "end": "2026-01-01T09:00:00Z"},
                "sourceBundleId": "com.apple.health",
                "idempotencyKey": "0b3f8a3c-52f0-4a52-a7a4-d06fd9e3f6aa",
                "clientSubmittedAt": "2026-01-01T09:00:00Z",
            },
            headers={"X-Firebase-AppCheck": "a.b.c"},
        )
    assert response.status_code == status, response.text
    assert (home / "app-check-key.json").exists() == (environment == "staging")
