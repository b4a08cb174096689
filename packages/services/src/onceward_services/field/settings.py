"""Settings of field, ``ONCEWARD_FIELD_CHANGES_…``: part of the server's ``Settings``."""

from pydantic import BaseModel, Field

__all__ = ["FieldSettings"]


class FieldSettings(BaseModel):
    """Descriptions say what the variable should be; error messages quote them."""

    field_changes_wait_seconds: float = Field(
        60.0, ge=0, le=3600, description="a number of seconds from 0 to 3600"
    )
    field_changes_waiting: int = Field(
        10, ge=0, le=1_000_000, description="a whole number, or 0 for no limit"
    )
