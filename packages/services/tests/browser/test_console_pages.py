"""Every page of the console in Chromium: what it shows, how it looks, and without JavaScript."""

from pathlib import Path

import pytest
from playwright.async_api import StorageState

from onceward.jobs.admin import PausedQueues
from packages.services.tests.browser.conftest import OpenTab
from packages.services.tests.browser.shop import Shop
from packages.services.tests.browser.tab import BROWSER_TEST, Tab

pytestmark = BROWSER_TEST

# Each page, with what it must show. In braces: what the shop has made.
PAGES = {
    "overview": ("", ("dead letters in payouts", "Executed", "Replayed", "reminders")),
    "records": ("records?tenant=bob", ("{endpoint}", "{key}")),
    "records-all": ("records", ("{endpoint}", "erin")),
    "requests": ("requests", ("Replayed", "Mismatched", "{mismatch}")),
    "records-none": ("records?key=none", ("No record matches.",)),
    "record": (
        "find?q={key}",
        ("{first}", "12.50", "executed once", "2 replays got the same response", "1 done"),
    ),
    "request-replayed": ("requests/{replay}", ("It was replayed", "{first}")),
    "request-mismatched": (
        "requests/{mismatch}",
        ("Why 409?", "body", "Nothing was executed or written"),
    ),
    "request-executed": ("requests/{first}", ("was executed once", "Stored response")),
    "request-invalid": (
        "requests/{invalid}",
        ("refused before it was executed", "idempotency.key_invalid", "400"),
    ),
    "request-refused": ("requests/{refused}", ("refused by the app", "403")),
    "trace": (
        "trace/order-4711",
        ("record", "replayed", "mismatched", "receipt", "audit", "same key", "Not included"),
    ),
    "jobs": ("jobs", ("Running", "report", "Waiting", "reminder", "Dead", "payout", "Done")),
    "jobs-waiting": ("jobs?state=waiting", ("reminder", "reminders")),
    "jobs-running": ("jobs?state=running", ("report",)),
    "jobs-done": ("jobs?state=done", ("receipt",)),
    "jobs-dead": ("jobs?state=dead", ("payout", "the bank refused the account")),
    "job": ("jobs/{job}?tenant=bob", ("payout", "the bank refused the account", "carol")),
    "dead-letters": ("dead-letters?tenant=bob", ("By error", "the bank refused the account")),
    "jobs-cancel": ("jobs/cancel?queue=reminders", ("waiting jobs match", "become dead letters")),
    "queues": ("queues", ("payouts", "reminders", "Pause payouts")),
    "workers": ("workers", ("reports", "Running jobs")),
    "webhooks": ("webhooks", ("127.0.0.1:9", "acme")),
    "webhook": ("webhooks/{webhook}?tenant=acme", ("assignment.changed", "acme", "failed")),
    "delivery": (
        "webhooks/{webhook}/deliveries/{delivery}?tenant=acme",
        ("the response was 500", "Send again"),
    ),
    "reviews": ("reviews", ("wanda", "TZ_JUMP")),
    "review": ("reviews/{review}?tenant=wanda", ("Anti cheat", "TZ_JUMP", "Resolve this review")),
    "devices": ("devices", ("wanda", "web")),
    "periodic": ("periodic", ("every day at 03:00 UTC", "every hour", "done", "in ")),
    "tenants": ("tenants", ("bob", "erin")),
    "tenant": (
        "tenants/show?tenant=bob",
        ("Stored data", "Idempotency records", "Export all data"),
    ),
    "system": ("system", ("ONCEWARD_JWT_SECRET", "7 (default)", "Migrations", "Rate limits")),
}
# Pictures of the documentation: the page, the scheme and the width.
PICTURES = {
    "overview": [("console-overview", "light", 1280), ("console-overview-phone", "dark", 390)],
    "record": [("console-record", "light", 1280)],
    "request-mismatched": [("console-mismatch", "light", 1280)],
    "trace": [("console-trace", "dark", 1280)],
    "dead-letters": [("console-dead-letters", "light", 1280)],
}


@pytest.mark.parametrize("name", PAGES)
async def test_page_shows_its_data_and_is_accessible(
    tab: Tab, shop: Shop, name: str, screenshots: Path | None
) -> None:
    path, expected = PAGES[name]
    await tab.go(path.format_map(shop.ids))
    text = await tab.text()
    missing = [each for each in expected if each.format_map(shop.ids) not in text]
    assert missing == [], text
    await tab.check_looks()
    for file, scheme, width in PICTURES.get(name, ()) if screenshots is not None else ():
        assert screenshots is not None
        await tab.save(screenshots / f"{file}.png", scheme=scheme, width=width)


