"""Quests: list, start, advance and complete. Points are awarded once.

What was done while a day up to then was not settled is provisional: it is confirmed with those
days, and reverted after the grace period if one of them is rejected.
"""

from collections.abc import Sequence
from datetime import date, datetime, timedelta
from typing import Literal

import msgspec

from onceward import Transaction
from onceward.errors import NotFoundError
from onceward.ports import Row, Store
from onceward.stores.sql_loader import load_queries
from onceward_services.walk.catalogue import Catalogue, Quest
from onceward_services.walk.errors import walk_error
from onceward_services.walk.events import WalkerEvent, add_event, insert_event
from onceward_services.walk.steps.open_days import OpenDays, read_open_days
from onceward_services.walk.suspension import lock_active_walker
from onceward_services.walk.tree import refund_for_points
from onceward_services.walk.walkers import (
    Walker,
    find_walker,
    instant,
    update_walker,
)

__all__ = [
    "QuestState",
    "Unsettled",
    "UnsettledQuest",
    "advance_quest",
    "complete_quest",
    "confirm_quest",
    "mark_quest",
    "read_board",
    "revert_due_quests",
    "start_quest",
    "unsettled_quests",
    "visible_quests",
]

_PREREQUISITES = "PREREQUISITES_NOT_MET"


class Unsettled(msgspec.Struct, frozen=True, omit_defaults=True):
    """When the steps and the completion were made that are provisional, in UTC."""

    steps: dict[int, datetime] = {}
    completed: datetime | None = None

    def encode(self) -> str:
        """Return the text of the column, which is empty if nothing is provisional."""
        return msgspec.json.encode(self).decode() if self else ""

    def __bool__(self) -> bool:
        return bool(self.steps) or self.completed is not None


class UnsettledQuest(msgspec.Struct, frozen=True):
    """A quest with provisional progress. Its points are part of the walker's."""

    quest_id: str
    is_completed: bool
    steps_done: int
    points: int
    unsettled: Unsettled
    # Set once a day was rejected on which some of the progress was made.
    revert_due_at: datetime | None = None
    rejected_day: date | None = None


class QuestState(msgspec.Struct, frozen=True):
    """A quest and a walker's progress in it."""

    quest: Quest
    status: Literal["available", "in_progress", "completed"]
    steps_done: int = 0
    is_provisional: bool = False
    # For when the caller enqueues the job that settles what is provisional; None if it is enqueued.
    settle_at: datetime | None = None

    @property
    def current_step(self) -> int:
        """The next step: 0 before the start, one more than the number of steps at the end."""
        return 0 if self.status == "available" else self.steps_done + 1


class _Board(msgspec.Struct, frozen=True):
    """A walker's progress and nodes, which decide what the walker can do with each quest."""

    catalogue: Catalogue
    progress: dict[str, Row]
    nodes: frozenset[str]

    def quest(self, quest_id: str) -> Quest:
        quest = self.catalogue.quests.get(quest_id)
        if quest is None:
            raise NotFoundError("there is no such quest")
        return quest

    def state(self, quest: Quest) -> QuestState:
        row = self.progress.get(quest.id)
        if row is None:
            return QuestState(quest, "available")
        is_provisional = bool(row["unsettled"])
        return QuestState(quest, row["status"], row["steps_done"], is_provisional)

    def unsettled(self, quest: Quest) -> Unsettled:
        return decode_unsettled(self.progress[quest.id]["unsettled"])

    def depends_on_provisional(self, quest: Quest) -> bool:
        """Return whether a quest that this one requires is provisional."""
        return any(
            self.progress[id_]["unsettled"] for id_ in quest.requires if id_ in self.progress
        )

    def visible(self) -> list[QuestState]:
        return [
            state
            for state in map(self.state, self.catalogue.quests.values())
            if state.status == "completed" or not self.missing(state.quest)
        ]

    def missing(self, quest: Quest) -> list[str]:
        """Return the missing prerequisites: quests, or the keystones that reveal this one."""
        lacking = [id_ for id_ in quest.requires if self.status_of(id_) != "completed"]
        if quest.hidden:
            keystones = self.catalogue.revealed_by(quest.id)
            if self.nodes.isdisjoint(keystones):
                lacking += keystones
        return lacking

    def status_of(self, quest_id: str) -> str | None:
        row = self.progress.get(quest_id)
        return None if row is None else row["status"]

    def check_prerequisites(self, quest: Quest) -> None:
        missing = self.missing(quest)
        if missing:
            raise walk_error(
                _PREREQUISITES,
                f"{quest.title!r} is not available yet",
                questId=quest.id,
                missing=missing,
            )

    def require_in_progress(self, quest: Quest) -> QuestState:
        """Return the state of a quest in progress; raises if it is not in progress."""
        state = self.state(quest)
        if state.status == "completed":
            raise walk_error(
                "QUEST_ALREADY_COMPLETED", f"{quest.title!r} is completed", questId=quest.id
            )
        if state.status != "in_progress":
            raise walk_error(
                "QUEST_NOT_IN_PROGRESS", f"{quest.title!r} has not been started", questId=quest.id
            )
        # After a refund of the keystone the quest is not available any more.
        self.check_prerequisites(quest)
        return state


