"""What tree, quests and the walker look like on the wire. Shapes only."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from holdfast.core.staleness import parse_instant
from holdfast.errors import BodyInvalidError
from holdfast_services.walk.steps.model import StreakView

__all__ = [
    "AllocationView",
    "EventPage",
    "EventView",
    "NodeView",
    "QuestAdvance",
    "QuestBoard",
    "QuestCompleted",
    "QuestCompletion",
    "QuestStart",
    "QuestStatus",
    "QuestView",
    "TreeAllocated",
    "TreeAllocation",
    "TreeState",
    "WalkerView",
]

# More than the tree has: a bound on the work of one request, not on anyone's plans.
_MAX_BATCH = 100

QuestStatus = Literal["available", "in_progress", "completed"]


def _an_instant(text: str) -> str:
    """Take what the guard takes; where there is no guard for it, say the same."""
    try:
        parse_instant(text, "it")
    except BodyInvalidError:
        raise PydanticCustomError(
            "instant", "should be an ISO-8601 instant with a zone, such as 2026-01-31T09:30:00Z"
        ) from None
    return text


def _each_once(nodes: "list[NodeChoice]") -> "list[NodeChoice]":
    ids = [node.node_id for node in nodes]
    if len(set(ids)) < len(ids):
        raise ValueError("should name each node once")
    return nodes


Instant = Annotated[
    str,
    AfterValidator(_an_instant),
    Field(json_schema_extra={"format": "date-time"}, examples=["2026-01-31T09:30:00Z"]),
]
NodeId = Annotated[str, Field(min_length=1, max_length=64, examples=["node.even-stride"])]
QuestId = Annotated[str, Field(min_length=1, max_length=64, examples=["quest.001"])]


class _Request(BaseModel):
    """Nothing is converted and nothing is ignored: a misspelt field is an error, not a default."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, alias_generator=to_camel)


class _Action(_Request):
    """Something a person did, maybe days ago. The guard has checked both times."""

    client_generated_at: Instant = Field(description="When the person acted. Never changes.")
    client_submitted_at: Instant | None = Field(None, description="When this try was sent.")


class NodeChoice(_Request):
    """A node to take."""

    node_id: NodeId


class TreeAllocation(_Action):
    """Nodes to take, in this order: all or none."""

    allocations: Annotated[
        list[NodeChoice],
        Field(min_length=1, max_length=_MAX_BATCH),
        AfterValidator(_each_once),
    ]


class QuestStart(_Request):
    """A quest to begin. Times are welcome, since a queue adds them; they do not matter here."""

    quest_id: QuestId
    client_generated_at: Instant | None = None
    client_submitted_at: Instant | None = None


class QuestAdvance(_Action):
    """One more step done; which one stands in the path."""


class QuestCompletion(_Action):
    """A quest all of whose steps are done."""

    quest_id: QuestId


class _View(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class AllocationView(_View):
    """A node the walker has; provisional until the steps it rests on are looked at."""

    node_id: str
    kind: Literal["node", "keystone"]
    provisional: bool
    allocated_at: datetime


class NodeView(_View):
    """A node there is."""

    node_id: str
    kind: Literal["node", "keystone"]
    title: str
    points_cost: int
    energy_cost: int = Field(description="What is taken now: 0 where energy is not required.")
    prerequisites: list[str]
    reveals_quest: bool


class TreeState(_View):
    """A walker's tree."""

    walker_id: str
    points_banked: int
    allocations: list[AllocationView]
    nodes: list[NodeView]


class TreeAllocated(TreeState):
    """The tree after an allocation, and the energy that is left."""

    energy_balance: int


class QuestView(_View):
    """A quest as one walker sees it."""

    quest_id: str
    title: str
    steps: int
    current_step: int = Field(
        description="The step to do next: 0 before the start, one more than `steps` at the end."
    )
    status: QuestStatus
    points_awarded: int = Field(description="What completing it awards, once.")


class QuestBoard(_View):
    """The quests a walker can start, is on, or has completed."""

    quests: list[QuestView]


class QuestCompleted(QuestView):
    """A completed quest, and the points the walker has with its award."""

    points_banked: int


class WalkerView(_View):
    """Who is signed in, and what they have."""

    walker_id: str
    points_banked: int
    energy_balance: int
    last_event_id: int
    streak_state: StreakView


class EventView(_View):
    """One thing that happened to the walker. Ids grow by one."""

    id: int
    type: str
    data: Mapping[str, Any]
    created_at: datetime


class EventPage(_View):
    """Events, oldest first; ``next`` is what to ask ``after`` where there are more."""

    items: list[EventView]
    next: int | None
