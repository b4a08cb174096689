"""The process of a user: enqueues all actions and prints the acknowledged ones.

When it is killed and restarted it reads the outbox and continues with the first missing action.
"""

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Final

from onceward_lab.chaos.actions import action_id, actions_of
from onceward_outbox import OutboxQueue
from onceward_outbox.entry import Entry

__all__ = ["all_entries", "main"]

_PAGE: Final = 500
_MAX_BATCH: Final = 12
_MAX_PAUSE_SECONDS: Final = 0.1


def main() -> None:
    """Run with the arguments: outbox file, user, seed, name of the passphrase variable."""
    path, user, seed, variable = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    rng = random.Random(seed)  # noqa: S311 - batch sizes and pauses, not a secret
    with OutboxQueue.open(path, passphrase=os.environ.get(variable)) as queue:
        queue.add_user(user)
        queued = {action_id(user, e.endpoint, e.decoded()) for e in all_entries(queue, user)}
        left = [
            new
            for new in actions_of(user)
            if action_id(user, new.endpoint, new.payload) not in queued
        ]
        while left:
            count = rng.randint(1, _MAX_BATCH)
            batch, left = left[:count], left[count:]
            entries = [queue.enqueue(batch[0])] if count == 1 else queue.enqueue_many(batch)
            _acknowledge(user, entries)
            time.sleep(rng.random() * _MAX_PAUSE_SECONDS)


def all_entries(queue: OutboxQueue, user: str) -> list[Entry]:
    """Return all entries of a user."""
    found: list[Entry] = []
    after = None
    while page := queue.entries(user, limit=_PAGE, after=after):
        found += page
        after = page[-1].id
    return found


def _acknowledge(user: str, entries: list[Entry]) -> None:
    """Print ids and keys in one write, so that a kill cannot leave half a line."""
    keys = {action_id(user, e.endpoint, e.decoded()): e.idempotency_key for e in entries}
    os.write(1, json.dumps(keys).encode() + b"\n")