async def read_board(store: Store, tenant: str, catalogue: Catalogue) -> list[QuestState]:
    """Return the quests that a walker can start, has started or has completed."""
    board = _board(await store.read(_sql("quest_board"), {"tenant": tenant}), catalogue)
    return board.visible()


def visible_quests(
    catalogue: Catalogue, progress: dict[str, Row], nodes: frozenset[str]
) -> list[QuestState]:
    """Return the quests that a walker with this progress and these nodes sees."""
    return _Board(catalogue, progress, nodes).visible()


async def start_quest(
    tx: Transaction,
    tenant: str,
    quest_id: str,
    *,
    now: datetime,
    catalogue: Catalogue,
    acted_at: datetime | None = None,
) -> QuestState:
    """Start a quest. A second start fails, with another key or without one."""
    _, board = await _lock_board(tx, tenant, now, catalogue, min(acted_at or now, now))
    quest = board.quest(quest_id)
    status = board.status_of(quest.id)
    if status == "in_progress":
        raise walk_error(
            "QUEST_ALREADY_IN_PROGRESS", f"{quest.title!r} is in progress", questId=quest.id
        )
    if status == "completed":
        raise walk_error(
            "QUEST_ALREADY_COMPLETED", f"{quest.title!r} is completed", questId=quest.id
        )
    board.check_prerequisites(quest)
    await tx.execute(_sql("start_quest"), {"tenant": tenant, "quest_id": quest.id, "now": now})
    await add_event(tx, tenant, "quest.started", {"questId": quest.id}, now)
    return QuestState(quest, "in_progress")


async def advance_quest(
    tx: Transaction,
    tenant: str,
    quest_id: str,
    step: int,
    *,
    now: datetime,
    catalogue: Catalogue,
    empty_after: timedelta,
    acted_at: datetime | None = None,
) -> QuestState:
    """Complete a step, which must be the next one. ``acted_at`` is when the walker acted."""
    acted_at = min(acted_at or now, now)
    walker, board = await _lock_board(tx, tenant, now, catalogue, acted_at)
    quest = board.quest(quest_id)
    state = board.require_in_progress(quest)
    if step != state.current_step or step > quest.steps:
        raise walk_error(
            "STEP_OUT_OF_ORDER",
            f"{quest.title!r} is at step {state.current_step} of {quest.steps}",
            questId=quest.id,
            step=step,
            currentStep=state.current_step,
            steps=quest.steps,
        )
    days = await read_open_days(
        tx, tenant, walker.first_action_at, empty_after=empty_after, now=now
    )
    unsettled = board.unsettled(quest)
    # A step stays with the steps before it: if one is reverted, so are the later ones.
    if unsettled or days.is_open_up_to(acted_at):
        unsettled = Unsettled({**unsettled.steps, step: acted_at})
    await tx.execute(
        _sql("advance_quest"),
        {
            "tenant": tenant,
            "quest_id": quest.id,
            "steps_done": step,
            "unsettled": unsettled.encode(),
            "now": now,
        },
    )
    await add_event(tx, tenant, "quest.advanced", {"questId": quest.id, "step": step}, now)
    return QuestState(quest, "in_progress", step, bool(unsettled), _new_due(walker, days, acted_at))


