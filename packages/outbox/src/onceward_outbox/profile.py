"""Profiles: how the outbox treats entries for one API, and where profiles are registered.

The library has one profile, ``default``. An API that differs describes itself with a ``Profile``
object, passed to ``Outbox.open(profiles=[…])`` or published by a package under the entry point
group ``onceward.outbox_profiles``. An entry names its profile; the queue and the drain look it up.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from math import inf
from types import MappingProxyType
from typing import Any, Final, Protocol

import msgspec

from onceward_outbox.entry import (
    DEFAULT_PRIORITY,
    DEFAULT_PROFILE_NAME,
    ConflictResolution,
    Entry,
    OnRefusal,
    Reason,
    UnknownBase,
    instant,
    member_named,
)
from onceward_outbox.errors import ConfigurationError, EntryInvalidError
from onceward_protocol.keys import KEY_HEADER, KeyFormat
from onceward_protocol.operation import Operation
from onceward_protocol.response_classification import Recogniser, Verdict, is_service_response
from onceward_protocol.retry import QUEUE, RetryPolicy

_STREAM: Final = "strict sequence"

ENTRY_POINT_GROUP: Final = "onceward.outbox_profiles"


class RequestFormat(Protocol):
    """Hook that decides where a request carries its timestamps and what its body looks like."""

    def build(
        self, entry: Entry, payload: Any, submitted_at: datetime
    ) -> tuple[Mapping[str, str], Any]:
        """Return headers to add and the JSON body; a body of None sends none.

        ``payload`` is the entry's JSON value with server ids in place of local ids. Everything
        but ``submitted_at`` is the same on every send, so that the server sees the same request.
        """


class Send(msgspec.Struct, frozen=True):
    """Keep an entry in the queue, or send it to another endpoint (with a new key)."""

    # The entry to send.
    entry: Entry
    # The path to send it to.
    endpoint: str | None = None


class Drop(msgspec.Struct, frozen=True):
    """Discard an entry, because its effect already exists on the server."""

    # The entry to discard.
    entry: Entry


class Park(msgspec.Struct, frozen=True):
    """Make an entry ``failed`` and show ``why`` to the user."""

    # The entry that fails.
    entry: Entry
    # The reason, in one line.
    why: str


ChainAction = Send | Drop | Park
"""Change to one entry when a chain is rebuilt."""


class Recovery(Protocol):
    """Hook that repairs the queue after the server rejected an entry as out of order."""

    @property
    def path(self) -> str:
        """Path of a GET that returns the server's state, such as ``/orders/open``."""

    def plan(self, entry: Entry, pending: Sequence[Entry], state: Any) -> Sequence[ChainAction]:
        """Return the actions for the rejected entry and for pending ones. Pure.

        ``pending`` are the user's pending entries in order, without ``entry``; those without an
        action stay as they are. ``state`` is the decoded JSON body of the GET.
        """


