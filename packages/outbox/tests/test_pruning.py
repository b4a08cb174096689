"""Removal of failed entries, conflicts, mappings and versions that nothing refers to."""

from datetime import timedelta
from pathlib import Path

import pytest

from onceward_outbox import EventKind, QueueSettings, Status, maintenance
from onceward_outbox.errors import EntryNotFoundError
from onceward_outbox.versions import Produced
from packages.outbox.tests.outcomes import fail, record_conflict, succeed
from packages.outbox.tests.queue_harness import Lab, local, new


def heard(lab: Lab) -> list[tuple[str, str | None, int | None]]:
    """The events about pruning since the last call."""
    kinds = {EventKind.PRUNING, EventKind.PRUNED, EventKind.DISCARDED}
    found = [(one.kind.value, one.entry_id, one.count) for one in lab.events if one.kind in kinds]
    lab.events.clear()
    return found


def versions(lab: Lab) -> list[str]:
    with lab.queue.transaction() as connection:
        rows = connection.execute("SELECT entity FROM entity_versions ORDER BY entity").fetchall()
    return [entity for (entity,) in rows]


@pytest.mark.parametrize("status", [Status.FAILED, Status.CONFLICT])
def test_a_failed_entry_is_announced_a_week_before_it_is_removed(lab: Lab, status: Status) -> None:
    entry = lab.add()
    (fail if status is Status.FAILED else record_conflict)(lab.queue, lab.claim())
    assert lab.queue.prune() == 0  # from now on it is kept for 90 days
    lab.clock.pass_by(days=82, hours=23)
    assert (lab.queue.prune(), heard(lab)) == (0, [])
    lab.clock.pass_by(hours=1)
    assert lab.queue.prune() == 0
    (notice,) = (event for event in lab.events if event.kind is EventKind.PRUNING)
    assert (notice.entry_id, notice.status, notice.user_id) == (entry.id, status, "ada")
    assert (notice.delay_seconds, notice.age_seconds) == (7 * 86_400, 83 * 86_400)
    lab.events.clear()
    lab.clock.pass_by(days=6, hours=23)
    assert (lab.queue.prune(), heard(lab)) == (0, [])
    lab.clock.pass_by(hours=1)
    assert lab.queue.prune() == 1
    assert heard(lab) == [("discarded", entry.id, None), ("pruned", None, 1)]
    with pytest.raises(EntryNotFoundError):
        lab.queue.get(entry.id)


def test_a_device_that_was_not_used_announces_before_it_removes(lab: Lab) -> None:
    lab.add()
    fail(lab.queue, lab.claim())
    lab.queue.prune()
    lab.clock.pass_by(days=400)
    assert (lab.queue.prune(), [kind for kind, *_ in heard(lab)]) == (0, ["pruning"])
    lab.clock.pass_by(days=7)
    assert lab.queue.prune() == 1


def test_a_retry_begins_the_time_anew(lab: Lab) -> None:
    entry = lab.add()
    fail(lab.queue, lab.claim())
    lab.queue.prune()
    lab.clock.pass_by(days=85)
    lab.queue.prune()
    assert len(heard(lab)) == 1
    lab.queue.retry(entry.id)
    fail(lab.queue, lab.claim())
    lab.clock.pass_by(days=10)
    assert (lab.queue.prune(), heard(lab)) == (0, [])
    lab.clock.pass_by(days=83)
    assert (lab.queue.prune(), [kind for kind, *_ in heard(lab)]) == (0, ["pruning"])


def test_entries_that_others_wait_for_are_kept(lab: Lab) -> None:
    # The pending entry waits behind the conflict, in its lane.
    change = {"operation": "patch", "endpoint": "/api/v1/activities/5"}
    disputed = lab.add(**change)
    record_conflict(lab.queue, lab.claim())
    parent = lab.add()
    children = [lab.add(depends_on=(parent.id,)) for _ in range(2)]
    fail(lab.queue, lab.claim())
    lab.queue.prune()
    lab.clock.pass_by(days=83)
    lab.queue.prune()
    lab.clock.pass_by(days=7)
    behind = lab.add(**change)
    assert lab.queue.prune() == 3  # the children first, then their parent
    assert [one.id for one in lab.queue.entries()] == [disputed.id, behind.id]
    assert {entry_id for kind, entry_id, _ in heard(lab) if kind == "discarded"} == {
        parent.id,
        *(one.id for one in children),
    }
    lab.queue.cancel(behind.id)
    assert lab.queue.prune() == 1


