"""Many entries and long chains: no recursion, and no work that grows with the square.

Work is counted in steps of SQLite's virtual machine, which are the same on every machine.
ONCEWARD_TEST_ROUNDS=5000 makes it a hundred thousand entries.
"""

import os
from pathlib import Path
from uuid import UUID

import pytest

from onceward_outbox import OutboxQueue
from onceward_outbox.drain_state import Ended
from onceward_outbox.entry import NewEntry, Status
from packages.onceward.tests.support.outbox_harness import (
    Scripted,
    drain,
    response,
)
from packages.outbox.tests.outcomes import fail, succeed
from packages.outbox.tests.queue_harness import new

ROUNDS = int(os.environ.get("ONCEWARD_TEST_ROUNDS", "0"))
ENTRIES = 100_000 if ROUNDS >= 5000 else 1_500
DEEP = 1_000


def named(number: int) -> str:
    return str(UUID(int=number))


def chain(length: int) -> list[NewEntry]:
    """Each waits for the one before it, and for the id that the server gives to it."""
    return [
        new(local_id=named(1), id=named(1 << 64)),
        *(
            new(
                id=named(number << 64),
                local_id=named(number),
                payload={"after": f"see {{local:{named(number - 1)}}}"},
                depends_on=(named((number - 1) << 64),),
            )
            for number in range(2, length + 1)
        ),
    ]


def opened(path: Path) -> OutboxQueue:
    queue = OutboxQueue.open(path)
    queue.add_user("ada")
    return queue


class Steps:
    """Counts what SQLite does on a queue's connection, in hundreds of steps."""

    def __init__(self, queue: OutboxQueue) -> None:
        self.count = 0
        with queue.transaction() as connection:
            connection.set_progress_handler(self._pass, 100)  # type: ignore[attr-defined]

    def _pass(self) -> int:
        self.count += 1
        return 0


def test_a_chain_a_thousand_deep_beside_many_others_is_parked_revived_and_sent(
    quick_path: Path,
) -> None:
    with opened(quick_path / "q.db") as queue:
        links = queue.enqueue_many(chain(DEEP))
        for start in range(DEEP, ENTRIES, 10_000):
            queue.enqueue_many([new(priority=1) for _ in range(min(10_000, ENTRIES - start))])
        head = queue.claim("ada")
        assert head is not None
        assert head.entry.id == links[0].id
        fail(queue, head)
        assert queue.stats().counts[Status.FAILED] == DEEP
        assert len(queue.dependents(head.entry.id, transitive=True)) == DEEP - 1
        queue.retry(head.entry.id)
        assert queue.stats().counts[Status.FAILED] == 0
        numbers = iter(range(10**9))
        server = Scripted(lambda _: response(201, {"id": f"server-{next(numbers)}"}))
        report = drain(queue, "ada", server)
        assert (report.succeeded, report.ended) == (ENTRIES, Ended.EMPTY)
        done = [queue.get(link.id) for link in links]
    assert done == sorted(done, key=lambda entry: int(str(entry.server_id)[7:]))


@pytest.mark.parametrize("what", ["park", "revive", "send", "discard"])
def test_a_chain_twice_as_deep_is_twice_the_work(quick_path: Path, what: str) -> None:
    counts = []
    for length in (150, 300):
        with opened(quick_path / f"{length}.db") as queue:
            head = queue.enqueue_many(chain(length))[0]
            steps = Steps(queue)
            if what == "send":
                drain(queue, "ada", Scripted(lambda _: response(201, {"id": "x"})))
            else:
                claimed = queue.claim("ada")
                assert claimed is not None
                fail(queue, claimed)
                if what == "revive":
                    steps.count = 0
                    queue.retry(head.id)
                if what == "discard":
                    steps.count = 0
                    queue.discard(head.id, with_dependents=True)
            counts.append(steps.count)
    assert counts[0] > 20
    assert counts[1] / counts[0] < 2.6, counts


@pytest.mark.parametrize("profile", ["field", "walk"])
def test_one_more_claim_costs_the_same_however_many_are_queued(
    quick_path: Path, profile: str
) -> None:
    counts = []
    for size in (100, 2_000):
        with opened(quick_path / f"{profile}-{size}.db") as queue:
            queue.enqueue_many([new(profile=profile, endpoint="/x") for _ in range(size)])
            steps = Steps(queue)
            for _ in range(40):
                claimed = queue.claim("ada")
                assert claimed is not None
                succeed(queue, claimed)
                queue.enqueue(new(profile=profile, endpoint="/x"))
            counts.append(steps.count)
    assert counts[1] < 1.5 * counts[0], counts
