"""Changes to entries by a person or a strategy: retry, edit, resolve, cancel, discard, park."""

from collections.abc import Mapping, Sequence
from typing import Any, assert_never

import msgspec
from msgspec import UNSET, UnsetType

from onceward_outbox.dependencies import (
    EntryRef,
    find_dependencies,
    find_entity,
    keep_version,
    leave_lane,
    park_dependents,
    rejoin_lane,
    revive_dependents,
)
from onceward_outbox.entry import (
    Entry,
    Reason,
    Resolution,
    Status,
    Transition,
    after,
    created_by,
    json_text,
)
from onceward_outbox.errors import OutcomeUnknownError, TransitionError, UsageError
from onceward_outbox.events import EventKind
from onceward_outbox.settings import QueueSettings
from onceward_outbox.transaction import Transaction
from onceward_outbox.validation import Request, check_if_match, check_request
from onceward_outbox.versions import base_later_edits_on, record_adopted
from onceward_protocol.ids import new_uuid4
from onceward_protocol.operation import Operation
from onceward_protocol.versions import ANY_TAG, if_match_in


class Rewrite(msgspec.Struct, frozen=True, kw_only=True):
    """The new request of an entry. What is left out stays."""

    # The new payload; UNSET keeps the old one.
    payload: Any = UNSET
    # The new path; UNSET keeps the old one.
    endpoint: str | UnsetType = UNSET
    # The new headers; UNSET keeps the old ones.
    headers: Mapping[str, str] | UnsetType = UNSET

    def applied_to(self, tx: Transaction, entry: Entry, max_payload_bytes: int) -> Request:
        """Return the request of an entry after the change, or raise ``EntryInvalidError``."""
        payload = self.payload
        if payload is UNSET:
            payload = None if entry.payload is None else entry.payload.encode()
        if self.headers is not UNSET and entry.operation is not Operation.CREATE:
            check_if_match(self.headers)
        return check_request(
            tx.profiles.get(entry.profile),
            entry.endpoint if self.endpoint is UNSET else self.endpoint,
            payload,
            entry.headers if self.headers is UNSET else self.headers,
            max_payload_bytes,
        )


def retry(tx: Transaction, entry_id: str) -> Entry:
    """Return a failed entry, or one that expired unsent, to ``pending``."""
    entry = before = tx.entry(entry_id)
    is_unsent = not entry.outcome_unknown and not tx.rows("expired_by_server", id=entry_id)
    is_revived = entry.status is Status.EXPIRED and is_unsent
    after(Transition.REVIVE if is_revived else Transition.RETRY, entry.status)
    dead = tx.rows("dead_waits", id=entry_id)
    if dead:
        raise TransitionError(
            f"{entry_id} depends on {dead[0][0].rpartition('/')[2]}, which is failed, discarded or "
            "expired: retry that one, or edit this one so that it no longer needs it"
        )
    _check_once(tx, entry)
    if is_revived:  # its lane has gone on without it
        tx.rows("leave_lane", id=entry_id)
    entry = tx.changed("to_pending", id=entry_id, ms=tx.ms, key=new_uuid4())
    entry = rejoin_lane(tx, entry)
    _begin_age_behind(tx, before)
    tx.emit(EventKind.RETRIED, entry)
    revive_dependents(tx, entry)
    return entry


def edit(
    tx: Transaction,
    entry_id: str,
    rewrite: Rewrite,
    settings: QueueSettings,
    *,
    depends_on: Sequence[str] | UnsetType,
    force: bool,
) -> Entry:
    """Change the request of an entry, and with it its key."""
    entry = tx.entry(entry_id)
    after(Transition.EDIT, entry.status)
    _check_outcome(entry, "edited", force=force)
    is_in_lane = entry.lane is not None
    _check_once(tx, entry)
    _begin_age_behind(tx, entry)
    entry = _rewrite(tx, entry, rewrite, settings, depends_on=depends_on)
    if is_in_lane:  # it may have come back to it before
        entry = keep_version(tx, entry)
    tx.emit(EventKind.EDITED, entry)
    if entry.status is Status.PENDING:
        revive_dependents(tx, entry)
    else:
        park_dependents(tx, entry)
    return entry


