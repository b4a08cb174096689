"""The outbox's own time: how much has certainly passed, whatever the device's clock is set to.

A clock that somebody sets forward must not expire what was queued, and one set back must not revive
it. So age is measured as *elapsed milliseconds of the file*, a number that only grows:

- While the device is on, by its boot clock, which counts sleep and cannot be set. All processes of
  one boot read the same clock, so they agree without writing anything.
- After a restart the boot clock begins anew. What is certain is that the time since the start has
  passed; how long the device was off is not known. The number goes on from where it was, plus the
  time since the start, and the place is remembered as a *gap*.
- When the server's ``Date`` is learnt, the gap is filled: the server's time since the last ``Date``
  less what was counted is what was missed. It is added, and entries queued after the gap began are
  moved along, because the missing time may have passed before them. So time is never counted
  against an entry unless it is certain; the server, which judges age too, has the last word.

A gap before the first ``Date`` ever cannot be filled, and for an entry's age does not have to be.
For what was sent before it without an answer the device's clock speaks: its key may be forgotten.
"""

from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import msgspec

__all__ = ["ClockRow", "Learnt", "Moment", "learn", "moment_of", "server_time"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)

SAVE_AFTER_MS: Final = 300_000
"""How much elapsed time may be lost by a sudden restart: written down every five minutes."""

_LATEST_MS: Final = (datetime(2200, 1, 1, tzinfo=UTC) - _EPOCH) // _MILLISECOND
"""Whoever says that it is later than this is wrong, and sums with it would not be dates."""

_NEWS_MS: Final = 2_000
"""``Date`` has whole seconds; less than this is not worth a commit."""

_REFRESH_MS: Final = 3_600_000
"""An anchor this old is renewed, so that the next gap is measured from close by."""


class ClockRow(msgspec.Struct, frozen=True):
    """What the file remembers: ``elapsed_ms`` had passed when the boot clock was at ``boot_ms``."""

    boot_id: str
    boot_ms: int
    elapsed_ms: int
    gap_ms: int | None = None
    # The server's time, the elapsed time it was learnt at, and how far the wall clock was off.
    server_ms: int | None = None
    server_at_ms: int | None = None
    server_offset_ms: int | None = None


class Moment(NamedTuple):
    """One reading of all clocks."""

    wall: datetime
    ms: int
    row: ClockRow
    # What has to be written down: a restart was seen, or it is time again.
    restarted: bool
    save: bool


class Learnt(NamedTuple):
    """What a ``Date`` tells: the new row, and how much time had passed unseen since where."""

    row: ClockRow
    missed_ms: int
    since_ms: int
    # There was a gap, and no ``Date`` from before it: how long it was nobody will ever know.
    is_blind: bool


def moment_of(
    row: ClockRow | None, boot_id: str, boot_seconds: float, wall: datetime, newest_ms: Any = None
) -> Moment:
    """Read the file's time. ``newest_ms`` is the highest time known to be used in it, or None.

    A boot clock that is behind the file's is one that began anew, also where boots have no ids; one
    that is ahead counts the difference, which is never more than what has passed.
    """
    boot_ms = int(boot_seconds * 1000)
    if row is None:
        return Moment(wall, 0, ClockRow(boot_id, boot_ms, 0), restarted=False, save=True)
    if row.boot_id == boot_id and boot_ms >= row.boot_ms:
        passed = boot_ms - row.boot_ms
        elapsed = row.elapsed_ms + passed
        if passed < SAVE_AFTER_MS:
            return Moment(wall, elapsed, row, restarted=False, save=False)
        saved = msgspec.structs.replace(row, boot_ms=boot_ms, elapsed_ms=elapsed)
        return Moment(wall, elapsed, saved, restarted=False, save=True)
    before = max(row.elapsed_ms, newest_ms or 0)
    elapsed = before + boot_ms
    begun = msgspec.structs.replace(
        row,
        boot_id=boot_id,
        boot_ms=boot_ms,
        elapsed_ms=elapsed,
        gap_ms=before if row.gap_ms is None else row.gap_ms,
    )
    return Moment(wall, elapsed, begun, restarted=True, save=True)


def learn(moment: Moment, server_now: datetime) -> Learnt | None:
    """Take the server's time; None if it says nothing new, or what cannot be."""
    row, now = moment.row, moment.ms
    server_ms = _to_ms(server_now)
    if not 0 <= server_ms < _LATEST_MS:
        return None
    offset = server_ms - _to_ms(moment.wall)
    missed, since = 0, now
    if row.server_ms is not None and row.server_at_ms is not None:
        unseen = (server_ms - row.server_ms) - (now - row.server_at_ms)
        if row.gap_ms is not None:
            missed, since = max(0, unseen), row.gap_ms
        elif (
            abs(unseen) < _NEWS_MS
            and now - row.server_at_ms < _REFRESH_MS
            and abs(offset - (row.server_offset_ms or 0)) < _NEWS_MS
        ):
            return None
    changed = msgspec.structs.replace(
        row,
        elapsed_ms=row.elapsed_ms + missed,
        gap_ms=None,
        server_ms=server_ms,
        server_at_ms=now + missed,
        server_offset_ms=offset,
    )
    if row.gap_ms is None or row.server_ms is not None:
        return Learnt(changed, missed, since, is_blind=False)
    return Learnt(changed, 0, row.gap_ms, is_blind=True)


def server_time(moment: Moment) -> datetime:
    """Return the server's time as far as it is known, otherwise the device's.

    Counted from the last ``Date`` by the clock that cannot be set. After a gap that has not been
    filled that may be far behind; then the wall clock speaks, if it is not behind as well.
    """
    row = moment.row
    if row.server_ms is None or row.server_at_ms is None:
        return moment.wall
    counted = row.server_ms + moment.ms - row.server_at_ms
    if row.gap_ms is not None:
        counted = max(counted, _to_ms(moment.wall) + (row.server_offset_ms or 0))
    return _EPOCH + timedelta(milliseconds=min(max(counted, 0), _LATEST_MS))


def _to_ms(at: datetime) -> int:
    return (at - _EPOCH) // _MILLISECOND
