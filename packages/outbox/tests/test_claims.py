"""Claims, leases, and the history of attempts."""

import threading

import pytest

from onceward_outbox import Claimed, Status
from onceward_outbox.errors import ClaimLostError
from packages.outbox.tests.outcomes import fail, record_conflict, release, retry_later, succeed
from packages.outbox.tests.queue_harness import ENDINGS, Lab, local, walk


def test_in_flight_lock_prevents_duplicate_dispatch(lab: Lab) -> None:
    entry = lab.add()
    with lab.open() as other:
        claimed = lab.claim()
        assert claimed.entry.id == entry.id
        assert claimed.entry.status is Status.IN_FLIGHT
        assert other.claim("ada") is None
        lab.clock.pass_by(seconds=119)
        assert other.watchdog() == []
        lab.clock.pass_by(seconds=1)
        assert [back.id for back in other.watchdog()] == [entry.id]
        again = other.claim("ada")
        assert again is not None
        assert again.number == claimed.number + 1
        assert again.entry.idempotency_key == entry.idempotency_key


@pytest.mark.parametrize("ending", list(ENDINGS))
def test_a_claim_that_was_lost_changes_nothing_any_more(lab: Lab, ending: str) -> None:
    lab.add()
    lost = lab.claim()
    lab.clock.pass_by(minutes=2)
    lab.queue.watchdog()
    holder = lab.claim()
    before = lab.queue.get(lost.entry.id)
    with pytest.raises(ClaimLostError):
        ENDINGS[ending](lab.queue, lost)
    with pytest.raises(ClaimLostError):
        lab.queue.renew(lost)
    assert lab.queue.get(lost.entry.id) == before
    assert ENDINGS[ending](lab.queue, holder).id == lost.entry.id


def test_a_renewed_claim_is_left_alone_by_the_watchdog(lab: Lab) -> None:
    lab.add()
    claimed = lab.claim()
    for _ in range(5):
        lab.clock.pass_by(seconds=100)
        lab.queue.renew(claimed)
        assert lab.queue.watchdog() == []
    assert succeed(lab.queue, claimed).status is Status.SUCCEEDED


def test_a_lease_can_be_longer_for_one_claim(lab: Lab) -> None:
    lab.add()
    claimed = lab.queue.claim("ada", lease_seconds=600)
    assert claimed is not None
    lab.clock.pass_by(seconds=599)
    assert lab.queue.watchdog() == []
    lab.queue.renew(claimed)
    lab.clock.pass_by(seconds=599)
    assert lab.queue.watchdog() == []
    lab.clock.pass_by(seconds=1)
    assert len(lab.queue.watchdog()) == 1


def test_the_watchdog_returns_only_expired_claims(lab: Lab) -> None:
    early, late = lab.add(), lab.add()
    lab.claim()
    lab.clock.pass_by(seconds=60)
    lab.claim()
    lab.clock.pass_by(seconds=60)
    assert [entry.id for entry in lab.queue.watchdog()] == [early.id]
    assert lab.queue.get(late.id).status is Status.IN_FLIGHT


def test_expired_claims_use_up_no_attempts(lab: Lab) -> None:
    entry = lab.add(max_attempts=2)
    for _ in range(10):
        lab.claim()
        lab.clock.pass_by(minutes=2)
        lab.queue.watchdog()
    back = lab.queue.get(entry.id)
    assert (back.status, back.attempt_count, back.claim_number) == (Status.PENDING, 0, 10)
    assert [attempt.outcome for attempt in lab.queue.attempts(entry.id)] == ["watchdog"] * 10


def test_a_released_claim_counts_no_attempt(lab: Lab) -> None:
    entry = lab.add()
    released = release(lab.queue, lab.claim())
    assert (released.status, released.attempt_count) == (Status.PENDING, 0)
    assert lab.queue.attempts(entry.id) == []
    release(lab.queue, lab.claim(), sent=True, error="token not accepted")
    (attempt,) = lab.queue.attempts(entry.id)
    assert (attempt.outcome, attempt.error) == ("release", "token not accepted")
    assert lab.claim().entry.attempt_count == 1


