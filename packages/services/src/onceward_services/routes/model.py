"""Request and response models of route submissions."""

from datetime import datetime
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

__all__ = ["Place", "RouteAccepted", "RouteSubmission", "RouteView", "Status"]

Status = Literal["queued", "running", "done", "failed"]

_FIRST_PRINTABLE: Final = 0x20
_DELETE: Final = 0x7F


def _check_printable(text: str) -> str:
    """Reject blank text and control characters."""
    if not text.strip():
        raise ValueError("should not be blank")
    if any(ord(c) < _FIRST_PRINTABLE or ord(c) == _DELETE for c in text):
        raise ValueError("should have no control characters")
    return text


Interest = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_check_printable)]


class _Strict(BaseModel):
    """Values are not converted, and unknown fields are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Place(_Strict):
    """A point on the map, in degrees."""

    lat: float = Field(ge=-90, le=90)
    lon: float = Field(ge=-180, le=180)


class RouteSubmission(_Strict):
    """A request for a walk: start, duration, interests."""

    start: Place
    minutes: float = Field(ge=1, le=1440)
    interests: list[Interest] = Field(default_factory=list, max_length=20)

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "start": {"lat": 55.9533, "lon": -3.1883},
                    "minutes": 90,
                    "interests": ["history", "coffee"],
                }
            ]
        }
    )


class RouteAccepted(BaseModel):
    """The submission is stored; a job plans the route."""

    request_id: str
    status: Literal["accepted"] = "accepted"


class RouteView(BaseModel):
    """The status of a submission and, once it is done, the route."""

    request_id: str
    status: Status
    created_at: datetime
    updated_at: datetime
    route: dict[str, Any] | None = None
