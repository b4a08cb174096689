"""The first page: the last hour, the state of the store, and what needs attention."""

import re
import uuid
from datetime import timedelta
from html import unescape

import pytest

from onceward_operator.console.overview import _columns
from onceward_operator.record_search import database_time
from packages.operator.tests.console.lab import ConsoleLab
from packages.operator.tests.console.test_records import flush


def tiles(text: str) -> dict[str, str]:
    found = re.findall(r'<span class="dim">([^<]+)</span><strong>([^<]+)</strong>', text)
    return dict(found)


async def test_overview_counts_the_last_hour_and_times_the_store(lab: ConsoleLab) -> None:
    key = {"idempotency-key": str(uuid.uuid4())}
    await lab.order("bob", **key)
    await lab.order("bob", **key)
    await lab.order("bob", "/orders/farm", **key)
    for name, number in (("store calls", 4), ("store seconds", 0.01), ("waited", 2)):
        lab.onceward.runtime.request_log.count(name, number)
    await flush(lab)
    async with lab.browser("ada", "viewer") as browser:
        page = await browser.get("")
    found = tiles(page.text)
    assert (found["Executed"], found["Replayed"], found["Mismatched"]) == ("1", "1", "1")
    assert found["Mean store call"] == "2.50 ms"
    assert found["Waited"] == "2"
    assert "Circuit breaker" in page.text


async def test_overview_names_weaknesses_of_the_database(lab: ConsoleLab) -> None:
    async with lab.browser("ada", "viewer") as browser:
        page = await browser.get("")
    # The test server has no synchronous standby; SQLite has no such weakness.
    is_weak = "there is no synchronous standby" in page.text
    assert is_weak == (lab.onceward.store.name != "sqlite")


async def test_overview_says_that_nothing_sweeps(lab: ConsoleLab) -> None:
    await lab.order("bob")
    async with lab.browser("ada", "viewer") as browser:
        assert "No expired record was deleted" not in (await browser.get("")).text
        store = lab.onceward.store
        before = database_time(store, lab.onceward.clock.now() - timedelta(hours=5))
        await store.write(
            store.table_names.render(
                "UPDATE onceward_idempotency_records SET expires_at = :before RETURNING tenant"
            ),
            {"before": before},
        )
        assert "No expired record was deleted for 5 hours" in (await browser.get("")).text


async def test_overview_shows_a_paused_queue_with_who_why_and_since_when(lab: ConsoleLab) -> None:
    async with lab.browser("ada", "operator") as browser:
        assert "is paused" not in (await browser.get("")).text
        await browser.post("queues/pause", queue="mail", reason="the <b>printer")
        page = (await browser.get("")).text
        attention = page.partition("Needs attention</h2>")[2].partition("</section>")[0]
        assert re.search(
            r"Queue mail has been paused for \d+ s, by ada via console: the &lt;b&gt;printer<",
            attention,
        )
        row = page.partition('data-label="Queue"><a href="/console/jobs?queue=mail"')[2]
        state = row.partition('data-label="State">')[2].partition("</td>")[0]
        assert re.search(r"paused</span> for \d+ s by ada via console: the &lt;b&gt;pr", state)
        await lab.order("bob", "/orders/mill?item=job")
        await lab.onceward.store.write(
            lab.onceward.store.table_names.render(
                "UPDATE onceward_jobs SET queue = 'mail', visible_at = visible_at RETURNING id"
            )
        )
        await browser.post("queues/resume", queue="mail", reason="repaired")
        page = (await browser.get("")).text
        assert "paused" not in page
        assert 'data-label="State">open</td>' in page
        assert 'data-label="Dead letters">0</td>' in page  # no link to an empty list


@pytest.mark.parametrize(("tiles", "columns"), [(3, 3), (4, 4), (5, 5), (6, 3), (7, 4), (9, 5)])
def test_no_row_of_tiles_has_a_single_one(tiles: int, columns: int) -> None:
    assert _columns(tiles) == columns
    assert tiles % columns != 1


async def test_tiles_say_what_they_count_and_lead_to_its_list(lab: ConsoleLab) -> None:
    await lab.order("bob")
    await flush(lab)
    async with lab.browser("ada", "viewer") as browser:
        page = (await browser.get("")).text
        links = re.findall(r'<a class="tile" href="/console/([^"]+)"', page)
        assert links == ["records", "requests?outcome=replayed", "requests?outcome=mismatched"]
        assert "409: the key was used for another request." in page
        for link in links:
            assert (await browser.get(unescape(link))).status_code == 200


async def test_record_shows_its_policy_and_that_it_has_expired(lab: ConsoleLab) -> None:
    key = str(uuid.uuid4())
    await lab.order("bob", **{"idempotency-key": key})
    async with lab.browser("ada", "viewer") as browser:
        page = await browser.get(f"find?q={key}")
        assert "default: responses kept 1 day, errors 4 hours" in page.text
        assert "errors stored: handler 4xx" in page.text
        assert "has expired" not in page.text
        store = lab.onceward.store
        await store.write(
            store.table_names.render(
                "UPDATE onceward_idempotency_records SET expires_at = :before RETURNING tenant"
            ),
            {"before": database_time(store, lab.onceward.clock.now() - timedelta(hours=1))},
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
