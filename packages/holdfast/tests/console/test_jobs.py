"""Jobs and dead letters, as operators see and requeue them."""

import asyncio
import re
from html import unescape

import pytest

from holdfast import JobContext, NonRetryableError
from packages.holdfast.tests.console.lab import Browser, ConsoleLab

STATES = ("waiting", "running", "done", "dead")


@pytest.fixture
async def parcels(lab: ConsoleLab) -> list[str]:
    """The shops whose parcels were sent. The shop ``burnt`` has none to send."""
    sent: list[str] = []

    @lab.holdfast.jobs.handler("parcel")
    async def send(job: JobContext) -> dict[str, str]:
        if job.payload["shop"].startswith("burnt"):
            raise NonRetryableError("there is no such <b>shop</b>")
        sent.append(job.payload["shop"])
        return {"sent": job.payload["shop"]}

    return sent


async def run_jobs(lab: ConsoleLab) -> None:
    """Run a worker until no job waits."""
    worker = lab.holdfast.worker()
    await worker.start()
    try:
        async with asyncio.timeout(60):
            while await lab.holdfast.store.read("SELECT id FROM holdfast_jobs"):
                await asyncio.sleep(0.02)
    finally:
        await worker.stop()


async def enqueue(lab: ConsoleLab, *shops: str, tenant: str = "bob") -> None:
    for shop in shops:
        assert (await lab.order(tenant, f"/orders/{shop}?item=job")).status_code == 201


async def ids(browser: Browser, path: str) -> list[str]:
    """Return the jobs of a list, page by page."""
    found: list[str] = []
    while path:
        page = await browser.get(path)
        assert page.status_code == 200, page.text
        found += re.findall(r'href="/console/jobs/([0-9a-f-]{36})\?', page.text)
        following = re.search(r'rel="next" href="/console/([^"]+)"', page.text)
        path = "" if following is None else unescape(following[1])
    return found


@pytest.mark.usefixtures("parcels")
async def test_lists_page_through_jobs_of_each_state_once(lab: ConsoleLab) -> None:
    shops = [f"shop-{number}" for number in range(60)] + [f"burnt-{n}" for n in range(55)]
    await enqueue(lab, *shops)
    async with lab.browser("ada", "viewer") as browser:
        waiting = await ids(browser, "jobs")
        assert len(waiting) == len(set(waiting)) == 115
        assert sorted(await ids(browser, "jobs?tenant=bob")) == sorted(waiting)
        assert await ids(browser, "jobs?tenant=eve") == []
        assert await ids(browser, "jobs?type=letter") == []
        assert await ids(browser, "jobs?queue=other") == []
        await run_jobs(lab)
        done, dead = [await ids(browser, f"jobs?state={state}") for state in ("done", "dead")]
        assert (len(set(done)), len(done)) == (60, 60)
        assert (len(set(dead)), len(dead)) == (55, 55)
        assert sorted(await ids(browser, "jobs?state=done&tenant=bob")) == sorted(done)
        assert sorted(await ids(browser, "dead-letters?tenant=bob")) == sorted(dead)
        assert await ids(browser, "jobs") == []


async def test_job_shows_payload_causes_and_failures(lab: ConsoleLab, parcels: list[str]) -> None:
    order = await lab.order("bob", "/orders/burnt?item=job")
    await run_jobs(lab)
    async with lab.browser("ada", "operator") as browser:
        (job_id,) = await ids(browser, "dead-letters")
        page = await browser.get(f"jobs/{job_id}?tenant=bob")
        assert "&#34;shop&#34;: &#34;burnt&#34;" in page.text
        assert order.headers["x-request-id"] in page.text
        assert "there is no such &lt;b&gt;shop&lt;/b&gt;" in page.text
    async with lab.browser("ada", "viewer") as browser:
        page = await browser.get(f"jobs/{job_id}?tenant=bob")
        assert "burnt&#34;" not in page.text
        assert "Requeue" not in page.text
    assert parcels == []


async def test_requeue_by_two_operators_has_one_effect(lab: ConsoleLab, parcels: list[str]) -> None:
    await enqueue(lab, "burnt")
    await run_jobs(lab)
    async with lab.browser("ada", "operator") as one, lab.browser("ada", "admin") as other:
        (job_id,) = await ids(one, "dead-letters")
        responses = await asyncio.gather(
            *(
                browser.post(f"jobs/{job_id}/requeue", tenant="bob", reason="shop rebuilt")
                for browser in (one, other)
            )
        )
        assert sorted(response.status_code for response in responses) == [303, 404]
        assert await ids(one, "jobs") == [job_id]
        assert await ids(one, "dead-letters") == []
    rows = await lab.holdfast.store.read(
        "SELECT actor FROM holdfast_audit_events WHERE endpoint LIKE 'job.requeued%'"
    )
    assert [row["actor"] for row in rows] == ["ada by console: shop rebuilt"]
    assert parcels == []


@pytest.mark.usefixtures("parcels")
async def test_bulk_requeue_moves_only_what_matches(lab: ConsoleLab) -> None:
    await enqueue(lab, "burnt-1", "burnt-2")
    await enqueue(lab, "burnt-3", tenant="eve")
    await run_jobs(lab)
    async with lab.browser("ada", "operator") as browser:
        page = await browser.get("dead-letters")
        assert "3 dead letters match" in page.text
        page = await browser.get("dead-letters?tenant=bob")
        assert "2 dead letters match" in page.text
        response = await browser.post("dead-letters/requeue", tenant="bob", reason="rebuilt")
        assert response.status_code == 303
        assert len(await ids(browser, "dead-letters")) == 1
        assert len(await ids(browser, "jobs?tenant=bob")) == 2
        assert (await browser.post("dead-letters/requeue", reason="")).status_code == 400
        assert len(await ids(browser, "dead-letters")) == 1


@pytest.mark.usefixtures("parcels")
async def test_bound_operator_sees_and_requeues_only_its_own_jobs(lab: ConsoleLab) -> None:
    await enqueue(lab, "burnt")
    await run_jobs(lab)
    await enqueue(lab, "mill")
    async with lab.browser("ada", "viewer") as browser:
        (dead,), (waiting,) = await ids(browser, "dead-letters"), await ids(browser, "jobs")
    async with lab.browser("eve", "admin") as browser:
        for state in STATES:
            assert await ids(browser, f"jobs?state={state}") == []
        assert await ids(browser, "dead-letters") == []
        for job_id in (dead, waiting):
            assert (await browser.get(f"jobs/{job_id}")).status_code == 404
            assert (await browser.get(f"jobs/{job_id}?tenant=bob")).status_code == 404
        for tenant in ("bob", "eve", ""):
            response = await browser.post(f"jobs/{dead}/requeue", tenant=tenant, reason="mine")
            assert response.status_code == 404
        await browser.post("dead-letters/requeue", tenant="bob", reason="mine")
        await browser.post("dead-letters/requeue", reason="mine")
    async with lab.browser("ada", "viewer") as browser:
        assert await ids(browser, "dead-letters") == [dead]


@pytest.mark.parametrize(
    "path",
    ["jobs?state=lost", "jobs?after=x", "jobs?after=1+2", "jobs?after=%27%3B--+1", "jobs/x",
     "jobs/%2e%2e", "jobs?after=infinity+zz", "dead-letters?after=1"],
)  # fmt: skip
async def test_malformed_address_is_an_error_for_the_operator(lab: ConsoleLab, path: str) -> None:
    async with lab.browser("ada", "viewer") as browser:
        response = await browser.get(path)
        assert response.status_code in {400, 404}
        assert "defect" not in response.text