@dataclass(frozen=True, slots=True)
class TimestampsInBody:
    """Request format with ``clientGeneratedAt`` and ``clientSubmittedAt`` in the body.

    For endpoints in ``key_in_body`` the body also carries ``idempotencyKey``. Payloads must be
    JSON objects.
    """

    # Also write the key into the body.
    key_in_body: frozenset[str] = frozenset()

    def build(
        self, entry: Entry, payload: Any, submitted_at: datetime
    ) -> tuple[Mapping[str, str], Any]:
        """Add the timestamps; a ``clientGeneratedAt`` that the app queued is kept."""
        if payload is None and entry.operation is Operation.DELETE:
            return {}, None
        body: dict[str, Any] = {"clientGeneratedAt": instant(entry.client_generated_at)}
        body |= payload or {}
        body["clientSubmittedAt"] = instant(submitted_at)
        if entry.endpoint in self.key_in_body:
            body["idempotencyKey"] = entry.idempotency_key
        return {}, body


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The rules for entries of one API. Immutable; every field but the name has a default."""

    # The name that entries have.
    name: str

    strict_order: bool = False
    """One lane per user: entries are sent strictly first in, first out. Otherwise entries about
    different entities are independent and may overtake each other."""

    priorities: Mapping[str, int] = field(default_factory=dict)
    """Priority by entity type, for entries that name none; higher goes first."""

    retry: RetryPolicy = QUEUE
    """Delays between attempts. With ``attempts`` set, an entry has that many per wake-up and then
    stays queued for the next one; otherwise it fails after the entry's own ``max_attempts``."""

    response_floor_seconds: float | None = None
    """The shortest time that a response may take; None is that of ``QueueSettings``."""

    response_ceiling_seconds: float | None = None
    """The longest time that a response may take, for an API that is slower or faster than others;
    None is that of ``QueueSettings``. If the floor is above it, this one holds."""

    key_lifetime: timedelta = timedelta(days=1)
    """How long the server remembers an idempotency key, at least."""

    stale_after: timedelta | None = None
    """How old an entry may become before it expires on the device: what the server accepts at most.
    None: entries do not expire by age."""

    key_format: KeyFormat = KeyFormat.UUID4
    """Format of a key that the app chooses."""

    key_header: str = KEY_HEADER
    """The header in which the server expects the key."""

    batch_headers: frozenset[str] = frozenset()
    """Headers that entries in a batch have each for itself, such as an attestation: those that the
    policies of the API allow (``Policy.batch_headers``), names in any case. Other headers that
    an entry has, or that are made at each send, travel with the whole batch: it then has
    only entries for which they are the same."""

    strict_endpoints: tuple[str, ...] = ()
    """Patterns of paths whose policy on the server is ``ordering="strict"``, such as
    ``/orders/{order}/*``; ``*`` is all. Their entries are numbered, and share one lane per user."""

    numbers_on_demand: bool = False
    """Entries for ``strict_endpoints`` are numbered after the server has refused one of the user
    without a number, for an API whose servers may have a strict order or not. False: always."""

    conflict_resolution: ConflictResolution = ConflictResolution.MANUAL
    """Strategy for conflicts of entries that name none."""

    force_with_version: bool = False
    """Behaviour of ``client_wins`` if the server has named no version. False: it sends
    ``If-Match: *``. True: the server refuses that, so a person decides."""

    on_refusal: OnRefusal = OnRefusal.CONTINUE
    """Behaviour behind an entry that the server refuses for good. ``CONTINUE``: the lane goes
    on, and only entries that depend on the refused one are parked. ``STOP``: the lane waits until a
    person has retried, edited or discarded it."""

    chains: tuple[str, ...] = ()
    """Patterns of paths whose entries make no sense without each other, such as
    ``/orders/{order}/*``: after a refusal the later entries with the same values are parked. A
    JSON Pointer after ``#`` takes a value from the payload: ``/orders/close#/orderId``."""

    unknown_base: UnknownBase = UnknownBase.FORCE
    """How an edit is sent if no version of the entity was ever seen. ``FORCE``: without a check.
    ``READ``: the version is read first, and checked. ``ASK``: it becomes a conflict, unsent."""

    merge_identities: Mapping[str, str] = field(default_factory=dict)
    """By which member elements of arrays are known when the strategy ``merge`` merges by field:
    the JSON Pointer of an array to the name of a member, such as ``{"/lines": "id"}``. Other arrays
    are merged as a whole."""

    codes: Mapping[str, Verdict] = field(default_factory=dict)
    """Meanings of the API's own error codes with status 409 or 422. They take precedence over the
    protocol's (``onceward_protocol.response_classification.BY_CODE``). With 401 only
    ``AttestationNeeded`` counts; any other code means that a new token is needed."""

    recognise: Recogniser = is_service_response
    """Whether a response is the service's: a function of status, headers (names in lower case) and
    body. Others, such as the page of a captive portal, leave the outcome unknown."""

    causes: Mapping[str, str] = field(default_factory=dict)
    """The class of cause by the API's own error codes, such as ``{"SOLD_OUT": "stock"}``, for the
    field ``cause`` of ``failed`` events. See ``onceward_outbox.profile`` for the others."""

    # Refuse payloads that are not JSON objects.
    payload_must_be_object: bool = False

    request_format: RequestFormat | None = None
    """None sends the payload as queued, and ``X-Client-Generated-At``."""

    recovery: Recovery | None = None
    """Plan for an ``OutOfOrder`` verdict; without one the entry fails."""

    def __post_init__(self) -> None:
        """Check the name and freeze the mappings."""
        if not (self.name.isascii() and self.name.isprintable() and 0 < len(self.name) <= 100):  # noqa: PLR2004
            raise ConfigurationError("a profile's name must be 1 to 100 printable ASCII characters")
        floor, ceiling = self.response_floor_seconds, self.response_ceiling_seconds
        if not 0 < (1 if floor is None else floor) <= (inf if ceiling is None else ceiling):
            raise ConfigurationError(
                f"profile {self.name}: 0 < response_floor_seconds <= response_ceiling_seconds "
                "must hold"
            )
        if isinstance(self.batch_headers, str):
            raise ConfigurationError(
                f'profile {self.name}: batch_headers is a set of names, such as {{"x-app"}}, not '
                f"{self.batch_headers!r}"
            )
        if isinstance(self.strict_endpoints, str) or not all(
            isinstance(path, str) and path[:1] in {"/", "*"} for path in self.strict_endpoints
        ):
            raise ConfigurationError(
                f'profile {self.name}: strict_endpoints are paths such as ("/orders/*",), not '
                f"{self.strict_endpoints!r}"
            )
        if self.numbers_on_demand and not self.strict_endpoints:
            raise ConfigurationError(
                f"profile {self.name}: numbers_on_demand is about strict_endpoints, which has none"
            )
        names = frozenset(name.lower() for name in self.batch_headers)
        object.__setattr__(self, "batch_headers", names)
        object.__setattr__(self, "priorities", MappingProxyType(dict(self.priorities)))
        object.__setattr__(self, "on_refusal", member_named(OnRefusal, self.on_refusal))
        object.__setattr__(self, "unknown_base", member_named(UnknownBase, self.unknown_base))
        object.__setattr__(self, "merge_identities", MappingProxyType(dict(self.merge_identities)))
        object.__setattr__(self, "codes", MappingProxyType(dict(self.codes)))
        object.__setattr__(self, "causes", MappingProxyType(dict(self.causes)))

    def chain_of(self, endpoint: str, payload: str | None = None) -> str | None:
        """Return the name of the chain that a request belongs to; None if it is in none."""
        path = endpoint.partition("?")[0]
        for pattern in self.chains:
            in_path, _, in_payload = pattern.partition("#")
            found = _chain_pattern(in_path).fullmatch(path)
            if found is None:
                continue
            values = list(found.groups())
            if in_payload:
                value = _text_at(in_payload, payload)
                if value is None:
                    continue
                values.append(value)
            return "/".join((self.name, *values))
        return None

    @property
    def stream_name(self) -> str:
        """The lane and the strict sequence that entries for strict endpoints share."""
        return self.name if self.strict_order else _STREAM

    def is_strict_endpoint(self, endpoint: str) -> bool:
        """Return whether requests to an endpoint are numbered."""
        path = endpoint.partition("?")[0]
        return any(_chain_pattern(each).fullmatch(path) for each in self.strict_endpoints)

    def priority_of(self, entity_type: str) -> int:
        """Return the priority of an entity type; the default is 5."""
        return self.priorities.get(entity_type, DEFAULT_PRIORITY)


