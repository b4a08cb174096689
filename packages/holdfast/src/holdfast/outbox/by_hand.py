"""What people decide about entries: resolve, edit, retry, undo, give up."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from holdfast.core.outbox_entry import Entry, Reason, Resolution
from holdfast.outbox import hands
from holdfast.outbox.operations import Operations

__all__ = ["ByHand"]


class ByHand(Operations):
    """Operations for a person, or for a strategy in a person's name."""

    def resolve(
        self,
        entry_id: str,
        how: Resolution,
        *,
        payload: Any = UNSET,
        headers: Mapping[str, str] | UnsetType = UNSET,
    ) -> Entry:
        """End a conflict.

        ``THEIRS`` discards the entry, ``GIVE_UP`` makes it ``failed``; both park its dependents.
        ``MINE`` sends it once more, ``forced`` and with a new key. ``MERGED`` sends ``payload``
        with a new key, and takes the server's side as its base. Both may come with new ``headers``,
        for example another ``If-Match``. Raises ``TransitionError`` unless it is in ``conflict``.
        """
        changes = hands.Changes(payload, headers)
        with self._write("resolve") as unit:
            return hands.resolve(unit, entry_id, how, changes, self._settings)

    def edit_payload(
        self,
        entry_id: str,
        payload: Any = UNSET,
        *,
        headers: Mapping[str, str] | UnsetType = UNSET,
        endpoint: str | UnsetType = UNSET,
        depends_on: Sequence[str] | UnsetType = UNSET,
        force: bool = False,
    ) -> Entry:
        """Replace what a pending, failed or conflicting entry will send; it gets a new key.

        The entry keeps its place in the order and becomes ``pending`` with all its attempts; parked
        dependents are revived. What is not given stays. Raises ``TransitionError``,
        ``EntryInvalidError``, and ``OutcomeUnknownError`` if it was sent without an answer (with
        ``force`` it is edited all the same, and may then happen twice).
        """
        changes = hands.Changes(payload, headers, endpoint, depends_on)
        with self._write("edit_payload") as unit:
            return hands.edit(unit, entry_id, changes, self._settings, force=force)

    def retry(self, entry_id: str) -> Entry:
        """Send a failed entry again: same key, all its attempts, and its dependents revived.

        Raises ``TransitionError`` unless it is ``failed``, or while something it depends on is
        failed, discarded or expired: that has to come back first.
        """
        with self._write("retry") as unit:
            return hands.retry(unit, entry_id)

    def cancel(
        self, entry_id: str, *, reason: Reason = Reason.PERSON, force: bool = False
    ) -> Entry:
        """Undo an entry while it is pending: it is discarded, and its dependents are parked.

        Raises ``TransitionError`` if it is not pending any more, ``OutcomeUnknownError`` if it was
        sent without an answer: it may have happened. ``force`` cancels it all the same.
        """
        with self._write("cancel") as unit:
            return hands.cancel(unit, entry_id, reason=reason, force=force)

    def discard(
        self,
        entry_id: str,
        *,
        reason: Reason = Reason.PERSON,
        with_dependents: bool = False,
    ) -> Entry:
        """Give a failed or conflicting entry up; its lane goes on.

        Dependents stay parked, or are discarded with it. Raises ``TransitionError``.
        """
        with self._write("discard") as unit:
            return hands.discard(unit, entry_id, reason=reason, with_dependents=with_dependents)

    def park(self, entry_id: str, *, reason: Reason, error: str | None = None) -> Entry:
        """Make a pending entry ``failed`` without sending it, and park its dependents.

        For a rebuild that finds no place for it. Raises ``TransitionError``.
        """
        with self._write("park") as unit:
            return hands.park(unit, entry_id, reason=reason, error=error)
