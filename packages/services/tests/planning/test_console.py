"""Webhooks in the console: shown by organization, sent again with an audit event."""

import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from html import unescape

import pytest

from packages.services.tests.support.operator_browser import OperatorBrowser, links

from .fixtures import NOWHERE, OpenPlanning
from .test_webhooks import Hooked, hooked


@pytest.fixture
async def hook(open_planning: OpenPlanning) -> AsyncIterator[Hooked]:
    async with hooked(open_planning, console_enabled=True, console_operators="boss") as opened:
        yield opened


async def signed_in(hook: Hooked, sub: str, *roles: str, org: str | None = None) -> OperatorBrowser:
    browser = OperatorBrowser(hook.planning.client)
    return await browser.sign_in(sub, *roles, org=org, now=datetime.now(UTC))


async def test_delivery_is_found_with_its_attempts_and_sent_again(hook: Hooked) -> None:
    await hook.register()
    await hook.assign("bob")
    await hook.work()
    boss = await signed_in(hook, "boss", "admin")
    (path,) = links(await boss.get("webhooks"), "webhooks/")
    (delivery,) = links(await boss.get(path), "webhooks/[^?]*/deliveries/")
    page = await boss.get(delivery)
    assert "the response was 204" in page.text or "the response was 200" in page.text
    assert "<pre" in page.text
    sent = len(hook.receiver.received)
    again = await boss.post(
        f"{delivery.partition('?')[0]}/resend", tenant="org:acme", reason="the receiver lost it"
    )
    assert again.status_code == 200, again.text
    await hook.work()
    assert len(hook.receiver.received) == sent + 1
    first, last = hook.receiver.received[0], hook.receiver.received[-1]
    assert first.headers["webhook-id"] == last.headers["webhook-id"]
    (audit,) = await hook.planning.rows(
        "SELECT * FROM onceward_audit_events WHERE endpoint = 'webhook.resend'"
    )
    assert (audit["tenant"], audit["actor"], audit["reason"]) == (
        "org:acme",
        "boss via console",
        "the receiver lost it",
    )


async def test_page_of_a_delivery_tells_tried_from_sent(hook: Hooked) -> None:
    await hook.register()
    hook.receiver.responses = [503]
    await hook.assign("bob")
    boss = await signed_in(hook, "boss", "admin")
    (path,) = links(await boss.get("webhooks"), "webhooks/")
    (delivery,) = links(await boss.get(path), "webhooks/[^?]*/deliveries/")
    waiting = (await boss.get(delivery)).text
    assert "not yet" in waiting
    assert "Last response" not in waiting
    await hook.attempt_once()
    tried = (await boss.get(delivery)).text
    assert re.search(r"Tried</dt>\s*<dd[^>]*>\s*1 time", tried), tried
    assert "Next attempt" in tried
    assert re.search(r"Last response</dt>\s*<dd[^>]*>\s*503", tried)
    assert "Sent" not in tried
    await hook.work()
    assert "Next attempt" not in (await boss.get(delivery)).text