async def test_all_pages_of_the_navigation_are_tested(tab: Tab) -> None:
    await tab.go("")
    links = await tab.page.eval_on_selector_all("nav a", "all => all.map(a => a.pathname)")
    tested = {path.partition("?")[0] for path, _ in PAGES.values()}
    assert {link.removeprefix("/console/") for link in links} - tested == set()
    assert len(links) >= 7


async def test_pages_can_be_read_without_javascript(
    open_tab: OpenTab, signed_in: StorageState, shop: Shop
) -> None:
    tab = await open_tab(storage_state=signed_in, java_script_enabled=False)
    for path, expected in PAGES.values():
        await tab.go(path.format_map(shop.ids))
        text = await tab.text()
        assert [each for each in expected if each.format_map(shop.ids) not in text] == [], path


async def test_search_and_filter_work_without_javascript(
    open_tab: OpenTab, signed_in: StorageState, shop: Shop
) -> None:
    tab = await open_tab(storage_state=signed_in, java_script_enabled=False)
    await tab.go("")
    await tab.page.fill("#find", shop.ids["mismatch"])
    await tab.page.click("text=Find")
    assert "Why 409?" in await tab.text()
    await tab.go("jobs")
    await tab.page.select_option("select[name=state]", "dead")
    await tab.page.click("text=Filter")
    assert "the bank refused the account" in await tab.text()


@pytest.mark.parametrize(
    ("path", "status", "heading"),
    [
        ("nothing", 404, "Not found"),
        ("find?q=nothing", 404, "Nothing found"),
        ("jobs?state=lost", 400, "This cannot be done"),
    ],
)
async def test_error_page_is_accessible(tab: Tab, path: str, status: int, heading: str) -> None:
    await tab.go(path, status=status)
    assert await tab.page.inner_text("h1") == heading
    await tab.check_looks()


async def test_request_id_leads_to_the_answer_in_three_steps(tab: Tab, shop: Shop) -> None:
    """From "I was charged twice, request id X" to the stored response and what differs."""
    await tab.go("")
    await tab.page.fill("#find", shop.ids["mismatch"])
    await tab.page.press("#find", "Enter")
    await tab.page.wait_for_selector("text=Why 409?")
    await tab.page.click("text=Open the record of this key")
    await tab.page.wait_for_selector("text=Stored response")
    assert shop.ids["first"] in await tab.text()
    await tab.page.click("text=order-4711")
    await tab.page.wait_for_selector("h1:has-text('Trace')")
    kinds = await tab.page.locator("td .state").all_inner_texts()
    assert (kinds.count("record"), kinds.count("replayed"), kinds.count("mismatched")) == (1, 2, 1)


async def test_badge_and_text_of_a_cell_are_on_one_line_on_a_phone(tab: Tab, shop: Shop) -> None:
    paused = PausedQueues(shop.onceward.store, lambda: None)
    await paused.pause("receipts", actor="ada", reason="the printer in the cellar is broken")
    try:
        for path in ("", "queues"):
            heights = []
            for width in (390, 1280):
                await tab.page.set_viewport_size({"width": width, "height": 844})
                await tab.go(path)
                box = await tab.page.locator("td .paused").bounding_box()
                assert box is not None
                heights.append(box["height"])
            assert heights[0] == heights[1]
    finally:
        await paused.resume("receipts", actor="ada", reason="repaired")


@pytest.mark.parametrize("path", ["jobs", "requests", "reviews", "dead-letters"])
async def test_labels_and_fields_of_a_filter_are_on_one_line(tab: Tab, path: str) -> None:
    await tab.go(path)
    boxes = await tab.page.eval_on_selector_all(
        ".filter label, .filter button",
        """all => all.map((each) => {
          const [whole, field] = [each, each.querySelector('input, select') || each]
            .map((one) => one.getBoundingClientRect());
          return [each.tagName === 'LABEL' ? whole.top : null, field.top, field.height];
        })""",
    )
    assert len(boxes) > 1
    assert len({top for top, _, _ in boxes if top is not None}) == 1
    assert len({(top, height) for _, top, height in boxes}) == 1


async def test_fields_of_a_phone_show_their_whole_hint(tab: Tab) -> None:
    await tab.page.set_viewport_size({"width": 360, "height": 740})
    await tab.go("")
    fits = """field => {
      const style = getComputedStyle(field);
      const context = document.createElement('canvas').getContext('2d');
      context.font = style.font;
      const width = field.clientWidth - 2 * parseFloat(style.paddingLeft);
      return context.measureText(field.placeholder).width <= width;
    }"""
    assert await tab.page.eval_on_selector("#find", fits)
