"""Quests: list, start, advance and complete. Points are awarded once."""

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

import msgspec

from holdfast import Transaction
from holdfast.errors import NotFoundError
from holdfast.ports import Row, Store
from holdfast.stores.sql_loader import load_queries
from holdfast_services.walk.catalogue import Catalogue, Quest
from holdfast_services.walk.errors import walk_error
from holdfast_services.walk.events import WalkerEvent, add_event, insert_event
from holdfast_services.walk.suspension import lock_active_walker
from holdfast_services.walk.walkers import update_walker

__all__ = [
    "QuestState",
    "advance_quest",
    "complete_quest",
    "read_board",
    "start_quest",
    "visible_quests",
]

_PREREQUISITES = "PREREQUISITES_NOT_MET"


class QuestState(msgspec.Struct, frozen=True):
    """A quest and a walker's progress in it."""

    quest: Quest
    status: Literal["available", "in_progress", "completed"]
    steps_done: int = 0

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
        return QuestState(quest, row["status"], row["steps_done"])

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
    tx: Transaction, tenant: str, quest_id: str, *, now: datetime, catalogue: Catalogue
) -> QuestState:
    """Start a quest. A second start fails, with another key or without one."""
    board = await _lock_board(tx, tenant, now, catalogue)
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
    tx: Transaction, tenant: str, quest_id: str, step: int, *, now: datetime, catalogue: Catalogue
) -> QuestState:
    """Complete a step, which must be the next one."""
    board = await _lock_board(tx, tenant, now, catalogue)
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
    await tx.execute(
        _sql("advance_quest"),
        {"tenant": tenant, "quest_id": quest.id, "steps_done": step, "now": now},
    )
    await add_event(tx, tenant, "quest.advanced", {"questId": quest.id, "step": step}, now)
    return QuestState(quest, "in_progress", step)


async def complete_quest(
    tx: Transaction, tenant: str, quest_id: str, *, now: datetime, catalogue: Catalogue
) -> tuple[QuestState, int]:
    """Complete a quest and award its points; returns its state and the walker's points."""
    board = await _lock_board(tx, tenant, now, catalogue)
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
    changed = await tx.execute(
        _sql("complete_quest"),
        {"tenant": tenant, "quest_id": quest.id, "points": quest.points, "now": now},
    )
    if changed != 1:
        raise LookupError(
            "a quest in progress has no row in progress, although its walker is locked"
        )
    walker = await update_walker(tx, tenant, now, points=quest.points, events=1)
    completed = {
        "questId": quest.id,
        "pointsAwarded": quest.points,
        "pointsBanked": walker.points_banked,
    }
    await insert_event(tx, tenant, WalkerEvent(walker.event_seq, "quest.completed", completed, now))
    return QuestState(quest, "completed", state.steps_done), walker.points_banked


async def _lock_board(tx: Transaction, tenant: str, now: datetime, catalogue: Catalogue) -> _Board:
    await lock_active_walker(tx, tenant, now)
    return _board(await tx.fetch_all(_sql("quest_board"), {"tenant": tenant}), catalogue)


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
    return load_queries("holdfast_services.walk")[name]
