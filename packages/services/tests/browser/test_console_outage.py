"""The console in Chromium while its database is away, and after it is back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import uvicorn
from playwright.async_api import expect

from onceward_testing.servers import RealPostgres
from packages.operator.tests.console.lab import ConsoleLab
from packages.services.tests.browser.conftest import OpenTab
from packages.services.tests.browser.tab import BROWSER_TEST, LIMIT_MILLISECONDS

pytestmark = BROWSER_TEST


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """Serve an app on a free port, in this process."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical")
    server = uvicorn.Server(config)
    vars(server)["capture_signals"] = nullcontext  # those of the tests stay
    task = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(60):
            while not server.started:
                await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


async def test_pages_say_that_the_database_is_away_and_recover_by_themselves(
    open_tab: OpenTab, postgres: RealPostgres
) -> None:
    postgres.start()
    lab = ConsoleLab(postgres.create_database())
    async with served(lab.app) as url:
        assert (await lab.order("ada")).status_code == 201
        live, tab = await open_tab(), await open_tab()
        live.url = tab.url = url
        await live.sign_in(lab.token("ada", "viewer"))
        await expect(live.page.locator("h1")).to_have_text("Overview")
        stale = live.page.locator("#stale")
        await expect(stale).to_be_hidden()
        await tab.context.add_cookies(await live.context.cookies())  # type: ignore[arg-type]
        await tab.go("records")
        postgres.stop("immediate")
        try:
            await tab.go("records", status=503)
            assert await tab.page.inner_text("h1") == "The database does not respond"
            await tab.check_looks()
            await live.page.evaluate("htmx.trigger('#live', 'sse:changed')")
            await expect(stale).to_be_visible(timeout=LIMIT_MILLISECONDS)
        finally:
            postgres.start()
        # Without a click.
        await expect(tab.page.locator("h1")).to_have_text("Records", timeout=LIMIT_MILLISECONDS)
        await expect(stale).to_be_hidden(timeout=LIMIT_MILLISECONDS)
        for each in (live, tab):
            each.problems.clear()  # the browser reports the status 503
            await each.page.close()
    await lab.onceward.close()
