"""Staleness: whether an action made offline still counts. The time is always an argument."""

import re
from datetime import UTC, datetime, timedelta

from holdfast.errors import BodyInvalidError, StaleActionError

__all__ = [
    "CAP",
    "GRACE",
    "check_not_stale",
    "check_submitted_after_generated",
    "parse_instant",
]

CAP = timedelta(days=7)
"""How old an action may be: as long as a device may stay offline."""

GRACE = timedelta(hours=6)
"""How far a device's clock may be off, either way."""

# Narrower than datetime.fromisoformat(), which also takes week dates, any separator, commas, and
# offsets of 99 minutes.
_INSTANT = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,9})?)?"
    r"(?:Z|[+-][0-9]{2}(?::?[0-5][0-9])?)"
)


def parse_instant(value: object, field: str) -> datetime:
    """Read an ISO-8601 instant with its zone, as UTC; anything else is the caller's mistake.

    Digits after the microsecond are dropped. Without a zone the text means a different instant in
    Warsaw and in Lisbon, so it is refused rather than taken for UTC.
    """
    if isinstance(value, str) and _INSTANT.fullmatch(value) is not None:
        try:
            return datetime.fromisoformat(value).astimezone(UTC)
        except (ValueError, OverflowError):
            pass  # 30 February, hour 25, or an offset that leads out of the years 1 to 9999
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
    """Raise if an action is older than the cap, or made in the future; both with grace."""
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
            "ageDays": age // timedelta(days=1),  # whole days, as the seed counts them
            "capDays": days,
            "graceHours": hours,
        },
    )


def check_submitted_after_generated(
    client_submitted_at: datetime, client_generated_at: datetime, *, grace: timedelta = GRACE
) -> None:
    """Raise if an action was sent before it was made, by more than clocks can be off.

    Not the other way round: that would refuse every action queued for longer than the grace.
    """
    if client_generated_at - client_submitted_at > grace:
        hours = _number(grace / timedelta(hours=1))
        raise BodyInvalidError(
            f"clientSubmittedAt is more than {hours} hours before clientGeneratedAt.",
            details={"field": "clientSubmittedAt"},
        )


def _iso(instant: datetime) -> str:
    # Milliseconds as JavaScript writes them, unless that would hide what made the difference.
    timespec = "microseconds" if instant.microsecond % 1000 else "milliseconds"
    return instant.astimezone(UTC).isoformat(timespec=timespec).replace("+00:00", "Z")


def _number(value: float) -> int | float:
    return int(value) if value.is_integer() else value