def test_failed_entries_are_kept_for_ever_if_the_setting_says_so(quick_path: Path) -> None:
    lab = Lab(quick_path / "kept.db", settings=QueueSettings(keep_failed=None))
    lab.add()
    fail(lab.queue, lab.claim())
    for _ in range(3):
        assert lab.queue.prune() == 0
        lab.clock.pass_by(days=400)
    assert [kind for kind, *_ in heard(lab)] == []
    lab.queue.close()


def test_a_mapping_is_announced_and_removed_when_no_entry_refers_to_it(lab: Lab) -> None:
    unused, used, lane = local(), local(), local()
    for number, local_id in enumerate((unused, used, lane)):
        lab.queue.map_local_id("ada", local_id, number, entity_type="activity")
    lab.queue.prune()
    lab.clock.pass_by(days=83)
    # By its placeholder, and by its server id: the lane has the name of the local id.
    lab.add(payload={"of": f"{{local:{used}}}"})
    lab.add(operation="patch", endpoint="/api/v1/activities/2", server_id=2)
    assert lab.queue.entries()[1].lane == f"activity/{lane}"
    lab.queue.prune()
    assert heard(lab) == [("pruning", None, 1)]
    lab.clock.pass_by(days=7)
    lab.queue.prune()
    assert lab.queue.mappings("ada", [unused, used, lane]) == {used: 1, lane: 2}
    # From the removal of the last entry on it is kept for 90 days.
    lab.send()
    lab.send()
    lab.clock.pass_by(days=100)
    assert lab.queue.prune() == 2
    lab.events.clear()
    lab.clock.pass_by(days=82)
    lab.queue.prune()
    assert heard(lab) == []
    lab.clock.pass_by(days=1)
    lab.queue.prune()
    assert heard(lab) == [("pruning", None, 2)]
    lab.clock.pass_by(days=7)
    lab.queue.prune()
    assert lab.queue.mappings("ada", [used, lane]) == {}


def test_versions_are_removed_unless_an_unsettled_entry_is_about_the_entity(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "PRUNE_BATCH", 2)
    for number in range(5):
        lab.add(operation="patch", endpoint=f"/api/v1/activities/{number}")
        succeed(lab.queue, lab.claim(), produced=Produced('"1"', "{}"))
    lab.clock.pass_by(days=89)
    lab.queue.prune()
    assert len(versions(lab)) == 5
    lab.add(operation="patch", endpoint="/api/v1/activities/3")
    lab.clock.pass_by(days=1)
    lab.queue.prune()
    assert versions(lab) == ["activity/3"]
    lab.queue.prune()
    assert lab.claim().version == '"1"'


def test_pruning_in_passing_finds_all_of_these(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000_000.0
    monkeypatch.setattr("onceward_outbox.maintenance.monotonic", lambda: now)
    lab.add()
    fail(lab.queue, lab.claim())
    lab.queue.map_local_id("ada", local(), 1, entity_type="activity")
    lab.queue.prune_if_due()
    assert heard(lab) == []
    lab.clock.pass_by(days=83)
    now += 4000
    lab.queue.prune_if_due()
    assert [kind for kind, *_ in heard(lab)] == ["pruning"] * 2
    lab.clock.pass_by(days=7)
    now += 4000
    lab.queue.prune_if_due()
    assert [kind for kind, *_ in heard(lab)] == ["discarded", "pruned"]
    with lab.queue.transaction() as connection:
        assert connection.execute("SELECT count(*) FROM id_mappings").fetchall() == [(0,)]


def test_pruning_is_done_in_small_transactions(quick_path: Path) -> None:
    commits: list[str] = []

    class Points:
        def reach(self, point: str) -> None:
            commits.append(point)

    settings = QueueSettings(keep_failed=timedelta(days=1), prune_notice=timedelta())
    lab = Lab(quick_path / "many.db", settings=settings, fault_points=Points())
    lab.queue.enqueue_many([new() for _ in range(1001)])
    with lab.queue.transaction():
        for claimed in lab.queue.claim_some("ada", 1001):
            fail(lab.queue, claimed)
    lab.queue.prune()
    lab.clock.pass_by(days=1)
    commits.clear()
    assert lab.queue.prune() == 1001
    assert commits.count("prune.after_commit") > 6  # three each to announce and to remove
    lab.queue.close()