async def complete_quest(
    tx: Transaction,
    tenant: str,
    quest_id: str,
    *,
    now: datetime,
    catalogue: Catalogue,
    empty_after: timedelta,
    acted_at: datetime | None = None,
) -> tuple[QuestState, int]:
    """Complete a quest and award its points; returns its state and the walker's points."""
    acted_at = min(acted_at or now, now)
    walker, board = await _lock_board(tx, tenant, now, catalogue, acted_at)
    quest = board.quest(quest_id)
    state = board.require_in_progress(quest)
    if state.steps_done < quest.steps:
        raise walk_error(
            "QUEST_INCOMPLETE",
            f"{quest.title!r} is at step {state.current_step} of {quest.steps}",
            questId=quest.id,
            currentStep=state.current_step,
            steps=quest.steps,
        )
    days = await read_open_days(
        tx, tenant, walker.first_action_at, empty_after=empty_after, now=now
    )
    unsettled = board.unsettled(quest)
    if unsettled or board.depends_on_provisional(quest) or days.is_open_up_to(acted_at):
        unsettled = Unsettled(unsettled.steps, acted_at)
    changed = await tx.execute(
        _sql("complete_quest"),
        {
            "tenant": tenant,
            "quest_id": quest.id,
            "points": quest.points,
            "unsettled": unsettled.encode(),
            "now": now,
        },
    )
    if changed != 1:
        raise LookupError(
            "a quest in progress has no row in progress, although its walker is locked"
        )
    moved = await update_walker(
        tx,
        tenant,
        now,
        points=quest.points,
        provisional_points=quest.points if unsettled else 0,
        events=1,
    )
    completed = {
        "questId": quest.id,
        "pointsAwarded": quest.points,
        "pointsBanked": moved.points_banked,
    }
    await insert_event(tx, tenant, WalkerEvent(moved.event_seq, "quest.completed", completed, now))
    done = QuestState(
        quest, "completed", state.steps_done, bool(unsettled), _new_due(walker, days, acted_at)
    )
    return done, moved.points_banked


# -- confirmation and reverts ---------------------------------------------------------------------


async def unsettled_quests(tx: Transaction, tenant: str) -> list[UnsettledQuest]:
    """Return the quests with provisional progress. The walker is locked."""
    rows = await tx.fetch_all(_sql("unsettled_quests"), {"tenant": tenant})
    return [
        UnsettledQuest(
            quest_id=row["quest_id"],
            is_completed=row["status"] == "completed",
            steps_done=row["steps_done"],
            points=row["points_awarded"],
            unsettled=decode_unsettled(row["unsettled"]),
            revert_due_at=None if row["revert_due_at"] is None else instant(row["revert_due_at"]),
            rejected_day=(
                None if row["rejected_day"] is None else date.fromisoformat(row["rejected_day"])
            ),
        )
        for row in rows
    ]


async def confirm_quest(
    tx: Transaction, tenant: str, quest: UnsettledQuest, left: Unsettled, now: datetime
) -> None:
    """Make progress final, except for what is ``left``, and cancel a scheduled revert."""
    await _save(tx, tenant, quest.quest_id, left, due_at=None, rejected_day=None)
    if not left:
        points = quest.points if quest.unsettled.completed else 0
        moved = await update_walker(tx, tenant, now, provisional_points=-points, events=1)
        data = {"questId": quest.quest_id, "points": points}
        event = WalkerEvent(moved.event_seq, "quest.confirmed", data, now)
        await insert_event(tx, tenant, event)


