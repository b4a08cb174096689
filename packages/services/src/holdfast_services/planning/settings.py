"""Settings of planning, ``HOLDFAST_PLANNING_…``: part of the server's ``Settings``."""

from pydantic import BaseModel, Field

__all__ = ["PlanningSettings"]


class PlanningSettings(BaseModel):
    """Descriptions say what the variable should be; error messages quote them."""

    planning_cache_bytes: int = Field(
        16 * 1024 * 1024, ge=0, le=2**40, description="a whole number of bytes"
    )
    planning_roles_required: bool = Field(default=False, description="true or false")
