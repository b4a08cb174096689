"""Handling of the outcome of a delivery by its job: a result, another attempt, or a dead letter."""

from typing import Any, assert_never

from onceward.errors import NonRetryableError, RetryLaterError
from onceward_services.webhooks.sender import Delivered, Gone, Outcome, Refused, Unavailable

__all__ = ["deliver"]


def deliver(outcome: Outcome) -> dict[str, Any]:
    """Return the result of a step. Raises ``RetryLaterError`` or ``NonRetryableError``."""
    match outcome:
        case Delivered(status):
            return {"status": status}
        case Unavailable(reason, after_seconds):
            raise RetryLaterError(reason, after_seconds=after_seconds)
        case Gone(reason) | Refused(reason):
            raise NonRetryableError(reason)
        case _:
            assert_never(outcome)
