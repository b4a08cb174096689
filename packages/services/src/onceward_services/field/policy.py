"""The idempotency policy of the field service: a device may be offline for a week."""

from datetime import timedelta
from typing import Final

from onceward import KeyFormat, Policy

__all__ = ["POLICY"]

POLICY: Final = Policy(name="field", key_format=KeyFormat.UUID4, success_ttl=timedelta(days=7))
