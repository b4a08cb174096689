"""The device outbox: mutations kept in order, encrypted, until they happened."""

from holdfast.core.entry import (
    Attempt,
    Claimed,
    ConflictResolution,
    Entry,
    NewEntry,
    Operation,
    Profile,
    Reason,
    Resolution,
    Status,
)
from holdfast.device.events import Event, EventKind
from holdfast.device.payload_migration import PayloadMigration, Rewrite
from holdfast.device.queue import OutboxQueue
from holdfast.device.settings import QueueSettings
from holdfast.device.upkeep import Stats

__all__ = [
    "Attempt",
    "Claimed",
    "ConflictResolution",
    "Entry",
    "Event",
    "EventKind",
    "NewEntry",
    "Operation",
    "OutboxQueue",
    "PayloadMigration",
    "Profile",
    "QueueSettings",
    "Reason",
    "Resolution",
    "Rewrite",
    "Stats",
    "Status",
]
