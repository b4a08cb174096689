"""Integration: end-to-end POST with retry and replay, conflict on a mismatched payload, the 409 of
the optimistic lock, lease renewal, the clean-up of expired records. Worker retry with the dedup
store is in ``test_effects``, the conflict matrix in ``test_conflicts``."""

import asyncio
from datetime import UTC, datetime, timedelta

from onceward_protocol.clock import SystemClock
from onceward_services.planning.jobs import NOTIFY

from .fixtures import OpenPlanning, PlanningServer, made, ok, refused, tag


async def test_end_to_end_post_with_retry_and_replay_semantics(planning: PlanningServer) -> None:
    responses = await asyncio.gather(
        *(planning.post("/v1/projects", {"name": "Harbour"}, key="k") for _ in range(8))
    )
    assert {response.status_code for response in responses} == {201}
    assert len({response.content for response in responses}) == 1
    [first] = [response for response in responses if "idempotency-replayed" not in response.headers]
    late = await planning.post("/v1/projects", {"name": "Harbour"}, key="k")
    assert late.headers["idempotency-replayed"] == "true"
    assert late.headers["x-original-request-id"] == first.headers["x-request-id"]
    assert (late.headers["etag"], made(late)) == (first.headers["etag"], made(first))
    assert await planning.count("planning_projects") == 1
    assert await planning.count("onceward_audit_events") == 1


async def test_conflict_on_mismatched_payload(planning: PlanningServer) -> None:
    await planning.post("/v1/projects", {"name": "Harbour"}, key="k")
    conflict = await planning.post("/v1/projects", {"name": "Quay"}, key="k")
    refused(conflict, 409, "idempotency.payload_mismatch")
    assert await planning.count("planning_projects") == 1


async def test_optimistic_lock_409_path_from_conflict_to_success(planning: PlanningServer) -> None:
    path = await planning.mission()
    ok(await planning.patch(path, {"title": "first"}, **tag(1)))
    conflict = await planning.patch(path, {"title": "second"}, **tag(1))
    current = refused(conflict, 409, "concurrency.version_mismatch")["currentVersion"]
    refetched = await planning.get(path)
    assert refetched.headers["etag"] == f'"{current}"'
    again = await planning.patch(
        path, {"title": "second"}, If_Match=refetched.headers["etag"], key="another"
    )
    assert (ok(again)["title"], ok(again)["version"]) == ("second", 3)


async def test_visibility_timeout_and_lease_renewal_handling(planning: PlanningServer) -> None:
    """A renewed lease hides the job; an expired one makes it available to the next worker."""
    await planning.assignment()
    table = planning.onceward.runtime.job_store
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
    open_planning: OpenPlanning,
) -> None:
    clock = HeldClock()
    async with open_planning(clock=clock) as planning:
        path = await planning.mission()  # two successes
        refused(await planning.patch(path, {}, **tag(9)), 409, "concurrency.version_mismatch")
        assert await planning.count("onceward_idempotency_records") == 3
        for hours, left in ((3.9, 3), (4.1, 2), (23.9, 2), (24.1, 0)):
            clock.ahead = timedelta(hours=hours)
            await planning.onceward.runtime.sweeper.sweep()
            assert await planning.count("onceward_idempotency_records") == left, hours
        assert await planning.count("onceward_audit_events") > 0


async def test_an_expired_record_does_not_count_whether_or_not_it_was_swept(
    open_planning: OpenPlanning,
) -> None:
    clock = HeldClock()
    async with open_planning(clock=clock, planning_success_ttl_hours=0.001) as planning:
        first = await planning.post("/v1/projects", {"name": "x"}, key="k")
        clock.ahead = timedelta(seconds=4)
        again = await planning.post("/v1/projects", {"name": "x"}, key="k")
        assert made(again) != made(first)
        assert "idempotency-replayed" not in again.headers
