"""Settings of planning. Part of the server's: ``HOLDFAST_PLANNING_…``."""

from pydantic import BaseModel, Field

__all__ = ["PlanningSettings"]


class PlanningSettings(BaseModel):
    """What can be set about the planning service. Descriptions as in the server's settings."""

    planning_cache_bytes: int = Field(
        16 * 1024 * 1024, ge=0, le=2**40, description="a whole number of bytes"
    )
