"""The device process of the demo: an encrypted outbox that drains in the background.

The first run enqueues 40 user actions. Every run sends what is in the outbox, as an app would: the
process does not know whether there is a network, nor that it was killed before.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Final

from onceward_lab.user_actions import SHORT_DAY, interleave, visit, walk_entry
from onceward_outbox import OutboxQueue, QueueSettings
from onceward_outbox.entry import Status
from onceward_outbox.events import Event, EventKind
from onceward_outbox.outbox import Outbox
from onceward_outbox.transport import HttpTransport
from onceward_protocol.retry import Jitter, RetryPolicy

__all__ = ["PASSPHRASE", "PLACES", "TOKEN", "USER", "main"]

USER: Final = "ada"
PLACES: Final = ("the mill", "the ferry", "the quarry")
PASSPHRASE: Final = "DEMO_PASSPHRASE"  # noqa: S105 - the name of the variable
TOKEN: Final = "DEMO_TOKEN"  # noqa: S105 - the name of the variable

# Much shorter than the defaults of a real device, so that the demo takes seconds.
_LEASE_SECONDS: Final = 0.5
_RETRY: Final = RetryPolicy(
    first_seconds=0.1, ceiling_seconds=0.4, jitter=Jitter.PLUS_MINUS, jitter_fraction=0.25
)
_ACTION_SECONDS: Final = 0.03
_POLL_SECONDS: Final = 0.05
_FAILURES: Final = frozenset({EventKind.FAILED, EventKind.CONFLICT, EventKind.EXPIRED})


def main() -> None:
    """Run with the arguments: outbox file, server URL, and ``first`` or ``again``."""
    path, server, run = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    queue = OutboxQueue.open(
        path,
        passphrase=os.environ[PASSPHRASE],
        # One request for each action: the demo counts those whose response is lost.
        settings=QueueSettings(lease_seconds=_LEASE_SECONDS, batch=False),
    )
    token = os.environ[TOKEN]
    with Outbox(queue, HttpTransport(server), token, retry=_RETRY, back_off=_RETRY) as outbox:
        outbox.subscribe(_report_failure)
        queue.add_user(USER)
        outbox.start()
        if run == "first":
            _enqueue_actions(outbox)
        while _report_queue(queue):
            time.sleep(_POLL_SECONDS)


def _enqueue_actions(outbox: Outbox) -> None:
    field = [entry for place in PLACES for entry in visit(USER, place)]
    for entry in interleave((walk_entry(USER, action) for action in SHORT_DAY), field):
        outbox.enqueue(entry)
        _report_queue(outbox.queue)
        time.sleep(_ACTION_SECONDS)
    _write({"enqueued": True})


def _report_queue(queue: OutboxQueue) -> bool:
    """Write the counts by status; returns whether entries are left to send."""
    stats = queue.stats(USER)
    _write({"queue": {status.value: count for status, count in stats.counts.items() if count}})
    counts = stats.counts
    return counts[Status.PENDING] + counts[Status.IN_FLIGHT] > 0


def _report_failure(event: Event) -> None:
    if event.kind in _FAILURES:
        _write({"error": f"{event.kind}: {event.entity_type} {event.detail or event.http_status}"})


def _write(line: object) -> None:
    # One write, so that a kill cannot leave half a line.
    os.write(1, json.dumps(line).encode() + b"\n")