def resolve(
    tx: Transaction,
    entry_id: str,
    how: Resolution,
    rewrite: Rewrite,
    settings: QueueSettings,
    *,
    adopts: bool,
) -> Entry:
    """End a conflict.

    ``adopts``: the edits behind it are based on the server's side from now on, because a person
    has seen that.
    """
    entry = tx.entry(entry_id)
    is_create = entry.operation is Operation.CREATE
    _begin_age_behind(tx, entry)
    match how:
        case Resolution.SERVER_WINS:
            _check_conflict(entry, Transition.DISCARD)
            if adopts:
                record_adopted(tx, entry)
            reason = Reason.PERSON if adopts else Reason.RESPONSE
            return settle_unclaimed(tx, entry, Status.DISCARDED, reason, None)
        case Resolution.GIVE_UP:
            _check_conflict(entry, Transition.GIVE_UP)
            entry = tx.changed("give_up", id=entry_id, reason=Reason.RESPONSE.value)
            tx.emit(EventKind.FAILED, entry)
            park_dependents(tx, entry)
            return leave_lane(tx, entry)
        case Resolution.CLIENT_WINS:
            _check_conflict(entry, Transition.RESEND)
            if adopts:
                record_adopted(tx, entry)
            entry = _rewrite(tx, entry, rewrite, settings, forced=True, rebased=not is_create)
        case Resolution.MERGE:
            if rewrite.payload is UNSET:
                raise UsageError("resolving a conflict by merging needs the merged payload")
            _check_conflict(entry, Transition.RESEND)
            if adopts:
                record_adopted(tx, entry)
            else:
                base_later_edits_on(tx, entry)
            entry = _rewrite(tx, entry, rewrite, settings, rebased=True)
        case _:
            assert_never(how)
    tx.emit(EventKind.RESOLVED, entry)
    return entry


def cancel(tx: Transaction, entry_id: str, *, reason: Reason, force: bool) -> Entry:
    """Discard a pending entry."""
    entry = tx.entry(entry_id)
    status = after(Transition.CANCEL, entry.status)
    _check_outcome(entry, "cancelled", force=force)
    return settle_unclaimed(tx, entry, status, reason, None)


def discard(tx: Transaction, entry_id: str, *, reason: Reason, with_dependents: bool) -> Entry:
    """Discard a failed or conflicting entry, and optionally all that were parked because of it."""
    entry = tx.entry(entry_id)
    status = after(Transition.DISCARD, entry.status)
    children = (
        tx.entries("all_dependents", id=entry_id, local=created_by(entry))
        if with_dependents
        else []
    )
    _begin_age_behind(tx, entry)
    if entry.status is Status.CONFLICT:
        # As with ``Resolution.SERVER_WINS``: a person has decided for the server's side.
        record_adopted(tx, entry)
    entry = settle_unclaimed(tx, entry, status, reason, None)
    for child in children:
        # Read again: pending ones were parked by the line above.
        current = tx.entry(child.id)
        if current.status is Status.FAILED:
            settle_unclaimed(tx, current, Status.DISCARDED, reason, None)
    return entry


def park(tx: Transaction, entry_id: str, *, reason: Reason, error: str | None) -> Entry:
    """Fail a pending entry without sending it."""
    entry = tx.entry(entry_id)
    after(Transition.PARK, entry.status)
    entry = tx.changed("park", id=entry_id, reason=reason.value, error=error)
    tx.emit(EventKind.FAILED, entry)
    park_dependents(tx, entry)
    return leave_lane(tx, entry) if reason is Reason.REBUILD else entry


def settle_unclaimed(
    tx: Transaction, entry: Entry, status: Status, reason: Reason, error: str | None
) -> Entry:
    """Discard or expire an entry that is not claimed; its lane continues."""
    entry = tx.changed(
        "settle_unclaimed",
        id=entry.id,
        status=status.value,
        reason=reason.value,
        error=error,
        ms=tx.ms,
    )
    if entry.lane is not None:
        tx.rows("pass_turn", user_id=entry.user_id, lane=entry.lane)
    kind = EventKind.EXPIRED if status is Status.EXPIRED else EventKind.DISCARDED
    tx.emit(kind, entry)
    park_dependents(tx, entry)
    return entry


