"""A queue in a temporary file, and a device whose clocks the test sets."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

from onceward_outbox import Claimed, Entry, Event, NewEntry, OutboxQueue
from packages.outbox.tests.outcomes import (
    expire,
    fail,
    record_conflict,
    release,
    retry_later,
    succeed,
)

KEY = bytes(range(32))
"""A key of bytes: the file is encrypted, and opens without stretching a passphrase."""


class PocketClock:
    """The clocks of a device in somebody's pocket."""

    def __init__(self) -> None:
        self.wall = datetime(2026, 3, 1, 12, tzinfo=UTC)
        self.since_boot = 1_000.0
        self.boot = "boot-1"

    def now(self) -> datetime:
        return self.wall

    def monotonic(self) -> float:
        return self.since_boot

    def boot_id(self) -> str:
        return self.boot

    def pass_by(self, **span: float) -> None:
        """Let time pass, on all clocks."""
        self.wall += timedelta(**span)
        self.since_boot += timedelta(**span).total_seconds()

    def set_by(self, **span: float) -> None:
        """Set the wall clock: no time passes."""
        self.wall += timedelta(**span)

    def restart(self, **off: float) -> None:
        """Switch the device off for this long and on again."""
        self.wall += timedelta(**off)
        self.since_boot = 5.0
        self.boot = f"boot-{uuid4()}"


class Lab:
    """One queue for a test, with its clock and all its events."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self.clock = PocketClock()
        self.events: list[Event] = []
        self.options = options
        self._opened: list[OutboxQueue] = []
        self.queue = self.open()
        self.queue.add_user("ada")

    def open(self, path: Path | None = None, **options: Any) -> OutboxQueue:
        """Open a queue, which ``close`` closes."""
        queue = OutboxQueue.open(
            path or self.path,
            **{
                "clock": self.clock,
                "listeners": [self.events.append],
                "chance": lambda: 0.5,  # no jitter
                **self.options,
                **options,
            },
        )
        self._opened.append(queue)
        return queue

    def close(self) -> None:
        for queue in self._opened:
            queue.close()

    def reopen(self, **options: Any) -> OutboxQueue:
        self.queue.close()
        self.queue = self.open(**options)
        return self.queue

    def add(self, **fields: Any) -> Entry:
        return self.queue.enqueue(new(**fields))

    def claim(self, user: str = "ada") -> Claimed:
        claimed = self.queue.claim(user)
        assert claimed is not None
        return claimed

    def send(self, user: str = "ada", **result: Any) -> Entry:
        """Claim the next entry and have it succeed."""
        return succeed(self.queue, self.claim(user), **result)

    def claimable(self, user: str = "ada") -> list[str]:
        """Claim all there is to claim, without ending any."""
        found = []
        while (claimed := self.queue.claim(user)) is not None:
            found.append(claimed.entry.id)
        return found

    def kinds(self) -> list[str]:
        return [event.kind.value for event in self.events]


def new(**fields: Any) -> NewEntry:
    """A create of an activity, unless the fields say otherwise."""
    return NewEntry(
        **{
            "user_id": "ada",
            "operation": "create",
            "entity_type": "activity",
            "endpoint": "/api/v1/activities",
            "payload": {"name": "a walk"},
            "profile": "field",
            **fields,
        }
    )


def walk(**fields: Any) -> NewEntry:
    """A step of a quest, in the profile that keeps strict order."""
    return new(
        **{"profile": "walk", "endpoint": "/quest/complete", "entity_type": "quest", **fields}
    )


def local() -> str:
    return str(uuid4())


Answers = Mapping[str, Callable[[OutboxQueue, Claimed], Entry]]

ENDINGS: Answers = {
    "succeed": succeed,
    "schedule_retry": retry_later,
    "release": release,
    "fail": fail,
    "conflict": record_conflict,
    "expire": expire,
}
"""Every way in which a claim can end, by its holder's word."""
