"""Quests: what a walker sees of them, and the three ways on. Points are awarded once."""

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

import msgspec

from holdfast import Transaction
from holdfast.errors import NotFoundError
from holdfast.ports import Row, Store
from holdfast.stores.sql_loader import load_queries
from holdfast_services.walk.catalogue import Catalogue, Quest
from holdfast_services.walk.errors import refusal
from holdfast_services.walk.events import WalkerEvent, add_event, put_event
from holdfast_services.walk.walkers import lock_walker, move_walker

__all__ = ["Standing", "advance_quest", "complete_quest", "read_board", "start_quest"]

_MISSING = "PREREQUISITES_NOT_MET"


class Standing(msgspec.Struct, frozen=True):
    """A quest and how far a walker is with it."""

    quest: Quest
    status: Literal["available", "in_progress", "completed"]
    steps_done: int = 0

    @property
    def current_step(self) -> int:
        """The step to do next; 0 before the start, one more than there are at the end."""
        return 0 if self.status == "available" else self.steps_done + 1


class _Board(msgspec.Struct, frozen=True):
    """Everything that decides about a walker's quests."""

    catalogue: Catalogue
    progress: dict[str, Row]
    nodes: frozenset[str]

    def quest(self, quest_id: str) -> Quest:
        quest = self.catalogue.quests.get(quest_id)
        if quest is None:
            raise NotFoundError("there is no such quest")
        return quest

    def standing(self, quest: Quest) -> Standing:
        row = self.progress.get(quest.id)
        if row is None:
            return Standing(quest, "available")
        return Standing(quest, row["status"], row["steps_done"])

    def missing(self, quest: Quest) -> list[str]:
        """Return what the walker lacks for this quest: quests, or the keystone that reveals it."""
        lacking = [id_ for id_ in quest.requires if self.standing_of(id_) != "completed"]
        if quest.hidden:
            keystones = self.catalogue.revealed_by(quest.id)
            if self.nodes.isdisjoint(keystones):
                lacking += keystones
        return lacking

    def standing_of(self, quest_id: str) -> str | None:
        row = self.progress.get(quest_id)
        return None if row is None else row["status"]

    def refuse_missing(self, quest: Quest) -> None:
        missing = self.missing(quest)
        if missing:
            raise refusal(
                _MISSING, f"{quest.title!r} is not open yet", questId=quest.id, missing=missing
            )

    def under_way(self, quest: Quest) -> Standing:
        """Return a quest the walker is on, or raise why they are not."""
        standing = self.standing(quest)
        if standing.status == "completed":
            raise refusal(
                "QUEST_ALREADY_COMPLETED", f"{quest.title!r} is completed", questId=quest.id
            )
        if standing.status != "in_progress":
            raise refusal(
                "QUEST_NOT_IN_PROGRESS", f"{quest.title!r} has not been started", questId=quest.id
            )
        # A keystone that was given back takes the quest it revealed out of reach.
        self.refuse_missing(quest)
        return standing


async def read_board(store: Store, tenant: str, catalogue: Catalogue) -> list[Standing]:
    """Return the quests a walker can start, is on, or has completed."""
    board = _board(await store.read(_sql("quest_board"), {"tenant": tenant}), catalogue)
    return [
        standing
        for standing in map(board.standing, catalogue.quests.values())
        if standing.status == "completed" or not board.missing(standing.quest)
    ]


async def start_quest(
    tx: Transaction, tenant: str, quest_id: str, *, now: datetime, catalogue: Catalogue
) -> Standing:
    """Begin a quest. A second start is refused, with a key of its own or without one."""
    board = await _lock_board(tx, tenant, now, catalogue)
    quest = board.quest(quest_id)
    status = board.standing_of(quest.id)
    if status == "in_progress":
        raise refusal(
            "QUEST_ALREADY_IN_PROGRESS", f"{quest.title!r} is in progress", questId=quest.id
        )
    if status == "completed":
        raise refusal("QUEST_ALREADY_COMPLETED", f"{quest.title!r} is completed", questId=quest.id)
    board.refuse_missing(quest)
    await tx.execute(_sql("start_quest"), {"tenant": tenant, "quest_id": quest.id, "now": now})
    await add_event(tx, tenant, "quest.started", {"questId": quest.id}, now)
    return Standing(quest, "in_progress")


async def advance_quest(
    tx: Transaction, tenant: str, quest_id: str, step: int, *, now: datetime, catalogue: Catalogue
) -> Standing:
    """Do one step: the next one, and no other."""
    board = await _lock_board(tx, tenant, now, catalogue)
    quest = board.quest(quest_id)
    standing = board.under_way(quest)
    if step != standing.current_step or step > quest.steps:
        raise refusal(
            "STEP_OUT_OF_ORDER",
            f"{quest.title!r} is at step {standing.current_step} of {quest.steps}",
            questId=quest.id,
            step=step,
            currentStep=standing.current_step,
            steps=quest.steps,
        )
    await tx.execute(
        _sql("advance_quest"),
        {"tenant": tenant, "quest_id": quest.id, "steps_done": step, "now": now},
    )
    await add_event(tx, tenant, "quest.advanced", {"questId": quest.id, "step": step}, now)
    return Standing(quest, "in_progress", step)


async def complete_quest(
    tx: Transaction, tenant: str, quest_id: str, *, now: datetime, catalogue: Catalogue
) -> tuple[Standing, int]:
    """Complete a quest and award its points; returns it and the points the walker has now."""
    board = await _lock_board(tx, tenant, now, catalogue)
    quest = board.quest(quest_id)
    standing = board.under_way(quest)
    if standing.steps_done < quest.steps:
        raise refusal(
            "QUEST_INCOMPLETE",
            f"{quest.title!r} is at step {standing.current_step} of {quest.steps}",
            questId=quest.id,
            currentStep=standing.current_step,
            steps=quest.steps,
        )
    changed = await tx.execute(
        _sql("complete_quest"),
        {"tenant": tenant, "quest_id": quest.id, "points": quest.points, "now": now},
    )
    if changed != 1:
        raise LookupError("a quest under way has no row under way, though its walker is locked")
    walker = await move_walker(tx, tenant, now, points=quest.points, events=1)
    completed = {
        "questId": quest.id,
        "pointsAwarded": quest.points,
        "pointsBanked": walker.points_banked,
    }
    await put_event(tx, tenant, WalkerEvent(walker.event_seq, "quest.completed", completed, now))
    return Standing(quest, "completed", standing.steps_done), walker.points_banked


async def _lock_board(tx: Transaction, tenant: str, now: datetime, catalogue: Catalogue) -> _Board:
    await lock_walker(tx, tenant, now)
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
