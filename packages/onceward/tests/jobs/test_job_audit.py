"""The audit events of jobs: enqueued, merged, dead and requeued, with request and version."""

from typing import Any

import pytest

from onceward.errors import UsageError
from onceward.jobs.context import JobContext
from onceward.jobs.enqueue import Cause, new_job
from onceward.jobs.job import Merged
from packages.onceward.tests.support.jobs_harness import JobsLab


async def enqueue(lab: JobsLab, request_id: str, **options: Any) -> Any:
    cause = Cause("ada", "ada's phone", request_id, f"correlation of {request_id}")
    async with lab.transaction() as tx:
        return await lab.job_store.enqueue(
            tx, new_job("effect", request_id, cause=cause, **options)
        )


async def job_events(lab: JobsLab) -> list[tuple[Any, ...]]:
    rows = await lab.rows(
        "SELECT endpoint, request_id, correlation_id, version, status, resource, payload_hash"
        " FROM onceward_audit_events WHERE tenant = 'ada' ORDER BY created_at, id"
    )
    return [tuple(row.values()) for row in rows]


@pytest.mark.parametrize("option", ["coalesce", "resource_id"])
async def test_merged_job_leaves_an_event_with_the_request_that_caused_it(
    lab: JobsLab, option: str
) -> None:
    first = await enqueue(lab, "r-1", **{option: "day"}, version=3)
    assert await enqueue(lab, "r-2", **{option: "day"}, version=4) == Merged(first.job_id)
    enqueued, merged = await job_events(lab)
    assert enqueued[:5] == ("job.enqueued default effect", "r-1", "correlation of r-1", 3, 202)
    assert merged[:5] == ("job.merged default effect", "r-2", "correlation of r-2", 4, 202)
    assert merged[5] == enqueued[5] == (await lab.job(first.job_id)).view.key, "the one that runs"
    assert merged[6] != enqueued[6], "the hash is that of the merged payload"


async def test_merge_that_is_rolled_back_leaves_no_event(lab: JobsLab) -> None:
    await lab.enqueued("effect", 1, coalesce="day")
    unit = await lab.store.begin()
    assert isinstance(await lab.enqueue_in(unit.statements, "effect", 2, coalesce="day"), Merged)
    await unit.rollback()
    assert len(await job_events(lab)) == 1


async def test_events_of_a_job_keep_the_version_until_it_is_requeued(lab: JobsLab) -> None:
    await enqueue(lab, "r-1", coalesce="day", version=7)
    await enqueue(lab, "r-2", coalesce="day", version=8)
    job = await lab.claim_one("one")
    assert job.version == 8, "the payload is that of the second request"
    assert await lab.job_store.dead_letter(job, worker="one", reason="error", error="no")
    assert await lab.admin.requeue(job.lease.job_id, tenant="ada", actor="grace")
    assert [(event[0].split()[0], event[3]) for event in await job_events(lab)] == [
        ("job.enqueued", 7), ("job.merged", 8), ("job.dead", 8), ("job.requeued", 8),
    ]  # fmt: skip
    assert (await lab.claim_one("one")).version == 8


async def test_job_that_a_job_enqueues_has_its_version(lab: JobsLab) -> None:
    @lab.jobs.handler("effect")
    async def parent(job: JobContext) -> None:
        await job.enqueue("next", {"n": 1})
        await job.enqueue("next", {"n": 2}, version=9)

    @lab.jobs.handler("next")
    async def child(_job: JobContext) -> None: ...

    await enqueue(lab, "r-1", version=5)
    await lab.start_worker()
    await lab.until_idle()
    assert [event[3] for event in await job_events(lab)] == [5, 5, 9]


@pytest.mark.parametrize("version", [-1, 2**63, "3", True, 1.0])
def test_version_that_is_not_a_number_of_64_bits_is_refused(version: Any) -> None:
    with pytest.raises(UsageError, match="version must be"):
        new_job("effect", 1, cause=Cause("ada", "a", "r", "c"), version=version)
