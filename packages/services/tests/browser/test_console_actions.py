"""What operators do in the console, in Chromium: sign-in, keyboard, actions, live pages."""

import asyncio
import json
from urllib.parse import urlencode

from playwright.async_api import StorageState, expect

from onceward.jobs.admin import JobAdmin
from packages.services.tests.browser.conftest import OpenTab
from packages.services.tests.browser.shop import ENDPOINT, Shop, token
from packages.services.tests.browser.tab import BROWSER_TEST, LIMIT_MILLISECONDS, Tab

pytestmark = BROWSER_TEST


async def actors(shop: Shop, endpoint: str) -> list[str]:
    """Return who is named by the audit events of an action."""
    sql = "SELECT actor FROM onceward_audit_events WHERE endpoint LIKE :endpoint"
    rows = await shop.onceward.store.read(sql, {"endpoint": endpoint})
    return [row["actor"] for row in rows]


# -- sign-in -------------------------------------------------------------------------------------


async def test_sign_in_leads_to_the_page_that_was_asked_for(open_tab: OpenTab, shop: Shop) -> None:
    tab = await open_tab()
    await tab.go("jobs?state=dead")
    assert await tab.page.inner_text("h1") == "Sign in"
    await tab.check_looks()
    assert await tab.page.evaluate("document.activeElement.id") == "token"
    await tab.page.keyboard.type(token("ada", "viewer"))
    await tab.page.keyboard.press("Enter")
    await expect(tab.page.locator("h1")).to_have_text("Jobs")
    assert "state=dead" in tab.page.url
    assert "Requeue" not in await tab.text()


async def test_wrong_token_is_refused_with_the_reason(open_tab: OpenTab) -> None:
    tab = await open_tab()
    for wrong, reason in ((token("ada"), "needs the role viewer"), ("x.y.z", "is not valid")):
        await tab.sign_in(wrong)
        await expect(tab.page.get_by_role("alert")).to_contain_text(reason)
        tab.problems.clear()  # the browser reports the status 403
    await tab.check_looks()
    assert await tab.context.cookies() == []


async def test_sign_out_ends_the_session(open_tab: OpenTab) -> None:
    tab = await open_tab()
    await tab.sign_in(token("ada", "viewer"))
    cookies = await tab.context.cookies()
    assert [(one["httpOnly"], one["sameSite"], one["path"]) for one in cookies] == [
        (True, "Strict", "/console/")
    ]
    await tab.page.click("text=Sign out")
    await expect(tab.page.locator("h1")).to_have_text("Sign in")
    assert await tab.context.cookies() == []
    await tab.context.add_cookies([cookies[0]])  # type: ignore[list-item]
    await tab.go("records")
    assert await tab.page.inner_text("h1") == "Sign in"


async def test_session_that_ended_leads_live_page_to_the_sign_in(
    open_tab: OpenTab, shop: Shop
) -> None:
    tab = await open_tab()
    await tab.sign_in(token("ada", "viewer"))
    await tab.go("dead-letters")
    await tab.context.clear_cookies()
    await tab.page.evaluate("htmx.trigger('#live', 'sse:changed')")
    await expect(tab.page.locator("h1")).to_have_text("Sign in", timeout=LIMIT_MILLISECONDS)
    tab.problems.clear()  # the browser reports the status 401


async def test_bound_viewer_sees_one_tenant_and_no_action(open_tab: OpenTab, shop: Shop) -> None:
    tab = await open_tab()
    await tab.sign_in(token("bob", "viewer"))
    await tab.check_looks()
    assert "nothing of other tenants" in await tab.text()
    await tab.go("records")
    assert "erin" not in await tab.page.inner_text("main")
    record = urlencode({"tenant": "bob", "endpoint": ENDPOINT, "key": shop.ids["key"]})
    await tab.go(f"records/show?{record}")
    assert "your role does not show payloads" in await tab.text()
    assert await tab.page.locator("details.action").count() == 0
    for path in (
        "tenants/show?tenant=erin",
        "records?tenant=erin",
        f"trace/{shop.ids['attack trace']}",
    ):
        await tab.go(path, status=404)
    for path in ("tenants", "system", "periodic"):
        await tab.go(path, status=403)


