"""Request and response models of the walker's account: energy, synchronization, deletion."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from onceward_services.walk.model import Action, EventView, QuestView, TreeState, View
from onceward_services.walk.steps.model import StreakView

__all__ = [
    "DeletionAccepted",
    "EnergyEntry",
    "EnergyPage",
    "EnergySpend",
    "EnergySpent",
    "EnergyView",
    "SyncView",
]

_MAX_AMOUNT = 1_000_000_000


class EnergySpend(Action):
    """Energy to spend on one of the app's sinks."""

    sink: Annotated[str, Field(min_length=1, max_length=40, examples=["combat"])]
    amount: Annotated[int, Field(ge=1, le=_MAX_AMOUNT, examples=[120])]


class EnergySpent(View):
    """Energy was spent; ``spendId`` is the ``reference`` of its entry in the ledger."""

    spend_id: str
    sink: str
    amount: int
    energy_balance: int
    provisional: bool = Field(
        description="Open days have to pay: refunded if they bring less than they promised."
    )


class EnergyEntry(View):
    """One entry of the ledger. Ids grow by one."""

    id: int
    delta: int = Field(description="Positive for a credit, negative for a debit.")
    reason: str = Field(description="`steps`, `allocation`, `refund`, `spend.` and the sink, …")
    reference: str
    balance_after: int
    created_at: datetime


class EnergyPage(View):
    """A page of entries, newest first. If there are more, ``next`` is the next page's ``after``."""

    energy_balance: int
    items: list[EnergyEntry]
    next: int | None


class EnergyView(View):
    """The walker's energy: settled, promised by open days, and what can be spent of both."""

    energy_balance: int
    provisional_energy: int
    spendable_energy: int


class SyncView(View):
    """All that a device shows of a walker at one instant, and the events it has not seen."""

    walker_id: str
    last_event_id: int = Field(description="The newest event that this state contains.")
    tree: TreeState
    quests: list[QuestView]
    energy: EnergyView
    streak_state: StreakView
    events: list[EventView]
    next: int | None = Field(description="If there are more events, the next `after`; else null.")


class DeletionAccepted(View):
    """The walker's rows are being deleted."""

    status: Literal["accepted"] = "accepted"
