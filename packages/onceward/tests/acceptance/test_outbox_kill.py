"""kill -9 of the draining process, at each step, while responses of the server are lost, too."""

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from onceward_outbox import OutboxQueue
from onceward_outbox.drain import FAULT_POINTS
from onceward_outbox.entry import Status
from packages.onceward.tests.support.outbox_harness import (
    SECRET,
    CuttingProxy,
    activity,
    all_entries,
    fork_server,
    titles_of,
    token_of,
)
from packages.services.tests.cli.conftest import Server

# A tenth of the rounds that the other races take: 500 kills are ONCEWARD_TEST_ROUNDS=5000.
KILLS = max(40, int(os.environ.get("ONCEWARD_TEST_ROUNDS", "0")) // 10)

# A claim has no separate commit in a drain: it is part of the transaction.
POINTS = (
    "watchdog.after_commit",
    "claim.before_commit",
    *FAULT_POINTS,
    "record.before_commit",
    "transaction.before_commit",
    "transaction.after_commit",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    process = Server(tmp_path_factory.mktemp("server"), "--no-jobs", ONCEWARD_JWT_SECRET=SECRET)
    yield process
    process.close()


@pytest.mark.parametrize(("lane", "kills"), [("in order", KILLS), (None, KILLS // 2)])
def test_killed_drains_send_every_entry_once_and_in_order(
    server: Server, tmp_path: Path, lane: str | None, kills: int
) -> None:
    chance = random.Random(6)
    user = f"user-{uuid4()}"
    path = tmp_path / "outbox.db"
    # Each drain gets at most a few entries further before it is killed.
    titles = [f"visit {number:04}" for number in range(min(2 * kills, 490))]
    with OutboxQueue.open(path) as queue:
        queue.add_user(user)
        queue.enqueue_many([activity(user, title, lane=lane) for title in titles])
    killed: Counter[str] = Counter()
    with CuttingProxy(server.url) as proxy, fork_server() as processes:
        order = {"path": str(path), "server": proxy.url, "user": user, "token": token_of(user)}
        for number in range(kills):
            point = POINTS[number % len(POINTS)]
            nth = 1 if point == "watchdog.after_commit" else chance.choice([1, 1, 2])
            (end,) = processes.run(("drain_once", order | {"point": point, "nth": nth}))
            killed[point] += end == -signal.SIGKILL
            assert end in (0, -signal.SIGKILL)
        # However long it takes: a busy machine is no reason to leave something.
        assert processes.run(("drain_once", order | {"max_seconds": 600})) == [0]
    assert all(killed[point] for point in POINTS), killed
    assert killed.total() >= kills * 0.9, killed
    with OutboxQueue.open(path) as queue:
        queue.check_integrity()
        entries = list(all_entries(queue, user))
        left = {
            entry.id: [(one.outcome, one.status, one.code) for one in queue.attempts(entry.id)]
            for entry in entries
            if entry.status is not Status.SUCCEEDED
        }
    assert left == {}
    happened = titles_of(server.url, user)
    # Without a lane an entry whose response was lost is overtaken by the next.
    assert (happened if lane else sorted(happened)) == titles
    keys = {key for _, _, key, _ in proxy.seen}
    assert keys == {entry.idempotency_key for entry in entries}
    assert proxy.lost >= kills // 3
