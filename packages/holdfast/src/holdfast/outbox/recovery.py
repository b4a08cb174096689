"""Recovery from an out-of-order response: carry out the plan of the profile's recovery."""

from collections.abc import Iterable
from typing import Final, assert_never

from msgspec import UNSET

from holdfast.core.outbox_entry import Claimed, Entry, Reason, Status
from holdfast.errors import OutcomeUnknownError
from holdfast.outbox.claims import AttemptResult
from holdfast.outbox.profile import ChainAction, Drop, Park, Send
from holdfast.outbox.queue import OutboxQueue

__all__ = ["apply_plan", "pending_entries"]

_PAGE: Final = 500


def pending_entries(queue: OutboxQueue, user_id: str) -> list[Entry]:
    """Return all pending entries of a user, in order."""
    found: list[Entry] = []
    while True:
        after = found[-1].id if found else None
        page = queue.entries(user_id, status=Status.PENDING, limit=_PAGE, after=after)
        found += page
        if len(page) < _PAGE:
            return found


def apply_plan(
    queue: OutboxQueue, claimed: Claimed, result: AttemptResult, actions: Iterable[ChainAction]
) -> Entry:
    """Carry out the actions in the caller's transaction; returns the claimed entry afterwards."""
    planned = {action.entry.id: action for action in actions}
    _end_claim(queue, claimed, result, planned.pop(claimed.entry.id, Send(claimed.entry)))
    for action in planned.values():
        entry_id = action.entry.id
        match action:
            case Drop():
                # Forced: even if it was sent without a response, the server has its effect.
                queue.cancel(entry_id, reason=Reason.REBUILD, force=True)
            case Park():
                queue.park(entry_id, reason=Reason.REBUILD, error=action.why)
            case Send(endpoint=str() as endpoint):
                try:
                    queue.edit_payload(entry_id, UNSET, endpoint=endpoint)
                except OutcomeUnknownError:
                    continue  # it may have happened: only the same request can find that out
            case Send():
                pass
            case _:
                assert_never(action)
    return queue.get(claimed.entry.id)


def _end_claim(
    queue: OutboxQueue, claimed: Claimed, result: AttemptResult, action: ChainAction
) -> None:
    entry_id = claimed.entry.id
    match action:
        case Send():
            noted = result._replace(error=f"the server responded {result.code}")
            queue.release(claimed, sent=True, **noted._asdict())
            if action.endpoint is not None:
                # Forced: the server has just rejected this key, so it has not happened.
                queue.edit_payload(entry_id, UNSET, endpoint=action.endpoint, force=True)
        case Park():
            noted = result._replace(error=action.why)
            queue.fail(claimed, reason=Reason.REBUILD, **noted._asdict())
        case Drop():
            noted = result._replace(error="already done on the server")
            queue.fail(claimed, reason=Reason.REBUILD, **noted._asdict())
            queue.discard(entry_id, reason=Reason.REBUILD)
        case _:
            assert_never(action)
