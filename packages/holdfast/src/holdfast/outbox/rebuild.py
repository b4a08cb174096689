"""Rebuilding a quest's chain after the server has said that a step is out of order.

Only what the person has done is ever sent. Against the quest as the server has it:

- a step that is done there, or that stands in the queue twice, is dropped;
- the steps that follow on the server's next one without a gap are sent, in that order: where they
  stand in the queue in another, they are renumbered;
- the rest is parked with the reason. To make up the missing step would be a guess.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from msgspec import UNSET

from holdfast.core.outbox_entry import Claimed, Entry, Profile, Reason, Status
from holdfast.errors import OutcomeUnknownError
from holdfast.outbox.exchange import Answer
from holdfast.outbox.queue import OutboxQueue

__all__ = ["BOARD", "Fate", "Standing", "chain_of", "fates", "rebuild", "standing_in"]

BOARD: Final = "/quest/available"
"""Where the server tells how far the quests are."""

_ADVANCE: Final = re.compile(r"/quest/(?P<quest>[^/?]+)/step/(?P<step>[0-9]{1,9})/advance")
_COMPLETE: Final = "/quest/complete"
_PAGE: Final = 500


class Standing(NamedTuple):
    """A quest as the server has it."""

    quest_id: str
    # The step to do next; one more than there are when all are done, 0 before the start.
    next_step: int
    steps: int
    is_completed: bool


class Fate(NamedTuple):
    """What becomes of an entry of the chain."""

    entry: Entry
    # Another path to send it to; None leaves it as it is.
    endpoint: str | None = None
    # Dropped: the server has it already.
    drop: bool = False
    # Parked, and why.
    park: str | None = None


def standing_in(answer: Answer, entry: Entry) -> Standing | None:
    """Find the quest of an entry on the server's board; None if it is not there for the walker."""
    quest_id = _quest_of(entry)
    body = answer.json()
    quests = body.get("quests") if isinstance(body, dict) else None
    for quest in quests if isinstance(quests, list) else ():
        if isinstance(quest, dict) and quest.get("questId") == quest_id:
            return Standing(
                str(quest_id),
                _number(quest.get("currentStep")),
                _number(quest.get("steps")),
                quest.get("status") == "completed",
            )
    return None


def chain_of(queue: OutboxQueue, entry: Entry) -> list[Entry]:
    """Return the entry and all pending ones of the same quest, in their order."""
    quest_id = _quest_of(entry)
    if quest_id is None:
        return [entry]
    return [entry, *(one for one in _pending(queue, entry.user_id) if _quest_of(one) == quest_id)]


def fates(chain: Sequence[Entry], standing: Standing | None) -> list[Fate]:
    """Decide about every entry of a chain. Pure."""
    if standing is None:
        return [Fate(one, park="the quest is not open on the server") for one in chain]
    if standing.is_completed:
        return [Fate(one, drop=True) for one in chain]
    wanted = sorted({step for one in chain if (step := _step_of(one)) is not None})
    sendable = list(_run(wanted, standing))
    left = iter(sendable)
    decided = []
    for one in chain:
        step = _step_of(one)
        if step is None:
            decided.append(_completion(one, sendable, standing))
        elif step < standing.next_step:
            decided.append(Fate(one, drop=True))
        elif step in sendable:
            number = next(left, None)
            decided.append(Fate(one, drop=True) if number is None else _renumbered(one, number))
        else:
            decided.append(Fate(one, park=_gap(standing)))
    return decided


def rebuild(queue: OutboxQueue, claimed: Claimed, answer: Answer, decided: Iterable[Fate]) -> Entry:
    """Carry the decisions out, in the caller's transaction; returns the claimed entry after it."""
    for fate in decided:
        if fate.entry.id == claimed.entry.id:
            _end_claim(queue, claimed, answer, fate)
        elif fate.drop:
            # By force: if it was sent without an answer, the server still has the step already.
            queue.cancel(fate.entry.id, reason=Reason.REBUILD, force=True)
        elif fate.park is not None:
            queue.park(fate.entry.id, reason=Reason.REBUILD, error=fate.park)
        elif fate.endpoint is not None:
            try:
                queue.edit_payload(fate.entry.id, UNSET, endpoint=fate.endpoint)
            except OutcomeUnknownError:
                continue  # it was sent once, and has to be asked for as it is
    return queue.get(claimed.entry.id)


def _end_claim(queue: OutboxQueue, claimed: Claimed, answer: Answer, fate: Fate) -> None:
    entry_id = claimed.entry.id
    facts: dict[str, Any] = {
        "http_status": answer.status,
        "code": answer.code,
        "request_id": answer.request_id,
    }
    if fate.endpoint is not None:
        queue.release(claimed, sent=True, error=f"the server said {answer.code}", **facts)
        # The server has just answered under this key: it has not happened.
        queue.edit_payload(entry_id, UNSET, endpoint=fate.endpoint, force=True)
        return
    if not fate.drop and fate.park is None:
        queue.release(claimed, sent=True, error=f"the server said {answer.code}", **facts)
        return
    queue.fail(
        claimed,
        reason=Reason.REBUILD,
        error=fate.park or "the server has it already",
        **facts,
    )
    if fate.drop:
        queue.discard(entry_id, reason=Reason.REBUILD)


def _run(wanted: Sequence[int], standing: Standing) -> Iterator[int]:
    """Give the steps that follow on the server's next one without a gap."""
    expected = standing.next_step
    # Before the start there is no step to do.
    for step in wanted if expected else ():
        if step == expected <= standing.steps:
            yield step
            expected += 1


def _completion(entry: Entry, sendable: Sequence[int], standing: Standing) -> Fate:
    after = standing.next_step + len(sendable)
    return Fate(entry) if after > standing.steps else Fate(entry, park=_gap(standing))


def _renumbered(entry: Entry, step: int) -> Fate:
    if step == _step_of(entry):
        return Fate(entry)
    found = _ADVANCE.fullmatch(entry.endpoint)
    assert found is not None  # noqa: S101 - only steps are renumbered
    return Fate(entry, endpoint=f"/quest/{found['quest']}/step/{step}/advance")


def _gap(standing: Standing) -> str:
    if not standing.next_step:
        return "the quest has not been started on the server"
    return (
        f"the server waits for step {standing.next_step} of {standing.steps}, "
        "which is not in the queue"
    )


def _quest_of(entry: Entry) -> str | None:
    if entry.profile is not Profile.WALK:
        return None
    found = _ADVANCE.fullmatch(entry.endpoint)
    if found is not None:
        return found["quest"]
    if entry.endpoint == _COMPLETE:
        payload = entry.decoded()
        quest_id = payload.get("questId") if isinstance(payload, dict) else None
        return quest_id if isinstance(quest_id, str) else None
    return None


def _step_of(entry: Entry) -> int | None:
    found = _ADVANCE.fullmatch(entry.endpoint)
    return None if found is None else int(found["step"])


def _pending(queue: OutboxQueue, user_id: str) -> Iterator[Entry]:
    after = None
    while True:
        page = queue.entries(user_id, status=Status.PENDING, limit=_PAGE, after=after)
        yield from page
        if len(page) < _PAGE:
            return
        after = page[-1].id


def _number(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
