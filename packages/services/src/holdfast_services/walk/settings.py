"""Settings of tree, quests and events, ``HOLDFAST_WALK_…``: part of the server's ``Settings``."""

from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, Field

__all__ = ["WalkSettings"]

# A day is settled, reviewed and refunded within weeks. Until then entries are needed: they make
# a booking that is repeated have one effect.
_MIN_KEPT_DAYS: Final = 30
_KEPT: Final = f"a number of days from {_MIN_KEPT_DAYS}, or 0 to keep everything"


def _long_enough(days: float) -> float:
    if 0 < days < _MIN_KEPT_DAYS:
        raise ValueError("too short")
    return days


KeptDays = Annotated[
    float, Field(ge=0, le=36_500, allow_inf_nan=False), AfterValidator(_long_enough)
]


class WalkSettings(BaseModel):
    """Descriptions say what the variable should be; error messages quote them."""

    walk_energy_required: bool = Field(default=False, description="true or false")
    walk_events_poll_seconds: float = Field(
        1.0, ge=1, le=3600, description="a number of seconds from 1 to 3600"
    )
    walk_events_streams: int = Field(
        10, ge=0, le=1_000_000, description="a whole number, or 0 for no limit"
    )
    walk_events_keep_alive_seconds: float = Field(
        15.0, ge=1, le=3600, description="a number of seconds from 1 to 3600"
    )
    # How long events, refunds and entries of the energy ledger are kept; 0 keeps them for ever.
    walk_event_retention_days: KeptDays = Field(90.0, description=_KEPT)
    walk_refund_retention_days: KeptDays = Field(730.0, description=_KEPT)
    walk_ledger_retention_days: KeptDays = Field(730.0, description=_KEPT)
