"""The first page: the last hour, the state of the store, and what needs attention."""

import re
import uuid
from datetime import timedelta

from holdfast.server.record_search import database_time
from packages.holdfast.tests.console.lab import ConsoleLab
from packages.holdfast.tests.console.test_records import flush


def tiles(text: str) -> dict[str, str]:
    found = re.findall(r'<span class="dim">([^<]+)</span><strong>([^<]+)</strong>', text)
    return dict(found)


async def test_overview_counts_the_last_hour_and_times_the_store(lab: ConsoleLab) -> None:
    key = {"idempotency-key": str(uuid.uuid4())}
    await lab.order("bob", **key)
    await lab.order("bob", **key)
    await lab.order("bob", "/orders/farm", **key)
    for name, number in (("store calls", 4), ("store seconds", 0.01), ("waited", 2)):
        lab.holdfast.request_log.count(name, number)
    await flush(lab)
    async with lab.browser("ada", "viewer") as browser:
        page = await browser.get("")
    found = tiles(page.text)
    assert (found["Executed"], found["Replayed"], found["Mismatched"]) == ("1", "1", "1")
    assert found["Mean time of a store call"] == "2.50 ms"
    assert found["Waited for the first request"] == "2"
    assert "Circuit breaker" in page.text


async def test_overview_names_weaknesses_of_the_database(lab: ConsoleLab) -> None:
    async with lab.browser("ada", "viewer") as browser:
        page = await browser.get("")
    # The test server has no synchronous standby; SQLite has no such weakness.
    is_weak = "there is no synchronous standby" in page.text
    assert is_weak == (lab.holdfast.store.name != "sqlite")


async def test_overview_says_that_nothing_sweeps(lab: ConsoleLab) -> None:
    await lab.order("bob")
    async with lab.browser("ada", "viewer") as browser:
        assert "No expired record was deleted" not in (await browser.get("")).text
        store = lab.holdfast.store
        before = database_time(store, lab.holdfast.clock.now() - timedelta(hours=5))
        await store.write(
            "UPDATE holdfast_idempotency_records SET expires_at = :before RETURNING tenant",
            {"before": before},
        )
        assert "No expired record was deleted for 5 hours" in (await browser.get("")).text


async def test_record_shows_its_policy_and_that_it_has_expired(lab: ConsoleLab) -> None:
    key = str(uuid.uuid4())
    await lab.order("bob", **{"idempotency-key": key})
    async with lab.browser("ada", "viewer") as browser:
        page = await browser.get(f"find?q={key}")
        assert "default: responses kept 1 day, errors 4 hours" in page.text
        assert "errors stored: handler 4xx" in page.text
        assert "has expired" not in page.text
        store = lab.holdfast.store
        await store.write(
            "UPDATE holdfast_idempotency_records SET expires_at = :before RETURNING tenant",
            {"before": database_time(store, lab.holdfast.clock.now() - timedelta(hours=1))},
        )
        assert "This record has expired" in (await browser.get(f"find?q={key}")).text


async def test_find_lists_the_places_of_an_ambiguous_id(lab: ConsoleLab) -> None:
    shared = str(uuid.uuid4())
    await lab.order("bob", **{"idempotency-key": shared})
    await lab.order("bob", **{"x-correlation-id": shared})
    async with lab.browser("ada", "viewer") as browser:
        page = await browser.get(f"find?q={shared}")
        assert page.url.path == "/console/find"
        assert len(re.findall(r'<li><a href="/console/records/show', page.text)) == 2
    async with lab.browser("eve", "viewer") as browser:
        assert (await browser.get(f"find?q={shared}")).status_code == 404
