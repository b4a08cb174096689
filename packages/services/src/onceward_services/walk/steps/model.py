"""Request and response models of steps and reviews."""

import re
from datetime import date, datetime
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from onceward.errors import BodyInvalidError
from onceward_protocol.staleness import parse_instant
from onceward_services.walk.steps.rules import find_zone

__all__ = [
    "DayView",
    "DayViews",
    "IngestResponse",
    "Resolution",
    "ReviewView",
    "ReviewViews",
    "StepReport",
    "StreakView",
]

_DAY: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_MAX_STEPS: Final = 1_000_000
# One for each minute of a day of 25 hours.
_MAX_SAMPLES: Final = 1500


def _instant(value: object) -> datetime:
    """Parse an instant as the guard does. Anything else is malformed: 400."""
    try:
        return parse_instant(value, "it")
    except BodyInvalidError:
        raise PydanticCustomError(
            "instant", "should be an ISO-8601 instant with a zone, such as 2026-01-31T09:30:00Z"
        ) from None


def _day(value: object) -> date:
    if isinstance(value, str) and _DAY.fullmatch(value) is not None:
        try:
            return date.fromisoformat(value)
        except ValueError:
            pass  # 30 February
    raise PydanticCustomError("day", "should be a day, such as 2026-01-31")


def _text(value: object) -> object:
    """Raise "malformed" (400) for a wrong type; a wrong word is "not allowed" (422)."""
    if not isinstance(value, str):
        raise PydanticCustomError("text", "should be a string")
    return value


def _zone(name: str) -> str:
    return find_zone(name).key


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("should have no control characters")
    return text


Instant = Annotated[datetime, BeforeValidator(_instant, json_schema_input_type=str)]
Day = Annotated[date, BeforeValidator(_day, json_schema_input_type=str)]
Zone = Annotated[str, Field(max_length=100), AfterValidator(_zone)]
Bundle = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_printable)]


class _Strict(BaseModel):
    """Values are not converted, and unknown fields are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, alias_generator=to_camel)


class _Response(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class SampleSpan(_Strict):
    """The times of the first and the last sample."""

    start: Instant
    end: Instant

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.end < self.start:
            raise ValueError("should not end before it starts")
        return self


class SampleView(_Strict):
    """The steps between two instants, as the health app has them."""

    start: Instant
    end: Instant
    count: int = Field(ge=0, le=_MAX_STEPS)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.end < self.start:
            raise ValueError("should not end before it starts")
        return self


class ChallengeResponse(_Strict):
    """The samples of a day that was read again, in order, and their digest.

    The digest is the SHA-256, in lowercase hex, of the id and a line feed, followed by one line for
    each sample: start and end in milliseconds since 1970 and the count, with a space between them
    and a line feed at the end.
    """

    id: Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_printable)]
    samples: Annotated[list[SampleView], Field(max_length=_MAX_SAMPLES)]
    sample_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class StepReport(_Strict):
    """The steps of one of the walker's days so far, as the health app counted them."""

    day: Day
    # No upper bound here: too many steps have a separate error code.
    count: int = Field(ge=0)
    source: Annotated[Literal["HealthKit", "HealthConnect", "WatchNative"], BeforeValidator(_text)]
    tz: Zone
    sample_span: SampleSpan
    source_bundle_id: Bundle
    # The guard checks its format.
    idempotency_key: str
    client_submitted_at: Instant
    # Outboxes add it to every action. It is ignored: a report is about a day.
    client_generated_at: Instant | None = None
    attestation_token: str | None = None
    challenge: ChallengeResponse | None = Field(
        None, description="The response to a `challenge` of this day."
    )

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "day": "2026-05-18",
                    "count": 4200,
                    "source": "HealthKit",
                    "tz": "Europe/Warsaw",
                    "sampleSpan": {
                        "start": "2026-05-18T06:00:00Z",
                        "end": "2026-05-18T15:30:00Z",
                    },
                    "sourceBundleId": "com.apple.health",
                    "idempotencyKey": "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10",
                    "clientSubmittedAt": "2026-05-18T15:31:00Z",
                }
            ]
        }
    )


class StreakView(_Response):
    """A streak. ``decayAt`` is when it next decays unless another day is attested."""

    current_length_days: int
    last_attested_date: date | None
    bonus_tier: int
    decay_at: datetime | None
    total_lifetime_steps: int


class ChallengeView(_Response):
    """A day to read again from the health app, and until when."""

    id: str
    day: date
    due_at: datetime


class IngestResponse(_Response):
    """The report is stored. Its energy is provisional until the day is reconciled."""

    provisional: Literal[True] = True
    provisional_energy: int
    streak_state: StreakView
    challenge: ChallengeView | None = Field(
        None, description="A day that looks odd: read it again, and report it with this id."
    )


class DayView(_Response):
    """One of the walker's days."""

    id: str
    day: str
    reconciliation_status: Literal["PENDING", "ACCEPTED", "QUARANTINED", "REJECTED"]
    reported_count: int
    accepted_count: int
    attested: bool
    source: str
    source_bundle_id: str
    tz: str
    sample_span: dict[str, datetime]
    reported_at: datetime
    reconciled_at: datetime | None


class DayViews(_Response):
    """A page of days, newest first."""

    items: list[DayView]
    next: str | None


class Resolution(_Strict):
    """An admin's decision. The accepted count may be lower than the reported one.

    ``suspend`` rejects, and suspends the walker.
    """

    decision: Annotated[Literal["accept", "reject", "suspend"], BeforeValidator(_text)]
    accepted_count: int | None = Field(None, ge=0, le=_MAX_STEPS)
    note: Annotated[str, Field(max_length=1000), AfterValidator(_printable)] | None = None

    @model_validator(mode="after")
    def _check_accepted_count(self) -> Self:
        if self.decision != "accept" and self.accepted_count is not None:
            raise ValueError("acceptedCount is only allowed with accept")
        return self


class ReviewView(_Response):
    """A review by an admin, open or resolved."""

    id: str
    kind: Literal["quarantined_day", "anti_cheat"]
    walker_id: str
    day: str | None
    reasons: list[dict[str, Any]]
    status: Literal["open", "resolved"]
    opened_at: datetime
    resolved_at: datetime | None
    resolved_by: str | None
    decision: Literal["accept", "reject", "suspend"] | None
    note: str | None


class ReviewViews(_Response):
    """A page of reviews, oldest first."""

    items: list[ReviewView]
    next: str | None