async def mark_quest(
    tx: Transaction,
    tenant: str,
    quest: UnsettledQuest,
    *,
    due_at: datetime | None,
    rejected_day: date | None,
) -> None:
    """Schedule the revert of what was done since a rejected day; None cancels it."""
    await _save(
        tx, tenant, quest.quest_id, quest.unsettled, due_at=due_at, rejected_day=rejected_day
    )


async def revert_due_quests(
    tx: Transaction, tenant: str, now: datetime, days: OpenDays, catalogue: Catalogue
) -> list[str]:
    """Revert what was done since a rejected day, where it is due; returns the quests.

    A quest returns to the step before that day, and its points are taken back. If they were spent,
    the newest provisional allocations are refunded first, so points are never below zero.
    """
    reverted = []
    for quest in await unsettled_quests(tx, tenant):
        if quest.revert_due_at is None or quest.revert_due_at > now or quest.rejected_day is None:
            continue
        lost = [
            step
            for step, at in quest.unsettled.steps.items()
            if days.day_of(at) >= quest.rejected_day
        ]
        steps_done = min([quest.steps_done, *(step - 1 for step in lost)])
        kept = {step: at for step, at in quest.unsettled.steps.items() if step <= steps_done}
        await tx.execute(
            _sql("revert_quest"),
            {
                "tenant": tenant,
                "quest_id": quest.quest_id,
                "steps_done": steps_done,
                "unsettled": Unsettled(kept).encode(),
                "now": now,
            },
        )
        banked = (await find_walker(tx, tenant)).points_banked
        await refund_for_points(tx, tenant, quest.points - banked, now, catalogue)
        moved = await update_walker(
            tx,
            tenant,
            now,
            points=-quest.points,
            provisional_points=-quest.points,
            events=1,
        )
        data = {
            "questId": quest.quest_id,
            "reason": "steps_rejected",
            "currentStep": steps_done + 1,
            "pointsTaken": quest.points,
            "pointsBanked": moved.points_banked,
        }
        event = WalkerEvent(moved.event_seq, "quest.reverted", data, now)
        await insert_event(tx, tenant, event)
        reverted.append(quest.quest_id)
    return reverted


async def _save(
    tx: Transaction,
    tenant: str,
    quest_id: str,
    unsettled: Unsettled,
    *,
    due_at: datetime | None,
    rejected_day: date | None,
) -> None:
    await tx.execute(
        _sql("save_unsettled"),
        {
            "tenant": tenant,
            "quest_id": quest_id,
            "unsettled": unsettled.encode(),
            "revert_due_at": due_at,
            "rejected_day": None if rejected_day is None else rejected_day.isoformat(),
        },
    )


def decode_unsettled(text: str) -> Unsettled:
    """Parse the column."""
    return msgspec.json.decode(text, type=Unsettled) if text else Unsettled()


def _new_due(walker: Walker, days: OpenDays, acted_at: datetime) -> datetime | None:
    settle_at = days.settles_at(acted_at)
    return None if settle_at == walker.settle_due_at else settle_at


async def _lock_board(
    tx: Transaction, tenant: str, now: datetime, catalogue: Catalogue, acted_at: datetime
) -> tuple[Walker, _Board]:
    walker = await lock_active_walker(tx, tenant, now, acted_at)
    rows = await tx.fetch_all(_sql("quest_board"), {"tenant": tenant})
    return walker, _board(rows, catalogue)


def _board(rows: Sequence[Row], catalogue: Catalogue) -> _Board:
    progress: dict[str, Row] = {}
    nodes: set[str] = set()
    for row in rows:
        if row["what"] == "quest":
            progress[row["id"]] = row
        else:
            nodes.add(row["id"])
    return _Board(catalogue, progress, frozenset(nodes))


def _sql(name: str) -> str:
    return load_queries("onceward_services.walk")[name]
