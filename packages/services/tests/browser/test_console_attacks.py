"""Attacks on operators of the console, in Chromium: stored scripts, frames, forms of others."""

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import quote, urlencode

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import StorageState, expect

from packages.services.tests.browser.conftest import OpenTab
from packages.services.tests.browser.shop import ATTACK, ENDPOINT, Shop, token
from packages.services.tests.browser.tab import BROWSER_TEST, Tab

pytestmark = BROWSER_TEST

# Where texts of attackers are shown: contents, tenants, errors, payloads, addresses.
SHOWN = (
    f"records?{urlencode({'tenant': ATTACK})}",
    "records",
    "requests/{attack}",
    "trace/{attack trace}",
    "find?q={attack}",
    "find?q={large}",
    "jobs?state=dead",
    "jobs?state=done",
    "jobs",
    "dead-letters",
    "webhooks/{webhook}?tenant=acme",
    "webhooks/{webhook}/deliveries/{delivery}?tenant=acme",
    "reviews/{review}?tenant=wanda",
    "devices",
    "tenants",
    f"tenants/show?{urlencode({'tenant': ATTACK})}",
    f"?notice={quote(ATTACK)}",
    f"records?{urlencode({'endpoint': ATTACK, 'request_id': ATTACK, 'correlation_id': ATTACK})}",
    f"dead-letters?{urlencode({'error': ATTACK, 'type': ATTACK, 'queue': ATTACK})}",
)
# What escaped markup never becomes.
EXECUTED = """
() => [
  ...document.querySelectorAll("main script, main img, main iframe"),
  ...document.querySelectorAll("[onerror], [onload], [onclick]"),
  ...[...document.querySelectorAll("a, form")].filter((each) =>
    !(each.href || each.action).startsWith(location.origin)),
].map((each) => each.outerHTML.slice(0, 200))
"""


@pytest.mark.parametrize("path", SHOWN)
async def test_stored_markup_is_shown_and_never_executed(tab: Tab, shop: Shop, path: str) -> None:
    await tab.go(path.format_map(shop.ids))
    assert await tab.page.evaluate(EXECUTED) == []
    shown = await tab.text()
    fields = await tab.page.eval_on_selector_all("input", "all => all.map(e => e.value).join()")
    assert "attacked()" in shown + fields or "Its record" in shown or "<b><b>" in shown
    wide = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    await tab.page.set_viewport_size({"width": 390, "height": 844})
    assert await tab.page.evaluate(wide)


async def test_control_characters_and_directions_are_made_visible(tab: Tab, shop: Shop) -> None:
    await tab.go("dead-letters")
    await tab.page.click("table a:has-text('attacked')")
    await tab.page.locator("tbody a:has-text('payout')").last.click()
    text = await tab.text()
    assert "<script>attacked()</script>" in text
    assert "{{7*7}}" in text
    assert all(code in text for code in ("\\u001b", "\\u0007", "\\u202e", "\\u202c", "\\u200b"))
    assert not set(text) & set("\x1b\x07\u202e\u202c\u200b")
    assert await tab.page.evaluate(EXECUTED) == []


async def test_large_body_is_cut(tab: Tab, shop: Shop) -> None:
    await tab.go(f"find?q={shop.ids['large']}")
    assert len(await tab.page.content()) < 500_000
    assert "characters more" in await tab.text()
    await tab.check_looks()


@pytest.mark.parametrize(
    "target", ["//example.org", "javascript:attacked()", "jobs\r\nset-cookie: a=b"]
)
async def test_sign_in_leads_to_no_other_place(open_tab: OpenTab, target: str) -> None:
    tab = await open_tab()
    await tab.go(f"sign-in?to={quote(target)}")
    await tab.page.fill("#token", token("ada", "viewer"))
    await tab.page.click("main button")
    await expect(tab.page.locator("h1")).to_have_text("Overview")
    assert tab.page.url == f"{tab.url}/console/"
    assert len(await tab.context.cookies()) == 1


async def test_notice_adds_no_header_and_no_markup(tab: Tab) -> None:
    response = await tab.go(f"jobs?notice={quote('a' + chr(13) + chr(10) + 'x-own: 1 <b>')}")
    assert "x-own" not in await response.all_headers()
    assert "<b>" in await tab.page.get_by_role("status").inner_text()


# -- pages of another origin ---------------------------------------------------------------------


@pytest_asyncio.fixture(loop_scope="session")
async def elsewhere() -> AsyncIterator["Elsewhere"]:
    page = Elsewhere()
    await page.start()
    yield page
    await page.stop()


