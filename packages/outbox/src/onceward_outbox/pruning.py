"""Pruning: removal of entries, mappings and versions that are old and that nothing refers to.

Settled entries are removed without notice. Failed entries and conflicts are a person's work, and a
mapping may still be in use in the app's own tables: their removal is announced by the event
``pruning``, and happens only if the announcement was long enough ago.

Everything happens in small transactions, so that each takes milliseconds.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Final, NamedTuple

import msgspec

from onceward_outbox.entry import Entry, Reason, Status
from onceward_outbox.events import Event, EventKind
from onceward_outbox.resolution import settle_unclaimed
from onceward_outbox.settings import QueueSettings
from onceward_outbox.transaction import Transaction
from onceward_protocol.local_ids import is_local_id

__all__ = ["PRUNE_BATCH", "may_prune", "prune"]

Write = Callable[[str], AbstractContextManager[Transaction]]
"""Begins a transaction of its own for the named operation."""

PRUNE_BATCH: Final = 500
"""Rows removed per commit."""

_MILLISECOND: Final = timedelta(milliseconds=1)
_SETTLED: Final = (Status.SUCCEEDED, Status.DISCARDED, Status.EXPIRED)
_strings = msgspec.json.Decoder(tuple[str, ...]).decode


def prune(write: Write, settings: QueueSettings, limit: int | None) -> int:
    """Remove what is old; returns how many entries were removed, at most ``limit``."""
    removed = _prune_settled(write, settings, limit)
    with write("prune") as tx:
        users = [user_id for (user_id,) in tx.rows("users")]
    for user_id in users:
        left = None if limit is None else limit - removed
        removed += _prune_stuck(write, settings, user_id, left)
        _repeat(write, _prune_mappings, settings, user_id)
        _repeat(write, _prune_versions, settings, user_id)
    return removed


def may_prune(tx: Transaction, settings: QueueSettings) -> bool:
    """Return whether there is something to announce, or the oldest of something can be removed."""
    for (user_id,) in tx.rows("users"):
        for status in _SETTLED:
            oldest = tx.rows("oldest_settled", user_id=user_id, status=status.value)[0][0]
            if oldest is not None and oldest <= _before(tx, _kept_for(settings, status)):
                return True
        if (
            (
                settings.keep_failed is not None
                and tx.rows("has_stuck", user_id=user_id, **_stuck_times(tx, settings))
            )
            or tx.rows("has_mappings", user_id=user_id, **_mapping_times(tx, settings))
            or tx.rows(
                "has_versions", user_id=user_id, seen_before=_before(tx, settings.keep_versions)
            )
        ):
            return True
    return False


# -- settled entries -------------------------------------------------------------------------------


def _prune_settled(write: Write, settings: QueueSettings, limit: int | None) -> int:
    removed = 0
    for status in _SETTLED:
        after, has_more = 0, True
        while has_more and (limit is None or removed < limit):
            size = PRUNE_BATCH if limit is None else min(PRUNE_BATCH, limit - removed)
            with write("prune") as tx:
                before = _before(tx, _kept_for(settings, status))
                page = tx.rows(
                    "prunable",
                    status=status.value,
                    after=after,
                    settled_before=before,
                    limit=size,
                )
                _remove(
                    tx,
                    [
                        _Removed(entry_id, user_id, number, _referred(names))
                        for _, entry_id, user_id, number, *names in page
                    ],
                )
                if page:
                    tx.rows("forget_bodies", before=before)
            removed += len(page)
            has_more = len(page) == size
            after = page[-1][0] if page else after
    return removed


class _Removed(NamedTuple):
    """An entry that is removed, and the local ids in it."""

    id: str
    user_id: str
    sequence_number: int
    names: set[str]


def _remove(tx: Transaction, entries: Iterable[_Removed]) -> None:
    """Delete entries, and emit how many of each user."""
    counts: Counter[str] = Counter()
    for entry in entries:
        counts[entry.user_id] += 1
        tx.rows("raise_floor", user_id=entry.user_id, sequence_number=entry.sequence_number)
        tx.rows("forget_awaited", id=entry.id)
        tx.rows("remove", id=entry.id)
        if entry.names:
            local_ids = _json(entry.names)
            tx.rows("use_mappings", user_id=entry.user_id, ms=tx.ms, local_ids=local_ids)
    for user_id, count in counts.items():
        tx.events.append(Event(kind=EventKind.PRUNED, at=tx.now, user_id=user_id, count=count))


def _kept_for(settings: QueueSettings, status: Status) -> timedelta:
    return settings.keep_succeeded if status is Status.SUCCEEDED else settings.keep_settled


# -- failed entries and conflicts ------------------------------------------------------------------


def _prune_stuck(write: Write, settings: QueueSettings, user_id: str, limit: int | None) -> int:
    if settings.keep_failed is None:
        return 0
    _repeat(write, _note_stuck, settings, user_id)
    _repeat(write, _announce_stuck, settings, user_id)
    removed, has_more = 0, True
    while has_more and (limit is None or removed < limit):
        size = PRUNE_BATCH if limit is None else min(PRUNE_BATCH, limit - removed)
        with write("prune") as tx:
            times = _stuck_times(tx, settings)
            del times["stuck_notice"]
            # Those that others depend on follow in the next round.
            page = tx.entries("prunable_stuck", user_id=user_id, limit=size, **times)
            for entry in page:
                settle_unclaimed(tx, entry, Status.DISCARDED, Reason.STALE, None)
            _remove(tx, [_removed(entry) for entry in page])
        removed += len(page)
        has_more = bool(page)
    return removed


def _removed(entry: Entry) -> _Removed:
    names = _names_in(entry.local_id, entry.local_refs, entry.lane, entry.left_lane)
    return _Removed(entry.id, entry.user_id, entry.sequence_number, names)


def _note_stuck(tx: Transaction, _: QueueSettings, user_id: str) -> int:
    return len(tx.rows("note_stuck", user_id=user_id, ms=tx.ms, limit=PRUNE_BATCH))


def _announce_stuck(tx: Transaction, settings: QueueSettings, user_id: str) -> int:
    found = tx.entries(
        "announce_stuck",
        user_id=user_id,
        ms=tx.ms,
        stuck_before=_stuck_times(tx, settings)["stuck_notice"],
        limit=PRUNE_BATCH,
    )
    for entry in found:
        tx.emit(EventKind.PRUNING, entry, delay_seconds=settings.prune_notice.total_seconds())
    return len(found)


def _stuck_times(tx: Transaction, settings: QueueSettings) -> dict[str, int]:
    assert settings.keep_failed is not None  # noqa: S101 - checked by the callers
    return {
        "stuck_notice": _before(tx, settings.keep_failed - settings.prune_notice),
        "stuck_before": _before(tx, settings.keep_failed),
        "noticed_before": _before(tx, settings.prune_notice),
    }


# -- mappings and versions -------------------------------------------------------------------------


def _prune_mappings(tx: Transaction, settings: QueueSettings, user_id: str) -> int:
    """Announce and remove mappings that no entry refers to; returns how many were changed."""
    noted = len(tx.rows("note_mappings", user_id=user_id, ms=tx.ms, limit=PRUNE_BATCH))
    times = _mapping_times(tx, settings)
    found = tx.rows("old_mappings", user_id=user_id, limit=PRUNE_BATCH, **times)
    if not found:
        return noted
    used = {name for row in tx.rows("referring", user_id=user_id) for name in _referred(row)}
    changes: dict[str, list[str]] = {
        "use_mappings": [name for name, _ in found if name in used],
        "announce_mappings": [name for name, known in found if not known and name not in used],
        "remove_mappings": [name for name, known in found if known and name not in used],
    }
    for name, local_ids in changes.items():
        params: dict[str, Any] = {} if name == "remove_mappings" else {"ms": tx.ms}
        if local_ids:
            tx.rows(name, user_id=user_id, local_ids=_json(local_ids), **params)
    if changes["announce_mappings"]:
        tx.events.append(
            Event(
                kind=EventKind.PRUNING,
                at=tx.now,
                user_id=user_id,
                delay_seconds=settings.prune_notice.total_seconds(),
                count=len(changes["announce_mappings"]),
                detail="id mappings",
            )
        )
    return noted + len(found)


def _mapping_times(tx: Transaction, settings: QueueSettings) -> dict[str, int]:
    return {
        "used_notice": _before(tx, settings.keep_mappings - settings.prune_notice),
        "used_before": _before(tx, settings.keep_mappings),
        "noticed_before": _before(tx, settings.prune_notice),
    }


def _referred(row: Any) -> set[str]:
    local_id, local_refs, lane, left_lane = row
    return _names_in(local_id, _strings(local_refs) if local_refs else (), lane, left_lane)


def _names_in(
    local_id: str | None, local_refs: Iterable[str], lane: str | None, left_lane: str | None
) -> set[str]:
    """Return the local ids that an entry refers to; its lane may be named after one."""
    names = {*local_refs}
    if local_id is not None:
        names.add(local_id)
    for one in (lane, left_lane):
        if one is not None:
            names.update(part for part in one.split("/") if is_local_id(part))
    return names


def _prune_versions(tx: Transaction, settings: QueueSettings, user_id: str) -> int:
    before = _before(tx, settings.keep_versions)
    return len(tx.rows("prune_versions", user_id=user_id, seen_before=before, limit=PRUNE_BATCH))


# -- helpers ---------------------------------------------------------------------------------------


def _repeat(
    write: Write,
    step: Callable[[Transaction, QueueSettings, str], int],
    settings: QueueSettings,
    user_id: str,
) -> None:
    """Repeat a step, each time in a transaction of its own, until it changes nothing."""
    changed = True
    while changed:
        with write("prune") as tx:
            changed = step(tx, settings, user_id) > 0


def _before(tx: Transaction, span: timedelta) -> int:
    return tx.ms - span // _MILLISECOND


def _json(names: Iterable[str]) -> str:
    return msgspec.json.encode(sorted(names)).decode()
