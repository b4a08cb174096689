"""Request and response models of planning."""

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Final, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from onceward.errors import BodyInvalidError, FieldNotAllowedError
from onceward.ports import Row
from onceward_protocol.staleness import parse_instant

__all__ = [
    "AssignmentMove",
    "AssignmentPatch",
    "AssignmentView",
    "AttemptView",
    "AuditEventView",
    "DashboardView",
    "DeliveryDetail",
    "DeliveryView",
    "MissionCounts",
    "MissionPatch",
    "MissionReplacement",
    "MissionView",
    "NewAssignment",
    "NewMission",
    "NewProject",
    "NewWebhook",
    "NotificationView",
    "OwnAssignmentView",
    "Page",
    "ProjectPatch",
    "ProjectView",
    "ReadUpTo",
    "ReadUpToResult",
    "Rotation",
    "VersionOnly",
    "WebhookPatch",
    "WebhookView",
    "WebhookWithSecret",
    "check_period",
    "dashboard_view",
    "row_view",
]

Status = Literal["planned", "active", "done", "cancelled"]
Item = TypeVar("Item")

# Control characters other than line breaks and tabs.
_CONTROL: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_LINE_BREAKS: Final = re.compile("[\n\r\t]")


def _text(value: str) -> str:
    if _CONTROL.search(value) is not None:
        raise ValueError("should have no control characters")
    return value


def _line(value: str) -> str:
    if not value.strip():
        raise ValueError("should not be blank")
    if _LINE_BREAKS.search(value) is not None:
        raise ValueError("should be one line")
    return _text(value)


def _instant(value: object) -> datetime:
    """Parse an instant as the guard does. Anything else is malformed: 400."""
    try:
        return parse_instant(value, "it")
    except BodyInvalidError:
        raise PydanticCustomError(
            "instant", "should be an ISO-8601 instant with a zone, such as 2026-01-31T09:30:00Z"
        ) from None


Line = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_line)]
Text = Annotated[str, Field(max_length=10_000), AfterValidator(_text)]
Person = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_line)]
Instant = Annotated[datetime, BeforeValidator(_instant)]
SeenVersion = Annotated[
    int | None,
    Field(description="The version to change, if there is no If-Match."),
]


