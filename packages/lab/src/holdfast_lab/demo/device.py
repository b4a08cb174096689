"""The device of the demo, a process of its own: an encrypted outbox that sends by itself.

In its first life it queues the person's taps. In every life it sends what is queued, as any app
would: it is not told whether there is a network, nor that it was killed.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Final

from holdfast.core.outbox_entry import Status
from holdfast.core.retry import Jitter, RetryPolicy
from holdfast.outbox import OutboxQueue, QueueSettings
from holdfast.outbox.events import Event, EventKind
from holdfast.outbox.outbox import Outbox
from holdfast.outbox.transport import HttpTransport
from holdfast_lab.user_actions import SHORT_DAY, visit, walk_entry, woven

__all__ = ["PASSPHRASE", "PLACES", "TOKEN", "USER", "main"]

USER: Final = "ada"
PLACES: Final = ("the mill", "the ferry", "the quarry")
PASSPHRASE: Final = "DEMO_PASSPHRASE"  # noqa: S105 - the name of the variable
TOKEN: Final = "DEMO_TOKEN"  # noqa: S105 - the name of the variable

# A real device waits longer: two minutes for a dead process, seconds to minutes between tries.
# Nobody watches a demo for that long.
_LEASE_SECONDS: Final = 0.5
_SOON: Final = RetryPolicy(
    first_seconds=0.1, ceiling_seconds=0.4, jitter=Jitter.PLUS_MINUS, jitter_fraction=0.25
)
_TAP_SECONDS: Final = 0.03
_LOOK_SECONDS: Final = 0.05
_TOLD: Final = frozenset({EventKind.FAILED, EventKind.CONFLICT, EventKind.EXPIRED})


def main() -> None:
    """Run: arguments are the file, the server's address, and ``new`` in the first life."""
    path, server, life = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    queue = OutboxQueue.open(
        path,
        passphrase=os.environ[PASSPHRASE],
        settings=QueueSettings(lease_seconds=_LEASE_SECONDS),
    )
    token = os.environ[TOKEN]
    with Outbox(queue, HttpTransport(server), token, retry=_SOON, back_off=_SOON) as outbox:
        outbox.subscribe(_complain)
        queue.add_user(USER)
        outbox.start()
        if life == "new":
            _live_a_day(outbox)
        while _tell(queue):
            time.sleep(_LOOK_SECONDS)


def _live_a_day(outbox: Outbox) -> None:
    """Tap forty times. Each tap is on disk before the next one."""
    field = [entry for place in PLACES for entry in visit(USER, place)]
    for entry in woven((walk_entry(USER, act) for act in SHORT_DAY), field):
        outbox.enqueue(entry)
        _tell(outbox.queue)
        time.sleep(_TAP_SECONDS)
    _say({"day": "over"})


def _tell(queue: OutboxQueue) -> bool:
    """Say how the queue stands; returns whether something is left to be sent."""
    stats = queue.stats(USER)
    _say({"queue": {status.value: count for status, count in stats.counts.items() if count}})
    counts = stats.counts
    return counts[Status.PENDING] + counts[Status.IN_FLIGHT] > 0


def _complain(event: Event) -> None:
    if event.kind in _TOLD:
        _say({"trouble": f"{event.kind}: {event.entity_type} {event.detail or event.error_code}"})


def _say(line: object) -> None:
    # One write: a reader sees the whole line or nothing of it, whatever becomes of this process.
    os.write(1, json.dumps(line).encode() + b"\n")
