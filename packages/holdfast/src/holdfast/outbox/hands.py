"""What people do to entries, or a strategy in their name, in the transaction of the caller."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, assert_never

from msgspec import UNSET, UnsetType

from holdfast.core.outbox_entry import Action, Entry, Reason, Resolution, Status, after
from holdfast.errors import OutcomeUnknownError, TransitionError, UsageError
from holdfast.ids import new_uuid4
from holdfast.outbox.dependencies import (
    Members,
    Subject,
    park_dependents,
    revive_dependents,
    waits_of,
)
from holdfast.outbox.events import EventKind
from holdfast.outbox.rows import created_by, json_text
from holdfast.outbox.settings import QueueSettings
from holdfast.outbox.unit import Unit
from holdfast.outbox.validation import check_request

__all__ = ["Changes", "cancel", "discard", "edit", "park", "put_aside", "resolve", "retry"]


class Changes(NamedTuple):
    """What is to be different; UNSET stays as it is."""

    payload: Any = UNSET
    headers: Mapping[str, str] | UnsetType = UNSET
    endpoint: str | UnsetType = UNSET
    depends_on: Sequence[str] | UnsetType = UNSET


def retry(unit: Unit, entry_id: str) -> Entry:
    """Queue a failed entry again."""
    entry = unit.entry(entry_id)
    after(Action.RETRY, entry.status)
    dead = unit.rows("dead_waits", id=entry_id)
    if dead:
        raise TransitionError(
            f"{entry_id} depends on {dead[0][0].rpartition('/')[2]}, which is failed, discarded or "
            "expired: retry that one, or edit this one so that it no longer needs it"
        )
    entry = unit.changed("to_pending", id=entry_id)
    unit.tell(EventKind.RETRIED, entry)
    revive_dependents(unit, entry)
    return entry


def edit(
    unit: Unit, entry_id: str, changes: Changes, settings: QueueSettings, *, force: bool
) -> Entry:
    """Give an entry another request, and with it another key."""
    entry = unit.entry(entry_id)
    after(Action.EDIT, entry.status)
    _check_outcome(entry, "edited", force=force)
    entry = _rewrite(unit, entry, changes, settings)
    unit.tell(EventKind.EDITED, entry)
    if entry.status is Status.PENDING:
        revive_dependents(unit, entry)
    else:
        park_dependents(unit, entry)
    return entry


def resolve(
    unit: Unit,
    entry_id: str,
    how: Resolution,
    changes: Changes,
    settings: QueueSettings,
) -> Entry:
    """End a conflict."""
    entry = unit.entry(entry_id)
    match how:
        case Resolution.THEIRS:
            _check_conflict(entry, Action.DISCARD)
            return put_aside(unit, entry, Status.DISCARDED, Reason.ANSWER, None)
        case Resolution.GIVE_UP:
            _check_conflict(entry, Action.GIVE_UP)
            entry = unit.changed("give_up", id=entry_id, reason=Reason.ANSWER.value)
            unit.tell(EventKind.FAILED, entry)
            park_dependents(unit, entry)
            return entry
        case Resolution.MINE:
            _check_conflict(entry, Action.RESEND)
            entry = _rewrite(unit, entry, changes, settings, forced=True)
        case Resolution.MERGED:
            if changes.payload is UNSET:
                raise UsageError("to resolve a conflict by merging takes the merged payload")
            _check_conflict(entry, Action.RESEND)
            entry = _rewrite(unit, entry, changes, settings, rebased=True)
        case _:
            assert_never(how)
    unit.tell(EventKind.RESOLVED, entry)
    return entry


def cancel(unit: Unit, entry_id: str, *, reason: Reason, force: bool) -> Entry:
    """Undo what has not been sent."""
    entry = unit.entry(entry_id)
    status = after(Action.CANCEL, entry.status)
    _check_outcome(entry, "cancelled", force=force)
    return put_aside(unit, entry, status, reason, None)


def discard(unit: Unit, entry_id: str, *, reason: Reason, with_dependents: bool) -> Entry:
    """Give an entry up, and on request all that were parked because of it."""
    entry = unit.entry(entry_id)
    status = after(Action.DISCARD, entry.status)
    children = (
        unit.entries("all_dependents", id=entry_id, local=created_by(entry))
        if with_dependents
        else []
    )
    entry = put_aside(unit, entry, status, reason, None)
    for child in children:
        # Looked at again: what was pending a moment ago is parked by now.
        current = unit.entry(child.id)
        if current.status is Status.FAILED:
            put_aside(unit, current, Status.DISCARDED, reason, None)
    return entry


def park(unit: Unit, entry_id: str, *, reason: Reason, error: str | None) -> Entry:
    """Fail an entry that was not sent."""
    entry = unit.entry(entry_id)
    after(Action.PARK, entry.status)
    entry = unit.changed("park", id=entry_id, reason=reason.value, error=error)
    unit.tell(EventKind.FAILED, entry)
    park_dependents(unit, entry)
    return entry


def put_aside(unit: Unit, entry: Entry, status: Status, reason: Reason, error: str | None) -> Entry:
    """Settle an entry that nobody holds as discarded or expired; its lane goes on."""
    entry = unit.changed(
        "put_aside", id=entry.id, status=status.value, reason=reason.value, error=error, ms=unit.ms
    )
    if entry.lane is not None:
        unit.rows("pass_turn", user_id=entry.user_id, lane=entry.lane)
    kind = EventKind.EXPIRED if status is Status.EXPIRED else EventKind.DISCARDED
    unit.tell(kind, entry)
    park_dependents(unit, entry)
    return entry


def _rewrite(
    unit: Unit,
    entry: Entry,
    changes: Changes,
    settings: QueueSettings,
    *,
    forced: bool = False,
    rebased: bool = False,
) -> Entry:
    payload = changes.payload
    if payload is UNSET:
        payload = None if entry.payload is None else entry.payload.encode()
    headers = entry.headers if changes.headers is UNSET else changes.headers
    endpoint = entry.endpoint if changes.endpoint is UNSET else changes.endpoint
    depends_on = entry.dependency_ids if changes.depends_on is UNSET else changes.depends_on
    profile = unit.profiles.get(entry.profile)
    request = check_request(profile, endpoint, payload, headers, settings.max_payload_bytes)
    subject = Subject(
        entry.id,
        entry.user_id,
        entry.operation,
        entry.local_id,
        strict_order=profile.strict_order,
    )
    waits = waits_of(unit, subject, tuple(depends_on), request.refers_to, Members())
    _check_still_acyclic(unit, entry, waits.awaited)
    unit.rows("forget_waits", entry_id=entry.id)
    unit.many("insert_wait", [(awaited, entry.id) for awaited in waits.awaited])
    changed = unit.changed(
        "rewrite",
        id=entry.id,
        payload=request.payload,
        headers=json_text(request.headers),
        endpoint=request.endpoint,
        key=new_uuid4(),
        dependency_ids=json_text(waits.dependency_ids),
        local_refs=json_text(waits.local_refs),
        waiting_for=len(waits.awaited),
        payload_version=settings.payload_version,
        base=entry.theirs if rebased else entry.base,
        base_version=entry.theirs_version if rebased else entry.base_version,
        forced=forced,
    )
    if waits.doomed:
        changed = unit.changed("park", id=entry.id, reason=Reason.DEPENDENCY.value, error=None)
    return changed


def _check_still_acyclic(unit: Unit, entry: Entry, awaited: Sequence[str]) -> None:
    """Refuse new dependencies that come after the entry, or depend on it themselves."""
    for name in awaited:
        parent_id = name
        if "/" in name:
            found = unit.rows(
                "local_state", user_id=entry.user_id, local_id=name.rpartition("/")[2]
            )
            parent_id = found[0][1]
        if parent_id is not None:
            # Only what was queued before: nothing earlier can wait for something later that is
            # not in the same batch, so this keeps cycles out without walking the graph.
            parent = unit.entry(parent_id)
            if parent.sequence_number >= entry.sequence_number and (
                parent.id not in entry.dependency_ids
            ):
                raise TransitionError(
                    f"{entry.id} cannot come to depend on {parent.id}, which was queued later"
                )


def _check_conflict(entry: Entry, action: Action) -> None:
    if entry.status is not Status.CONFLICT:
        raise TransitionError(f"there is no conflict to resolve: the entry is {entry.status}")
    after(action, entry.status)


def _check_outcome(entry: Entry, what: str, *, force: bool) -> None:
    if entry.outcome_unknown and not force:
        raise OutcomeUnknownError(
            f"{entry.id} was sent and no answer settled it, so it may have happened: it can only "
            f"be sent again as it is, or be {what} by force"
        )