# -- keyboard ------------------------------------------------------------------------------------


async def test_keyboard_reaches_search_content_and_actions(tab: Tab, shop: Shop) -> None:
    await tab.go(f"jobs/{shop.ids['job']}?tenant=bob")
    page = tab.page
    await page.keyboard.press("Tab")
    assert await page.evaluate("document.activeElement.className") == "skip"
    assert await page.locator(".skip").evaluate("e => e.getBoundingClientRect().left >= 0")
    await page.keyboard.press("Enter")
    assert await page.evaluate("document.activeElement.id") == "content"
    await page.keyboard.press("/")
    assert await page.evaluate("document.activeElement.id") == "find"
    await page.keyboard.type("a/b")
    assert await page.input_value("#find") == "a/b"
    # The order of the tab key is that of the page, and each stop can be seen.
    await page.locator(".brand").focus()
    stops: list[tuple[int, str, bool]] = []
    for _ in range(60):
        stop = await page.evaluate(
            """() => {
              const e = document.activeElement;
              const box = e.getBoundingClientRect();
              const ring = getComputedStyle(e).outlineStyle !== 'none';
              const place = [...document.querySelectorAll('*')].indexOf(e);
              return [place, e.tagName, ring && box.width > 0 && box.height > 0];
            }"""
        )
        if stop[1] == "BODY" or (stops and stop[0] <= stops[-1][0]):
            break
        stops.append(stop)
        await page.keyboard.press("Tab")
    assert "SUMMARY" in [name for _, name, _ in stops]
    assert [stop for stop in stops if not stop[2]] == []


# -- actions -------------------------------------------------------------------------------------


async def test_requeue_asks_why_and_is_audited(tab: Tab, shop: Shop) -> None:
    await shop.charge("bob", "gina", amount="1.00", jobs=["payout"], note="closed account")
    await shop.until(
        lambda rows: rows == 1,
        "SELECT job_id FROM onceward_dead_letters WHERE resource_id = 'gina'",
    )
    job = await shop.dead_job("gina")
    await tab.go(f"jobs/{job}?tenant=bob")
    await tab.page.click("summary:has-text('Requeue')")
    await tab.page.wait_for_function("document.activeElement.name === 'reason'")
    await tab.page.locator(":focus").blur()
    await tab.page.click("details.action button")  # without a reason the form is not sent
    assert await tab.page.evaluate("document.activeElement.name") == "reason"
    await tab.page.fill("details.action [name=reason]", "the account is open again")
    await tab.page.click("details.action button")
    await expect(tab.page.get_by_role("status")).to_have_text("The job is requeued.")
    assert "ada via console: the account is open again" in await actors(shop, "job.requeued%")


async def test_bulk_requeue_says_how_many_and_moves_those(tab: Tab, shop: Shop) -> None:
    for customer in ("hugo", "ida"):
        await shop.charge("hugo", customer, jobs=["payout"], note="holiday")
    dead = "SELECT job_id FROM onceward_dead_letters WHERE tenant = 'hugo' AND requeued_at IS NULL"
    await shop.until(lambda rows: rows == 2, dead)
    await tab.go("dead-letters?tenant=hugo")
    await tab.page.click("table a:has-text('holiday')")
    await tab.check_looks()
    await tab.act("Requeue 2 jobs", reason="the holiday is over")
    await expect(tab.page.get_by_role("status")).to_have_text("2 jobs were requeued.")
    assert (await actors(shop, "job.requeued%")).count("ada via console: the holiday is over") == 2


