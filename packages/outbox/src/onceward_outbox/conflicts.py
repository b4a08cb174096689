"""Conflicts: the entity was changed on the server, and the entry's strategy decides what follows.

The server's side is read first; then the conflict and its resolution are recorded in one commit.
If the process dies in between, nothing is recorded, and the entry is sent once more.

In a three-way merge, what one side has changed is taken, what both have is not. Objects are merged
member by member; arrays by element if their elements are objects with an identity, a member whose
values are unique in the array, otherwise as one value.
"""

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from onceward_outbox.entry import (
    ConflictResolution,
    Entry,
    Resolution,
    ResolutionName,
    member_named,
)
from onceward_outbox.errors import UsageError
from onceward_outbox.profile import Profile, ProfileRegistry
from onceward_outbox.resolution import Rewrite
from onceward_outbox.transport import NoResponse, Response
from onceward_outbox.versions import current_version, version_of
from onceward_protocol.operation import Operation
from onceward_protocol.retry import is_transient
from onceward_protocol.versions import without_if_match

if TYPE_CHECKING:
    from onceward_outbox.queue import OutboxQueue


# -- three-way merge of JSON objects ---------------------------------------------------------------


class _Absent:
    """The value of a member that an object does not have."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = _Absent()
_Members = Mapping[Any, Any]


class Merged(NamedTuple):
    """The merged value, with the local side where both have changed the same."""

    value: Any
    # JSON Pointers (RFC 6901) of what both sides have changed differently; "" is the whole value.
    conflicts: tuple[str, ...]


def three_way_merge(
    base: Any, mine: Any, theirs: Any, *, identities: Mapping[str, str] | None = None
) -> Merged:
    """Merge two values that were made from ``base``.

    ``identities`` says by which member the elements of an array are known: it maps the JSON Pointer
    of the array, without indexes (``/lines``, ``/orders/lines``), to the name of the member.
    """
    merge = _Merge(identities or {})
    value = merge.values(base, mine, theirs)
    return Merged(value, tuple(merge.conflicts))


def merge_patch(
    base: Mapping[str, Any] | None,
    patch: Mapping[str, Any],
    theirs: Mapping[str, Any],
    *,
    identities: Mapping[str, str] | None = None,
) -> Merged:
    """Merge a patch, whose members replace those of the entity, with the server's entity.

    The value is the patch to send: the same members, merged. Without a base every member that
    differs from the server's is a conflict.
    """
    merge = _Merge(identities or {})
    merged = {}
    for name, value in patch.items():
        before = ABSENT if base is None else base.get(name, ABSENT)
        pointer = f"/{_escaped(name)}"
        is_nested = isinstance(value, dict) and isinstance(before, dict)
        mine = before | value if is_nested else value
        now = theirs.get(name, ABSENT)
        if base is None and not _same(mine, now):
            merge.conflicts.append(pointer)
            merged[name] = mine
            continue
        made = merge.values(before, mine, now, pointer, pointer)
        if made is not ABSENT:  # the server has removed what the patch does not change
            merged[name] = made
    return Merged(merged, tuple(merge.conflicts))


class _Merge:
    """One merge. ``shape`` is a pointer without the places in arrays."""

    def __init__(self, identities: Mapping[str, str]) -> None:
        self._identities = identities
        self.conflicts: list[str] = []

    def values(self, base: Any, mine: Any, theirs: Any, pointer: str = "", shape: str = "") -> Any:
        if _same(mine, theirs) or _same(theirs, base):
            return mine
        if _same(mine, base):
            return theirs
        if isinstance(mine, dict) and isinstance(theirs, dict):
            before = base if isinstance(base, dict) else {}
            return self._members((before, mine, theirs), pointer, shape)
        identity = self._identities.get(shape)
        if identity is not None:
            known, ours, others = (_by_identity(side, identity) for side in (base, mine, theirs))
            if ours is not None and others is not None:
                sides = (known or {}, ours, others)
                return list(self._members(sides, pointer, shape, in_array=True).values())
        self.conflicts.append(pointer)
        return mine

    def _members(
        self,
        sides: tuple[_Members, _Members, _Members],
        pointer: str,
        shape: str,
        *,
        in_array: bool = False,
    ) -> dict[Any, Any]:
        base, mine, theirs = sides
        merged = {}
        # In the order of the server, then what only the device has.
        for name in dict.fromkeys((*theirs, *mine, *base)):
            part = f"/{_escaped(str(name))}"
            base_value, mine_value, their_value = (side.get(name, ABSENT) for side in sides)
            value = self.values(
                base_value,
                mine_value,
                their_value,
                pointer + part,
                shape if in_array else shape + part,
            )
            if value is not ABSENT:
                merged[name] = value
        return merged


def _by_identity(side: Any, identity: str) -> dict[Any, Any] | None:
    """Return the elements of an array by identity; None if one has none, or two have the same."""
    if not isinstance(side, list):
        return None
    found: dict[Any, Any] = {}
    for element in side:
        key = element.get(identity) if isinstance(element, dict) else None
        if not isinstance(key, str | int) or isinstance(key, bool) or key in found:
            return None
        found[key] = element
    return found


def _same(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal: ``1`` and ``1.0`` are, ``1`` and ``true`` not."""
    if one is ABSENT or other is ABSENT:
        return one is other
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


