"""The outbox profile of planning: any visible ASCII as key, and a version with every write."""

from datetime import timedelta
from typing import Final

from onceward_outbox import Profile
from onceward_protocol.keys import KeyFormat

__all__ = ["PROFILE"]

PROFILE: Final = Profile(
    name="planning",
    key_lifetime=timedelta(hours=24),
    key_format=KeyFormat.OPAQUE,
    # Writes without a version are refused, forced ones too.
    force_with_version=True,
)
