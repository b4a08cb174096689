"""What a queued mutation is, and what may become of it: values and tables only, no I/O.

::

                          ┌────────── watchdog, retry_later, release ─────────┐
                          ▼                                                   │
    enqueue ──────▶  pending  ──────────────── claim ──────────────▶  in_flight
                      │  ▲  │                                          │  │  │  │
             cancel   │  │  │ expire                    succeed ◀──────┘  │  │  └──▶ conflict
                ▼     │  │  └────▶ expired ◀──────────── expire ──────────┘  │         │
           discarded  │  │ retry, revive, edit                               │         │
                ▲     │  │                                                   │         │
                │     └──┼── park ──▶ failed ◀───────────── fail ────────────┘         │
                │        └─────────── │    ▲                                           │
                └──── discard ────────┘    └────────────── give_up ────────────────────┘

``TRANSITIONS`` below is the same in full, and it is what decides.
"""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

import msgspec

from holdfast.errors import TransitionError

__all__ = [
    "DEFAULT_MAX_ATTEMPTS",
    "DEFAULT_PRIORITY",
    "DEFAULT_PROFILE_NAME",
    "METHODS",
    "OPEN",
    "TRANSITIONS",
    "Action",
    "Attempt",
    "Claimed",
    "ConflictResolution",
    "Entry",
    "NewEntry",
    "Operation",
    "Reason",
    "Resolution",
    "Status",
    "after",
]


class Operation(StrEnum):
    """What an entry does to its entity."""

    CREATE = "create"
    UPDATE = "update"
    PATCH = "patch"
    DELETE = "delete"


METHODS: Final[Mapping[Operation, str]] = MappingProxyType(
    {
        Operation.CREATE: "POST",
        Operation.UPDATE: "PUT",
        Operation.PATCH: "PATCH",
        Operation.DELETE: "DELETE",
    }
)
"""The HTTP method each operation is sent as."""

DEFAULT_PRIORITY: Final = 5
"""Priority of entity types for which the profile names none."""

DEFAULT_PROFILE_NAME: Final = "default"

DEFAULT_MAX_ATTEMPTS: Final = 12
"""Sends of one entry before it is shown to a person, unless the app says otherwise."""


class ConflictResolution(StrEnum):
    """What to do when the server says that the entity has moved on."""

    SERVER_WINS = "server_wins"
    CLIENT_WINS = "client_wins"
    MANUAL = "manual"
    MERGE = "merge"
    """The app's own function decides, from base, mine and theirs."""


class Status(StrEnum):
    """Where an entry stands."""

    PENDING = "pending"
    IN_FLIGHT = "in_flight"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CONFLICT = "conflict"
    EXPIRED = "expired"
    DISCARDED = "discarded"


OPEN: Final = frozenset({Status.PENDING, Status.IN_FLIGHT, Status.FAILED, Status.CONFLICT})
"""Not settled: these keep their place in the order, and those behind them waiting."""


class Reason(StrEnum):
    """Why an entry is failed, discarded or expired, beside what the server said."""

    DEPENDENCY = "dependency"
    """What it waits for will not happen: parked, and revived with its parent."""
    ATTEMPTS = "attempts"
    """It was sent as often as it may be."""
    ANSWER = "answer"
    """The server's answer settles it."""
    REBUILD = "rebuild"
    """The server's state has left no place for it."""
    MIGRATION = "migration"
    """The app could not bring its payload into the new format."""
    COALESCED = "coalesced"
    """A later entry made it superfluous before it was ever sent."""
    PERSON = "person"
    """Somebody said so."""
    UNKNOWN = "unknown"
    """It may have happened, and nobody can ask the server any more."""
    STALE = "stale"
    """It is older than the cap."""


class Action(StrEnum):
    """What can be done to an entry."""

    CLAIM = "claim"
    SUCCEED = "succeed"
    RETRY_LATER = "retry_later"
    RELEASE = "release"
    FAIL = "fail"
    CONFLICT = "conflict"
    EXPIRE = "expire"
    WATCHDOG = "watchdog"
    PARK = "park"
    REVIVE = "revive"
    RETRY = "retry"
    RESEND = "resend"
    GIVE_UP = "give_up"
    EDIT = "edit"
    CANCEL = "cancel"
    DISCARD = "discard"


class Resolution(StrEnum):
    """How a conflict ends."""

    THEIRS = "theirs"
    """The server's side stands; the entry is discarded."""
    MINE = "mine"
    """The person's side is sent once more, forced, with a new key."""
    MERGED = "merged"
    """A new payload, made of both, is sent with a new key."""
    GIVE_UP = "give_up"
    """Nobody can say; the entry is failed and keeps what both sides had."""


_P, _I, _F, _C = Status.PENDING, Status.IN_FLIGHT, Status.FAILED, Status.CONFLICT

