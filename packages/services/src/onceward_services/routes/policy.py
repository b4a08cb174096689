"""The idempotency policy of the routes service."""

from typing import Final

from onceward import ErrorsStored, KeyFormat, Policy

__all__ = ["POLICY"]

POLICY: Final = Policy(
    name="routes",
    key_required=False,
    key_format=KeyFormat.UUID4,
    errors_stored=ErrorsStored.NONE,
)
