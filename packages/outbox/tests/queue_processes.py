"""Functions that use a queue in a forked process, which can be killed at any step."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from onceward_outbox import OutboxQueue, QueueSettings, Status, database
from onceward_testing.fork_server import ForkServer
from packages.outbox.tests.outcomes import succeed
from packages.outbox.tests.queue_harness import KEY, new

ROOT = Path(__file__).parents[3]
OTHER_KEY = bytes(reversed(KEY))


class KillAt:
    """Kills this process when a fault point is reached for the n-th time."""

    def __init__(self, point: str, times: int) -> None:
        self._point = point
        self._left = times

    def reach(self, point: str) -> None:
        if point == self._point:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def opened(path: str, kill_at: list[Any] | None = None, **options: Any) -> OutboxQueue:
    if options.pop("encrypted", False):
        options["passphrase"] = KEY
    lease = options.pop("lease_seconds", 120.0)
    return OutboxQueue.open(
        path,
        fault_points=None if kill_at is None else KillAt(*kill_at),
        settings=QueueSettings(lease_seconds=lease, busy_seconds=30),
        **options,
    )


def note(log: str, line: str) -> None:
    """Append a line in one write: a kill cannot leave half of it."""
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, f"{line}\n".encode())
    os.close(handle)


def enqueue_some(path: str, log: str, count: int, who: str, **options: Any) -> None:
    """Enqueue entries and log the id of each one that was acknowledged."""
    with opened(path, **options) as queue:
        for number in range(count):
            entry = queue.enqueue(new(payload={"who": who, "n": number}))
            note(log, entry.id)


def work(path: str, log: str, pause: float = 0.0, **options: Any) -> None:
    """Claim and complete entries until none is left; log when each claim begins and ends."""
    with opened(path, **options) as queue:
        idle = 0
        while idle < 3:
            claimed = queue.claim("ada")
            if claimed is None:
                queue.watchdog()
                idle += 1
                time.sleep(0.005)
                continue
            idle = 0
            note(log, f"take {claimed.entry.id} {claimed.number} {time.monotonic_ns()}")
            time.sleep(pause)
            note(log, f"give {claimed.entry.id} {claimed.number} {time.monotonic_ns()}")
            succeed(queue, claimed, server_id=claimed.entry.sequence_number)


def work_in_groups(path: str, log: str, **options: Any) -> None:
    """Complete an entry and claim the next one in one transaction, until none is left."""
    with opened(path, **options) as queue:
        queue.watchdog()
        claimed = queue.claim("ada")
        while claimed is not None:
            note(log, f"sent {claimed.entry.id} {claimed.entry.idempotency_key}")
            with queue.transaction():
                succeed(queue, claimed, server_id=claimed.entry.sequence_number)
                claimed = queue.claim("ada")


def add_user(path: str, passphrase: str) -> None:
    with OutboxQueue.open(path, passphrase=passphrase) as queue:
        queue.add_user("ada")


def change_key(path: str) -> None:
    with OutboxQueue.open(path, passphrase=KEY) as queue:
        queue.change_passphrase(OTHER_KEY)


def encrypt(path: str, kill: str) -> None:
    """Encrypt a plain file, and die before or after the copy is encrypted."""
    give_key = database.give_key

    def and_die(*arguments: Any, **options: Any) -> None:
        if kill == "after the key":
            give_key(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    with OutboxQueue.open(path, driver="apsw") as queue:
        database.give_key = and_die  # in a forked process, which dies
        queue.change_passphrase(OTHER_KEY)


def fork_server() -> ForkServer:
    """Return a server whose calls are the functions of this module, by name."""
    return ForkServer(__name__, cwd=ROOT)


def lines(log: Path) -> list[list[str]]:
    """Return the lines of the log, each split into words."""
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def settled(path: Path, **options: Any) -> list[tuple[str, str]]:
    with opened(str(path), **options) as queue:
        queue.check_integrity()
        return [(entry.id, entry.status.value) for entry in queue.entries(limit=100_000)]


ALL_DONE = Status.SUCCEEDED.value
