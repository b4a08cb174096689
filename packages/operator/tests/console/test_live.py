"""Live pages: what is rendered for several of them, and the events they get."""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from onceward_operator.console import Page, PageRequest, Shown
from onceward_operator.console import live as live_module
from onceward_operator.console.live import LiveUpdates, View
from packages.operator.tests.console.conftest import opened
from packages.operator.tests.console.lab import Browser, ConsoleLab

PART = {"hx-request": "true"}


@asynccontextmanager
async def stream(lab: ConsoleLab, browser: Browser, page: str) -> AsyncIterator["Stream"]:
    """Open the stream of a page; httpx would wait for its end."""
    cookie = f"onceward_console={browser.client.cookies['onceward_console']}"
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/console/events",
        "root_path": "",
        "query_string": f"page={page}".encode(),
        "headers": [(b"host", b"shop.test"), (b"cookie", cookie.encode())],
        "scheme": "http",
        "server": ("shop.test", 80),
        "client": None,
        "http_version": "1.1",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "app": lab.app,
    }
    found = Stream()
    task = asyncio.create_task(lab.app(scope, found.receive, found.send))
    try:
        await found.opened.wait()
        yield found
    finally:
        found.disconnected.set()
        await asyncio.wait_for(task, 30)


class Stream:
    """What the server sends to one open page."""

    def __init__(self) -> None:
        self.status = 0
        self.content = b""
        self.opened = asyncio.Event()
        self.disconnected = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.content += message["body"]
            self.opened.set()

    @property
    def changes(self) -> int:
        return self.content.count(b"event: changed")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates only when a test asks for them."""
    monkeypatch.setattr(live_module, "_EVERY_SECONDS", 3600.0)
    monkeypatch.setattr(live_module, "_GATHER_SECONDS", 3600.0)


def updates_of(lab: ConsoleLab) -> LiveUpdates:
    return lab.console._live


async def update(lab: ConsoleLab) -> None:
    await updates_of(lab).update()
    for _ in range(20):  # the streams run in tasks of their own
        await asyncio.sleep(0)


async def test_pages_with_the_same_view_are_rendered_once(sqlite_lab: ConsoleLab) -> None:
    lab, calls = sqlite_lab, 0
    updates = updates_of(lab)
    right = updates._render

    async def counted(view: View) -> str:
        nonlocal calls
        calls += 1
        return await right(view)

    updates._render = counted
    async with lab.browser("ada", "operator") as one, lab.browser("ada", "operator") as two:
        async with stream(lab, one, "queues") as first, stream(lab, two, "queues") as second:
            await update(lab)
            assert calls == 1
            assert (first.changes, second.changes) == (1, 1)
            parts = [await each.get("queues", headers=PART) for each in (one, two)]
            assert calls == 1
            assert all(part.status_code == 200 for part in parts)
        async with stream(lab, one, "queues"), stream(lab, two, "jobs"):
            await update(lab)
            assert calls == 3


async def test_page_that_has_not_changed_gets_no_event(sqlite_lab: ConsoleLab) -> None:
    lab = sqlite_lab
    async with lab.browser("ada", "viewer") as browser, stream(lab, browser, "jobs") as found:
        await update(lab)
        assert found.changes == 1  # it may have changed between its load and the stream
        await update(lab)
        await update(lab)
        assert found.changes == 1
        await lab.order("bob", "/orders/mill?item=job")
        await update(lab)
        assert found.changes == 2
        part = await browser.get("jobs", headers=PART)
        assert "mill" in part.text
        assert "<nav" not in part.text


async def test_shared_content_has_the_form_token_of_each_session(sqlite_lab: ConsoleLab) -> None:
    lab = sqlite_lab
    await lab.order("bob", "/orders/mill?item=job")
    async with (
        lab.browser("ada", "operator") as one,
        lab.browser("ada", "operator") as two,
        stream(lab, one, "queues"),
        stream(lab, two, "queues"),
    ):
        await update(lab)
        tokens: list[str] = []
        for browser in (one, two):
            part = await browser.get("queues", headers=PART)
            whole = await browser.get("records")
            own = set(re.findall(r'name="form_token" value="([^"]+)"', whole.text))
            assert set(re.findall(r'name="form_token" value="([^"]+)"', part.text)) == own
            tokens += own
        assert len(set(tokens)) == 2


async def test_viewer_does_not_get_what_was_rendered_for_an_operator(
    sqlite_lab: ConsoleLab,
) -> None:
    lab = sqlite_lab
    await lab.order("bob", "/orders/mill?item=job")
    async with (
        lab.browser("ada", "operator") as operator,
        lab.browser("bob", "viewer") as viewer,
        stream(lab, operator, "jobs"),
        stream(lab, viewer, "jobs"),
    ):
        await lab.order("eve", "/orders/secret?item=job")
        await update(lab)
        assert "secret" in (await operator.get("jobs", headers=PART)).text
        seen = (await viewer.get("jobs", headers=PART)).text
        assert "mill" in seen
        assert "secret" not in seen


async def test_load_of_a_whole_page_is_never_shared(sqlite_lab: ConsoleLab) -> None:
    lab = sqlite_lab
    async with lab.browser("ada", "viewer") as browser, stream(lab, browser, "jobs"):
        await update(lab)
        await lab.order("bob", "/orders/mill?item=job")
        assert "mill" not in (await browser.get("jobs", headers=PART)).text
        assert "mill" in (await browser.get("jobs")).text


@pytest.mark.parametrize(
    ("page", "status"), [("queues", 403), ("jobs?tenant=eve", 404), ("records", 404), ("x", 404)]
)
async def test_stream_of_a_page_that_is_hidden_or_not_live_is_refused(
    sqlite_lab: ConsoleLab, page: str, status: int
) -> None:
    async with sqlite_lab.browser("bob", "viewer") as browser:
        found = await browser.get("events", params={"page": page})
        assert found.status_code == status


async def test_page_that_fails_does_not_keep_others_from_updates(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(_request: PageRequest) -> Shown:
        raise ZeroDivisionError

    pages = (Page("broken", broken, live=True),)
    async with (
        opened(ConsoleLab(f"sqlite:///{tmp_path}/live.db", pages)) as lab,
        lab.browser("ada", "viewer") as browser,
        stream(lab, browser, "broken"),
        stream(lab, browser, "jobs") as good,
    ):
        await update(lab)
        assert good.changes == 1
        assert (await browser.get("broken", headers=PART)).status_code == 500
    assert "the console cannot show broken" in caplog.text


def test_pause_grows_with_the_time_of_rendering_up_to_a_limit() -> None:
    assert live_module._pause_seconds(0.001) == live_module._PAUSE_SECONDS
    assert live_module._pause_seconds(0.1) == pytest.approx(5.0)
    # A database that takes a minute must not make pages an hour old.
    assert live_module._pause_seconds(60.0) == live_module._MAX_PAUSE_SECONDS <= 20


async def test_stream_ends_in_time_though_nothing_changes(
    sqlite_lab: ConsoleLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onceward_operator.console import app

    monkeypatch.setattr(app, "_STREAM_SECONDS", 0.05)
    async with sqlite_lab.browser("ada", "viewer") as browser:
        found = await asyncio.wait_for(browser.get("events", params={"page": "jobs"}), 30)
        assert found.headers["content-type"].startswith("text/event-stream")
    assert not updates_of(sqlite_lab)._views


async def test_notification_of_a_job_updates_pages(
    lab: ConsoleLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "_GATHER_SECONDS", 0.0)
    async with lab.browser("ada", "viewer") as browser, stream(lab, browser, "jobs") as found:
        shown, numbers = "", itertools.count(1)
        async with asyncio.timeout(60):
            # The listener may not be ready for the first; another change updates pages, too.
            while not (found.changes and "mill-" in shown):
                await lab.order("bob", f"/orders/mill-{next(numbers)}?item=job")
                await asyncio.sleep(0.05)
                shown = (await browser.get("jobs", headers=PART)).text
        assert "mill-1" in shown
