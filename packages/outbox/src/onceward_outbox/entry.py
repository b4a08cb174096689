"""Entries of the outbox, their statuses, the table of allowed transitions, and their rows.

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

``TRANSITIONS`` below is the complete table.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from types import MappingProxyType
from typing import Any, Final, Literal, TypedDict, TypeVar

import msgspec

from onceward_outbox.errors import ConfigurationError, TransitionError, UsageError
from onceward_protocol.operation import METHODS, Operation, OperationName
from onceward_protocol.sequence import SequenceNumber
from onceward_protocol.storage.sql_files import read_queries

# The values of the enumerations below: either may be given where an app names one.
# The values of ``ConflictResolution``.
ConflictResolutionName = Literal["server_wins", "client_wins", "manual", "merge"]
# The values of ``Resolution``.
ResolutionName = Literal["server_wins", "client_wins", "merge", "give_up"]
# The values of ``Status``.
StatusName = Literal[
    "pending", "in_flight", "succeeded", "failed", "conflict", "expired", "discarded"
]
# The values of ``Reason``.
ReasonName = Literal[
    "dependency",
    "attempts",
    "answer",
    "rebuild",
    "migration",
    "coalesced",
    "person",
    "unknown",
    "stale",
]

_Member = TypeVar("_Member", bound=StrEnum)


DEFAULT_PRIORITY: Final = 5
"""Priority of entity types for which the profile names none."""

DEFAULT_PROFILE_NAME: Final = "default"

DEFAULT_MAX_ATTEMPTS: Final = 12
"""Attempts after which an entry fails, unless the app sets another number."""


class ConflictResolution(StrEnum):
    """Strategy for an entry whose entity was changed on the server."""

    # The entry is discarded.
    SERVER_WINS = "server_wins"
    # The entry is sent once more, forced.
    CLIENT_WINS = "client_wins"
    # The entry waits for a person.
    MANUAL = "manual"
    MERGE = "merge"
    """By field, or by the app's own function of base, mine and theirs."""


# SQL repeats these values. To add a status, check these places too:
# - the CHECK and the indexes in migrations/0009_queue.sql, which need a new migration;
# - the lists of open statuses in outbox/enqueue.sql and outbox/maintenance.sql;
# - the list of statuses that wait for a person in outbox/queries.sql;
# - the macros IS_OPEN and IS_DEAD in macros.sql.
class Status(StrEnum):
    """Status of an entry."""

    # It waits to be sent.
    PENDING = "pending"
    # A drain has claimed it.
    IN_FLIGHT = "in_flight"
    # The server has done it.
    SUCCEEDED = "succeeded"
    # It waits for a person: retry, edit or discard.
    FAILED = "failed"
    # It waits for a decision about both sides.
    CONFLICT = "conflict"
    # It is older than the server accepts.
    EXPIRED = "expired"
    # It will never be sent.
    DISCARDED = "discarded"


OPEN: Final = frozenset({Status.PENDING, Status.IN_FLIGHT, Status.FAILED, Status.CONFLICT})
"""Not settled: an entry in one of these blocks the ones behind it in its lane."""


class Reason(StrEnum):
    """Why an entry is failed, discarded or expired."""

    DEPENDENCY = "dependency"
    """Something it depends on will not succeed: parked, and revived with its parent."""
    ATTEMPTS = "attempts"
    """It has had all its attempts."""
    RESPONSE = "answer"
    """The server's response decided."""
    REBUILD = "rebuild"
    """Recovery from an out-of-order response could not keep it in the queue."""
    MIGRATION = "migration"
    """The app could not migrate its payload to the new format."""
    COALESCED = "coalesced"
    """A later entry replaced it before it was sent."""
    PERSON = "person"
    """A person decided."""
    UNKNOWN = "unknown"
    """It may have happened, and the server no longer knows its key."""
    STALE = "stale"
    """It is older than the cap, or than failed entries are kept."""


