"""The port through which events reach devices."""

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from onceward_services.walk.events import WalkerEvent
from onceward_services.webhooks.sender import Outcome

__all__ = ["Push", "PushMessage"]


@dataclass(frozen=True, slots=True)
class PushMessage:
    """One event for one device. ``id`` is the same in every attempt."""

    id: str
    walker: str
    platform: str
    token: str
    event: WalkerEvent


class Push(Protocol):
    """Delivers messages to devices."""

    async def send(self, message: PushMessage, now: datetime) -> Outcome:
        """Send one message. ``Gone`` means that the device does not exist any more."""