async def test_webhooks_are_listed_once_page_by_page(
    hook: Hooked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onceward_services.planning.console._PAGE_ROWS", 2)
    made = {(await hook.register())["id"] for _ in range(5)}
    boss = await signed_in(hook, "boss", "admin")
    for path in ("webhooks", "webhooks?tenant=org:acme"):
        found, address = list[str](), path
        while address:
            page = (await boss.get(address)).text
            found += re.findall(r"/console/webhooks/([0-9a-f-]{36})\?", page)
            following = re.search(r'rel="next" href="/console/([^"]+)"', page)
            address = "" if following is None else unescape(following[1])
        assert len(found) == 5
        assert set(found) == made


async def test_delivery_of_a_disabled_webhook_is_not_sent_again(hook: Hooked) -> None:
    webhook = await hook.register()
    await hook.assign("bob")
    await hook.work()
    (delivery,) = await hook.deliveries(webhook)
    await hook.admin.patch(f"/v1/webhooks/{webhook['id']}", {"enabled": False})
    boss = await signed_in(hook, "boss", "admin")
    path = f"webhooks/{webhook['id']}/deliveries/{delivery['id']}/resend"
    page = await boss.post(path, tenant="org:acme", reason="again")
    assert page.status_code == 400
    assert "enable it first" in page.text
    assert await hook.planning.rows("SELECT id FROM onceward_jobs") == []


async def test_sending_again_needs_the_same_role_as_in_the_api(hook: Hooked) -> None:
    webhook = await hook.register()
    await hook.assign("bob")
    await hook.work()
    (delivery,) = await hook.deliveries(webhook)
    path = f"webhooks/{webhook['id']}/deliveries/{delivery['id']}"
    sent = len(hook.receiver.received)
    operator = await signed_in(hook, "eve", "operator", org="acme")
    assert "Send again" not in (await operator.get(f"{path}?tenant=org:acme")).text
    page = await operator.post(f"{path}/resend", tenant="org:acme", reason="again")
    assert page.status_code == 403
    assert "the role admin" in page.text
    refused = await hook.planning.member("eve", "acme", "operator").post(f"/v1/{path}/resend", {})
    assert refused.status_code == 403
    await hook.work()
    assert len(hook.receiver.received) == sent


async def test_organization_sees_and_sends_nothing_of_another(hook: Hooked) -> None:
    webhook = await hook.register(description="of acme")
    await hook.assign("bob")
    await hook.work()
    (delivery,) = await hook.deliveries(webhook)
    eve = await signed_in(hook, "eve", "admin", org="globex")
    own = f"webhooks/{webhook['id']}"
    for path in (
        "webhooks",
        "webhooks?tenant=org:globex",
        "webhooks?tenant=org:acme",
        "webhooks?after=%1F",
        own,
        f"{own}?tenant=org:acme",
        f"{own}?tenant=org:globex",
        f"{own}/deliveries/{delivery['id']}?tenant=org:globex",
        f"{own}/deliveries/{delivery['id']}?tenant=org:acme",
    ):
        page = await eve.get(path)
        assert "of acme" not in page.text, path
        assert hook.receiver.url not in page.text, path
        assert "the response was" not in page.text, path
    sent = len(hook.receiver.received)
    for tenant in ("org:acme", "org:globex", ""):
        page = await eve.post(
            f"{own}/deliveries/{delivery['id']}/resend", tenant=tenant, reason="mine"
        )
        assert page.status_code == 404
    assert len(hook.receiver.received) == sent
    assert await hook.planning.rows("SELECT id FROM onceward_jobs") == []


async def test_member_of_an_organization_sees_its_webhooks(hook: Hooked) -> None:
    await hook.register(description="of acme")
    eve = await signed_in(hook, "eve", "viewer", org="acme")
    assert len(links(await eve.get("webhooks?tenant=org:acme"), "webhooks/")) == 1


async def test_address_and_message_are_hidden_from_viewers(hook: Hooked) -> None:
    await hook.register(f"{hook.receiver.url}/hooks/a-secret")
    await hook.assign("bob")
    boss = await signed_in(hook, "boss", "viewer")
    listed = await boss.get("webhooks")
    (path,) = links(listed, "webhooks/")
    webhook = await boss.get(path)
    (delivery,) = links(webhook, "webhooks/[^?]*/deliveries/")
    page = await boss.get(delivery)
    for each in (listed, webhook, page):
        assert "a-secret" not in each.text
        assert "<pre" not in each.text
    assert "Hidden" in page.text


async def test_unknown_ids_are_not_found(hook: Hooked) -> None:
    boss = await signed_in(hook, "boss", "viewer")
    for path in (
        f"webhooks/{NOWHERE}?tenant=org:acme",
        f"webhooks/{NOWHERE}",
        "webhooks/x?tenant=org:acme",
        f"webhooks/{NOWHERE}/deliveries/{NOWHERE}?tenant=org:acme",
    ):
        assert (await boss.get(path)).status_code == 404
