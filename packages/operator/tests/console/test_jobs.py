"""Jobs and dead letters, as operators see and requeue them."""

import asyncio
import re
from html import unescape

import pytest

from onceward import JobContext, NonRetryableError
from packages.operator.tests.console.lab import Browser, ConsoleLab

STATES = ("waiting", "running", "done", "dead")
WAITING = "jobs?state=waiting"


@pytest.fixture
async def parcels(lab: ConsoleLab) -> list[str]:
    """The shops whose parcels were sent. The shop ``burnt`` has none to send."""
    sent: list[str] = []

    @lab.onceward.jobs.handler("parcel")
    async def send(job: JobContext) -> dict[str, str]:
        if job.payload["shop"].startswith("burnt"):
            raise NonRetryableError("there is no such <b>shop</b>")
        sent.append(job.payload["shop"])
        return {"sent": job.payload["shop"]}

    return sent


async def run_jobs(lab: ConsoleLab) -> None:
    """Run a worker until no job waits."""
    worker = lab.onceward.worker()
    await worker.start()
    try:
        async with asyncio.timeout(60):
            while await lab.onceward.store.read(
                lab.onceward.store.table_names.render("SELECT id FROM onceward_jobs")
            ):
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
        waiting = await ids(browser, WAITING)
        assert len(waiting) == len(set(waiting)) == 115
        assert sorted(await ids(browser, f"{WAITING}&tenant=bob")) == sorted(waiting)
        assert await ids(browser, f"{WAITING}&tenant=eve") == []
        assert await ids(browser, f"{WAITING}&type=letter") == []
        assert await ids(browser, f"{WAITING}&queue=other") == []
        await run_jobs(lab)
        done, dead = [await ids(browser, f"jobs?state={state}") for state in ("done", "dead")]
        assert (len(set(done)), len(done)) == (60, 60)
        assert (len(set(dead)), len(dead)) == (55, 55)
        assert sorted(await ids(browser, "jobs?state=done&tenant=bob")) == sorted(done)
        assert sorted(await ids(browser, "dead-letters?tenant=bob")) == sorted(dead)
        assert await ids(browser, WAITING) == []


async def test_list_without_a_state_has_the_first_jobs_of_each(
    lab: ConsoleLab, parcels: list[str]
) -> None:
    await enqueue(lab, "sent", "burnt")
    await run_jobs(lab)
    await enqueue(lab, *(f"shop-{number}" for number in range(12)))
    async with lab.browser("ada", "operator") as browser:
        page = (await browser.get("jobs")).text
        sections = dict(
            re.findall(
                r"<h2>(Running|Waiting|Dead|Done)</h2>(.*?)(?=<h2>|</main>)", page, re.DOTALL
            )
        )
        assert list(sections) == ["Running", "Waiting", "Dead", "Done"]
        assert "None." in sections["Running"]
        assert sections["Waiting"].count("<tr>") - 1 == 8
        assert 'href="/console/jobs?state=waiting">More waiting jobs' in sections["Waiting"]
        assert "there is no such &lt;b&gt;shop" in sections["Dead"]
        assert "NonRetryableError" not in sections["Dead"]
        assert "<code>sent</code>" in sections["Done"]
        assert "More" not in sections["Done"]
        assert '<option value="">all</option>' in page
        page = (await browser.get("jobs?type=letter")).text
        assert "No job matches." in page
    assert parcels == ["sent"]


@pytest.mark.usefixtures("parcels")
async def test_cancelling_is_offered_only_if_jobs_wait(lab: ConsoleLab) -> None:
    paths = ("jobs", WAITING, "jobs?queue=default")
    async with lab.browser("ada", "operator") as browser:
        for path in paths:
            assert "Cancel waiting jobs" not in (await browser.get(path)).text
        await enqueue(lab, "mill")
        for path in paths:
            assert "Cancel waiting jobs" in (await browser.get(path)).text
        for path in ("jobs?queue=other", f"{WAITING}&type=letter", "jobs?state=done"):
            assert "Cancel waiting jobs" not in (await browser.get(path)).text


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
        assert await ids(one, WAITING) == [job_id]
        assert await ids(one, "dead-letters") == []
    rows = await lab.onceward.store.read(
        lab.onceward.store.table_names.render(
            "SELECT actor FROM onceward_audit_events WHERE endpoint LIKE 'job.requeued%'"
        )
    )
    assert [row["actor"] for row in rows] == ["ada via console: shop rebuilt"]
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
        assert len(await ids(browser, f"{WAITING}&tenant=bob")) == 2
        assert (await browser.post("dead-letters/requeue", reason="")).status_code == 400
        assert len(await ids(browser, "dead-letters")) == 1


@pytest.mark.usefixtures("parcels")
async def test_bound_operator_sees_and_requeues_only_its_own_jobs(lab: ConsoleLab) -> None:
    await enqueue(lab, "burnt")
    await run_jobs(lab)
    await enqueue(lab, "mill")
    async with lab.browser("ada", "viewer") as browser:
        (dead,), (waiting,) = await ids(browser, "dead-letters"), await ids(browser, WAITING)
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


# -- cancelling -----------------------------------------------------------------------------------


async def audited(lab: ConsoleLab, event: str) -> list[tuple[str, str, str]]:
    """Return tenant, actor and reason of audit events whose name begins like this."""
    rows = await lab.onceward.store.read(
        lab.onceward.store.table_names.render(
            "SELECT tenant, actor, reason FROM onceward_audit_events WHERE endpoint LIKE :event"
        ),
        {"event": f"{event}%"},
    )
    return [(row["tenant"], row["actor"], row["reason"]) for row in rows]