class Transition(StrEnum):
    """A change of an entry's status; ``TRANSITIONS`` says from which status to which."""

    # A drain takes it.
    CLAIM = "claim"
    # The server has done it.
    SUCCEED = "succeed"
    # It is sent again after a delay.
    RETRY_LATER = "retry_later"
    # The claim ends without an attempt.
    RELEASE = "release"
    # The server refuses it, or the attempts are used up.
    FAIL = "fail"
    # The entity was changed on the server.
    CONFLICT = "conflict"
    # It is older than the server accepts.
    EXPIRE = "expire"
    # The lease of a claim has ended.
    WATCHDOG = "watchdog"
    # An entry it depends on will not happen.
    PARK = "park"
    # That entry may happen again; or a person revives what the device expired unsent.
    REVIVE = "revive"
    # A person sends it again.
    RETRY = "retry"
    # A resolved conflict is sent once more.
    RESEND = "resend"
    # A conflict ends undecided.
    GIVE_UP = "give_up"
    # A person changes it.
    EDIT = "edit"
    # A person takes it back before it is sent.
    CANCEL = "cancel"
    # It will never be sent.
    DISCARD = "discard"


class Resolution(StrEnum):
    """How a conflict ends: by the names of the strategies, or undecided."""

    SERVER_WINS = "server_wins"
    """The server's side is kept; the entry is discarded."""
    CLIENT_WINS = "client_wins"
    """The device's side is sent once more, forced, with a new key."""
    MERGE = "merge"
    """A new payload, made of both, is sent with a new key."""
    GIVE_UP = "give_up"
    """Undecided: the entry is failed and keeps both sides."""


_P, _I, _F, _C = Status.PENDING, Status.IN_FLIGHT, Status.FAILED, Status.CONFLICT

TRANSITIONS: Final[Mapping[Transition, Mapping[Status, Status]]] = MappingProxyType(
    {
        # By the drain.
        Transition.CLAIM: {_P: _I},
        Transition.SUCCEED: {_I: Status.SUCCEEDED},
        Transition.RETRY_LATER: {_I: _P},
        Transition.RELEASE: {_I: _P},
        Transition.FAIL: {_I: _F},
        Transition.CONFLICT: {_I: _C},
        Transition.EXPIRE: {_I: Status.EXPIRED, _P: Status.EXPIRED},
        Transition.WATCHDOG: {_I: _P},
        # Following from another entry.
        Transition.PARK: {_P: _F},
        Transition.REVIVE: {_F: _P, Status.EXPIRED: _P},
        # By a person, or by the chosen strategy.
        Transition.RETRY: {_F: _P},
        Transition.RESEND: {_C: _P},
        Transition.GIVE_UP: {_C: _F},
        Transition.EDIT: {_P: _P, _F: _P, _C: _P},
        Transition.CANCEL: {_P: Status.DISCARDED},
        Transition.DISCARD: {_F: Status.DISCARDED, _C: Status.DISCARDED},
    }
)
"""Status after each transition, by the status before. Everything else is an error."""


def after(transition: Transition, status: Status) -> Status:
    """Return the status that a transition leads to, or raise ``TransitionError``."""
    try:
        return TRANSITIONS[transition][status]
    except KeyError:
        allowed = " or ".join(TRANSITIONS[transition])
        raise TransitionError(
            f"an entry that is {status} cannot {transition}: its status must be {allowed}"
        ) from None


def member_named(kind: type[_Member], value: str) -> _Member:
    """Return the member of an enumeration with this value. Raises ``UsageError``."""
    try:
        return kind(value)
    except ValueError:
        raise UsageError(
            f"{value!r} is not a {kind.__name__}: it must be one of {', '.join(kind)}"
        ) from None


class OnRefusal(StrEnum):
    """Behaviour of the entries behind a refused one."""

    CONTINUE = "continue"
    STOP = "stop"


class UnknownBase(StrEnum):
    """How an edit is sent if no version of its entity was ever seen."""

    FORCE = "force"
    READ = "read"
    ASK = "ask"


class NewEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A mutation to be queued. Each field says what is used if it is left out."""

    # Whose entry it is.
    user_id: str
    # What it does to the entity.
    operation: Operation | OperationName
    # The kind of entity, a name that the app chooses.
    entity_type: str
    # The path; ``{local:ID}`` is replaced by the server's id.
    endpoint: str
    # A JSON value, or the bytes of a JSON text; None sends no body.
    payload: Any = None
    # Headers to send besides those of the outbox; none by default.
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    # The device's id of the entity, a UUID; by default the one in ``endpoint``, if it has one.
    local_id: str | None = None
    # The server's id of the entity, if it is known.
    server_id: str | int | None = None
    # Ids of entries, or local ids, that must succeed first; none by default.
    depends_on: tuple[str, ...] = ()
    # A higher number is sent first; by default the profile's priority of the entity type.
    priority: int | None = None
    # The idempotency key, the same for every send; a new UUID version 4 by default.
    key: str | None = None
    # The rules of the API it is for, by name; see `onceward_outbox.Profile`.
    profile: str = DEFAULT_PROFILE_NAME
    # The strategy for conflicts; the profile's by default.
    conflict_resolution: ConflictResolution | ConflictResolutionName | None = None
    # Attempts after which it fails.
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    # When the user acted; by default now, on the server's clock if it is known, otherwise on the
    # device's.
    client_generated_at: datetime | None = None
    # The position in the user's order; the user's next number by default.
    sequence_number: int | None = None
    # Entries of one lane are sent in order. By default a lane for each entity; with strict order
    # one for the user.
    lane: str | None = None
    # The entity when the change was made, for a three-way merge; by default as the outbox saw it
    # last.
    base: Any = None
    # The version of ``base``, as the server writes it: ``'"3"'`` of ``ETag``, or the number 3 of
    # the body, which means the same. By default the version that the outbox saw last.
    base_version: str | int | None = None
    # A name for what the user does, such as ``order.close:001``: while the user has an unsettled
    # entry with this name, that one is returned and nothing is queued.
    once: str | None = None
    # The W3C trace context to send; that of the current OpenTelemetry span by default.
    traceparent: str | None = None
    # The id of the entry; a new UUID by default. Set one so that other entries of the same batch
    # can depend on this one.
    id: str | None = None


class EntryOptions(TypedDict, total=False):
    """The fields of ``NewEntry`` that need not be given; see there."""

    headers: Mapping[str, str]
    local_id: str | None
    server_id: str | int | None
    depends_on: tuple[str, ...]
    priority: int | None
    key: str | None
    profile: str
    conflict_resolution: ConflictResolution | ConflictResolutionName | None
    max_attempts: int
    client_generated_at: datetime | None
    sequence_number: int | None
    lane: str | None
    base: Any
    base_version: str | int | None
    once: str | None
    traceparent: str | None
    id: str | None


class Entry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row of the queue.

    It cannot be part of a reference cycle, so garbage collection is off for it.
    """

    # A UUID.
    id: str
    # Whose entry it is.
    user_id: str
    # What it does to the entity.
    operation: Operation
    # The kind of entity.
    entity_type: str
    # The device's id of the entity.
    local_id: str | None
    # The server's id of the entity, once it is known.
    server_id: str | int | None
    # The path; it may contain ``{local:…}``.
    endpoint: str
    # JSON text, with local ids as they were when it was queued.
    payload: str | None
    # Headers to send.
    headers: Mapping[str, str]
    # The key, the same for every send.
    idempotency_key: str
    # Where it is in its life.
    status: Status
    # Sends; those during outages and with responses of others are included.
    attempt_count: int = 0
    # Attempts after which it fails. Outages and responses of others do not count for it.
    max_attempts: int
    # On the device's clock, for people. Decisions use the elapsed clock.
    next_retry_at: datetime | None = None
    # The last error, in one line.
    last_error: str | None = None
    # The last HTTP status.
    last_error_code: int | None = None
    # The server's code in that response.
    last_code: str | None = None
    # The position in the user's order.
    sequence_number: int
    # Ids of entries.
    dependency_ids: tuple[str, ...]
    # On the device's clock.
    created_at: datetime
    # The same in milliseconds of the outbox's own clock, which cannot be set.
    enqueued_ms: int = 0
    # When it succeeded.
    synced_at: datetime | None = None
    # The strategy; None uses the profile's.
    conflict_resolution: ConflictResolution | None
    # A higher number is sent first.
    priority: int
    # The same on every send.
    client_generated_at: datetime
    # The name of its profile.
    profile: str
    # Entries of one lane are sent in order; None is independent.
    lane: str | None
    # The lane that it left when it failed; a retry brings it back there.
    left_lane: str | None = None
    # Why it has its status.
    reason: Reason | None
    # Local ids that are replaced by server ids; fixed when it was queued, so that every send
    # has the same body.
    local_refs: tuple[str, ...]
    # The version of the app's payload format.
    payload_version: int
    # The entity when the change was made.
    base: str | None
    # The version of ``base``, as ``If-Match`` takes it; the one seen last, unless the app set one.
    base_version: str | None
    # The server's side of a conflict, and its version.
    theirs: str | None = None
    # The version of ``theirs``.
    theirs_version: str | None = None
    # JSON Pointers of what both sides of a conflict have changed, if both are JSON objects.
    conflict_fields: tuple[str, ...] = ()
    # The entity whose version is checked; None for a create.
    entity: str | None = None
    # Entries of one chain make no sense without each other; None is in none.
    chain: str | None = None
    # ``If-Match`` of the last send, which every later send repeats; empty if it had none.
    sent_version: str | None = None
    # Sent once without a version check: the device's side has won.
    forced: bool = False
    # Sent without a conclusive response. Only the same key and body may be sent again.
    outcome_unknown: bool = False
    # Number of claims: the fencing token of the last one.
    claim_number: int = 0
    # How many of its dependencies are not met.
    waiting_for: int
    # The user has no other entry with this name that is unsettled or succeeded; None for none.
    once: str | None = None
    # The W3C trace context that is sent with it.
    traceparent: str | None = None

    @property
    def method(self) -> str:
        """The HTTP method it is sent as."""
        return METHODS[self.operation]

    def decoded(self) -> Any:
        """Return the payload as a JSON value; None if there is no payload."""
        return None if self.payload is None else msgspec.json.decode(self.payload)