async def test_dead_letter_requeued_in_two_tabs_runs_once(
    tab: Tab, open_tab: OpenTab, shop: Shop
) -> None:
    store = shop.onceward.store
    await shop.charge("nina", "nina", jobs=["reminder"])
    (row,) = await store.read(
        store.table_names.render("SELECT id FROM onceward_jobs WHERE tenant = 'nina'")
    )
    job = str(row["id"])
    assert await JobAdmin(store).cancel(job, tenant="nina", actor="test", reason="to requeue it")
    other = await open_tab()
    await other.sign_in(token("grace", "operator"))
    for each in (tab, other):  # both see the dead letter before one of them acts
        await each.go(f"jobs/{job}?tenant=nina")
        await each.page.click("summary:has-text('Requeue')")
        await each.page.fill("[name=reason]", "it is Monday")
    await tab.page.click("details.action button")
    await expect(tab.page.get_by_role("status")).to_have_text("The job is requeued.")
    await other.page.click("details.action button")
    await expect(other.page.locator("h1")).to_have_text("Not found")
    other.problems.clear()  # the browser reports the status 404
    await shop.until(
        lambda rows: rows == 1, "SELECT job_id FROM onceward_job_completions WHERE tenant = 'nina'"
    )
    requeued = "SELECT id FROM onceward_audit_events WHERE tenant = 'nina' AND endpoint LIKE "
    assert len(await store.read(f"{requeued} 'job.requeued%'")) == 1


async def test_queue_is_paused_and_resumed(tab: Tab, shop: Shop) -> None:
    await tab.go("queues")
    # No job waits in it, and the server has no handler for it.
    await tab.act("Pause another queue", queue="receipts", reason="the printer is broken")
    await expect(tab.page.get_by_role("status")).to_have_text("Queue receipts is paused.")
    assert "ada via console: the printer is broken" in await tab.text()
    await shop.charge("olga", "olga", jobs=["receipt"])
    waiting = "SELECT id FROM onceward_jobs WHERE queue = 'receipts'"
    assert len(await shop.onceward.store.read(waiting)) == 1
    await tab.go("queues")
    await tab.act("Resume receipts", reason="it works again")
    await expect(tab.page.get_by_role("status")).to_have_text("Queue receipts is resumed.")
    await shop.until(lambda rows: rows == 0, waiting)


async def test_waiting_jobs_are_cancelled_one_by_one_and_by_filter(tab: Tab, shop: Shop) -> None:
    for customer in ("pia", "pit", "pam"):
        await shop.charge("pia", customer, jobs=["reminder"])
    await tab.go("jobs?tenant=pia")
    await tab.page.locator("#live tbody a").first.click()
    await tab.act("Cancel", reason="paid in cash")
    await expect(tab.page.get_by_role("status")).to_have_text("The job is cancelled.")
    await tab.go("jobs?tenant=pia")
    await tab.page.click("text=Cancel waiting jobs that match")
    await expect(tab.page.locator("main")).to_contain_text("2 waiting jobs match")
    await tab.act("Cancel 2 jobs", reason="paid in cash")
    await expect(tab.page.get_by_role("status")).to_have_text("2 jobs were cancelled.")
    assert (await actors(shop, "job.cancelled%")).count("ada via console") == 3


async def test_review_is_resolved_and_delivery_sent_again(tab: Tab, shop: Shop) -> None:
    await tab.go("reviews")
    await tab.page.click("tr:has-text('willy') a")
    await tab.page.click("summary:has-text('Resolve this review')")
    await tab.page.select_option("[name=decision]", "reject")
    await tab.page.fill("[name=reason]", "a traveller")
    await tab.page.click("details.action button")
    await expect(tab.page.get_by_role("status")).to_have_text("The review is resolved: reject.")
    assert await actors(shop, "admin.review.resolve") == ["ada via console"]
    await tab.go(f"webhooks/{shop.ids['webhook']}/deliveries/{shop.ids['delivery']}?tenant=acme")
    await tab.act("Send again", reason="the receiver was down")
    await expect(tab.page.get_by_role("status")).to_have_text("The delivery is sent again.")
    assert await actors(shop, "webhook.resend") == ["ada via console"]


