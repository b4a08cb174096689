"""Error codes of tree, quests and the walker's account with their HTTP statuses."""

from typing import Any, Final

from onceward.errors import ServiceError

__all__ = ["STATUSES", "walk_error"]

STATUSES: Final = {
    "ALREADY_ALLOCATED": 409,
    "INSUFFICIENT_ENERGY": 422,
    "INSUFFICIENT_POINTS": 422,
    "PREREQUISITES_NOT_MET": 422,
    "QUEST_ALREADY_COMPLETED": 409,
    "QUEST_ALREADY_IN_PROGRESS": 409,
    "QUEST_INCOMPLETE": 422,
    "QUEST_NOT_IN_PROGRESS": 422,
    "STEP_OUT_OF_ORDER": 422,
    "TOO_MANY_DEVICES": 422,
    "UNKNOWN_NODE": 422,
    "UNKNOWN_SINK": 422,
    "WALKER_BEING_DELETED": 409,
    "WALKER_NOT_SUSPENDED": 409,
    "WALKER_SUSPENDED": 403,
}


def walk_error(code: str, message: str, **details: Any) -> ServiceError:
    """Create the error to raise. Details are sent as they are, so their names are camelCase."""
    return ServiceError(STATUSES[code], code, message, details=details)
