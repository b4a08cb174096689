"""Integration: end-to-end POST with retry and replay, conflict on a mismatched payload, the 409 of
the optimistic lock, lease renewal, the clean-up of expired records. Worker retry with the dedup
store is in ``test_effects``, the conflict matrix in ``test_conflicts``."""

import asyncio
from datetime import UTC, datetime, timedelta

from holdfast.clock import SystemClock
from holdfast_services.planning.jobs import NOTIFY

from .fixtures import Office, OpenOffice, made, ok, refused, tag


async def test_end_to_end_post_with_retry_and_replay_semantics(office: Office) -> None:
    answers = await asyncio.gather(
        *(office.post("/v1/projects", {"name": "Harbour"}, key="k") for _ in range(8))
    )
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.content for answer in answers}) == 1
    [first] = [answer for answer in answers if "idempotency-replayed" not in answer.headers]
    late = await office.post("/v1/projects", {"name": "Harbour"}, key="k")
    assert late.headers["idempotency-replayed"] == "true"
    assert late.headers["x-original-request-id"] == first.headers["x-request-id"]
    assert (late.headers["etag"], made(late)) == (first.headers["etag"], made(first))
    assert await office.count("planning_projects") == 1
    assert await office.count("audit_events") == 1


async def test_conflict_on_mismatched_payload(office: Office) -> None:
    await office.post("/v1/projects", {"name": "Harbour"}, key="k")
    conflict = await office.post("/v1/projects", {"name": "Quay"}, key="k")
    refused(conflict, 409, "idempotency.payload_mismatch")
    assert await office.count("planning_projects") == 1


async def test_optimistic_lock_409_path_from_conflict_to_success(office: Office) -> None:
    path = await office.mission()
    ok(await office.patch(path, {"title": "first"}, **tag(1)))
    conflict = await office.patch(path, {"title": "second"}, **tag(1))
    current = refused(conflict, 409, "concurrency.version_mismatch")["currentVersion"]
    refetched = await office.get(path)
    assert refetched.headers["etag"] == f'"{current}"'
    again = await office.patch(
        path, {"title": "second"}, If_Match=refetched.headers["etag"], key="another"
    )
    assert (ok(again)["title"], ok(again)["version"]) == ("second", 3)


async def test_visibility_timeout_and_lease_renewal_handling(office: Office) -> None:
    """A lease that is renewed hides the job; one that runs out shows it to the next worker."""
    await office.assignment()
    table = office.holdfast.job_store
    jobs = await table.claim(["planning"], worker="slow", limit=10, lease_seconds=0.5)
    [job] = [each for each in jobs if each.type == NOTIFY]
    assert await table.renew([job.lease], worker="slow", lease_seconds=30)
    await asyncio.sleep(0.6)
    visible = await table.claim(["planning"], worker="next", limit=10, lease_seconds=30)
    assert {each.lease.job_id for each in visible} == {
        each.lease.job_id for each in jobs if each is not job
    }
    lost = [each.lease for each in jobs if each is not job]
    assert await table.renew(lost, worker="slow", lease_seconds=30) == set()


class HeldClock(SystemClock):
    ahead = timedelta(0)

    def now(self) -> datetime:
        return datetime.now(UTC) + self.ahead


async def test_cleanup_purges_expired_records_of_successes_after_24_hours_and_errors_after_4(
    open_office: OpenOffice,
) -> None:
    clock = HeldClock()
    async with open_office(clock=clock) as office:
        path = await office.mission()  # two successes
        refused(await office.patch(path, {}, **tag(9)), 409, "concurrency.version_mismatch")
        assert await office.count("idempotency_records") == 3
        for hours, left in ((3.9, 3), (4.1, 2), (23.9, 2), (24.1, 0)):
            clock.ahead = timedelta(hours=hours)
            await office.holdfast.sweep()
            assert await office.count("idempotency_records") == left, hours
        assert await office.count("audit_events") > 0


async def test_an_expired_record_does_not_count_whether_or_not_it_was_swept(
    open_office: OpenOffice,
) -> None:
    clock = HeldClock()
    async with open_office(clock=clock, planning_success_ttl_hours=0.001) as office:
        first = await office.post("/v1/projects", {"name": "x"}, key="k")
        clock.ahead = timedelta(seconds=4)
        again = await office.post("/v1/projects", {"name": "x"}, key="k")
        assert made(again) != made(first)
        assert "idempotency-replayed" not in again.headers