async def test_waiting_job_is_cancelled_once_and_can_be_requeued(
    lab: ConsoleLab, parcels: list[str]
) -> None:
    await enqueue(lab, "mill")
    async with lab.browser("ada", "operator") as one, lab.browser("ada", "admin") as other:
        (job_id,) = await ids(one, WAITING)
        page = await one.get(f"jobs/{job_id}?tenant=bob")
        assert f'action="/console/jobs/{job_id}/cancel"' in page.text
        responses = await asyncio.gather(
            *(
                browser.post(f"jobs/{job_id}/cancel", tenant="bob", reason="sent by post")
                for browser in (one, other)
            )
        )
        assert sorted(response.status_code for response in responses) == [303, 404]
        assert await ids(one, WAITING) == []
        assert await ids(one, "dead-letters?error=sent+by+post") == [job_id]
        page = await one.get(f"jobs/{job_id}?tenant=bob")
        assert "an operator cancelled it. sent by post" in page.text
        await run_jobs(lab)
        assert parcels == []
        await one.post(f"jobs/{job_id}/requeue", tenant="bob", reason="the other parcel was lost")
        await run_jobs(lab)
    assert parcels == ["mill"]
    assert await audited(lab, "job.cancelled") == [("bob", "ada via console", "sent by post")]


@pytest.mark.usefixtures("parcels")
async def test_bulk_cancel_counts_first_and_cancels_only_what_matches(lab: ConsoleLab) -> None:
    await enqueue(lab, "one", "two")
    await enqueue(lab, "three", tenant="eve")
    async with lab.browser("ada", "operator") as browser:
        jobs = await browser.get("jobs?tenant=bob&queue=default")
        assert 'href="/console/jobs/cancel?tenant=bob&amp;queue=default"' in jobs.text
        for path, matching in (
            ("jobs/cancel", 3),
            ("jobs/cancel?tenant=bob", 2),
            ("jobs/cancel?tenant=bob&queue=default&type=parcel", 2),
            ("jobs/cancel?queue=other", 0),
            ("jobs/cancel?tenant=eve&type=letter", 0),
        ):
            page = await browser.get(path)
            assert f"{matching} waiting jobs match" in page.text, path
        assert len(await ids(browser, WAITING)) == 3
        assert (await browser.post("jobs/cancel", tenant="bob", reason="")).status_code == 400
        response = await browser.post("jobs/cancel", tenant="bob", reason="closed")
        assert (
            response.headers["location"]
            == "/console/jobs?state=waiting&tenant=bob&notice=2+jobs+were+cancelled."
        )
        assert len(await ids(browser, WAITING)) == 1
        assert len(await ids(browser, "dead-letters?error=closed")) == 2
    assert await audited(lab, "job.cancelled") == [("bob", "ada via console", "closed")] * 2


@pytest.mark.usefixtures("parcels")
async def test_bulk_actions_of_two_operators_have_one_effect_each(lab: ConsoleLab) -> None:
    await enqueue(lab, *(f"shop-{number}" for number in range(20)))
    async with lab.browser("ada", "operator") as one, lab.browser("ada", "admin") as other:
        for path, event in (
            ("jobs/cancel", "job.cancelled"),
            ("dead-letters/requeue", "job.requeued"),
        ):
            responses = await asyncio.gather(
                *(browser.post(path, reason="strike") for browser in (one, other))
            )
            notices = [response.headers["location"] for response in responses]
            assert sum(int(re.findall(r"notice=(\d+)", each)[0]) for each in notices) == 20
            assert len(await audited(lab, event)) == 20
        assert len(await ids(one, WAITING)) == 20


async def test_bulk_action_is_limited(
    lab: ConsoleLab, parcels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onceward_operator.console.jobs._BULK", 3)
    await enqueue(lab, "a", "b", "c", "d")
    async with lab.browser("ada", "operator") as browser:
        assert "3+ waiting jobs match" in (await browser.get("jobs/cancel")).text
        await browser.post("jobs/cancel", reason="closed")
        assert len(await ids(browser, WAITING)) == 1
    assert parcels == []


@pytest.mark.usefixtures("parcels")
async def test_viewer_and_bound_operator_cancel_nothing_of_others(lab: ConsoleLab) -> None:
    await enqueue(lab, "mill")
    async with lab.browser("ada", "viewer") as browser:
        (job_id,) = await ids(browser, WAITING)
        assert "Cancel" not in (await browser.get("jobs")).text
        assert "Cancel" not in (await browser.get(f"jobs/{job_id}?tenant=bob")).text
        assert (await browser.get("jobs/cancel")).status_code == 403
        for path in ("jobs/cancel", f"jobs/{job_id}/cancel"):
            assert (await browser.post(path, tenant="bob", reason="x")).status_code == 403
    async with lab.browser("eve", "admin") as browser:
        assert "0 waiting jobs match" in (await browser.get("jobs/cancel")).text
        assert (await browser.get("jobs/cancel?tenant=bob")).status_code == 404
        for tenant in ("bob", "eve"):
            for path in ("jobs/cancel", f"jobs/{job_id}/cancel"):
                await browser.post(path, tenant=tenant, reason="mine")
        await browser.post("jobs/cancel", reason="mine")
    async with lab.browser("ada", "viewer") as browser:
        assert await ids(browser, WAITING) == [job_id]
