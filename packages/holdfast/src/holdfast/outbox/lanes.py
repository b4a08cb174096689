"""Lanes and sequence numbers: where in the order a new entry goes."""

import re
from typing import Final

from holdfast.core.outbox_entry import NewEntry, Operation
from holdfast.errors import EntryInvalidError, QueueFullError
from holdfast.outbox.transaction import Transaction
from holdfast.outbox.validation import Draft

__all__ = ["QueueQuota", "explicit_lane", "lane_of", "next_number", "position"]

# Path segments with a digit look like ids; the version of an API does not.
_HAS_DIGIT: Final = re.compile(r"^(?!v[0-9]+$).*[0-9]")


class QueueQuota:
    """Limit of unsettled entries per user, checked without counting them at every enqueue.

    Sequence numbers are never reused, so a user has at most as many entries as numbers were given
    since the last count. Entries are counted again only when that exceeds the limit.
    """

    def __init__(self, max_entries: int) -> None:
        self._max = max_entries
        self._limits: dict[str, int] = {}

    def check(self, tx: Transaction, user_id: str, last: int) -> None:
        """Raise ``QueueFullError`` if the user cannot add an entry after number ``last``."""
        if last < self._limits.get(user_id, self._max):
            return
        entries = tx.rows("count_open", user_id=user_id)[0][0]
        if entries >= self._max:
            raise QueueFullError(
                f"the queue of {user_id} has {entries} unsettled entries, the maximum: send or "
                "discard some first"
            )
        self._limits[user_id] = last + self._max - entries

    def is_certain(self, user_id: str, last: int) -> bool:
        """Return whether ``check`` would pass without counting."""
        return last < self._limits.get(user_id, self._max)


def position(tx: Transaction, user_id: str, lane: str | None) -> tuple[int, bool]:
    """Return the user's last sequence number, and whether the lane has an unsettled entry."""
    found = tx.rows("place", user_id=user_id, lane=lane)
    if not found:
        raise EntryInvalidError(
            "user_id_must_reference_existing_user", f"there is no user {user_id}: add_user first"
        )
    last, taken = found[0]
    return last, bool(taken)


def next_number(last: int, new: NewEntry) -> int:
    """Return the entry's sequence number: the next one, or its own if that is higher."""
    if new.sequence_number is None:
        return last + 1
    if new.sequence_number <= last:
        raise EntryInvalidError(
            "sequence_number_must_be_monotonic",
            f"sequence number {new.sequence_number} is not higher than the last one, {last}",
        )
    return new.sequence_number


def lane_of(tx: Transaction, draft: Draft) -> str | None:
    """Return the lane of an entry; entries of one lane are sent in order, None is independent.

    Entries about one entity share a lane, whichever of its ids they use.
    """
    lane = explicit_lane(draft)
    if lane is not None:
        return lane
    new = draft.new
    entity: str | int | None = new.server_id
    if entity is None:
        if draft.operation is Operation.CREATE:
            return None
        entity = _entity_in(draft.request.endpoint.partition("?")[0])
    text = str(entity)
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None  # noqa: PLR2004
    found = tx.rows("local_of_server_id", user_id=new.user_id, text=text, number=number)
    entity = found[0][0] if found else entity
    return f"{new.entity_type}/{entity}"


def explicit_lane(draft: Draft) -> str | None:
    """Return the lane if it follows from the entry alone, without reading the queue."""
    if draft.profile.strict_order:
        return draft.profile.name
    if draft.new.lane is not None:
        return draft.new.lane
    return None if draft.local_id is None else f"{draft.new.entity_type}/{draft.local_id}"


def _entity_in(path: str) -> str:
    """Return what names the entity in a path: ``5`` in ``/notes/5`` and in ``/notes/5/pin``."""
    parts = path.split("/")
    named = (part for part in reversed(parts) if _HAS_DIGIT.search(part))
    return next(named, parts[-1])
