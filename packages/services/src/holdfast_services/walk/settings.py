"""Settings of tree, quests and events, ``HOLDFAST_WALK_…``: part of the server's ``Settings``."""

from pydantic import BaseModel, Field

__all__ = ["WalkSettings"]


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