class Claimed(msgspec.Struct, frozen=True):
    """An entry claimed for sending until the lease expires. ``number`` is the fencing token."""

    # The entry as it was claimed.
    entry: Entry
    # Grows with each claim; an outcome of an older claim is refused.
    number: int
    # How long the claim is valid.
    lease_seconds: float
    # The version to send as ``If-Match``; None for none.
    version: str | None = None
    # The entity as of that version, a JSON text, if an earlier send of the same drain returned it.
    base: str | None = None
    # The number in a strict sequence; None if the endpoint has none.
    sequence: SequenceNumber | None = None


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One send of an entry, and its outcome."""

    # The entry.
    entry_id: str
    # The number of the attempt, from 1.
    number: int
    # On the device's clock.
    started_at: datetime
    # When the outcome was recorded; None while it runs.
    ended_at: datetime
    # The transition that ended it: `succeed`, `retry_later`, `watchdog` and so on.
    outcome: Transition
    # HTTP status; None without a response.
    status: int | None
    # The server's machine-readable code.
    code: str | None
    # The ``X-Request-ID`` of the response.
    request_id: str | None
    # What went wrong, in one line.
    error: str | None


# -- statements and rows ---------------------------------------------------------------------------


COLUMNS: Final = Entry.__struct_fields__
"""The columns of an entry, which are named as its fields."""

_FILES: Final = (
    "enqueue.sql",
    "claims.sql",
    "resolution.sql",
    "queries.sql",
    "maintenance.sql",
    "pruning.sql",
    "versions.sql",
    "sequences.sql",
)


def statement(name: str) -> str:
    """Return the SQL of one statement. Raises ``ConfigurationError`` for an unknown name."""
    try:
        return _statements()[name]
    except KeyError:
        raise ConfigurationError(f"the outbox has no statement {name!r}") from None


@cache
def _statements() -> dict[str, str]:
    return {
        name: _expand(sql)
        for file in _FILES
        for name, sql in read_queries("onceward_outbox", file).items()
    }


def _expand(sql: str) -> str:
    """Replace the names of macros, in the order of their file; see there."""
    sql = re.sub(r"\bENTRY\b", ", ".join(COLUMNS), sql)
    for name, text in read_queries("onceward_outbox", "macros.sql").items():
        for found in reversed([*re.finditer(rf"\b{name}\b(?:\(([\w.]+)\))?", sql)]):
            expanded = text.replace("ARGUMENT", found[1] or "")
            sql = sql[: found.start()] + expanded + sql[found.end() :]
    return sql


# -- rows -----------------------------------------------------------------------------------------

_encode = msgspec.json.Encoder().encode
_strings = msgspec.json.Decoder(tuple[str, ...]).decode
_headers = msgspec.json.Decoder(dict[str, str]).decode
_date = datetime.fromisoformat


def _member(kind: type[StrEnum]) -> Callable[[str], StrEnum]:
    """Return a look-up of an enumeration's members by value, which is faster than a call of it."""
    return {member.value: member for member in kind}.__getitem__


