"""Tenants, their export and erasure, and the page about the system."""

import asyncio
import json

from packages.operator.tests.console.lab import ConsoleLab


async def test_tenants_are_listed_by_name_in_pages(lab: ConsoleLab) -> None:
    for number in range(60):
        assert (await lab.order(f"tenant-{number:02}")).status_code == 201
    async with lab.browser("ada", "viewer") as browser:
        first = await browser.get("tenants")
        assert "tenant-49" in first.text
        assert "tenant-50" not in first.text
        second = await browser.get("tenants?after=tenant-49")
        assert "tenant-59" in second.text
        assert "Next page" not in second.text
    async with lab.browser("tenant-07", "admin") as browser:
        assert (await browser.get("tenants")).status_code == 403
        assert (await browser.get("tenants/show?tenant=tenant-08")).status_code == 404
        assert (await browser.get("tenants/show?tenant=tenant-07")).status_code == 200


async def test_export_has_every_row_and_leaves_an_audit_event(lab: ConsoleLab) -> None:
    await lab.order("bob")
    await lab.order("zoe")
    async with lab.browser("ada", "admin") as browser:
        assert (await browser.post("tenants/export", tenant="bob")).status_code == 400
        response = await browser.post("tenants/export", tenant="bob", reason="asked for")
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert lines[0]["tenant"] == "bob"
    assert lines[-1]["complete"] is True
    name = f"{lab.onceward.store.table_names.prefix}idempotency_records"
    assert lines[-1]["rows"][name] == 1
    assert "zoe" not in response.text
    rows = await lab.onceward.store.read(
        lab.onceward.store.table_names.render(
            "SELECT tenant, actor, reason FROM onceward_audit_events WHERE reason IS NOT NULL"
        )
    )
    expected = {"tenant": "bob", "actor": "ada via console", "reason": "asked for"}
    assert [dict(row) for row in rows] == [expected]


async def test_erasure_needs_the_name_and_deletes_only_that_tenant(lab: ConsoleLab) -> None:
    for tenant in ("bob", "zoe"):
        await lab.order(tenant)
    counted = lab.onceward.store.table_names.render(
        "SELECT tenant FROM onceward_idempotency_records ORDER BY tenant"
    )
    async with lab.browser("ada", "admin") as browser:
        fields = {"tenant": "bob", "reason": "left"}
        for confirmed in ("", "zoe"):
            response = await browser.post("tenants/erase", confirmed=confirmed, **fields)
            assert response.status_code == 400
        assert len(await lab.onceward.store.read(counted)) == 2
        assert (await browser.post("tenants/erase", confirmed="bob", **fields)).status_code == 303
        async with asyncio.timeout(30):
            while [row["tenant"] for row in await lab.onceward.store.read(counted)] != ["zoe"]:
                await asyncio.sleep(0.02)
    async with lab.browser("zoe", "admin") as browser:
        response = await browser.post("tenants/erase", tenant="bob", confirmed="bob", reason="x")
        assert response.status_code == 404


async def test_erasure_ends_the_sessions_of_the_tenant(lab: ConsoleLab) -> None:
    await lab.order("bob")
    names = lab.onceward.store.table_names
    sessions = names.render("SELECT tenants FROM onceward_console_sessions")
    async with lab.browser("bob", "admin") as bob, lab.browser("zoe", "viewer") as zoe:
        fields = {"tenant": "bob", "confirmed": "bob", "reason": "left"}
        assert (await bob.post("tenants/erase", **fields)).status_code == 303
        async with asyncio.timeout(30):
            while len(await lab.onceward.store.read(sessions)) > 1:
                await asyncio.sleep(0.02)
        assert (await bob.client.get("/console/records")).status_code == 303
        assert (await zoe.client.get("/console/records")).status_code == 200


async def test_system_is_for_administrators_of_all_tenants(lab: ConsoleLab) -> None:
    async with lab.browser("ada", "admin") as browser:
        page = await browser.get("system")
        assert page.status_code == 200
        assert "Durability" in page.text
        assert "guard" in page.text
    for sub, role in (("ada", "operator"), ("bob", "admin")):
        async with lab.browser(sub, role) as browser:
            assert (await browser.get("system")).status_code == 403
            assert "System" not in (await browser.get("")).text