async def test_removal_of_a_record_is_audited(tab: Tab, shop: Shop) -> None:
    key = "7b0f3d52-91ab-4b3e-b3aa-000000000001"
    assert (await shop.charge("bob", "jo", key=key)).status_code == 201
    await tab.go("records?" + urlencode({"tenant": "bob", "key": key}))
    await tab.page.click(f"table a:has-text('{key}')")
    await tab.act("Remove this record", reason="made by a test")
    await expect(tab.page.get_by_role("status")).to_contain_text("removed; audit event")
    await tab.go("records?" + urlencode({"tenant": "bob", "key": key}))
    assert "No record matches." in await tab.text()


async def test_tenant_is_exported_and_erased(tab: Tab, shop: Shop) -> None:
    assert (await shop.charge("kim", "kim", amount="2.00")).status_code == 201
    await tab.go("tenants/show?tenant=kim")
    assert "not exported" not in await tab.text()  # the services' tables are known
    async with tab.page.expect_download() as waiting:
        await tab.act("Export all data", is_download=True, reason="asked for by Kim")
    content = (await (await waiting.value).path()).read_text()
    rows = [json.loads(line) for line in content.splitlines()]
    assert any("kim" in str(row) for row in rows)
    await tab.go("tenants/show?tenant=kim")
    await tab.page.click("summary:has-text('Erase this tenant')")
    await tab.page.fill("[name=confirmed]", "tim")
    form = tab.page.locator("form", has=tab.page.locator("[name=confirmed]"))
    await form.locator("[name=reason]").fill("asked for by Kim")
    await form.locator("button").click()
    await expect(tab.page.locator("h1")).to_have_text("This cannot be done")
    tab.problems.clear()  # the browser reports the status 400
    await tab.go("tenants/show?tenant=kim")
    await tab.act("Erase this tenant", confirmed="kim", reason="asked for by Kim")
    await expect(tab.page.get_by_role("status")).to_be_visible()
    async with asyncio.timeout(LIMIT_MILLISECONDS / 1000):  # it goes on after the response
        while True:
            await tab.go("records?tenant=kim")
            if "No record matches." in await tab.text():
                break


# -- live ----------------------------------------------------------------------------------------


async def test_dead_letter_appears_without_a_reload(tab: Tab, shop: Shop) -> None:
    await tab.go("")
    await tab.page.evaluate("window.stayed = true")
    before = await tab.page.inner_text(".attention")
    await expect(tab.page.locator("#live")).to_be_visible()
    for number in range(3):
        await shop.charge("leo", f"leo-{number}", jobs=["payout"], note="late")
    attention = tab.page.locator(".attention")
    await expect(attention).not_to_have_text(before, timeout=LIMIT_MILLISECONDS)
    assert await tab.page.evaluate("window.stayed") is True
    assert sum("/console/events?" in url for url in tab.loaded) == 1


async def test_live_page_keeps_what_is_being_typed(
    open_tab: OpenTab, signed_in: StorageState, shop: Shop
) -> None:
    tab = await open_tab(storage_state=signed_in)
    await tab.go(f"jobs/{shop.ids['job']}?tenant=bob")
    await tab.page.click("summary:has-text('Requeue')")
    await tab.page.locator("[name=reason]").press_sequentially("the bank ")
    async with tab.page.expect_response(lambda response: shop.ids["job"] in response.url):
        await tab.page.evaluate("htmx.trigger('#live', 'sse:changed')")
    await tab.page.keyboard.type("is open")
    assert await tab.page.input_value("[name=reason]") == "the bank is open"


async def test_live_page_keeps_the_focus_of_the_keyboard(tab: Tab, shop: Shop) -> None:
    await tab.go("dead-letters")
    await tab.page.locator("#live a").first.focus()
    await tab.page.keyboard.press("Shift")  # the keyboard is in use
    before = len(tab.loaded)
    await tab.page.evaluate("htmx.trigger('#live', 'sse:changed')")
    assert await tab.page.evaluate("document.activeElement.closest('#live') !== null")
    assert [url for url in tab.loaded[before:] if "dead-letters" in url] == []
    await tab.page.locator("#find").focus()
    async with tab.page.expect_response(lambda response: "dead-letters" in response.url):
        await tab.page.evaluate("htmx.trigger('#live', 'sse:changed')")
