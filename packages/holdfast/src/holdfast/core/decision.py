"""The decision: what becomes of a guarded request, given what is known of its key."""

from dataclasses import dataclass
from datetime import datetime
from typing import Final

import msgspec

from holdfast.core.idempotency_record import Record, RequestFingerprint

__all__ = [
    "HELD",
    "Decision",
    "Expired",
    "Fresh",
    "Held",
    "InProgress",
    "Mismatched",
    "Replayed",
    "decide",
]


class Held:
    """Someone else is running the first request with this key right now."""


HELD: Final = Held()


@dataclass(frozen=True, slots=True)
class Fresh:
    """Never seen: run the handler."""


class Replayed(msgspec.Struct, frozen=True):
    """Seen and done: answer from the record."""

    record: Record


@dataclass(frozen=True, slots=True)
class Mismatched:
    """The key belongs to another request."""

    expected_hash: str
    received_hash: str


@dataclass(frozen=True, slots=True)
class InProgress:
    """Seen and not done: wait, or say so."""


@dataclass(frozen=True, slots=True)
class Expired:
    """Seen, but too long ago: run the handler as if it were new."""

    record: Record


Decision = Fresh | Replayed | Mismatched | InProgress | Expired

_FRESH: Final = Fresh()
_IN_PROGRESS: Final = InProgress()


def decide(known: Record | Held | None, mark: RequestFingerprint, now: datetime) -> Decision:
    """Decide from what the store knows of the key and what this request is."""
    if known is None:
        return _FRESH
    if isinstance(known, Held):
        return _IN_PROGRESS
    if known.expires_at <= now:
        return Expired(known)
    if known.mark == mark:
        return Replayed(known)
    if known.mark.body_hash != mark.body_hash:
        return Mismatched(known.mark.body_hash, mark.body_hash)
    # The same body sent to another place: only the wider hash tells them apart.
    return Mismatched(known.mark.fingerprint, mark.fingerprint)
