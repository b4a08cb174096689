"""When periodic work is due. A slot is an instant with a name; each slot is worked once."""

from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta

from holdfast.errors import ConfigurationError

__all__ = ["Daily", "Every", "Schedule"]


@dataclass(frozen=True, slots=True)
class Every:
    """Once in every span of so many seconds, counted from 1970: all processes agree on it."""

    seconds: float

    def __post_init__(self) -> None:
        """Refuse what would be due without end."""
        if not 1 <= self.seconds < float("inf"):
            raise ConfigurationError("periodic work should have at least a second in between")

    def slot(self, now: datetime) -> datetime:
        """Return the newest slot that has begun."""
        count = int(now.timestamp() // self.seconds)
        return datetime.fromtimestamp(count * self.seconds, UTC)

    def next_slot(self, now: datetime) -> datetime:
        """Return the slot after that."""
        return self.slot(now) + timedelta(seconds=self.seconds)


@dataclass(frozen=True, slots=True)
class Daily:
    """Once a day at this time of day, in UTC. A day that was slept through is made up for, once."""

    at: time

    def __post_init__(self) -> None:
        """Refuse a time of another zone: to read it as UTC would be a guess."""
        if self.at.tzinfo not in (None, UTC):
            raise ConfigurationError("the time of daily work is in UTC: give it without a zone")

    def slot(self, now: datetime) -> datetime:
        """Return the newest slot that has begun."""
        today = datetime.combine(now.astimezone(UTC).date(), self.at, UTC)
        return today if today <= now else today - timedelta(days=1)

    def next_slot(self, now: datetime) -> datetime:
        """Return the slot after that."""
        return self.slot(now) + timedelta(days=1)


Schedule = Every | Daily
