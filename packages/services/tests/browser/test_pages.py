"""``/`` and ``/docs`` in Chromium, under the Content-Security-Policy that the server sends."""

import pytest

from packages.services.tests.browser.conftest import OpenTab
from packages.services.tests.browser.tab import BROWSER_TEST

pytestmark = BROWSER_TEST


@pytest.mark.parametrize(
    ("path", "selector", "expected"),
    [
        ("/docs", ".opblock-tag", ("/api/v1/contacts", "operations-field-create_contact")),
        ("/", "h1", ("/api/v1/contacts",)),
    ],
)
async def test_page_renders_and_nothing_is_blocked(
    open_tab: OpenTab, path: str, selector: str, expected: tuple[str, ...]
) -> None:
    tab = await open_tab()  # which reports what was blocked
    await tab.page.goto(tab.url + path)
    await tab.page.wait_for_selector(selector)
    content = await tab.page.content()
    assert [text for text in expected if text not in content] == []
