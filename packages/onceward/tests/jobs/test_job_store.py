"""The tables decide: who gets a job, for how long, and who may not end it any more."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from onceward.errors import LeaseLostError, UsageError
from onceward.jobs.admin import JobAdmin
from onceward.jobs.cleaner import clean_up
from onceward.jobs.job import Lease, LeasedJob
from onceward.jobs.job_store import JobStore, _statements, audit_values
from onceward.ports import RecordQuery
from onceward.tenants import ALL_TENANTS
from packages.onceward.tests.jobs.conftest import OpenStore
from packages.onceward.tests.support.jobs_harness import JobsLab

# -- taking -----------------------------------------------------------------------------------


async def test_due_jobs_are_claimed_oldest_first_up_to_the_limit(lab: JobsLab) -> None:
    ids = [await lab.enqueued("effect", n, queue=f"q{n % 2}") for n in range(6)]
    for n in range(6):  # else two may be due in the same millisecond
        await lab.show_in(-20 if n == 5 else -10 + n, f"payload = '{n}'")
    await lab.enqueued("effect", "later", queue="q0", delay_seconds=60)
    await lab.enqueued("effect", "elsewhere", queue="q2")
    first = await lab.job_store.claim(("q0", "q1"), worker="w", limit=4, lease_seconds=30)
    assert {job.lease.job_id for job in first} == {ids[5], ids[0], ids[1], ids[2]}
    rest = await lab.job_store.claim(("q0", "q1"), worker="w", limit=100, lease_seconds=30)
    assert {job.lease.job_id for job in rest} == {ids[3], ids[4]}
    assert await lab.job_store.claim(("q0", "q1"), worker="w", limit=100, lease_seconds=30) == []


async def test_claimed_job_has_everything_that_was_enqueued(lab: JobsLab) -> None:
    job_id = await lab.enqueued("effect", {"ü": [1]}, resource_id="order/1", max_attempts=3)
    job = await lab.claim_one()
    assert job.lease == Lease("ada", job_id, 1)
    assert (job.queue, job.type, job.resource_id) == ("default", "effect", "order/1")
    assert job.key == "job:ada:default:effect:order/1"
    assert job.decoded() == {"ü": [1]}
    assert (job.attempt, job.max_attempts, job.completed) == (1, 3, False)
    assert (job.request_id, job.correlation_id) == ("request-1", "correlation-1")
    assert abs((job.enqueued_at - await lab.job_store.now()).total_seconds()) < 5


async def test_concurrent_claims_get_different_jobs(lab: JobsLab, another_store: OpenStore) -> None:
    count = 60
    for n in range(count):
        await lab.enqueued("effect", n)
    tables = [JobStore(await another_store()) for _ in range(3)]

    async def take_all(table: JobStore, lane: int) -> list[LeasedJob]:
        claimed: list[LeasedJob] = []
        for _ in range(12):
            claimed += await table.claim(("default",), worker=f"w{lane}", limit=5, lease_seconds=30)
        return claimed

    claimed = await asyncio.gather(*(take_all(tables[lane % 3], lane) for lane in range(6)))
    owners = Counter(job.lease.job_id for jobs in claimed for job in jobs)
    assert len(owners) == count, "some were not claimed"
    assert set(owners.values()) == {1}, "some were claimed twice"


# What the current transaction has read from the table of jobs.
READS = """
SELECT seq_scan AS scans, seq_tup_read + idx_tup_fetch AS rows
  FROM pg_stat_xact_user_tables WHERE relname = 'jobs'
