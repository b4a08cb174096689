"""Conflicts: the entity has moved on, and the entry's strategy says what becomes of the change.

The server's side is read first; then the conflict and what ends it are recorded in one commit. So
a process that dies in between leaves an entry that is sent once more, not half a decision.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from holdfast.core.outbox_entry import (
    Claimed,
    ConflictResolution,
    Entry,
    Operation,
    Resolution,
)
from holdfast.core.retry import is_transient
from holdfast.errors import UsageError
from holdfast.outbox.exchange import Answer, NoAnswer
from holdfast.outbox.profile import Profile
from holdfast.outbox.queue import OutboxQueue

__all__ = ["Merge", "Plan", "plan_for", "record", "resolve_by_hand", "said"]

_log = logging.getLogger(__name__)

Merge = Callable[[Any, Any, Any], Any]
"""The app's own strategy: base, mine, theirs → the payload to send, or a ``Resolution``.

``base`` is what the entity was when the change was made, None if the app did not say;
``theirs`` is None if the server no longer has it.
"""

Read = Callable[[], Answer | NoAnswer]

_OK: Final = 200
_SIGN_IN: Final = 401
_GONE: Final = frozenset({404, 410})


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the server's side, and what is to be done; None waits for a person."""

    theirs: Any = UNSET
    version: str | None = None
    how: Resolution | None = None
    payload: Any = UNSET


def plan_for(
    entry: Entry, profile: Profile, read: Read, merge: Merge | None
) -> Plan | NoAnswer | Answer:
    """Read the server's side and decide. What could not be read comes back as it is."""
    strategy = entry.conflict_resolution or profile.conflict_resolution
    if entry.operation is Operation.CREATE:
        # There is no entity of ours to read yet.
        return _decided(entry, strategy, Plan(), merge)
    answer = read()
    if isinstance(answer, NoAnswer) or answer.status not in {_OK, *_GONE}:
        if strategy is ConflictResolution.SERVER_WINS:
            return Plan(how=Resolution.THEIRS)
        if isinstance(answer, NoAnswer) or answer.status == _SIGN_IN or is_transient(answer.status):
            return answer
        # It cannot be read at all: a person decides without it, or a strategy that needs no more.
        if strategy is ConflictResolution.CLIENT_WINS and profile.force_with_version:
            return Plan()
        return _decided(entry, strategy, Plan(), None)
    theirs = answer.json() if answer.status == _OK else None
    return _decided(entry, strategy, Plan(theirs=theirs, version=_version(answer)), merge)


def record(queue: OutboxQueue, claimed: Claimed, answer: Answer, plan: Plan) -> Entry:
    """Record the conflict, and end it if the plan says how. One commit, made by the caller."""
    entry = queue.conflict(
        claimed,
        theirs=plan.theirs,
        theirs_version=plan.version,
        error=said(answer),
        http_status=answer.status,
        code=answer.code,
        request_id=answer.request_id,
    )
    if plan.how is None:
        return entry
    return resolve_by_hand(queue, entry, plan.how, payload=plan.payload)


def resolve_by_hand(
    queue: OutboxQueue, entry: Entry, how: Resolution, *, payload: Any = UNSET
) -> Entry:
    """End a conflict as somebody has decided.

    ``MINE`` is sent whatever the server has by then (``If-Match: *``; where a service wants a
    version even so, against the one that was read). ``MERGED`` is sent against what was read.
    """
    if how not in (Resolution.MINE, Resolution.MERGED):
        return queue.resolve(entry.id, how)
    if how is Resolution.MERGED and payload is UNSET:
        raise UsageError("to resolve a conflict by merging takes the merged payload")
    forced = how is Resolution.MINE and not queue.profiles.get(entry.profile).force_with_version
    version = "*" if forced else entry.theirs_version
    body = entry.decoded() if payload is UNSET else payload
    return queue.resolve(
        entry.id, how, payload=_rebased(body, entry, forced), headers=_headers(entry, version)
    )


def said(answer: Answer) -> str:
    """Return what the server said about an error, for the entry's history."""
    return answer.body.decode("utf-8", "replace")


def _decided(entry: Entry, strategy: ConflictResolution, known: Plan, merge: Merge | None) -> Plan:
    replace = msgspec.structs.replace
    match strategy:
        case ConflictResolution.SERVER_WINS:
            return replace(known, how=Resolution.THEIRS)
        case ConflictResolution.CLIENT_WINS:
            # Once. If even a forced send meets a conflict, a person has to look.
            return known if entry.forced else replace(known, how=Resolution.MINE)
        case ConflictResolution.MERGE if merge is not None:
            return _merged(entry, known, merge)
        case _:
            return known


def _merged(entry: Entry, known: Plan, merge: Merge) -> Plan:
    base = None if entry.base is None else msgspec.json.decode(entry.base)
    theirs = None if known.theirs is UNSET else known.theirs
    try:
        made = merge(base, entry.decoded(), theirs)
    except Exception:  # noqa: BLE001 - the app's own code may raise anything
        _log.exception("the merge function failed; the conflict waits for a person")
        return known
    if isinstance(made, Resolution):
        return msgspec.structs.replace(known, how=made)
    return msgspec.structs.replace(known, how=Resolution.MERGED, payload=made)


def _version(answer: Answer) -> str | None:
    tag = answer.headers.get("etag")
    if tag is not None:
        return tag
    body = answer.json()
    version = body.get("version") if isinstance(body, dict) else None
    return None if version is None else f'"{version}"'


def _headers(entry: Entry, version: str | None) -> Mapping[str, str]:
    kept = {name: value for name, value in entry.headers.items() if name.lower() != "if-match"}
    if version is None or entry.operation is Operation.CREATE:
        return kept
    return kept | {"If-Match": version}


def _rebased(body: Any, entry: Entry, forced: bool) -> Any | UnsetType:
    """Take the version out of a body that names one: it would contradict the header."""
    if isinstance(body, dict) and "version" in body and (forced or entry.theirs_version):
        return {name: value for name, value in body.items() if name != "version"}
    return UNSET if body is None else body