class Elsewhere:
    """A web server on another port, whose page ``html`` is."""

    html = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        # Another site, not only another origin: a name that also resolves to this machine.
        self.other_site = self.url.replace("127.0.0.1", "localhost")

    async def stop(self) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = f"<link rel=icon href=data:,>{self.html}".encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: {len(body)}\r\n"
        writer.write(head.encode() + b"connection: close\r\n\r\n" + body)
        await writer.drain()
        writer.close()


async def test_frame_of_another_origin_is_refused(
    open_tab: OpenTab, signed_in: StorageState, elsewhere: Elsewhere
) -> None:
    tab = await open_tab(storage_state=signed_in)
    elsewhere.html = f"<iframe src='{tab.url}/console/records'></iframe>"
    await tab.page.goto(elsewhere.url)
    frames = [frame for frame in tab.page.frames if frame is not tab.page.main_frame]
    assert [frame.url for frame in frames] == ["chrome-error://chromewebdata/"]
    assert any("frame-ancestors" in each for each in tab.problems)
    tab.problems.clear()


@pytest.mark.parametrize("is_other_site", [False, True])
async def test_form_of_another_origin_is_refused(
    open_tab: OpenTab,
    signed_in: StorageState,
    shop: Shop,
    elsewhere: Elsewhere,
    is_other_site: bool,
) -> None:
    tab = await open_tab(storage_state=signed_in)
    fields = {"tenant": "bob", "endpoint": ENDPOINT, "key": shop.ids["key"], "reason": "none"}
    inputs = "".join(f'<input name="{name}" value="{value}">' for name, value in fields.items())
    elsewhere.html = (
        f'<form method="post" action="{tab.url}/console/records/remove">{inputs}'
        "<button>Win</button></form>"
    )
    await tab.page.goto(elsewhere.other_site if is_other_site else elsewhere.url)
    async with tab.page.expect_request(f"{tab.url}/console/records/remove") as sent:
        await tab.page.click("button")
    await tab.page.wait_for_load_state()
    request = await sent.value
    response = await request.response()
    assert response is not None
    assert response.status == 403
    # Ports of one host are one site for cookies; the form's origin and token are checked as well.
    assert ("cookie" in await request.all_headers()) is not is_other_site
    tab.problems.clear()
    await tab.go("records?" + urlencode({"tenant": "bob", "key": shop.ids["key"]}))
    assert "No record matches" not in await tab.text()


async def test_link_of_another_site_is_opened_without_the_session(
    open_tab: OpenTab, signed_in: StorageState, elsewhere: Elsewhere
) -> None:
    tab = await open_tab(storage_state=signed_in)
    elsewhere.html = f'<a href="{tab.url}/console/records">Look</a>'
    await tab.page.goto(elsewhere.other_site)
    await tab.page.click("a")
    await expect(tab.page.locator("h1")).to_have_text("Sign in")
    assert await tab.page.evaluate("document.referrer") in {"", f"{elsewhere.other_site}/"}
    tab.problems.clear()  # the page of the other site itself


async def test_cookie_that_an_attacker_has_set_is_not_taken_over(open_tab: OpenTab) -> None:
    tab = await open_tab()
    planted = {"name": "onceward_console", "value": "planted", "url": f"{tab.url}/console/"}
    await tab.context.add_cookies([planted])  # type: ignore[list-item]
    await tab.sign_in(token("ada", "viewer"))
    await expect(tab.page.locator("h1")).to_have_text("Overview")
    cookies = {one["value"] for one in await tab.context.cookies()}
    async with httpx.AsyncClient(base_url=tab.url) as client:
        client.cookies.set("onceward_console", "planted", path="/console/")
        assert (await client.get("/console/records")).status_code == 303
    assert len(cookies - {"planted"}) == 1


async def test_script_that_reaches_the_page_is_blocked(tab: Tab) -> None:
    """The second line of defence: markup that were not escaped would still not run."""
    await tab.go("")
    await tab.page.evaluate(
        """() => {
          const script = document.createElement("script");
          script.textContent = "window.attacked = 1";
          document.body.append(script);
          const image = document.createElement("img");
          image.setAttribute("onerror", "window.attacked = 1");
          image.src = "http://127.0.0.1:9/x";
          document.body.append(image);
          const form = document.createElement("form");
          form.action = "http://127.0.0.1:9/";
          document.body.append(form);
          form.submit();
        }"""
    )
    assert await tab.page.evaluate("window.attacked") is None
    assert await tab.page.evaluate("fetch('http://127.0.0.1:9/').then(() => 1, () => 0)") == 0
    refused = " ".join(tab.problems)
    for directive in ("script-src", "img-src", "connect-src", "form-action"):
        assert directive in refused
    tab.problems.clear()
