"""The outbox profile of routes: keys are remembered for 24 hours."""

from datetime import timedelta
from typing import Final

from onceward_outbox import Profile

__all__ = ["PROFILE"]

PROFILE: Final = Profile(name="routes", key_lifetime=timedelta(hours=24))
