"""The outbox: a durable, encrypted queue of mutations that are sent in order until they happened.

::

    Outbox         a file, a server, and the drain between them, for all users or bound to one,
                   who sees no other's entries; AsyncOutbox is the same for asyncio
    OutboxQueue    the file alone: every operation on it, for apps that send themselves
    Drain          sends what one user's queue holds, when the app calls it
    Outcome        what came of a send, for apps that send themselves
    Profile        the rules of one API: order, retries, codes, request format
    NewEntry       what to queue, as a value; Entry, Attempt and Stats are what comes back
    Event          what happened, for a screen or telemetry; EventStream and AsyncEventStream are
                   iterators of them
    HttpTransport  sends requests to the server; Transport is the protocol of another way
"""

from onceward_outbox.clock import DeviceClock
from onceward_outbox.conflicts import ConflictPlan, Merge
from onceward_outbox.database import AppConnection, Driver
from onceward_outbox.drain import Drain
from onceward_outbox.drain_state import DrainReport, Ended
from onceward_outbox.entries import Stats
from onceward_outbox.entry import (
    Attempt,
    Claimed,
    ConflictResolution,
    ConflictResolutionName,
    Entry,
    NewEntry,
    Reason,
    ReasonName,
    Resolution,
    ResolutionName,
    Status,
    StatusName,
    Transition,
)
from onceward_outbox.events import AsyncEventStream, Event, EventKind, EventStream, Listener
from onceward_outbox.maintenance import PayloadMigration
from onceward_outbox.outbox import AsyncOutbox, OpenOptions, Outbox, OutboxOptions
from onceward_outbox.outcome import (
    AttemptResult,
    Conflicted,
    Expired,
    Failed,
    Outcome,
    Released,
    RetryLater,
    Succeeded,
)
from onceward_outbox.profile import (
    ChainAction,
    Drop,
    Park,
    Profile,
    Recovery,
    RequestFormat,
    Send,
    TimestampsInBody,
)
from onceward_outbox.queue import OutboxQueue, QueueOptions
from onceward_outbox.resolution import Rewrite
from onceward_outbox.responses import AtSend, Token
from onceward_outbox.settings import QueueSettings
from onceward_outbox.transport import HttpTransport, NoResponse, Request, Response, Transport
from onceward_protocol.fault_points import SyncFaultPoints
from onceward_protocol.operation import Operation, OperationName

__all__ = [
    "AppConnection",
    "AsyncEventStream",
    "AsyncOutbox",
    "AtSend",
    "Attempt",
    "AttemptResult",
    "ChainAction",
    "Claimed",
    "ConflictPlan",
    "ConflictResolution",
    "ConflictResolutionName",
    "Conflicted",
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
    "Expired",
    "Failed",
    "HttpTransport",
    "Listener",
    "Merge",
    "NewEntry",
    "NoResponse",
    "OpenOptions",
    "Operation",
    "OperationName",
    "Outbox",
    "OutboxOptions",
    "OutboxQueue",
    "Outcome",
    "Park",
    "PayloadMigration",
    "Profile",
    "QueueOptions",
    "QueueSettings",
    "Reason",
    "ReasonName",
    "Recovery",
    "Released",
    "Request",
    "RequestFormat",
    "Resolution",
    "ResolutionName",
    "Response",
    "RetryLater",
    "Rewrite",
    "Send",
    "Stats",
    "Status",
    "StatusName",
    "Succeeded",
    "SyncFaultPoints",
    "TimestampsInBody",
    "Token",
    "Transition",
    "Transport",
]
