"""Processes that use a queue and can be killed anywhere.

As a program it imports everything once, and forks the processes that each line of JSON asks for: a
fork takes a millisecond where a new interpreter takes a second. The test's own process is not
forked, as it may have threads.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.outbox import OutboxQueue, QueueSettings, Status
from packages.holdfast.tests.outbox.queue_harness import KEY, new

ROOT = Path(__file__).parents[4]
OTHER_KEY = bytes(reversed(KEY))


class KillAt:
    """Kills the process when a point is reached for the n-th time."""

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
    """Write a line that other processes see whole, whatever becomes of this one."""
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, f"{line}\n".encode())
    os.close(handle)


def enqueue_some(path: str, log: str, count: int, who: str, **options: Any) -> None:
    """Queue entries, noting each one that was acknowledged."""
    with opened(path, **options) as queue:
        for number in range(count):
            entry = queue.enqueue(new(payload={"who": who, "n": number}))
            note(log, entry.id)


def work(path: str, log: str, pause: float = 0.0, **options: Any) -> None:
    """Claim and succeed until nothing is left, noting when each entry is held."""
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
            queue.succeed(claimed, server_id=claimed.entry.sequence_number)


def work_in_groups(path: str, log: str, **options: Any) -> None:
    """Do the same with one commit per entry."""
    with opened(path, **options) as queue:
        queue.watchdog()
        claimed = queue.claim("ada")
        while claimed is not None:
            note(log, f"sent {claimed.entry.id} {claimed.entry.idempotency_key}")
            with queue.transaction():
                queue.succeed(claimed, server_id=claimed.entry.sequence_number)
                claimed = queue.claim("ada")


def add_user(path: str, passphrase: str) -> None:
    with OutboxQueue.open(path, passphrase=passphrase) as queue:
        queue.add_user("ada")


def change_key(path: str) -> None:
    with OutboxQueue.open(path, passphrase=KEY) as queue:
        queue.change_passphrase(OTHER_KEY)


DOINGS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (enqueue_some, work, work_in_groups, add_user, change_key)
}


def _child(doing: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            DOINGS[doing["do"]](**doing["args"])
            code = 0
        finally:
            os._exit(code)
    return pid


def main() -> None:
    """Run what each line asks for, and answer with how the processes ended."""
    for line in sys.stdin:
        order = json.loads(line)
        pids = [_child(doing) for doing in order["doings"]]
        if order["kill_after"] is not None:
            time.sleep(order["kill_after"])
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), flush=True)


class Nursery:
    """The other end of the program."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(
        self, *doings: tuple[str, dict[str, Any]], kill_after: float | None = None
    ) -> list[int]:
        """Run these at once, and return how each ended: 0, 1, or -9 if it was killed."""
        order = {
            "doings": [{"do": name, "args": args} for name, args in doings],
            "kill_after": kill_after,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        codes: list[int] = json.loads(self._process.stdout.readline())
        return codes


@contextmanager
def nursery() -> Iterator[Nursery]:
    with subprocess.Popen(
        [sys.executable, "-m", "packages.holdfast.tests.outbox.fork_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        yield Nursery(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 0


def lines(log: Path) -> list[list[str]]:
    """Return what was noted, as words."""
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def settled(path: Path, **options: Any) -> list[tuple[str, str]]:
    with opened(str(path), **options) as queue:
        queue.check_integrity()
        return [(entry.id, entry.status.value) for entry in queue.entries(limit=100_000)]


ALL_DONE = Status.SUCCEEDED.value

if __name__ == "__main__":
    main()
