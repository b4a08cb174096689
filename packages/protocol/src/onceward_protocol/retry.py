"""Retry policies: which failures are transient, and how long to wait. Pure."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import assert_never

from onceward_protocol.errors import ConfigurationError

__all__ = [
    "CLIENT",
    "DEVICE",
    "PATIENT",
    "QUEUE",
    "WORKER",
    "Jitter",
    "RetryPolicy",
    "is_transient",
    "parse_retry_after",
    "queue_policy",
]

_TRANSIENT = frozenset({408, 425, 429})
_SERVER_ERRORS = range(500, 600)

_MAX_SECONDS = float(2**31 - 1)
"""Ceiling of ``Retry-After`` (68 years): adding it to any date must not overflow."""

_DELTA_SECONDS = re.compile(r"-?[0-9]+")


class Jitter(StrEnum):
    """How a delay is randomized, so that devices cut off together do not return together."""

    PLUS_MINUS = "plus-minus"
    """Up to ``jitter_fraction`` shorter or longer."""

    UP_TO = "up-to"
    """Up to ``jitter_fraction`` longer."""

    FULL = "full"
    """Anything between ``least_seconds`` and the delay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Exponential back-off with jitter, a maximum delay and a maximum number of attempts."""

    # The delay after the first attempt.
    first_seconds: float
    # Each delay is the one before times this.
    factor: float = 2.0
    # No delay is longer.
    ceiling_seconds: float
    # How the delay is randomized, so that clients do not retry together.
    jitter: Jitter
    # The part of the delay that is random.
    jitter_fraction: float = 0.0
    # No delay is shorter.
    least_seconds: float = 0.0
    attempts: int | None = None
    """Attempts in all, the first included. None: the caller sets a limit for each entry."""

    def __post_init__(self) -> None:
        """Raise ``ConfigurationError`` for invalid numbers."""
        if not 0 <= self.least_seconds <= self.first_seconds <= self.ceiling_seconds:
            raise ConfigurationError(
                "A retry policy needs 0 <= least_seconds <= first_seconds <= ceiling_seconds."
            )
        if not self.factor >= 1:
            raise ConfigurationError("A retry policy's factor must be at least 1.")
        if not 0 <= self.jitter_fraction <= 1:
            raise ConfigurationError("A retry policy's jitter_fraction must be between 0 and 1.")
        if self.attempts is not None and self.attempts < 1:
            raise ConfigurationError("A retry policy needs at least one attempt.")

    def delay_seconds(
        self, attempt: int, *, random: float, retry_after_seconds: float | None = None
    ) -> float:
        """Return how long to wait after the given attempt failed; the first attempt is 1.

        ``random`` is from [0, 1). The ceiling also holds after jitter. ``retry_after_seconds`` is a
        floor: jitter does not shorten it, and it may exceed the ceiling.
        """
        if attempt < 1:
            raise ValueError("attempt counts from 1")
        plain = self._plain_seconds(attempt)
        match self.jitter:
            case Jitter.PLUS_MINUS:
                delay = plain * (1 + self.jitter_fraction * (2 * random - 1))
            case Jitter.UP_TO:
                delay = plain * (1 + self.jitter_fraction * random)
            case Jitter.FULL:
                delay = self.least_seconds + (plain - self.least_seconds) * random
            case _:
                assert_never(self.jitter)
        delay = min(delay, self.ceiling_seconds)
        return delay if retry_after_seconds is None else max(delay, retry_after_seconds)

    def gives_up_after(self, attempt: int, *, max_attempts: int | None = None) -> bool:
        """Return whether the given failed attempt was the last one.

        ``max_attempts``, if given, overrides the policy's; with neither there is no limit.
        """
        limit = self.attempts if max_attempts is None else max_attempts
        return limit is not None and attempt >= limit

    def _plain_seconds(self, attempt: int) -> float:
        try:
            return min(self.first_seconds * self.factor ** (attempt - 1), self.ceiling_seconds)
        except OverflowError:
            return self.ceiling_seconds


def queue_policy(base_seconds: float = 1.0) -> RetryPolicy:
    """Return the policy of a device's queue: 2^n times a base, n being the attempts so far.

    It sets no number of attempts: each entry has its ``max_attempts``.
    """
    return RetryPolicy(
        first_seconds=2 * base_seconds,
        ceiling_seconds=1800,
        jitter=Jitter.PLUS_MINUS,
        jitter_fraction=0.25,
    )


DEVICE = RetryPolicy(
    first_seconds=5,
    ceiling_seconds=300,
    jitter=Jitter.PLUS_MINUS,
    jitter_fraction=0.25,
    attempts=12,
)
"""Twelve attempts per wake-up, then the entry stays queued for the next one."""

QUEUE = queue_policy()
"""The queue's policy with a base of one second."""

CLIENT = RetryPolicy(
    first_seconds=0.5, least_seconds=0.2, ceiling_seconds=5, jitter=Jitter.FULL, attempts=5
)
"""First 200 to 500 ms, then 200 ms to a doubling limit. A person is waiting."""

WORKER = RetryPolicy(
    first_seconds=1, ceiling_seconds=300, jitter=Jitter.UP_TO, jitter_fraction=0.5, attempts=5
)
"""Five attempts, then a dead letter."""

PATIENT = RetryPolicy(
    first_seconds=1,
    factor=4.0,
    ceiling_seconds=3600,
    jitter=Jitter.UP_TO,
    jitter_fraction=0.5,
    attempts=12,
)
"""Twelve attempts over at least five hours, then a dead letter. No caller waits for it."""


def is_transient(status: int | None) -> bool:
    """Return whether a failure may pass by itself; a status of None means no response."""
    return status is None or status in _TRANSIENT or status in _SERVER_ERRORS


def parse_retry_after(value: str | None, now: datetime) -> float | None:
    """Parse a ``Retry-After`` header, in seconds or as an HTTP-date; None if it is invalid.

    A past date or a negative number is 0.
    """
    text = (value or "").strip(" \t")
    if _DELTA_SECONDS.fullmatch(text) is not None:
        seconds = float(text)
    else:
        try:
            date = parsedate_to_datetime(text)
            # HTTP-dates are in UTC by definition, also in the old format without a zone.
            date = date if date.tzinfo is not None else date.replace(tzinfo=UTC)
            seconds = (date - now).total_seconds()
        except (ValueError, TypeError, IndexError, OverflowError):
            return None  # what email.utils raises for invalid dates
    return min(max(seconds, 0.0), _MAX_SECONDS)
