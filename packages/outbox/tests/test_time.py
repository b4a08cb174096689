"""The elapsed clock: setting the device's clock neither expires nor revives entries."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceward_outbox import Status
from onceward_outbox.clock import (
    ClockRow,
    SystemDeviceClock,
    read_clock,
    server_time,
    update_from_server,
)
from packages.outbox.tests.outcomes import retry_later
from packages.outbox.tests.queue_harness import Lab


def test_entries_past_the_cap_expire_with_an_event(lab: Lab) -> None:
    old = lab.add()
    lab.clock.pass_by(days=6)
    young = lab.add()
    lab.clock.pass_by(days=1)
    assert lab.queue.expire_stale("ada") == []  # exactly the cap still counts
    lab.clock.pass_by(seconds=1)
    (expired,) = lab.queue.expire_stale("ada")
    assert (expired.id, expired.status, expired.reason) == (old.id, Status.EXPIRED, "stale")
    assert lab.events[-1].kind == "expired"
    assert lab.claimable() == [young.id]
    assert lab.queue.expire_stale("nobody") == []


def test_many_old_entries_expire_and_newer_ones_stay(lab: Lab) -> None:
    from packages.outbox.tests.queue_harness import new

    lab.queue.enqueue_many([new() for _ in range(450)])
    lab.clock.pass_by(days=8)
    lab.queue.enqueue_many([new() for _ in range(50)])
    assert len(lab.queue.expire_stale("ada")) == 450
    assert lab.queue.stats().counts[Status.PENDING] == 50


@pytest.mark.parametrize("days", [30, -30, 4000, -4000])
def test_a_clock_that_is_set_neither_kills_nor_revives(lab: Lab, days: int) -> None:
    old = lab.add()
    lab.clock.pass_by(days=6)
    lab.clock.set_by(days=days)
    young = lab.add()
    assert lab.queue.expire_stale("ada") == []
    lab.clock.pass_by(days=1, seconds=1)
    assert [entry.id for entry in lab.queue.expire_stale("ada")] == [old.id]
    lab.clock.set_by(days=-days)
    assert lab.queue.expire_stale("ada") == []
    assert lab.claim().entry.id == young.id


@pytest.mark.parametrize("days", [30, -30])
def test_a_clock_that_is_set_moves_no_retry_and_no_lease(lab: Lab, days: int) -> None:
    lab.add()
    retry_later(lab.queue, lab.claim(), delay_seconds=60)
    lab.clock.set_by(days=days)
    assert lab.queue.claim("ada") is None
    assert lab.queue.next_due_seconds("ada") == 60
    lab.clock.pass_by(seconds=60)
    lab.claim()
    lab.clock.set_by(days=days)
    assert lab.queue.watchdog() == []
    lab.clock.pass_by(seconds=120)
    assert len(lab.queue.watchdog()) == 1


def test_a_clock_that_is_set_prunes_nothing_early(lab: Lab) -> None:
    lab.add()
    lab.send()
    lab.clock.set_by(days=365)
    assert lab.queue.prune() == 0
    lab.clock.set_by(days=-365)
    lab.clock.pass_by(days=7)
    assert lab.queue.prune() == 1


def test_after_a_restart_only_the_time_since_boot_counts(lab: Lab) -> None:
    lab.add()
    lab.clock.pass_by(days=4)
    lab.reopen()
    lab.clock.restart(days=100)
    assert lab.queue.expire_stale("ada") == []  # off for long, or a wrong clock: nobody knows
    lab.clock.pass_by(days=2)
    assert lab.queue.expire_stale("ada") == []
    lab.clock.pass_by(days=2)
    assert len(lab.queue.expire_stale("ada")) == 1


def test_a_sudden_restart_loses_minutes_of_age_not_days(lab: Lab) -> None:
    lab.add()
    for _ in range(4 * 24):
        lab.clock.pass_by(hours=1)
        lab.queue.claim("nobody")  # any operation lets the file know the time
    lab.clock.restart(hours=1)
    lab.clock.pass_by(days=3, hours=1)
    assert len(lab.queue.expire_stale("ada")) == 1


def test_the_servers_date_fills_the_time_the_device_was_off(lab: Lab) -> None:
    old = lab.add()
    lab.queue.learn_server_time(lab.clock.now())
    lab.clock.pass_by(hours=1)
    lab.queue.claim("nobody")
    lab.clock.restart(days=8)
    after_restart = lab.add()
    assert lab.queue.expire_stale("ada") == []
    lab.queue.learn_server_time(lab.clock.now())
    # The old one has certainly lived through the gap; the new one was queued after it.
    assert [entry.id for entry in lab.queue.expire_stale("ada")] == [old.id]
    lab.clock.pass_by(days=6, hours=23)
    assert lab.queue.expire_stale("ada") == []
    lab.clock.pass_by(days=1)
    assert [entry.id for entry in lab.queue.expire_stale("ada")] == [after_restart.id]


def test_a_wrong_wall_clock_after_a_restart_does_not_change_the_gap(lab: Lab) -> None:
    real = lab.clock.now()
    lab.add()
    lab.queue.learn_server_time(real)
    lab.clock.restart(days=-5000)
    lab.queue.learn_server_time(real + timedelta(days=6))
    assert lab.queue.expire_stale("ada") == []
    lab.clock.restart(days=9000)
    lab.queue.learn_server_time(real + timedelta(days=8))
    assert len(lab.queue.expire_stale("ada")) == 1


def test_filling_a_gap_does_not_end_the_claims_of_today(lab: Lab) -> None:
    lab.queue.learn_server_time(lab.clock.now())
    lab.clock.restart(days=3)
    lab.add()
    lab.claim()
    lab.queue.learn_server_time(lab.clock.now())
    assert lab.queue.watchdog() == []
    lab.clock.pass_by(minutes=2)
    assert len(lab.queue.watchdog()) == 1


def test_a_restart_ends_all_claims(lab: Lab) -> None:
    lab.add()
    lab.claim()
    lab.clock.restart(seconds=1)
    assert len(lab.queue.watchdog()) == 1


def test_after_a_restart_retries_due_by_the_wall_clock_are_sent(lab: Lab) -> None:
    soon, late = lab.add(), lab.add()
    retry_later(lab.queue, lab.claim(), delay_seconds=600)
    retry_later(lab.queue, lab.claim(), delay_seconds=7200)
    lab.clock.restart(hours=1)
    assert lab.claimable() == [soon.id]
    lab.clock.pass_by(hours=2)
    assert lab.claimable() == [late.id]


def test_entries_with_unknown_outcome_do_not_expire_while_the_key_is_known(lab: Lab) -> None:
    entry = lab.add()
    lab.clock.pass_by(days=5)
    retry_later(lab.queue, lab.claim(), outcome_unknown=True)
    lab.clock.pass_by(days=4)
    assert lab.queue.expire_stale("ada") == []
    assert lab.claim().entry.outcome_unknown
    assert lab.queue.get(entry.id).status is Status.IN_FLIGHT


def test_entries_with_unknown_outcome_expire_when_the_key_is_expired(lab: Lab) -> None:
    lab.add()
    retry_later(lab.queue, lab.claim(), outcome_unknown=True)
    lab.clock.pass_by(days=8)
    (expired,) = lab.queue.expire_stale("ada")
    assert (expired.status, expired.outcome_unknown) == (Status.EXPIRED, True)
    assert "look whether it happened" in (expired.last_error or "")


def test_client_generated_at_uses_the_servers_clock_once_it_is_known(lab: Lab) -> None:
    assert lab.add().client_generated_at == lab.clock.now()
    real = lab.clock.now() + timedelta(days=30)
    lab.queue.learn_server_time(real)
    entry = lab.add()
    assert (entry.client_generated_at, entry.created_at) == (real, lab.clock.now())
    lab.clock.set_by(days=-77)
    lab.clock.pass_by(minutes=5)
    assert lab.add().client_generated_at == real + timedelta(minutes=5)
    assert lab.queue.server_now() == real + timedelta(minutes=5)
    assert lab.queue.get(entry.id).client_generated_at == real


def test_after_a_restart_server_time_uses_the_wall_clock_if_it_is_ahead(lab: Lab) -> None:
    lab.queue.learn_server_time(lab.clock.now() + timedelta(hours=2))
    lab.clock.restart(days=8)
    assert lab.queue.server_now() == lab.clock.now() + timedelta(hours=2)
    lab.clock.set_by(days=-400)
    # Behind what is certain: the last Date, and the seconds counted since.
    assert lab.queue.server_now() > lab.clock.now() + timedelta(days=300)


def test_the_same_server_time_again_writes_nothing(lab: Lab) -> None:
    lab.queue.learn_server_time(lab.clock.now())
    size = lab.queue.stats().file_bytes
    for _ in range(50):
        lab.clock.pass_by(seconds=1)
        lab.queue.learn_server_time(lab.clock.now())
    assert lab.queue.stats().file_bytes == size


def test_processes_of_one_boot_agree_on_the_time_without_writing(lab: Lab) -> None:
    lab.add()
    with lab.open() as other:
        lab.clock.pass_by(days=7, seconds=1)
        assert len(other.expire_stale("ada")) == 1


def test_the_system_clock_counts_up_and_has_a_boot_id() -> None:
    clock = SystemDeviceClock()
    before = clock.monotonic()
    assert clock.monotonic() >= before > 0
    assert clock.boot_id() == SystemDeviceClock().boot_id()
    assert clock.now().tzinfo is UTC


EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["pass", "restart", "set", "learn"]),
            st.integers(min_value=0, max_value=10**7),
            st.integers(min_value=-(10**9), max_value=10**9),
        ),
        max_size=40,
    )
)
def test_elapsed_time_never_goes_back_and_never_runs_ahead(
    steps: list[tuple[str, int, int]],
) -> None:
    """Whatever happens: what is counted is at most what has really passed."""
    row: ClockRow | None = None
    real, boot_at, boot, wall_off, counted = 0, 0, 0, 0, 0
    for what, seconds, jump in steps:
        real += seconds
        if what == "restart":
            boot, boot_at = boot + 1, real - min(seconds, 3)
        elif what == "set":
            wall_off = jump
        wall = EPOCH + timedelta(seconds=real + wall_off)
        # An entry is queued at every step, so the file knows how far its time has come.
        moment = read_clock(row, f"b{boot}", real - boot_at, wall, counted)
        if what == "learn":
            learnt = update_from_server(moment, EPOCH + timedelta(seconds=real))
            if learnt is not None:
                row = learnt.row
                moment = read_clock(row, f"b{boot}", real - boot_at, wall, counted)
                assert server_time(moment) == EPOCH + timedelta(seconds=real)
        else:
            row = moment.row
        assert counted <= moment.ms <= real * 1000
        counted = moment.ms
