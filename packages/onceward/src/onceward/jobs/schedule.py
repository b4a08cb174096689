"""Schedules of periodic jobs. A slot is the instant at which a job is due; each runs once."""

from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta

from onceward.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Every:
    """Every ``seconds``, counted from 1970, so that all processes compute the same slots."""

    seconds: float

    def __post_init__(self) -> None:
        if not 1 <= self.seconds < float("inf"):
            raise ConfigurationError(f"interval is {self.seconds} seconds, it must be at least 1")

    def describe(self) -> str:
        for unit, size in (("day", 86_400), ("hour", 3600), ("minute", 60), ("second", 1)):
            if self.seconds % size == 0:
                count = int(self.seconds // size)
                return f"every {unit}" if count == 1 else f"every {count:,} {unit}s"
        return f"every {self.seconds:g} seconds"

    def slot(self, now: datetime) -> datetime:
        """Return the newest slot that has begun."""
        count = int(now.timestamp() // self.seconds)
        return datetime.fromtimestamp(count * self.seconds, UTC)

    def next_slot(self, now: datetime) -> datetime:
        return self.slot(now) + timedelta(seconds=self.seconds)


@dataclass(frozen=True, slots=True)
class Daily:
    """Once a day at this time in UTC. Only the newest missed day is made up for."""

    at: time

    def __post_init__(self) -> None:
        if self.at.tzinfo not in (None, UTC):
            raise ConfigurationError("the time of a daily job is in UTC: use a time without a zone")

    def describe(self) -> str:
        precision = "minutes" if self.at == self.at.replace(second=0, microsecond=0) else "auto"
        return f"every day at {self.at.replace(tzinfo=None).isoformat(precision)} UTC"

    def slot(self, now: datetime) -> datetime:
        today = datetime.combine(now.astimezone(UTC).date(), self.at, UTC)
        return today if today <= now else today - timedelta(days=1)

    def next_slot(self, now: datetime) -> datetime:
        return self.slot(now) + timedelta(days=1)


Schedule = Every | Daily
