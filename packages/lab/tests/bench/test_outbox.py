"""The outbox benchmarks work, with small numbers."""

from pathlib import Path

from onceward_lab.bench import outbox, outbox_drain


def test_enqueue_is_compared_with_raw_commits_and_peers(tmp_path: Path) -> None:
    found = outbox.enqueue(tmp_path, rounds=1, seconds=0.01, warm_up=2)
    assert set(found["outbox_enqueue_plain"]) == {
        "raw commits of the same row",
        "raw commits, a table without indexes",
        "Onceward",
        "persist-queue at FULL",
        "litequeue at FULL",
    }
    found |= outbox.bulk(tmp_path, rounds=1, entries=50)
    for rows in found.values():
        assert all(row["per_second"] > 0 for row in rows.values())


def test_claims_are_measured_with_few_and_many_entries(tmp_path: Path) -> None:
    found, points = outbox.claims(tmp_path, small=50, large=500, rounds=1, count=20)
    assert found["claim_ratio"] > 0
    assert found["next_eligible_ratio"] > 0
    assert [point.rows for point in points if point.us > 0] == [50, 500]


def test_drain_is_compared_with_a_bare_loop(tmp_path: Path) -> None:
    found = outbox_drain.drain(tmp_path, rounds=1, entries=20, services=False)
    assert all(row["ratio"] > 0 for row in found.values())
    assert len(found) == 3


def test_memory_is_measured_during_a_drain(tmp_path: Path) -> None:
    found = outbox_drain.memory(tmp_path, entries=600, points=3)
    assert len(found["mb_samples"]) == 3