# -- strategies ------------------------------------------------------------------------------------


_log = logging.getLogger(__name__)

Merge = Callable[[Any, Any, Any], Any]
"""The app's own strategy: base, mine, theirs → the payload to send, or a ``Resolution``.

``base`` is what the entity was when the change was made, None if the app did not set it;
``theirs`` is None if the server no longer has it.
"""

_OK: Final = 200
_UNAUTHORIZED: Final = 401
_GONE: Final = frozenset({404, 410})


class ConflictPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The server's side, as far as it is known, and the resolution. None: a person decides."""

    # The entity as the server has it, a JSON value; UNSET if it is not known.
    theirs: Any = UNSET
    # Its version, as ``If-Match`` takes it.
    version: str | None = None
    # How the conflict ends.
    how: Resolution | None = None
    # The merged payload, for ``Resolution.MERGE``.
    payload: Any = UNSET
    # JSON Pointers of what both sides have changed.
    fields: tuple[str, ...] = ()


def plan_for(
    entry: Entry,
    profile: Profile,
    refusal: Response,
    read: Response | NoResponse | None,
    merge: Merge | None,
    *,
    may_merge: bool = True,
) -> ConflictPlan | NoResponse | Response:
    """Decide from what was read of the server's side. A failure to read it is returned as it is.

    ``entry.base`` is what the edit was made on. ``read`` is the response to a read of the entity,
    None for a create, whose entity does not exist yet. ``refusal`` is the response to the entry;
    it may name the current version. ``merge`` is the app's function; without it the strategy
    ``merge`` merges by field. Not ``may_merge``: such a conflict is left to a person.
    """
    strategy = entry.conflict_resolution or profile.conflict_resolution
    chosen = merge if may_merge else None
    if read is None:
        return _decide(entry, profile, strategy, ConflictPlan(), chosen, merges_fields=False)
    if isinstance(read, Response) and read.status in {_OK, *_GONE}:
        known = ConflictPlan(theirs=None)
        if read.status == _OK:
            version = version_of(read) or current_version(refusal)
            known = ConflictPlan(theirs=read.json(), version=version)
        return _decide(entry, profile, strategy, known, chosen, merges_fields=may_merge)
    if strategy is ConflictResolution.SERVER_WINS:
        return ConflictPlan(how=Resolution.SERVER_WINS)
    if isinstance(read, NoResponse) or read.status == _UNAUTHORIZED or is_transient(read.status):
        return read
    # It cannot be read at all: a person decides, or a strategy that does not need it.
    known = ConflictPlan(version=current_version(refusal))
    needs_version = profile.force_with_version and known.version is None
    if strategy is ConflictResolution.CLIENT_WINS and needs_version:
        return known
    return _decide(entry, profile, strategy, known, None, merges_fields=False)


def resolved_request(
    entry: Entry, profiles: ProfileRegistry, how: Resolution, payload: Any = UNSET
) -> Rewrite:
    """Return the request that ends a conflict as a person or a strategy has decided.

    ``CLIENT_WINS`` and ``MERGE`` are sent with the version that was read, so a change that another
    client makes in between is a new conflict. If the server has named no version, ``CLIENT_WINS``
    is sent with ``If-Match: *``, unless the profile says that the server refuses that.
    """
    if how not in (Resolution.CLIENT_WINS, Resolution.MERGE):
        return Rewrite()
    if how is Resolution.MERGE and payload is UNSET:
        raise UsageError("resolving a conflict by merging needs the merged payload")
    version = entry.theirs_version
    may_force = not profiles.get(entry.profile).force_with_version
    if how is Resolution.CLIENT_WINS and version is None and may_force:
        version = "*"
    body = entry.decoded() if payload is UNSET else payload
    return Rewrite(payload=_without_version(body, version), headers=_headers(entry, version))