"""


async def test_jobs_that_are_not_due_yet_do_not_slow_the_claim(lab: JobsLab) -> None:
    """It stops at the first one: a line of thousands costs no more than a line of ten."""
    await lab.enqueued("effect", 0, delay_seconds=3600)
    (text,) = _statements(lab.store.name, lab.store.table_names, "claim")
    is_sqlite = lab.store.name == "sqlite"
    values = {
        "queues": '["default"]' if is_sqlite else ["default"],
        "worker": "one",
        "limit": 10,
        "lease_seconds": 30.0,
        "alone": False,
    }
    if is_sqlite:
        plan = await lab.store.read(f"EXPLAIN QUERY PLAN {text}", values)
        assert any(
            "idx_onceward_jobs_visible_at (queue=? AND visible_at<?)" in row["detail"]
            for row in plan
        )
        return
    async with lab.transaction() as tx:
        before = await tx.fetch_one(READS)
        assert not await tx.fetch_all(text, values)
        after = await tx.fetch_one(READS)
    assert before is not None
    assert after is not None
    assert after["scans"] == before["scans"], "the claim reads the table"
    assert after["rows"] == before["rows"], "the claim reads jobs that are not due"


async def test_due_in_returns_the_seconds_until_the_next_job(lab: JobsLab) -> None:
    assert await lab.job_store.due_in(("default",)) is None
    await lab.enqueued("effect", 1, delay_seconds=60)
    due_in = await lab.job_store.due_in(("default", "other"))
    assert due_in is not None
    assert 55 < due_in <= 60
    assert await lab.job_store.due_in(("other",)) is None
    await lab.enqueued("effect", 2)
    assert await lab.job_store.due_in(("default",)) == 0
    await lab.claim(lease_seconds=20)
    due_in = await lab.job_store.due_in(("default",))
    assert due_in is not None
    assert 15 < due_in <= 20, "an expiring lease makes a job due"


# -- leases -----------------------------------------------------------------------------------


async def test_expired_lease_makes_the_job_claimable_with_a_new_number(lab: JobsLab) -> None:
    await lab.enqueued()
    first = await lab.claim_one("one", lease_seconds=30)
    assert await lab.claim("other") == []
    await lab.show_in(-0.001)
    second = await lab.claim_one("other")
    assert (first.lease.number, second.lease.number) == (1, 2)
    assert (first.attempt, second.attempt) == (1, 2)


async def test_lease_is_renewed_only_before_it_expires(lab: JobsLab) -> None:
    ids = [await lab.enqueued("effect", n) for n in range(3)]
    jobs = await lab.claim("one", lease_seconds=5)
    await lab.show_in(-0.001, f"id = '{ids[1]}'")
    await lab.store.write(
        lab.store.table_names.render(
            f"UPDATE onceward_jobs SET lease = lease + 1 WHERE id = '{ids[2]}'"
        )
    )
    held = await lab.job_store.renew([job.lease for job in jobs], worker="one", lease_seconds=100)
    assert held == {("ada", ids[0])}
    assert await lab.job_store.renew([jobs[0].lease], worker="two", lease_seconds=100) == set()
    now = await lab.job_store.now()
    due_at = (await lab.job(ids[0])).view.due_at
    assert due_at is not None
    assert 90 < (due_at - now).total_seconds() <= 100


Ending = Callable[[JobsLab, LeasedJob], Awaitable[bool]]


async def completes(lab: JobsLab, job: LeasedJob) -> bool:
    return bool(await lab.job_store.complete_alone([(job.lease, None)], worker="one"))


async def completes_with_effects(lab: JobsLab, job: LeasedJob) -> bool:
    unit = await lab.store.begin()
    await unit.statements.execute("INSERT INTO effects (name) VALUES ('stale')")
    try:
        await lab.job_store.complete_within(unit, job, None, worker="one")
    except LeaseLostError:
        await unit.rollback()
        return False
    await unit.commit(None, None)
    return True


async def completes_in_one_message(lab: JobsLab, job: LeasedJob) -> bool:
    last = lab.job_store.completion(job, '{"é": "\'"}', worker="one")
    if last is None:  # on SQLite, and with an order key
        return await completes_with_effects(lab, job)
    unit = await lab.store.begin()
    assert unit.can_commit_after
    await unit.transaction.execute("INSERT INTO effects (name) VALUES ('stale')")
    try:
        await unit.commit_after(last)
    except LeaseLostError:
        return False
    assert (await lab.rows("SELECT result FROM onceward_job_completions"))[0]["result"] == (
        '{"é": "\'"}'
    )
    return True


async def renews(lab: JobsLab, job: LeasedJob) -> bool:
    return bool(await lab.job_store.renew([job.lease], worker="one", lease_seconds=30))


async def retries(lab: JobsLab, job: LeasedJob) -> bool:
    return await lab.job_store.retry(job, worker="one", reason="error", error="e", delay_seconds=0)


async def dead_letters(lab: JobsLab, job: LeasedJob) -> bool:
    return await lab.job_store.dead_letter(job, worker="one", reason="error", error="e")


async def releases(lab: JobsLab, job: LeasedJob) -> bool:
    return await lab.job_store.release(job, worker="one")


async def saves_a_step(lab: JobsLab, job: LeasedJob) -> bool:
    try:
        await lab.job_store.save_step(job.lease, "mail", "1", worker="one")
    except LeaseLostError:
        return False
    return True


ENDINGS: list[Ending] = [
    completes,
    completes_with_effects,
    completes_in_one_message,
    renews,
    retries,
    dead_letters,
    releases,
    saves_a_step,
]


async def everything(lab: JobsLab) -> list[object]:
    tables = (
        "onceward_jobs",
        "onceward_job_completions",
        "onceward_dead_letters",
        "onceward_job_failures",
        "onceward_job_steps",
        "effects",
    )
    return [await lab.rows(f"SELECT * FROM {table}") for table in tables] + [
        await lab.count("onceward_audit_events")
    ]


@pytest.mark.parametrize("order", [None, "line"])
@pytest.mark.parametrize("end", ENDINGS)
async def test_only_the_holder_of_a_valid_lease_can(
    lab: JobsLab, end: Ending, order: str | None
) -> None:
    """A lease is lost if another worker leased the job, it expired, or the worker differs."""
    await lab.enqueued("effect", resource_id="1", order=order)
    job = await lab.claim_one("one")
    await lab.show_in(-0.001)
    before = await everything(lab)
    assert not await end(lab, job), "it had expired, although no other worker had leased it"
    assert await everything(lab) == before
    await lab.claim_one("two")
    before = await everything(lab)
    assert not await end(lab, job), "another had it"
    assert await everything(lab) == before
    await lab.store.write(lab.store.table_names.render("UPDATE onceward_jobs SET lease = 1"))
    before = await everything(lab)
    assert not await end(lab, job), "the same number, but another's"
    assert await everything(lab) == before
    await lab.store.write(
        lab.store.table_names.render("UPDATE onceward_jobs SET worker = 'one', attempts = 1")
    )
    assert await end(lab, job), "and the holder can"
    assert await everything(lab) != before


async def test_paused_worker_with_an_old_lease_number_cannot_complete(lab: JobsLab) -> None:
    """The same worker took it again: the name is right, the number is not."""
    await lab.enqueued()
    stale = await lab.claim_one("one")
    await lab.show_in(-0.001)
    await lab.claim_one("one")
    assert not await completes(lab, stale)
    assert not await completes_with_effects(lab, stale)
    assert not await completes_in_one_message(lab, stale)
    assert await lab.effects() == []


async def test_batch_completion_skips_only_lost_leases(lab: JobsLab) -> None:
    ids = [await lab.enqueued("effect", n) for n in range(10)]
    jobs = {job.lease.job_id: job for job in await lab.claim("one")}
    await lab.show_in(-0.001, f"id = '{ids[3]}'")
    await lab.store.write(
        lab.store.table_names.render(
            f"UPDATE onceward_jobs SET lease = lease + 1 WHERE id = '{ids[7]}'"
        )
    )
    results = [(jobs[job_id].lease, f'"{job_id}"') for job_id in ids]
    held = await lab.job_store.complete_alone(results, worker="one")
    kept = set(ids) - {ids[3], ids[7]}
    assert held == {("ada", job_id) for job_id in kept}
    markers = await lab.rows("SELECT job_id, result FROM onceward_job_completions")
    assert {str(row["job_id"]): row["result"] for row in markers} == {i: f'"{i}"' for i in kept}
    assert await lab.count("onceward_jobs") == 2


async def test_released_job_is_claimable_at_once_and_its_attempt_does_not_count(
    lab: JobsLab,
) -> None:
    job_id = await lab.enqueued()
    job = await lab.claim_one("one")
    assert await lab.job_store.release(job, worker="one")
    assert (await lab.job(job_id)).view.attempts == 0
    again = await lab.claim_one("other")
    assert (again.attempt, again.lease.number) == (1, 2)


async def test_job_whose_key_was_completed_meanwhile_is_removed(
    lab: JobsLab,
) -> None:
    """On PostgreSQL an enqueue may pass the completion of the same key; the marker decides."""
    if lab.store.name == "sqlite":
        pytest.skip("one writer at a time: a job and its marker never exist together")
    job_id = await lab.enqueued("effect", resource_id="1")
    done = await lab.claim_one("one")
    assert await completes(lab, done)
    row = "tenant, key, queue, type, payload_hash, request_id, correlation_id"
    await lab.store.write(
        lab.store.table_names.render(
            f"INSERT INTO onceward_jobs ({row}, id, payload, visible_at, run_at, max_attempts,"
            f" actor) SELECT {row}, job_id, 'null', now(), now(), 5, 'ada'"
            " FROM onceward_job_completions"
        )
    )
    job = await lab.claim_one("one")
    assert job.completed
    assert await lab.job_store.remove_completed(job, worker="one")
    assert await lab.state(job_id) == "done"
    assert await lab.count("onceward_jobs") == 0


# -- dead letters -----------------------------------------------------------------------------


async def die(lab: JobsLab, *, times: int = 1) -> None:
    for n in range(times):
        await lab.show_in(-0.001)
        job = await lab.claim_one("one")
        if n + 1 < times:
            assert await lab.job_store.retry(
                job, worker="one", reason="error", error=f"no {n}", delay_seconds=9
            )
        else:
            assert await lab.job_store.dead_letter(
                job, worker="one", reason="error", error=f"no {n}"
            )


async def test_dead_letter_has_tenant_job_and_reason(lab: JobsLab) -> None:
    job_id = await lab.enqueued("effect", {"n": 1}, resource_id="order/1")
    await die(lab, times=2)
    dead = await lab.job(job_id)
    assert (dead.view.state, dead.view.reason, dead.error) == ("dead", "error", "no 1")
    assert (dead.view.tenant, dead.view.attempts, dead.payload) == ("ada", 2, {"n": 1})
    assert (dead.view.request_id, dead.view.correlation_id) == ("request-1", "correlation-1")
    assert len(dead.payload_hash) == 64
    assert [(f.attempt, f.reason, f.error, f.worker) for f in dead.failures] == [
        (1, "error", "no 0", "one"),
        (2, "error", "no 1", "one"),
    ]
    assert await lab.count("onceward_jobs") == 0
    audits = await lab.rows(
        "SELECT endpoint, status, resource, actor FROM onceward_audit_events ORDER BY endpoint"
    )
    assert [tuple(row.values()) for row in audits] == [
        ("job.dead default effect", 500, "job:ada:default:effect:order/1", "ada's phone"),
        ("job.enqueued default effect", 202, "job:ada:default:effect:order/1", "ada's phone"),
    ]


async def test_requeued_job_keeps_its_history_and_gets_all_attempts(lab: JobsLab) -> None:
    job_id = await lab.enqueued("effect", {"n": 1}, resource_id="order/1", max_attempts=2)
    before = (await lab.job(job_id)).view.enqueued_at
    await die(lab, times=2)
    assert await lab.admin.requeue(job_id, tenant="ada", actor="grace")
    assert not await lab.admin.requeue(job_id, tenant="ada", actor="grace"), "it is no longer dead"
    back = await lab.job(job_id)
    assert (back.view.state, back.view.attempts, back.view.max_attempts) == ("waiting", 0, 2)
    assert (back.payload, back.view.enqueued_at) == ({"n": 1}, before)
    assert back.view.correlation_id == "correlation-1"
    assert len(back.failures) == 2
    assert (await lab.admin.depths())["default"].dead == 0
    audit = await lab.rows(
        "SELECT actor FROM onceward_audit_events WHERE endpoint LIKE 'job.requeued%'"
    )
    assert [row["actor"] for row in audit] == ["grace"]

    await die(lab, times=2)
    dead = await lab.job(job_id)
    assert [f.attempt for f in dead.failures] == [1, 2, 1, 2]
    deaths = await lab.rows("SELECT deaths, requeued_at FROM onceward_dead_letters")
    assert [(row["deaths"], row["requeued_at"]) for row in deaths] == [(2, None)]
    assert await lab.admin.requeue(job_id, tenant="ada", actor="grace")
    assert await completes(lab, await lab.claim_one("one"))
    done = await lab.job(job_id)
    assert (done.view.state, len(done.failures)) == ("done", 4)
    assert not await lab.admin.requeue(job_id, tenant="ada", actor="grace"), "done is done"


async def test_concurrent_requeues_create_one_job(lab: JobsLab, another_store: OpenStore) -> None:
    job_id = await lab.enqueued()
    await die(lab)
    admins = [lab.admin, JobAdmin(await another_store())]
    results = await asyncio.gather(
        *(admins[n % 2].requeue(job_id, tenant="ada", actor=f"{n}") for n in range(8))
    )
    assert sorted(results) == [False] * 7 + [True]
    assert await lab.count("onceward_jobs") == 1


async def test_dead_lettered_key_can_be_enqueued_again(
    lab: JobsLab,
) -> None:
    job_id = await lab.enqueued("effect", resource_id="order/1")
    await die(lab)
    assert await lab.enqueued("effect", resource_id="order/1") == job_id
    assert [view.state for view in await lab.admin.jobs(tenant="ada")] == ["waiting"]
    assert (await lab.admin.depths())["default"].dead == 0
    assert not await lab.admin.requeue(job_id, tenant="ada", actor="grace")
    assert await completes(lab, await lab.claim_one("one"))
    assert [view.state for view in await lab.admin.jobs(tenant="ada")] == ["done"]


# -- tenants ----------------------------------------------------------------------------------


async def test_reading_and_requeueing_never_cross_tenants(lab: JobsLab) -> None:
    """Waiting, done and dead jobs of one tenant are nothing to another."""
    ids = {}
    for state in ("dead", "done", "waiting"):
        ids[state] = await lab.enqueued("effect", state)
        if state == "dead":
            await die(lab)
        elif state == "done":
            assert await completes(lab, await lab.claim_one("one"))
    for stranger in ("eve", "ad", "ada ", "ADA", "%", "a_a"):
        assert await lab.admin.jobs(tenant=stranger) == []
        for job_id in ids.values():
            assert await lab.admin.find(job_id, tenant=stranger) is None
            assert await lab.admin.state(job_id, tenant=stranger) is None
            assert not await lab.admin.requeue(job_id, tenant=stranger, actor="eve")
            values = {"tenant": stranger, "job_id": job_id, "actor": "eve"}
            assert not await lab.job_store.write("requeue", values | audit_values())
            assert await lab.job_store.steps(stranger, job_id) == {}
    assert await lab.state(ids["dead"]) == "dead"
    seen = await lab.admin.jobs(tenant="ada")
    assert {view.id: view.state for view in seen} == {ids[state]: state for state in ids}
    assert len(await lab.admin.jobs(tenant=ALL_TENANTS)) == 3
    for missing in ("", None):
        unnamed: Any = {"tenant": missing}
        for call in (
            lab.admin.jobs(**unnamed),
            lab.admin.find(ids["dead"], **unnamed),
            lab.admin.state(ids["dead"], **unnamed),
            lab.admin.requeue(ids["dead"], **unnamed, actor="eve"),
        ):
            with pytest.raises(UsageError, match="ALL_TENANTS"):
                await call
        with pytest.raises(UsageError, match="ALL_TENANTS"):
            RecordQuery(**unnamed)
    assert await lab.state(ids["dead"]) == "dead"


async def test_the_same_work_for_two_tenants_is_two_jobs(lab: JobsLab) -> None:
    one = await lab.enqueued("effect", 1, resource_id="r")
    two = await lab.enqueued("effect", 1, resource_id="r", tenant="eve")
    assert one != two
    for job in await lab.claim("one"):
        if job.lease.tenant == "ada":
            assert await completes(lab, job)
    assert [view.state for view in await lab.admin.jobs(tenant="eve")] == ["running"]


@pytest.mark.parametrize(
    "name", ["o'; DROP TABLE onceward_jobs; --", "a:b", '"\\', "🐚", "x" * 300, "$1 :x"]
)
async def test_special_characters_in_tenants_and_resources_are_stored_unchanged(
    lab: JobsLab, name: str
) -> None:
    job_id = await lab.enqueued("effect", name, tenant=name, resource_id=name, order=name)
    job = await lab.claim_one("one")
    assert (job.lease.tenant, job.resource_id, job.order_key) == (name, name, name)
    assert job.decoded() == name
    assert await lab.job_store.renew([job.lease], worker="one", lease_seconds=9) == {(name, job_id)}
    assert await completes_with_effects(lab, job)
    assert await lab.admin.state(job_id, tenant=name) == "done"


# -- numbers and clean-up -----------------------------------------------------------------------


async def test_depths_count_waiting_running_and_dead_jobs(lab: JobsLab) -> None:
    assert await lab.admin.depths() == {}
    for n in range(3):
        await lab.enqueued("effect", n, queue="mail")
    await lab.enqueued("effect", "later", queue="mail", delay_seconds=60)
    await lab.enqueued("effect", "in line", queue="mail", order="o")
    await lab.enqueued("effect", "behind", queue="mail", order="o")
    (job, _) = await lab.job_store.claim(("mail",), worker="one", limit=2, lease_seconds=30)
    assert await lab.job_store.dead_letter(job, worker="one", reason="error", error="")
    depth = (await lab.admin.depths())["mail"]
    assert (depth.waiting, depth.running, depth.dead) == (4, 1, 1)
    assert 0 <= depth.oldest_seconds < 10
    await lab.job_store.claim(("mail",), worker="one", limit=9, lease_seconds=30)
    assert (await lab.admin.depths())["mail"].oldest_seconds == 0, "nothing due is waiting"


async def test_depths_for_metrics_read_a_limited_number_of_jobs(lab: JobsLab) -> None:
    """A long queue must not slow metrics down; up to the limit, the numbers are exact."""
    for n in range(5):
        await lab.enqueued("x", resource_id=f"due {n}", queue="mail")
    for n in range(3):
        await lab.enqueued("x", resource_id=f"later {n}", queue="mail", delay_seconds=3600)
        await lab.enqueued("x", resource_id=f"{n}", queue="other")
    (first, *_) = await lab.job_store.claim(("mail",), worker="w", limit=2, lease_seconds=30)
    await lab.job_store.dead_letter(first, worker="w", reason="error", error="no")
    exact, counted = await lab.admin.capped_depths(most=100)
    assert counted == 100
    assert {
        queue: (depth.waiting, depth.running, depth.dead) for queue, depth in exact.items()
    } == {"mail": (6, 1, 1), "other": (3, 0, 0)}
    assert 0 <= exact["mail"].oldest_seconds < 60
    assert exact.keys() == (await lab.admin.depths()).keys()
    few, counted = await lab.admin.capped_depths(most=2)
    assert counted == 2
    assert (few["mail"].waiting, few["mail"].running, few["other"].waiting) == (2, 1, 2)


async def test_depths_of_many_queues_count_fewer_jobs_of_each(lab: JobsLab) -> None:
    for n in range(4):
        await lab.enqueued("x", queue=f"queue-{n}")
    (job, *_) = await lab.job_store.claim(("queue-3",), worker="w", limit=1, lease_seconds=30)
    await lab.job_store.dead_letter(job, worker="w", reason="error", error="no")
    assert (await lab.admin.capped_depths(most=10_000, budget=2_500))[1] == 600
    assert (await lab.admin.capped_depths(most=500, budget=2_500))[1] == 500
    depths, counted = await lab.admin.capped_depths(most=10_000, budget=1)
    assert counted == 100
    assert {queue: (depth.waiting, depth.dead) for queue, depth in depths.items()} == {
        "queue-0": (1, 0),
        "queue-1": (1, 0),
        "queue-2": (1, 0),
        "queue-3": (0, 1),
    }


async def test_clean_up_deletes_old_rows_and_keeps_dead_letters_not_requeued(
    lab: JobsLab,
) -> None:
    done = await lab.enqueued("effect", "done")
    job = await lab.claim_one("one")
    await lab.job_store.save_step(job.lease, "mail", "1", worker="one")
    assert await lab.job_store.retry(job, worker="one", reason="e", error="e", delay_seconds=0)
    await lab.show_in(-0.001)
    assert await completes(lab, await lab.claim_one("one"))
    dead = await lab.enqueued("effect", "dead")
    job = await lab.claim_one("one")
    await lab.job_store.save_step(job.lease, "mail", "1", worker="one")
    assert await dead_letters(lab, job)

    assert await clean_up(lab.job_store, keep_done_days=1, keep_dead_days=1) == {
        "completions": 0,
        "dead_letters": 0,
        "steps": 0,
        "failures": 0,
        "causes": 0,
    }
    assert await clean_up(lab.job_store, keep_done_days=-1, keep_dead_days=-1) == {
        "completions": 1,
        "dead_letters": 0,
        "steps": 1,
        "failures": 1,
        "causes": 0,
    }
    assert await lab.state(done) is None
    assert (await lab.job(dead)).steps == {"mail": 1}
    assert await lab.admin.requeue(dead, tenant="ada", actor="grace")
    deleted = await clean_up(lab.job_store, keep_done_days=-1, keep_dead_days=-1)
    assert deleted == {
        "completions": 0,
        "dead_letters": 1,
        "steps": 0,
        "failures": 0,
        "causes": 0,
    }
    assert (await lab.job(dead)).steps == {"mail": 1}, "it will go on after that step"


async def test_clean_up_deletes_in_batches(lab: JobsLab) -> None:
    for n in range(5):
        await lab.enqueued("effect", n)
    jobs = await lab.claim("one")
    await lab.job_store.complete_alone([(job.lease, None) for job in jobs], worker="one")
    cleaned = [
        await lab.job_store.clean("clean_completions", older_than_seconds=-9, limit=2)
        for _ in range(4)
    ]
    assert cleaned == [2, 2, 1, 0]