def _rewrite(
    tx: Transaction,
    entry: Entry,
    rewrite: Rewrite,
    settings: QueueSettings,
    *,
    depends_on: Sequence[str] | UnsetType = UNSET,
    forced: bool = False,
    rebased: bool = False,
) -> Entry:
    request = rewrite.applied_to(tx, entry, settings.max_payload_bytes)
    strict_order = tx.profiles.get(entry.profile).strict_order
    ref = EntryRef(entry.id, entry.user_id, entry.operation, entry.local_id, strict_order)
    wanted = entry.dependency_ids if depends_on is UNSET else tuple(depends_on)
    dependencies = find_dependencies(tx, ref, wanted, request.refers_to)
    _check_still_acyclic(tx, entry, dependencies.awaited)
    entry = _about_another_entity(tx, entry, request.endpoint)
    tx.rows("forget_waits", entry_id=entry.id)
    tx.many("insert_wait", [(awaited, entry.id) for awaited in dependencies.awaited])
    changed = tx.changed(
        "rewrite",
        id=entry.id,
        payload=request.payload,
        headers=json_text(request.headers),
        endpoint=request.endpoint,
        key=new_uuid4(),
        dependency_ids=json_text(dependencies.dependency_ids),
        local_refs=json_text(dependencies.local_refs),
        waiting_for=len(dependencies.awaited),
        payload_version=settings.payload_version,
        base=entry.theirs if rebased else entry.base,
        base_version=_base_version(entry, request.headers, rebased=rebased),
        entity=entry.entity,
        forced=forced,
        ms=tx.ms,
    )
    changed = rejoin_lane(tx, changed)
    if dependencies.has_dead_parent:
        changed = tx.changed("park", id=entry.id, reason=Reason.DEPENDENCY.value, error=None)
    return changed


def _about_another_entity(tx: Transaction, entry: Entry, endpoint: str) -> Entry:
    """Return an entry with what is known of the entity that its new path names."""
    if entry.entity is None or endpoint == entry.endpoint:
        return entry
    _, entity = find_entity(
        tx,
        user_id=entry.user_id,
        entity_type=entry.entity_type,
        endpoint=endpoint,
        local_id=entry.local_id,
        server_id=entry.server_id,
    )
    if entity == entry.entity:
        return entry
    seen = tx.rows("seen_versions", user_id=entry.user_id, entities=json_text([entity]))
    return msgspec.structs.replace(
        entry,
        entity=entity,
        base=None,
        base_version=seen[0][1] if seen else None,
        theirs=None,
        theirs_version=None,
    )


def _base_version(entry: Entry, headers: Mapping[str, str], *, rebased: bool) -> str | None:
    named = None if entry.operation is Operation.CREATE else if_match_in(headers)
    if named is not None and named != ANY_TAG:
        return named
    return entry.theirs_version if rebased else entry.base_version


def _check_still_acyclic(tx: Transaction, entry: Entry, awaited: Sequence[str]) -> None:
    """Raise for new dependencies on entries that were queued later."""
    for name in awaited:
        parent_id = name
        if "/" in name:
            found = tx.rows("local_state", user_id=entry.user_id, local_id=name.rpartition("/")[2])
            parent_id = found[0][1]
        if parent_id is not None:
            # An earlier entry cannot depend on a later one outside its batch, so this check keeps
            # cycles out without a traversal of the graph.
            parent = tx.entry(parent_id)
            if parent.sequence_number >= entry.sequence_number and (
                parent.id not in entry.dependency_ids
            ):
                raise TransitionError(
                    f"{entry.id} cannot depend on {parent.id}, which was queued later"
                )


def _begin_age_behind(tx: Transaction, entry: Entry) -> None:
    """Let the age of what waited for a person to decide about an entry begin anew."""
    if entry.status in {Status.FAILED, Status.CONFLICT}:
        tx.rows(
            "begin_age",
            id=entry.id,
            user_id=entry.user_id,
            lane=entry.lane,
            sequence_number=entry.sequence_number,
            ms=tx.ms,
        )


def newer_with_once(tx: Transaction, entry: Entry) -> str | None:
    """Return the entry that was enqueued with the ``once`` of one that was refused or expired."""
    if entry.once is None:
        return None
    found = tx.rows("same_once", user_id=entry.user_id, once=entry.once, id=entry.id)
    return found[0][0] if found else None


def _check_once(tx: Transaction, entry: Entry) -> None:
    newer = newer_with_once(tx, entry)
    if newer is not None:
        raise TransitionError(
            f"{newer} was enqueued since with once={entry.once!r}: discard {entry.id}, or that one"
        )


def _check_conflict(entry: Entry, transition: Transition) -> None:
    if entry.status is not Status.CONFLICT:
        raise TransitionError(f"there is no conflict to resolve: the entry is {entry.status}")
    after(transition, entry.status)


def _check_outcome(entry: Entry, what: str, *, force: bool) -> None:
    if entry.outcome_unknown and not force:
        raise OutcomeUnknownError(
            f"{entry.id} was sent and got no conclusive response, so it may have happened: send it "
            f"again as it is, or use force to have it {what}"
        )
