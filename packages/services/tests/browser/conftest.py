"""One Chromium and one ``onceward serve`` with data for all tests of this directory."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, StorageState, async_playwright, expect

from packages.services.tests.browser.shop import SECRET, Shop, token
from packages.services.tests.browser.tab import LIMIT_MILLISECONDS, Tab
from packages.services.tests.cli.conftest import Server
from tools.chromium import find_chromium

OpenTab = Callable[..., Awaitable[Tab]]
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def chromium() -> AsyncIterator[Browser]:
    """Return a real browser. A machine without one fails here: `make test` fetches it."""
    found = find_chromium()
    assert found is not None, "there is no Chromium: run `make chromium`"
    expect.set_options(timeout=LIMIT_MILLISECONDS)
    async with async_playwright() as playwright:
        environment: dict[str, str | float | bool] = {**found.environment()}
        browser = await playwright.chromium.launch(
            executable_path=found.program, args=FLAGS, env=environment
        )
        yield browser
        await browser.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(
        tmp_path_factory.mktemp("server"),
        ONCEWARD_JWT_SECRET=SECRET,
        ONCEWARD_CONSOLE_OPERATORS="ada, grace",
    )
    assert server.url, server.stderr()
    yield server
    server.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shop(server: Server) -> AsyncIterator[Shop]:
    shop = Shop(f"sqlite:///{server.directory / 'onceward.db'}")
    await shop.open()
    try:
        # In a task: what a request sets in its context would be there in all later tests.
        await asyncio.create_task(shop.fill())
        yield shop
    finally:
        await shop.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def signed_in(chromium: Browser, server: Server) -> StorageState:
    """Return the cookie of an administrator of all tenants."""
    context = await chromium.new_context()
    tab = await Tab.open(context, server.url)
    await tab.sign_in(token("ada", "admin"))
    state = await context.storage_state()
    tab.check_problems()
    await context.close()
    return state


@pytest_asyncio.fixture(loop_scope="session")
async def open_tab(chromium: Browser, server: Server) -> AsyncIterator[OpenTab]:
    """Open a tab with its own cookies. What its pages log or load from elsewhere is an error."""
    tabs: list[Tab] = []

    async def opened(**options: Any) -> Tab:
        context = await chromium.new_context(**options)
        tabs.append(await Tab.open(context, server.url))
        return tabs[-1]

    yield opened
    for tab in tabs:
        await tab.context.close()
    for tab in tabs:
        tab.check_problems()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_tab(
    chromium: Browser, server: Server, signed_in: StorageState
) -> AsyncIterator[Tab]:
    context = await chromium.new_context(storage_state=signed_in)
    yield await Tab.open(context, server.url)
    await context.close()


@pytest_asyncio.fixture(loop_scope="session")
async def tab(shared_tab: Tab, shop: Shop) -> AsyncIterator[Tab]:
    """Return a tab in which an administrator has signed in, on a server with data.

    All tests have the same one: a new context takes half a second.
    """
    shared_tab.problems.clear()
    shared_tab.loaded.clear()
    await shared_tab.page.set_viewport_size({"width": 1280, "height": 800})
    yield shared_tab
    shared_tab.check_problems()
    await shared_tab.page.goto("about:blank")


@pytest.fixture(scope="session")
def screenshots() -> Path | None:
    """Return where pictures for the documentation go: ``make screenshots`` sets it."""
    directory = os.environ.get("ONCEWARD_SCREENSHOTS")
    return None if not directory else Path(directory).resolve()