def _text_at(pointer: str, payload: str | None) -> str | None:
    """Return the text or number that a JSON Pointer names in a JSON text; None for all else."""
    value = None if payload is None else msgspec.json.decode(payload)
    for part in pointer.removeprefix("/").split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        value = value.get(name) if isinstance(value, dict) else None
    is_name = isinstance(value, str | int) and not isinstance(value, bool)
    return str(value) if is_name else None


@cache
def _chain_pattern(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern: ``{name}`` is a segment, ``*`` is anything."""
    parts = re.split(r"(\{\w+\}|\*)", pattern)
    texts = (
        "([^/]+)" if part.startswith("{") else ".*" if part == "*" else re.escape(part)
        for part in parts
    )
    return re.compile("".join(texts))


DEFAULT_PROFILE: Final = Profile(name=DEFAULT_PROFILE_NAME)


class ProfileRegistry:
    """Profiles by name: those passed in, ``default``, then installed entry points, lazily."""

    def __init__(self, profiles: Iterable[Profile] = ()) -> None:
        given = list(profiles)
        self._known: dict[str, Profile | None] = {profile.name: profile for profile in given}
        if len(self._known) < len(given):
            raise ConfigurationError("two of the outbox profiles have the same name")
        self._known.setdefault(DEFAULT_PROFILE.name, DEFAULT_PROFILE)

    def loaded(self) -> list[Profile]:
        """Return the profiles that were passed in or looked up so far."""
        return [profile for profile in self._known.values() if profile is not None]

    def find(self, name: str) -> Profile | None:
        """Return the profile, or None if no such profile is registered.

        Raises ``ConfigurationError`` if an entry point of that name cannot be loaded.
        """
        try:
            return self._known[name]
        except KeyError:
            found = self._known[name] = _load(name)
            return found

    def get(self, name: str) -> Profile:
        """Return the profile, or raise ``EntryInvalidError`` with the line that registers it."""
        found = self.find(name)
        if found is None:
            raise EntryInvalidError("profile_must_be_known", unknown_profile(name))
        return found


def unknown_profile(name: str) -> str:
    """Return the message about a profile that is not registered."""
    return (
        f"no outbox profile {name!r} is registered: pass "
        f"Outbox.open(…, profiles=[Profile(name={name!r}, …)]), or install the package that "
        f"provides it under the entry point group {ENTRY_POINT_GROUP}"
    )


def _load(name: str) -> Profile | None:
    point = _installed().get(name)
    if point is None:
        return None
    try:
        loaded = point.load()
    except Exception as error:
        raise ConfigurationError(
            f"the outbox profile {name!r} cannot be loaded from {point.value}: {error}"
        ) from error
    if not isinstance(loaded, Profile) or loaded.name != name:
        raise ConfigurationError(f"{point.value} should be an outbox Profile named {name!r}")
    return loaded


@cache
def _installed() -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


# -- causes of failed entries ----------------------------------------------------------------------


PAYLOAD_MISMATCH: Final = "payload_mismatch"
"""The key was used for another payload: an error of the app."""

BAD_REQUEST: Final = "bad_request"
"""The server cannot read the request: an error of the app."""

_BY_CODE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "IDEMPOTENCY_CONFLICT": PAYLOAD_MISMATCH,
        "idempotency.payload_mismatch": PAYLOAD_MISMATCH,
    }
)
_BY_REASON: Final[Mapping[Reason | None, str]] = MappingProxyType(
    {
        Reason.DEPENDENCY: "dependency",
        Reason.ATTEMPTS: "attempts",
        Reason.MIGRATION: "migration",
        Reason.UNKNOWN: "unknown",
    }
)
_BY_STATUS: Final[Mapping[int | None, str]] = MappingProxyType(
    {
        400: BAD_REQUEST,
        403: "forbidden",
        404: "not_found",
        409: "conflict",
        410: "not_found",
        412: "conflict",
        413: "too_large",
        428: "conflict",
    }
)


def failure_cause(
    reason: Reason | None, code: str | None, status: int | None, causes: Mapping[str, str]
) -> str:
    """Return why an entry is failed; ``causes`` are the classes of the profile, by code.

    A reason of the device comes first, then the code, then the status. ``refused`` if none of them
    says more.
    """
    found = _BY_REASON.get(reason)
    if found is None and code is not None:
        found = causes.get(code) or _BY_CODE.get(code)
    if found is None and reason is Reason.REBUILD:
        found = "out_of_order"
    return found or _BY_STATUS.get(status, "refused")


def is_client_bug(cause: str) -> bool:
    """Return whether the app has to be corrected: no user can do anything about it."""
    return cause in (PAYLOAD_MISMATCH, BAD_REQUEST)