TRANSITIONS: Final[Mapping[Action, Mapping[Status, Status]]] = MappingProxyType(
    {
        # What the drain does.
        Action.CLAIM: {_P: _I},
        Action.SUCCEED: {_I: Status.SUCCEEDED},
        Action.RETRY_LATER: {_I: _P},
        Action.RELEASE: {_I: _P},
        Action.FAIL: {_I: _F},
        Action.CONFLICT: {_I: _C},
        Action.EXPIRE: {_I: Status.EXPIRED, _P: Status.EXPIRED},
        Action.WATCHDOG: {_I: _P},
        # What follows from another entry.
        Action.PARK: {_P: _F},
        Action.REVIVE: {_F: _P},
        # What a person, or the strategy they chose, does.
        Action.RETRY: {_F: _P},
        Action.RESEND: {_C: _P},
        Action.GIVE_UP: {_C: _F},
        Action.EDIT: {_P: _P, _F: _P, _C: _P},
        Action.CANCEL: {_P: Status.DISCARDED},
        Action.DISCARD: {_F: Status.DISCARDED, _C: Status.DISCARDED},
    }
)
"""What leads where. Everything that is not here is an error."""


def after(action: Action, status: Status) -> Status:
    """Return the status that an action leads to, or raise ``TransitionError``."""
    try:
        return TRANSITIONS[action][status]
    except KeyError:
        allowed = " or ".join(TRANSITIONS[action])
        raise TransitionError(
            f"an entry that is {status} cannot {action}: it would have to be {allowed}"
        ) from None


class NewEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A mutation to be queued. What is left out gets the default in the comment beside it."""

    user_id: str
    operation: str
    entity_type: str
    endpoint: str
    # A JSON value, or the bytes of a JSON text. None sends no body.
    payload: Any = None
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    local_id: str | None = None
    server_id: str | int | None = None
    # Ids of entries, or local ids, that must have succeeded before.
    depends_on: tuple[str, ...] = ()
    # By entity type, as the profile says.
    priority: int | None = None
    # A new UUID version 4, made now and never again.
    key: str | None = None
    # How the server of this entry wants it to be sent; see `holdfast.outbox.Profile`.
    profile: str = DEFAULT_PROFILE_NAME
    conflict_resolution: str | None = None
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    # The server's time as far as it is known, otherwise the device's.
    client_generated_at: datetime | None = None
    # The next number of the user.
    sequence_number: int | None = None
    # By entity: entries of one lane are sent one after the other. A profile with
    # strict order has one lane.
    lane: str | None = None
    # What the entity was when the change was made, for a three-way merge, and its version.
    base: Any = None
    base_version: str | None = None
    # A new id. Give one to let other entries of the same batch depend on this one.
    id: str | None = None


class Entry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row of the queue.

    It holds nothing that could hold it, so the garbage collector need not look at it.
    """

    id: str
    user_id: str
    operation: Operation
    entity_type: str
    local_id: str | None
    server_id: str | int | None
    endpoint: str
    # JSON text, with local ids as they were when it was queued.
    payload: str | None
    headers: Mapping[str, str]
    idempotency_key: str
    status: Status
    # Claims, hence sends, that were not taken back by `release`.
    attempt_count: int
    max_attempts: int
    # On the device's clock, for people to read. What decides is a clock that cannot be set.
    next_retry_at: datetime | None
    last_error: str | None
    last_error_code: int | None
    sequence_number: int
    # Ids of entries.
    dependency_ids: tuple[str, ...]
    # On the device's clock.
    created_at: datetime
    synced_at: datetime | None
    conflict_resolution: ConflictResolution | None
    priority: int
    # What the server is told, the same on every send.
    client_generated_at: datetime
    # The name of its profile.
    profile: str
    # Entries of one lane are sent one after the other; None is a lane of its own.
    lane: str | None
    reason: Reason | None
    # The local ids that stand for server ids in this entry; fixed when it was queued, so that
    # every send has the same body.
    local_refs: tuple[str, ...]
    payload_version: int
    base: str | None
    base_version: str | None
    # What the server had when it refused: the entity, and its version.
    theirs: str | None
    theirs_version: str | None
    # To be sent without If-Match, once: the person's side has won.
    forced: bool
    # Sent, and nobody knows what came of it. Only the same key and body may be sent again.
    outcome_unknown: bool
    # Counts the claims of this entry: the fencing number of the last one.
    claim_number: int
    # How many of the things it waits for have not happened yet.
    waiting_for: int

    @property
    def method(self) -> str:
        """The HTTP method it is sent as."""
        return METHODS[self.operation]

    def decoded(self) -> Any:
        """Return the payload as the JSON value it is; None also if there is none."""
        return None if self.payload is None else msgspec.json.decode(self.payload)


class Claimed(msgspec.Struct, frozen=True):
    """An entry that is ours to send, until the lease runs out. ``number`` is the fencing number."""

    entry: Entry
    number: int
    lease_seconds: float


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One send of an entry, and what came of it."""

    entry_id: str
    number: int
    # On the device's clock.
    started_at: datetime
    ended_at: datetime
    # The action that ended it: `succeed`, `retry_later`, `watchdog` and so on.
    outcome: Action
    # HTTP status; None if there was no answer.
    status: int | None
    # The server's machine-readable code.
    code: str | None
    request_id: str | None
    error: str | None