# Columns that are not stored as they are, by position; NULL stays None.
_CONVERTERS: Final[tuple[tuple[int, Callable[[Any], Any]], ...]] = tuple(
    (COLUMNS.index(name), convert)
    for name, convert in (
        ("operation", _member(Operation)),
        ("status", _member(Status)),
        ("conflict_resolution", _member(ConflictResolution)),
        ("reason", _member(Reason)),
        ("headers", _headers),
        ("dependency_ids", _strings),
        ("local_refs", _strings),
        ("conflict_fields", _strings),
        ("next_retry_at", _date),
        ("created_at", _date),
        ("synced_at", _date),
        ("client_generated_at", _date),
        ("forced", bool),
        ("outcome_unknown", bool),
    )
)


def instant(at: datetime) -> str:
    """Return an instant as ISO 8601 text in UTC, which sorts by time."""
    utc = at if at.tzinfo is UTC else at.astimezone(UTC)
    return f"{utc.isoformat(timespec='microseconds')[:-6]}Z"


def json_text(value: Any) -> str | None:
    """Return a list or an object as JSON; None if it is empty."""
    return _encode(value).decode() if value else None


def awaited_local(user_id: str, local_id: str) -> str:
    """Return the name of a local id's mapping in ``entry_waits``."""
    return f"local/{user_id}/{local_id}"


def created_by(entry: Entry) -> str | None:
    """Return the name in ``entry_waits`` of the mapping that this entry's success creates."""
    if entry.operation is not Operation.CREATE or entry.local_id is None:
        return None
    return awaited_local(entry.user_id, entry.local_id)


def entry_of(row: Sequence[Any]) -> Entry:
    """Return a row of ``COLUMNS`` as an entry."""
    values = list(row)
    for index, convert in _CONVERTERS:
        value = values[index]
        if value is not None:
            values[index] = convert(value)
    fields = dict(zip(COLUMNS, values, strict=True))
    # Stored as NULL if empty.
    fields["headers"] = fields["headers"] or {}
    fields["dependency_ids"] = fields["dependency_ids"] or ()
    fields["local_refs"] = fields["local_refs"] or ()
    fields["conflict_fields"] = fields["conflict_fields"] or ()
    return Entry(**fields)


def attempt_of(row: Sequence[Any]) -> Attempt:
    """Return a row of ``attempts``."""
    return msgspec.convert(dict(zip(Attempt.__struct_fields__, row, strict=True)), Attempt)
