"""A person who taps, as a process of its own: queues a day, and says what was acknowledged.

Killed anywhere, it begins again: looks at what the file holds, and goes on with the next tap, as an
app does that finds a half-done form.
"""

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Final

from holdfast.core.outbox_entry import Entry
from holdfast.outbox import OutboxQueue
from holdfast_lab.chaos.plan import day_of, tap_of

__all__ = ["all_entries", "main"]

_PAGE: Final = 500
_MOST_AT_ONCE: Final = 12
_LONGEST_PAUSE_SECONDS: Final = 0.1


def main() -> None:
    """Run: arguments are the file, the user, a number for chance and the passphrase's variable."""
    path, user, seed, variable = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    chance = random.Random(seed)  # noqa: S311 - when to pause, not a secret
    with OutboxQueue.open(path, passphrase=os.environ.get(variable)) as queue:
        queue.add_user(user)
        queued = {tap_of(user, one.endpoint, one.decoded()) for one in all_entries(queue, user)}
        left = [
            new for new in day_of(user) if tap_of(user, new.endpoint, new.payload) not in queued
        ]
        while left:
            count = chance.randint(1, _MOST_AT_ONCE)
            some, left = left[:count], left[count:]
            entries = [queue.enqueue(some[0])] if count == 1 else queue.enqueue_many(some)
            _acknowledge(user, entries)
            time.sleep(chance.random() * _LONGEST_PAUSE_SECONDS)


def all_entries(queue: OutboxQueue, user: str) -> list[Entry]:
    """Return everything the queue holds for a user."""
    found: list[Entry] = []
    after = None
    while page := queue.entries(user, limit=_PAGE, after=after):
        found += page
        after = page[-1].id
    return found


def _acknowledge(user: str, entries: list[Entry]) -> None:
    """Say it in one write: a reader sees the whole line, whatever becomes of this process."""
    keys = {tap_of(user, one.endpoint, one.decoded()): one.idempotency_key for one in entries}
    os.write(1, json.dumps(keys).encode() + b"\n")
