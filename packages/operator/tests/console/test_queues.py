"""Queues and workers, as operators see, pause and resume them."""

import asyncio

import pytest

from onceward import JobContext
from packages.onceward.tests.support.jobs_harness import eventually
from packages.operator.tests.console.lab import ConsoleLab


class Parcels:
    """A handler that waits for ``may_send``."""

    def __init__(self, lab: ConsoleLab) -> None:
        self.sent: list[str] = []
        self.started = asyncio.Event()
        self.may_send = asyncio.Event()
        self.may_send.set()

        @lab.onceward.jobs.handler("parcel")
        async def send(job: JobContext) -> None:
            self.started.set()
            await self.may_send.wait()
            self.sent.append(job.payload["shop"])


@pytest.fixture
async def parcels(lab: ConsoleLab) -> Parcels:
    return Parcels(lab)


async def order(lab: ConsoleLab, shop: str) -> None:
    assert (await lab.order("bob", f"/orders/{shop}?item=job")).status_code == 201


async def test_paused_queue_is_shown_and_runs_its_jobs_after_it_is_resumed(
    lab: ConsoleLab, parcels: Parcels
) -> None:
    worker = lab.onceward.worker()
    await worker.start()
    try:
        async with lab.browser("ada", "operator") as browser:
            assert "Pause default" in (await browser.get("queues")).text
            response = await browser.post("queues/pause", queue="default", reason="the <b>mill")
            assert response.headers["location"] == "/console/queues?notice=Queue+default+is+paused."
            response = await browser.post("queues/pause", queue="default", reason="too")
            assert "already" in response.headers["location"]
            await order(lab, "mill")
            await asyncio.sleep(0.3)
            page = await browser.get("queues")
            assert "by ada via console: the &lt;b&gt;mill" in page.text
            assert 'queue=default&amp;state=waiting">1</a></td>' in page.text
            assert parcels.sent == []
            await browser.post("queues/resume", queue="default", reason="rebuilt")

            async def is_sent() -> bool:
                return parcels.sent == ["mill"]

            await eventually(is_sent)
            assert "Pause default" in (await browser.get("queues")).text
    finally:
        await worker.stop()
    rows = await lab.onceward.store.read(
        lab.onceward.store.table_names.render(
            "SELECT endpoint, actor, reason FROM onceward_audit_events"
            " WHERE endpoint LIKE 'queue.%' ORDER BY id"
        )
    )
    assert [tuple(row.values()) for row in rows] == [
        ("queue.paused default", "ada via console", "the <b>mill"),
        ("queue.resumed default", "ada via console", "rebuilt"),
    ]


async def test_workers_that_hold_leases_are_listed(lab: ConsoleLab, parcels: Parcels) -> None:
    parcels.may_send.clear()
    await order(lab, "mill")
    worker = lab.onceward.worker()
    async with lab.browser("ada", "viewer") as browser:
        assert "No worker runs a job" in (await browser.get("workers")).text
        await worker.start()
        try:
            await asyncio.wait_for(parcels.started.wait(), 60)
            page = await browser.get("workers")
            assert worker.name in page.text
            assert '<td class="number" data-label="Running jobs">1</td>' in page.text
            parcels.may_send.set()
        finally:
            parcels.may_send.set()
            await worker.stop()
        assert "No worker runs a job" in (await browser.get("workers")).text


@pytest.mark.usefixtures("parcels")
async def test_only_operators_of_all_tenants_pause_queues(lab: ConsoleLab) -> None:
    async with lab.browser("eve", "admin") as browser:
        for path in ("queues", "workers"):
            assert (await browser.get(path)).status_code == 403
        for path in ("queues/pause", "queues/resume"):
            assert (await browser.post(path, queue="default", reason="x")).status_code == 403
    async with lab.browser("ada", "viewer") as browser:
        assert "Pause default" not in (await browser.get("queues")).text
        response = await browser.post("queues/pause", queue="default", reason="x")
        assert response.status_code == 403
    async with lab.browser("ada", "operator") as browser:
        for fields in ({"queue": "", "reason": "x"}, {"queue": "two words", "reason": "x"},
                       {"queue": "default", "reason": ""}):  # fmt: skip
            assert (await browser.post("queues/pause", **fields)).status_code == 400
        response = await browser.post("queues/resume", queue="default", reason="x")
        assert "was+not+paused" in response.headers["location"]
    assert (
        await lab.onceward.store.read(
            lab.onceward.store.table_names.render("SELECT * FROM onceward_paused_queues")
        )
        == []
    )
