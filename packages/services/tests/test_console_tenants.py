"""A tenant-bound operator sees and changes nothing of another tenant, by any URL of the console."""

import itertools
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
from fastapi import FastAPI

from onceward import Onceward
from onceward.sign_in.jwt_auth import mint_token
from onceward.stores.tenant_tables import covered_tables
from onceward_operator.console.app import ConsoleApp
from onceward_operator.console.page import Page
from packages.services.tests.browser.services_rows import (
    DELIVERY,
    REVIEWS,
    WEBHOOK,
    add_services_rows,
)
from packages.services.tests.conftest import SECRET, Serve, signed_in
from packages.services.tests.support.operator_browser import OperatorBrowser

MARK = "a-text-of-bob"
ENDPOINT = "POST /api/v1/contacts"
KEY = "7b0f3d52-91ab-4b3e-b3aa-000000000001"
TENANTS = ("bob", "acme", "wanda")


def pages_of(app: FastAPI) -> list[Page]:
    """Return all pages and actions of the console of an app."""
    mounted = [getattr(route, "app", None) for route in app.routes]
    (console,) = (each for each in mounted if isinstance(each, ConsoleApp))
    return [page for _, page in console._pages]


async def fill(client: httpx.AsyncClient, onceward: Onceward[Any]) -> dict[str, list[str]]:
    """Make a record, a replay, a mismatch and jobs of bob; return ids by name."""
    headers = {**signed_in("bob"), "Idempotency-Key": KEY, "X-Correlation-ID": "tap-of-bob"}
    contact = {"name": MARK, "email": "bob@example.org"}
    sent = [
        await client.post("/api/v1/contacts", json=body, headers=headers)
        for body in (contact, contact, contact | {"name": "other"})
    ]
    assert [each.status_code for each in sent] == [201, 201, 409], sent[0].text
    route = {"start": {"lat": 55.95, "lon": -3.19}, "minutes": 90, "interests": ["history"]}
    for key in ("7b0f3d52-91ab-4b3e-b3aa-000000000002", "7b0f3d52-91ab-4b3e-b3aa-000000000003"):
        accepted = await client.post(
            "/api/v1/routes", json=route, headers=headers | {"Idempotency-Key": key}
        )
        assert accepted.status_code == 202, accepted.text
    jobs = [
        str(row["id"])
        for row in await onceward.store.read(
            onceward.store.table_names.render("SELECT id FROM onceward_jobs")
        )
    ]
    await add_services_rows(onceward.store, MARK)
    await onceward.runtime.request_log.stop()  # writes what was noted
    requests = [each.headers["x-request-id"] for each in sent]
    return {
        "id": [*jobs, WEBHOOK, REVIEWS["wanda"]],
        "delivery_id": [DELIVERY],
        "request_id": requests,
        "correlation_id": ["tap-of-bob"],
        "q": [KEY, "tap-of-bob", *requests, *jobs],
    }


def paths_of(page: Page, ids: dict[str, list[str]]) -> Iterator[str]:
    names = [name for name in ids if f"{{{name}}}" in page.path]
    for chosen in itertools.product(*(ids[name] for name in names)):
        yield page.path.format(**dict(zip(names, chosen, strict=True)))


def queries(ids: dict[str, list[str]]) -> Iterator[dict[str, str]]:
    for tenant in ("", *TENANTS, "eve"):
        about = {"tenant": tenant} if tenant else {}
        yield about
        yield about | {"endpoint": ENDPOINT, "key": KEY}
        yield about | {"state": "dead"}
    for wanted in ids["q"]:
        yield {"q": wanted}
        yield {"q": wanted, "tenant": "bob"}


async def rows_of_others(onceward: Onceward[Any]) -> list[str]:
    found = []
    for table in await covered_tables(onceward.store, onceward.runtime.tenant_tables):
        rows = await onceward.store.read(f"SELECT * FROM {table.name}")
        found += [str(dict(row)) for row in rows if row.get(table.column) in TENANTS]
    return sorted(found)


async def test_nothing_of_another_tenant_by_any_url(serve: Serve, database_url: str) -> None:
    apps: list[FastAPI] = []
    async with serve(
        database_url,
        prepare=apps.append,
        console_enabled=True,
        console_operators="boss",
        audit_seal_seconds=0,  # seals would change the rows
    ) as client:
        pages, onceward = pages_of(apps[0]), apps[0].state.onceward
        ids = await fill(client, onceward)
        before = await rows_of_others(onceward)
        assert len(before) > 8
        now = datetime.now(UTC)
        boss = await OperatorBrowser(client).sign_in("boss", "admin", now=now)
        # What is hidden from others is there.
        assert MARK in (await boss.get(f"find?q={ids['request_id'][0]}")).text
        # An admin may open all that a viewer may. The roles do not depend on the database.
        roles = ("viewer", "admin") if database_url.startswith("sqlite") else ("admin",)
        for role in roles:
            eve = await OperatorBrowser(client).sign_in("eve", role, now=now)
            for page in pages:
                for path in paths_of(page, ids):
                    await check(eve, page, path, ids)
        assert await rows_of_others(onceward) == before


async def check(eve: OperatorBrowser, page: Page, path: str, ids: dict[str, list[str]]) -> None:
    if page.method == "POST":
        for tenant in (*TENANTS, "eve", ""):
            form = {"tenant": tenant, "endpoint": ENDPOINT, "key": KEY, "confirmed": tenant}
            form |= {"queue": "routes", "decision": "reject", "reason": "mine"}
            if path == "tenants/erase" and tenant == "eve":
                continue  # which ends the session of eve
            seen(await eve.post(path, **form), path)
        return
    for query in queries(ids):
        seen(await eve.get(f"{path}?{urlencode(query)}"), f"{path}?{urlencode(query)}")


def seen(page: httpx.Response, path: str) -> None:
    assert page.status_code in {200, 400, 403, 404}, (path, page.status_code)
    # What eve has sent may be shown to her.
    shown = page.text
    for hidden in (MARK, "the response was 500", "TZ_JUMP", "bob@example.org"):
        assert hidden not in shown, path


async def test_user_named_like_an_organization_sees_nothing_of_it(
    serve: Serve, tmp_path: Path
) -> None:
    now = datetime.now(UTC)
    about: dict[str, Any] = {"roles": ["admin"], "lifetime": timedelta(hours=1), "now": now}
    async with serve(f"sqlite:///{tmp_path}/s.db", console_enabled=True) as client:
        token = mint_token(SECRET, sub="boss", org="victim", **about)
        headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": KEY}
        made = await client.post("/v1/projects", json={"name": MARK}, headers=headers)
        assert made.status_code == 201, made.text
        ours = await OperatorBrowser(client).sign_in("boss", "admin", org="victim", now=now)
        assert KEY in (await ours.get("records?tenant=org:victim")).text
        user = await OperatorBrowser(client).sign_in("victim", "admin", org="tiny", now=now)
        assert KEY not in (await user.get("records?tenant=victim")).text
        assert (await user.get("records?tenant=org:victim")).status_code in {403, 404}
        for name in ("org:victim", "onceward", "onceward:operator"):
            token = mint_token(SECRET, sub=name, **about)
            refused = await client.post("/console/sign-in", data={"token": token})
            assert refused.status_code == 403, (name, refused.status_code)
