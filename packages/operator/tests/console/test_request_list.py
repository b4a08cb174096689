"""The list of requests without a record."""

import re
import uuid
from html import unescape

import pytest

from packages.operator.tests.console.lab import Browser, ConsoleLab
from packages.operator.tests.console.test_records import flush


async def listed(browser: Browser, path: str) -> list[tuple[str, str]]:
    """Return outcome and request id of a list, page by page."""
    found: list[tuple[str, str]] = []
    while path:
        page = await browser.get(path)
        assert page.status_code == 200, page.text
        found += re.findall(
            r'data-label="Outcome">([^<]+)</td>.*?href="/console/requests/([^"]+)"',
            page.text,
            re.DOTALL,
        )
        following = re.search(r'rel="next" href="/console/([^"]+)"', page.text)
        path = "" if following is None else unescape(following[1])
    return found


async def replay(lab: ConsoleLab, tenant: str, number: int) -> list[str]:
    """Send one request again and again; return the request ids of the replays."""
    key = {"idempotency-key": str(uuid.uuid4())}
    sent = [await lab.order(tenant, **key) for _ in range(number + 1)]
    return [each.headers["x-request-id"] for each in sent[1:]]


async def test_list_has_each_request_without_a_record_once_by_outcome(
    lab: ConsoleLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onceward_operator.console.request_list._PAGE_ROWS", 3)
    monkeypatch.setattr("onceward_operator.console.request_list._SCANNED", 5)
    bob, eve = await replay(lab, "bob", 7), await replay(lab, "eve", 2)
    key = {"idempotency-key": str(uuid.uuid4())}
    await lab.order("bob", **key)
    refused = await lab.order("bob", "/orders/farm", **key)
    await flush(lab)
    mismatch = ("Mismatched", refused.headers["x-request-id"])
    replays = [("Replayed", each) for each in (*reversed(eve), *reversed(bob))]
    async with lab.browser("ada", "viewer") as browser:
        assert await listed(browser, "requests") == [mismatch, *replays]
        assert await listed(browser, "requests?outcome=replayed") == replays
        assert await listed(browser, "requests?outcome=mismatched") == [mismatch]
        assert await listed(browser, "requests?outcome=stale") == []
        assert await listed(browser, "requests?tenant=eve") == replays[:2]
        shown = (await browser.get("requests?outcome=mismatched")).text
        assert f"<code>{refused.headers['onceward-error']}</code>" in shown
        page = await browser.get(f"requests/{mismatch[1]}")
        assert "Why 409?" in page.text
    async with lab.browser("eve", "viewer") as browser:
        assert await listed(browser, "requests") == replays[:2]
        assert (await browser.get("requests?tenant=bob")).status_code == 404


@pytest.mark.parametrize("query", ["outcome=fresh", "after=x", "after=1", "after=1e9+1", "after=+"])
async def test_malformed_address_is_an_error_for_the_operator(lab: ConsoleLab, query: str) -> None:
    async with lab.browser("ada", "viewer") as browser:
        assert (await browser.get(f"requests?{query}")).status_code == 400
