"""Rebuild the queued chain of a quest after the server rejected a step as out of order. Pure.

Only what the user has done is ever sent. Compared with the quest as the server has it:

- a step that is done there, or that is queued twice, is dropped;
- the steps that follow the server's next one without a gap are sent, in that order: where they are
  queued in another order, they are renumbered;
- the rest is parked with the reason. To make up the missing step would be a guess.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from onceward_outbox import ChainAction, Drop, Park, Send
from onceward_outbox.entry import Entry

__all__ = ["QuestChain", "QuestState"]

_ADVANCE: Final = re.compile(r"/quest/(?P<quest>[^/?]+)/step/(?P<step>[0-9]{1,9})/advance")
_COMPLETE: Final = "/quest/complete"


class QuestState(NamedTuple):
    """A quest as the server has it."""

    quest_id: str
    # The step to do next; one more than there are when all are done, 0 before the start.
    next_step: int
    steps: int
    is_completed: bool


class QuestChain:
    """Recovery of the walk profile."""

    path: Final = "/quest/available"

    def plan(self, entry: Entry, pending: Sequence[Entry], state: Any) -> Sequence[ChainAction]:
        """Decide about the rejected entry and the pending ones of the same quest."""
        quest_id = _quest_of(entry)
        chain = [entry]
        if quest_id is not None:
            chain += [one for one in pending if _quest_of(one) == quest_id]
        return plan_chain(chain, _state_of(quest_id, state))


def plan_chain(chain: Sequence[Entry], quest: QuestState | None) -> list[ChainAction]:
    """Decide about every entry of a chain."""
    if quest is None:
        return [Park(one, "the quest is not open on the server") for one in chain]
    if quest.is_completed:
        return [Drop(one) for one in chain]
    wanted = sorted({step for one in chain if (step := _step_of(one)) is not None})
    sendable = list(_without_gap(wanted, quest))
    left = iter(sendable)
    actions: list[ChainAction] = []
    for one in chain:
        step = _step_of(one)
        if step is None:
            actions.append(_completion(one, sendable, quest))
        elif step < quest.next_step:
            actions.append(Drop(one))
        elif step in sendable:
            number = next(left, None)
            actions.append(Drop(one) if number is None else _renumbered(one, number))
        else:
            actions.append(Park(one, _gap(quest)))
    return actions


def _state_of(quest_id: str | None, state: Any) -> QuestState | None:
    """Find the quest in the response; None if it is not open for this walker."""
    quests = state.get("quests") if isinstance(state, dict) else None
    for quest in quests if isinstance(quests, list) else ():
        if isinstance(quest, dict) and quest.get("questId") == quest_id:
            return QuestState(
                str(quest_id),
                _number(quest.get("currentStep")),
                _number(quest.get("steps")),
                quest.get("status") == "completed",
            )
    return None


def _without_gap(wanted: Sequence[int], quest: QuestState) -> Iterator[int]:
    """Give the steps that follow the server's next one without a gap."""
    expected = quest.next_step
    # Before the start there is no step to do.
    for step in wanted if expected else ():
        if step == expected <= quest.steps:
            yield step
            expected += 1


def _completion(entry: Entry, sendable: Sequence[int], quest: QuestState) -> ChainAction:
    after = quest.next_step + len(sendable)
    return Send(entry) if after > quest.steps else Park(entry, _gap(quest))


def _renumbered(entry: Entry, step: int) -> Send:
    if step == _step_of(entry):
        return Send(entry)
    found = _ADVANCE.fullmatch(entry.endpoint)
    assert found is not None  # noqa: S101 - only steps are renumbered
    return Send(entry, endpoint=f"/quest/{found['quest']}/step/{step}/advance")


def _gap(quest: QuestState) -> str:
    if not quest.next_step:
        return "the quest has not been started on the server"
    return (
        f"the server waits for step {quest.next_step} of {quest.steps}, which is not in the queue"
    )


def _quest_of(entry: Entry) -> str | None:
    if entry.profile != "walk":
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


def _number(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
