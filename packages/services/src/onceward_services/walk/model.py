"""Request and response models of tree, quests and the walker."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from onceward.errors import BodyInvalidError
from onceward_protocol.staleness import parse_instant
from onceward_services.walk.steps.model import StreakView

__all__ = [
    "Action",
    "AllocationView",
    "EventPage",
    "EventView",
    "NodeView",
    "OptionalTimes",
    "QuestAdvance",
    "QuestBoard",
    "QuestCompleted",
    "QuestCompletion",
    "QuestStart",
    "QuestStatus",
    "QuestView",
    "TreeAllocation",
    "TreeState",
    "View",
    "WalkerView",
]

# More than the tree has nodes: it limits the work of one request.
_MAX_BATCH = 100

QuestStatus = Literal["available", "in_progress", "completed"]


def _check_instant(text: str) -> str:
    """Accept what the guard accepts, with the same message."""
    try:
        parse_instant(text, "it")
    except BodyInvalidError:
        raise PydanticCustomError(
            "instant", "should be an ISO-8601 instant with a zone, such as 2026-01-31T09:30:00Z"
        ) from None
    return text


def _check_distinct(nodes: "list[NodeChoice]") -> "list[NodeChoice]":
    ids = [node.node_id for node in nodes]
    if len(set(ids)) < len(ids):
        raise ValueError("should name each node once")
    return nodes


Instant = Annotated[
    str,
    AfterValidator(_check_instant),
    Field(json_schema_extra={"format": "date-time"}, examples=["2026-01-31T09:30:00Z"]),
]
NodeId = Annotated[str, Field(min_length=1, max_length=64, examples=["node.even-stride"])]
QuestId = Annotated[str, Field(min_length=1, max_length=64, examples=["quest.001"])]


class _Request(BaseModel):
    """Values are not converted, and unknown fields are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, alias_generator=to_camel)


class _Keyed(_Request):
    """A body may repeat the key of the header, so that a queued payload is complete by itself."""

    idempotency_key: str | None = Field(
        None, description="If sent, the same as the header `Idempotency-Key`."
    )


class Action(_Keyed):
    """A user action, perhaps made days ago. The guard has checked both times."""

    client_generated_at: Instant = Field(
        description="When the user acted. The same for all retries."
    )
    client_submitted_at: Instant | None = Field(None, description="When this attempt was sent.")


class NodeChoice(_Request):
    """A node to allocate."""

    node_id: NodeId


class TreeAllocation(Action):
    """Nodes to allocate in this order, all or none."""

    allocations: Annotated[
        list[NodeChoice],
        Field(min_length=1, max_length=_MAX_BATCH),
        AfterValidator(_check_distinct),
    ]


class OptionalTimes(_Keyed):
    """A request that is never too old. Outboxes add the times to every body."""

    client_generated_at: Instant | None = None
    client_submitted_at: Instant | None = None


class QuestStart(OptionalTimes):
    """A quest to start."""

    quest_id: QuestId


class QuestAdvance(Action):
    """A completed step; the path names its number."""

    step_index: int | None = Field(None, description="If sent, the same number as in the path.")


class QuestCompletion(Action):
    """A quest whose steps are all completed."""

    quest_id: QuestId


class View(BaseModel):
    """A response; its fields are camelCase in JSON."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class AllocationView(View):
    """An allocated node; provisional until the steps it depends on have been reconciled."""

    node_id: str
    kind: Literal["node", "keystone"]
    provisional: bool
    allocated_at: datetime
    refund_due_at: datetime | None = Field(
        description="When it is refunded, because the steps it depends on were rejected; or null."
    )


class NodeView(View):
    """A node of the tree."""

    node_id: str
    kind: Literal["node", "keystone"]
    title: str
    points_cost: int
    energy_cost: int = Field(description="The cost now: 0 unless the server requires energy.")
    prerequisites: list[str]
    reveals_quest: bool


class TreeState(View):
    """A walker's tree."""

    walker_id: str
    points_banked: int
    energy_balance: int
    spendable_energy: int = Field(
        description="The balance and the credit of open days, minus what is spent of it already."
    )
    catalogue_version: str = Field(description="Differs if and only if nodes or quests do.")
    allocations: list[AllocationView]
    nodes: list[NodeView]


class QuestView(View):
    """A quest as one walker sees it."""

    quest_id: str
    title: str
    steps: int
    current_step: int = Field(
        description="The next step: 0 before the start, `steps` + 1 at the end."
    )
    status: QuestStatus
    points_awarded: int = Field(description="Points awarded once, on completion.")
    provisional: bool = Field(
        description="Some of the progress was made on days that are not settled yet."
    )


class QuestBoard(View):
    """The quests that a walker can start, has started or has completed."""

    quests: list[QuestView]


class QuestCompleted(QuestView):
    """A completed quest, and the walker's points including its award."""

    points_banked: int


class WalkerView(View):
    """The current walker: points, energy, streak."""

    walker_id: str
    points_banked: int
    points_provisional: int = Field(
        description="The part of `pointsBanked` that was won on days that are not settled yet."
    )
    energy_balance: int
    provisional_energy: int = Field(description="What reports of open days may still add.")
    spendable_energy: int = Field(
        description="The balance and `provisionalEnergy`, minus what is spent of it already."
    )
    last_event_id: int
    streak_state: StreakView


class EventView(View):
    """One event of the walker. Ids grow by one."""

    id: int
    type: str
    data: Mapping[str, Any]
    created_at: datetime


class EventPage(View):
    """A page of events, oldest first. If there are more, ``next`` is the next page's ``after``."""

    items: list[EventView]
    next: int | None
