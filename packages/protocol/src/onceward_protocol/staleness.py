"""Checks whether an action made offline is too old. The time is always an argument."""

import re
from datetime import UTC, datetime, timedelta

from onceward_protocol.errors import BodyInvalidError, StaleActionError

__all__ = [
    "CAP",
    "GRACE",
    "check_not_stale",
    "check_submitted_after_generated",
    "parse_instant",
]

CAP = timedelta(days=7)
"""The maximum age of an action: how long a device may stay offline."""

GRACE = timedelta(hours=6)
"""The tolerated difference between the clocks of device and server, either way."""

# Narrower than datetime.fromisoformat(), which also accepts week dates, any separator, commas and
# offsets of 99 minutes.
_INSTANT = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,9})?)?"
    r"(?:Z|[+-][0-9]{2}(?::?[0-5][0-9])?)"
)


def parse_instant(value: object, field: str) -> datetime:
    """Parse an ISO-8601 instant with a zone, as UTC. Raises ``BodyInvalidError`` otherwise.

    Digits after the microsecond are dropped. Without a zone the instant would be ambiguous, so it
    is refused rather than taken as UTC.
    """
    if isinstance(value, str) and _INSTANT.fullmatch(value) is not None:
        try:
            return datetime.fromisoformat(value).astimezone(UTC)
        except (ValueError, OverflowError):
            pass  # 30 February, hour 25, or outside the years 1 to 9999 in UTC
    raise BodyInvalidError(
        f"{field} must be an ISO-8601 instant with a zone, such as 2026-01-31T09:30:00Z.",
        details={"field": field},
    )


def check_not_stale(
    client_generated_at: datetime,
    now: datetime,
    *,
    cap: timedelta = CAP,
    grace: timedelta = GRACE,
) -> None:
    """Raise ``StaleActionError`` if older than cap + grace, or more than grace in the future."""
    age = now - client_generated_at
    if -grace <= age <= cap + grace:
        return
    days, hours = _number(cap / timedelta(days=1)), _number(grace / timedelta(hours=1))
    if age < timedelta():
        message = f"The action was made more than {hours} hours in the server's future."
    else:
        message = f"The action was made more than {days} days and {hours} hours ago."
    raise StaleActionError(
        message,
        details={
            "clientGeneratedAt": _iso(client_generated_at),
            "serverNow": _iso(now),
            "ageDays": age // timedelta(days=1),  # whole days
            "capDays": days,
            "graceHours": hours,
        },
    )


def check_submitted_after_generated(
    client_submitted_at: datetime, client_generated_at: datetime, *, grace: timedelta = GRACE
) -> None:
    """Raise ``BodyInvalidError`` if an action was sent more than the grace before it was made.

    Not the other way round: that would refuse every action queued for longer than the grace.
    """
    if client_generated_at - client_submitted_at > grace:
        hours = _number(grace / timedelta(hours=1))
        raise BodyInvalidError(
            f"clientSubmittedAt is more than {hours} hours before clientGeneratedAt.",
            details={"field": "clientSubmittedAt"},
        )


def _iso(instant: datetime) -> str:
    # Milliseconds as in JavaScript, unless they would hide the microseconds that matter.
    timespec = "microseconds" if instant.microsecond % 1000 else "milliseconds"
    return instant.astimezone(UTC).isoformat(timespec=timespec).replace("+00:00", "Z")


def _number(value: float) -> int | float:
    return int(value) if value.is_integer() else value
