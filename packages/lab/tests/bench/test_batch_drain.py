"""The benchmark of drains in batches works, with small numbers."""

from pathlib import Path

from onceward_lab.bench import batch_drain


def test_drains_in_batches_are_compared_with_single_requests(tmp_path: Path) -> None:
    found = batch_drain.batch_drain(tmp_path, rounds=1, entries=20, singles=3)
    assert set(found) == {"batch_drain_50", "batch_drain_200"}
    for row in found.values():
        # Twenty entries are one request.
        assert row["ratio"] > 1
        assert row["ms per single request, of 3"] >= 50