class _Strict(BaseModel):
    """Values are not converted, and unknown fields are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class NewProject(_Strict):
    """A project to create."""

    name: Line
    description: Text | None = None

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "Harbour clean-up"}]})


class ProjectPatch(_Strict):
    """The fields to change. Missing fields keep their values; null clears the description."""

    # A factory, so that the OpenAPI document shows no default: a missing field is not set.
    name: Line = Field(default_factory=str)
    description: Text | None = None
    archived: bool = Field(default_factory=bool, description="false takes it out of the archive.")
    version: SeenVersion = None

    model_config = ConfigDict(json_schema_extra={"examples": [{"archived": True, "version": 1}]})


class _MissionFields(_Strict):
    """All fields of a mission. Missing ones have their defaults."""

    title: Line
    description: Text | None = None
    status: Status = "planned"
    starts_at: Instant | None = None
    ends_at: Instant | None = None


_MISSION: Final[dict[str, Any]] = {
    "title": "Survey the north quay",
    "status": "planned",
    "starts_at": "2026-06-01T07:00:00Z",
    "ends_at": "2026-06-01T15:00:00Z",
}


class NewMission(_MissionFields):
    """A mission to create."""

    model_config = ConfigDict(json_schema_extra={"examples": [_MISSION]})


class MissionReplacement(_MissionFields):
    """The new state of a mission. Missing fields are reset to their defaults."""

    version: SeenVersion = None

    model_config = ConfigDict(json_schema_extra={"examples": [_MISSION | {"version": 1}]})


class MissionPatch(_Strict):
    """The fields to change. Missing fields keep their values; null clears an optional field."""

    # A factory, so that the OpenAPI document shows no default: a missing field is not set.
    title: Line = Field(default_factory=str)
    description: Text | None = None
    status: Status = Field(default_factory=lambda: "planned")
    starts_at: Instant | None = None
    ends_at: Instant | None = None
    version: SeenVersion = None

    model_config = ConfigDict(json_schema_extra={"examples": [{"status": "active", "version": 1}]})


class NewAssignment(_Strict):
    """A person to assign to a mission, and their role."""

    assignee: Person
    role: Line | None = None

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"assignee": "ada", "role": "diver"}]}
    )


class AssignmentPatch(_Strict):
    """The fields to change. Missing fields keep their values; null clears the role."""

    assignee: Person = Field(default_factory=str)
    role: Line | None = None
    version: SeenVersion = None

    model_config = ConfigDict(json_schema_extra={"examples": [{"role": "pilot", "version": 1}]})


class AssignmentMove(_Strict):
    """The mission to move an assignment to."""

    mission_id: str = Field(max_length=200)
    version: SeenVersion = None

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"mission_id": "0197a6d2-7c00-7000-8000-000000000000", "version": 1}]
        }
    )


class VersionOnly(_Strict):
    """The version to delete, if there is no If-Match."""

    version: SeenVersion = None

    model_config = ConfigDict(json_schema_extra={"examples": [{"version": 1}]})


class ReadUpTo(_Strict):
    """How far the notifications are read."""

    up_to: str = Field(max_length=100, description="The `cursor` of a notification.")

    model_config = ConfigDict(json_schema_extra={"examples": [{"up_to": "42-8f1c0e2d4b6a"}]})


Event = Literal["assignment.assigned", "assignment.moved", "assignment.changed", "assignment.ended"]
Events = Annotated[
    list[Event] | None,
    Field(min_length=1, description="The types of events it gets; null is all, later ones too."),
]
Url = Annotated[
    str, Field(description="An https address. Redirects and internal addresses are refused.")
]


class NewWebhook(_Strict):
    """A webhook to register."""

    url: Url
    description: Text | None = None
    events: Events = None

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"url": "https://example.com/hooks/planning"}]}
    )


class WebhookPatch(_Strict):
    """The fields to change. Missing fields keep their values."""

    url: Url = Field(default_factory=str)
    description: Text | None = None
    events: Events = None
    enabled: bool = Field(default_factory=bool, description="true enables a disabled webhook.")

    model_config = ConfigDict(json_schema_extra={"examples": [{"enabled": True}]})


class Rotation(_Strict):
    """How long messages are signed with the previous secret, too."""

    overlap_hours: float = Field(24.0, ge=0, le=720, allow_inf_nan=False)

    model_config = ConfigDict(json_schema_extra={"examples": [{"overlap_hours": 24}]})


# -- responses: only for the OpenAPI document; responses are built from rows ----------------------


class _View(BaseModel):
    id: str
    version: int
    created_at: datetime
    updated_at: datetime


class ProjectView(_View):
    """A project."""

    name: str
    description: str | None
    archived_at: datetime | None


class MissionView(_View):
    """A mission."""

    project_id: str
    title: str
    description: str | None
    status: Status
    starts_at: datetime | None
    ends_at: datetime | None


class AssignmentView(_View):
    """An assignment."""

    project_id: str
    mission_id: str
    assignee: str
    role: str | None


class OwnAssignmentView(AssignmentView):
    """An assignment of the signed-in person, with its mission."""

    mission_title: str
    mission_status: Status
    starts_at: datetime | None
    ends_at: datetime | None


class MissionCounts(BaseModel):
    """The number of missions of each status."""

    planned: int
    active: int
    done: int
    cancelled: int


class DashboardView(BaseModel):
    """Counters of a project, which include every write acknowledged before ``as_of``."""

    project_id: str
    missions: MissionCounts
    assignments: int
    people: int
    as_of: datetime


class AuditEventView(BaseModel):
    """One executed write or job."""

    id: str
    actor: str
    endpoint: str
    resource: str | None
    version: int | None
    status: int
    payload_hash: str = Field(
        description="The whole hash for the roles auditor and admin; 12 digits for others."
    )
    request_id: str
    correlation_id: str
    created_at: datetime


class NotificationView(BaseModel):
    """A notification of the signed-in person."""

    id: str
    kind: Literal["assigned", "moved", "changed", "ended"]
    assignment_id: str
    version: int = Field(description="The version of the assignment that it is about.")
    mission_id: str
    mission_title: str | None = Field(description="The current title.")
    project_id: str | None
    created_at: datetime
    read_at: datetime | None
    cursor: str = Field(description="For `after`, to read on behind this notification.")


class ReadUpToResult(BaseModel):
    """Result of marking notifications."""

    marked: int
    more: bool


class WebhookView(BaseModel):
    """A webhook, without its secret."""

    id: str
    url: str
    description: str | None
    events: list[Event] | None
    enabled: bool
    failing_since: datetime | None = Field(description="Of the first failure since a success.")
    disabled_at: datetime | None
    disabled_reason: str | None
    secret_created_at: datetime
    previous_secret_until: datetime | None
    created_by: str
    created_at: datetime
    updated_at: datetime


class WebhookWithSecret(WebhookView):
    """A webhook with its secret, which is shown in this response and in replays of it only."""

    secret: str = Field(description="`whsec_` and base64, as in Standard Webhooks.")


DeliveryState = Literal["waiting", "delivered", "failed", "cancelled"]


class DeliveryView(BaseModel):
    """A message to a webhook."""

    id: str = Field(description="The `webhook-id` of all attempts.")
    webhook_id: str
    notification_id: str | None
    type: str
    state: DeliveryState
    attempts: int
    detail: str | None = Field(description="What became of the last attempt.")
    created_at: datetime
    finished_at: datetime | None


class AttemptView(BaseModel):
    """A request to a webhook. Without an outcome it is running, or its process was killed."""

    id: str
    started_at: datetime
    finished_at: datetime | None
    outcome: Literal["delivered", "gone", "refused", "unavailable"] | None
    status: int | None
    detail: str | None


class DeliveryDetail(DeliveryView):
    """A message to a webhook, with its attempts."""

    next_attempt_at: datetime | None = Field(
        description="When it is tried next; null if it has ended, is tried now, or is behind "
        "another delivery."
    )
    message: dict[str, Any] = Field(description="The body of the request.")
    attempt_log: list[AttemptView] = Field(description="The last 100, oldest first.")


class Page(BaseModel, Generic[Item]):
    """One page. ``next`` is the cursor of the next page, or null."""

    items: list[Item]
    next: str | None


def row_view(row: Row) -> dict[str, Any]:
    """Return the JSON fields of a row, with instants in one format for both databases."""
    return {
        name: value.isoformat(timespec="microseconds").replace("+00:00", "Z")
        if isinstance(value, datetime)
        else value
        for name, value in row.items()
    }


def dashboard_view(row: Row) -> dict[str, Any]:
    """Return the JSON fields of a dashboard."""
    flat = row_view(row)
    return {
        "project_id": flat["project_id"],
        "missions": {status: flat[status] for status in ("planned", "active", "done", "cancelled")},
        "assignments": flat["assignments"],
        "people": flat["people"],
        "as_of": flat["as_of"],
    }


def check_period(mission: Mapping[str, Any]) -> None:
    """Raise ``FieldNotAllowedError`` for a mission that ends before it starts."""
    starts_at, ends_at = mission["starts_at"], mission["ends_at"]
    if starts_at is not None and ends_at is not None and ends_at < starts_at:
        raise FieldNotAllowedError(
            "ends_at: should not be before starts_at",
            details={"fields": [{"field": "ends_at", "reason": "should not be before starts_at"}]},
        )
