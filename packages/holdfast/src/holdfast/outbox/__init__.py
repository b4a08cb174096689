"""The device outbox: mutations kept in order, encrypted, until they happened.

::

    Outbox        a file, a server, and what sends from the one to the other; AsyncOutbox in asyncio
    OutboxQueue   the file alone: every operation on it, for apps that send by themselves
    Drain         sending what one user's queue holds, when the app says so
    NewEntry      what to queue; Entry, Attempt and Stats are what comes back
    Event         what happened, for a screen or telemetry; EventStream is an iterator of them
    HttpTransport how requests get to the server; Transport is what another way has to do
"""

from holdfast.core.outbox_entry import (
    Action,
    Attempt,
    Claimed,
    ConflictResolution,
    Entry,
    NewEntry,
    Operation,
    Reason,
    Resolution,
    Status,
)
from holdfast.outbox.conflicts import Merge
from holdfast.outbox.database import AppConnection, Driver
from holdfast.outbox.dispatch import AtSend
from holdfast.outbox.drain import Drain
from holdfast.outbox.events import Event, EventKind, Listener
from holdfast.outbox.exchange import Answer, NoAnswer, Request, Transport
from holdfast.outbox.outbox import AsyncOutbox, EventStream, Outbox
from holdfast.outbox.payload_migration import PayloadMigration, Rewrite
from holdfast.outbox.profile import (
    ChainAction,
    Drop,
    Park,
    Profile,
    Recovery,
    RequestFormat,
    Send,
    TimestampsInBody,
)
from holdfast.outbox.queue import OutboxQueue
from holdfast.outbox.report import DrainReport, Ended
from holdfast.outbox.sending import Token
from holdfast.outbox.settings import QueueSettings
from holdfast.outbox.transport import HttpTransport
from holdfast.outbox.upkeep import Stats
from holdfast.outbox.world import DeviceClock, FaultPoints

__all__ = [
    "Action",
    "Answer",
    "AppConnection",
    "AsyncOutbox",
    "AtSend",
    "Attempt",
    "ChainAction",
    "Claimed",
    "ConflictResolution",
    "DeviceClock",
    "Drain",
    "DrainReport",
    "Driver",
    "Drop",
    "Ended",
    "Entry",
    "Event",
    "EventKind",
    "EventStream",
    "FaultPoints",
    "HttpTransport",
    "Listener",
    "Merge",
    "NewEntry",
    "NoAnswer",
    "Operation",
    "Outbox",
    "OutboxQueue",
    "Park",
    "PayloadMigration",
    "Profile",
    "QueueSettings",
    "Reason",
    "Recovery",
    "Request",
    "RequestFormat",
    "Resolution",
    "Rewrite",
    "Send",
    "Stats",
    "Status",
    "TimestampsInBody",
    "Token",
    "Transport",
]