def resolve_conflict(
    queue: "OutboxQueue",
    entry: Entry,
    how: Resolution | ResolutionName,
    *,
    payload: Any = UNSET,
    adopts: bool = True,
) -> Entry:
    """End a conflict with the request that ``resolved_request`` returns."""
    how = member_named(Resolution, how)
    made = resolved_request(entry, queue.profiles, how, payload)
    return queue.resolve(entry.id, how, payload=made.payload, headers=made.headers, adopts=adopts)


def _decide(
    entry: Entry,
    profile: Profile,
    strategy: ConflictResolution,
    known: ConflictPlan,
    merge: Merge | None,
    *,
    merges_fields: bool,
) -> ConflictPlan:
    replace = msgspec.structs.replace
    match strategy:
        case ConflictResolution.SERVER_WINS:
            return replace(known, how=Resolution.SERVER_WINS)
        case ConflictResolution.CLIENT_WINS:
            # Once. If even a forced send gets a conflict, a person decides.
            if entry.forced:
                return _by_field(entry, profile, known, resolves=False)
            return replace(known, how=Resolution.CLIENT_WINS)
        case ConflictResolution.MERGE if merge is not None:
            return _merge(entry, known, merge)
        case ConflictResolution.MERGE if merges_fields:
            return _by_field(entry, profile, known, resolves=True)
        case _:
            return _by_field(entry, profile, known, resolves=False)


def merge_fields(
    entry: Entry, base: Any, theirs: Any, identities: Mapping[str, str]
) -> Merged | None:
    """Merge the edit of an entry with the server's side, by field; None if it cannot be merged."""
    mine = entry.decoded()
    if not (isinstance(mine, dict) and isinstance(theirs, dict)):
        return None
    mine, theirs = _content(mine), _content(theirs)
    before = _content(base) if isinstance(base, dict) else None
    if entry.operation is Operation.PATCH:
        return merge_patch(before, mine, theirs, identities=identities)
    if before is None:
        return merge_patch(None, theirs | mine, theirs, identities=identities)
    return three_way_merge(before, mine, theirs, identities=identities)


def _content(entity: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entity.items() if name != "version"}


def _by_field(
    entry: Entry, profile: Profile, known: ConflictPlan, *, resolves: bool
) -> ConflictPlan:
    """Merge by field; what both sides have changed is left to a person."""
    merged = merge_fields(entry, _base_of(entry), known.theirs, profile.merge_identities)
    if merged is None:
        return known
    if merged.conflicts or not resolves:
        return msgspec.structs.replace(known, fields=merged.conflicts)
    return msgspec.structs.replace(known, how=Resolution.MERGE, payload=merged.value)


def _base_of(entry: Entry) -> Any:
    return None if entry.base is None else msgspec.json.decode(entry.base)


def _merge(entry: Entry, known: ConflictPlan, merge: Merge) -> ConflictPlan:
    theirs = None if known.theirs is UNSET else known.theirs
    try:
        made = merge(_base_of(entry), entry.decoded(), theirs)
    except Exception:  # noqa: BLE001 - the app's own code may raise anything
        _log.exception("the merge function failed; the conflict waits for a person")
        return known
    if isinstance(made, Resolution):
        return msgspec.structs.replace(known, how=made)
    return msgspec.structs.replace(known, how=Resolution.MERGE, payload=made)


def _headers(entry: Entry, version: str | None) -> Mapping[str, str]:
    kept = without_if_match(entry.headers)
    if version is None or entry.operation is Operation.CREATE:
        return kept
    return kept | {"If-Match": version}


def _without_version(body: Any, version: str | None) -> Any | UnsetType:
    """Remove the version from a body that names one: it would contradict the header."""
    if isinstance(body, dict) and "version" in body and version is not None:
        return {name: value for name, value in body.items() if name != "version"}
    return UNSET if body is None else body