def test_the_history_of_every_send_is_kept(lab: Lab) -> None:
    entry = lab.add()
    started = lab.clock.now()
    claimed = lab.claim()
    lab.clock.pass_by(seconds=3)
    retry_later(
        lab.queue,
        claimed,
        delay_seconds=0,
        http_status=503,
        code="x.down",
        request_id="r-1",
        error="down",
    )
    succeed(lab.queue, lab.claim(), http_status=201, request_id="r-2")
    first, second = lab.queue.attempts(entry.id)
    assert (first.number, first.started_at, first.ended_at) == (1, started, lab.clock.now())
    assert (first.outcome, first.status, first.code) == ("retry_later", 503, "x.down")
    assert (first.request_id, first.error) == ("r-1", "down")
    assert (second.number, second.outcome, second.status) == (2, "succeed", 201)
    assert second.request_id == "r-2"


def test_the_last_error_is_stored_up_to_a_limit(lab: Lab) -> None:
    entry = lab.add()
    fail(lab.queue, lab.claim(), http_status=422, error="x" * 100_000)
    failed = lab.queue.get(entry.id)
    assert failed.last_error_code == 422
    assert len(str(failed.last_error)) == 8192


def test_success_clears_earlier_errors(lab: Lab) -> None:
    lab.add()
    retry_later(lab.queue, lab.claim(), delay_seconds=0, http_status=500, error="down")
    done = lab.send()
    assert (done.last_error, done.last_error_code, done.next_retry_at) == (None, None, None)


def test_both_sides_of_a_conflict_are_stored(lab: Lab) -> None:
    entry = lab.add(base={"name": "old"}, base_version="3", payload={"name": "mine"})
    record_conflict(
        lab.queue, lab.claim(), theirs={"name": "theirs"}, theirs_version="4", code="concurrency.x"
    )
    kept = lab.queue.get(entry.id)
    assert (kept.base, kept.payload, kept.theirs) == (
        '{"name":"old"}',
        '{"name":"mine"}',
        '{"name":"theirs"}',
    )
    assert (kept.base_version, kept.theirs_version, kept.last_error_code) == ("3", "4", 409)


def test_ending_one_claim_and_making_the_next_is_one_commit(lab: Lab) -> None:
    first, second = lab.queue.enqueue(walk()), lab.queue.enqueue(walk())
    claimed = lab.claim()
    with lab.queue.transaction():
        succeed(lab.queue, claimed)
        following = lab.queue.claim("ada")
    assert following is not None
    assert (claimed.entry.id, following.entry.id) == (first.id, second.id)
    assert lab.queue.get(first.id).status is Status.SUCCEEDED


def test_threads_of_one_process_claim_each_entry_once(lab: Lab) -> None:
    entries = lab.queue.enqueue_many([walk(profile="field", endpoint="/x") for _ in range(200)])
    claims: list[Claimed] = []

    def work() -> None:
        while (claimed := lab.queue.claim("ada")) is not None:
            claims.append(claimed)
            succeed(lab.queue, claimed)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed.entry.id for claimed in claims) == sorted(entry.id for entry in entries)


def test_stats_count_entries_by_status_and_readiness(lab: Lab) -> None:
    ref = local()
    lab.add(local_id=ref)
    lab.add(operation="update", local_id=ref)
    lab.add(priority=0)
    retry_later(lab.queue, lab.claim(), delay_seconds=60)
    lab.clock.pass_by(seconds=30)
    stats = lab.queue.stats("ada")
    assert stats.counts[Status.PENDING] == 3
    assert (stats.ready, stats.waiting, stats.blocked) == (1, 1, 1)
    assert (stats.unsent, stats.oldest_pending_seconds) == (3, 30)
    assert stats.file_bytes > 0
    lab.clock.pass_by(seconds=30)
    stats = lab.queue.stats()
    assert (stats.ready, stats.waiting, stats.blocked) == (2, 0, 1)
    nobody = lab.queue.stats("nobody")
    assert (nobody.unsent, nobody.oldest_pending_seconds) == (0, None)
