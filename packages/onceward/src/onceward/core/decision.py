"""Decides what happens to a guarded request, given what is known about its key."""

from dataclasses import dataclass
from datetime import datetime
from typing import Final

import msgspec

from onceward.core.idempotency_record import Record, RequestFingerprint

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
    """Another request with this key is running and has not committed yet."""


HELD: Final = Held()


@dataclass(frozen=True, slots=True)
class Fresh:
    """The key is unknown: run the handler."""


class Replayed(msgspec.Struct, frozen=True):
    """The key has a record of the same request: send the stored response."""

    record: Record


@dataclass(frozen=True, slots=True)
class Mismatched:
    """The key has a record of a different request."""

    expected_hash: str
    received_hash: str
    record: Record


@dataclass(frozen=True, slots=True)
class InProgress:
    """The first request with this key is running: wait for it, or return 409."""


@dataclass(frozen=True, slots=True)
class Expired:
    """The key has an expired record: run the handler as if the key were unknown."""

    record: Record


Decision = Fresh | Replayed | Mismatched | InProgress | Expired

_FRESH: Final = Fresh()
_IN_PROGRESS: Final = InProgress()


def decide(known: Record | Held | None, fingerprint: RequestFingerprint, now: datetime) -> Decision:
    """Compare what the store has under the key with the fingerprint of this request."""
    if known is None:
        return _FRESH
    if isinstance(known, Held):
        return _IN_PROGRESS
    if known.expires_at <= now:
        return Expired(known)
    if known.fingerprint == fingerprint:
        return Replayed(known)
    if known.fingerprint.body_hash != fingerprint.body_hash:
        return Mismatched(known.fingerprint.body_hash, fingerprint.body_hash, known)
    # The same body sent to another path or query: only the request hashes differ.
    return Mismatched(known.fingerprint.request_hash, fingerprint.request_hash, known)
