"""Requests to read a day again, with the samples and their digest.

A day that looks odd gets one challenge. The device reads the day from the health app again and
reports it with the id of the challenge, every sample, and the digest of both. This report then
counts instead of those before it. ``check_reread`` is pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from hashlib import sha256
from itertools import pairwise
from typing import Any, Final

from onceward import Transaction
from onceward_protocol.ids import new_id
from onceward_services.walk.events import add_event
from onceward_services.walk.steps.repository import save_challenge
from onceward_services.walk.steps.rules import Limits, Rejection, Report, Span, is_burst

__all__ = ["Reread", "Sample", "check_reread", "open_challenge", "sample_digest"]

_MILLISECOND: Final = timedelta(milliseconds=1)
_EPOCH: Final = datetime.fromisoformat("1970-01-01T00:00:00+00:00")


@dataclass(frozen=True, slots=True)
class Sample:
    """The steps between two instants, as the health app has them."""

    span: Span
    count: int


@dataclass(frozen=True, slots=True)
class Reread:
    """Response of a report to a challenge."""

    challenge_id: str
    samples: Sequence[Sample]
    digest: str


async def open_challenge(
    tx: Transaction,
    tenant: str,
    day: date,
    *,
    reasons: Sequence[str],
    due_at: datetime,
    now: datetime,
) -> None:
    """Ask the walker's devices to read a day again. The walker is locked."""
    challenge_id = new_id(now)
    await save_challenge(tx, tenant, day, challenge_id=challenge_id, due_at=due_at)
    data = {
        "day": day.isoformat(),
        "challengeId": challenge_id,
        "dueAt": due_at.isoformat().replace("+00:00", "Z"),
        "reasons": list(reasons),
    }
    await add_event(tx, tenant, "steps.reread_requested", data, now)


def sample_digest(challenge_id: str, samples: Sequence[Sample]) -> str:
    """Return the SHA-256 of the challenge's id and one line for each sample.

    A line has the start and the end in milliseconds since 1970 and the count, with spaces between
    them; every line ends with a line feed.
    """
    lines = [challenge_id]
    lines += [
        f"{_milliseconds(sample.span.start)} {_milliseconds(sample.span.end)} {sample.count}"
        for sample in samples
    ]
    return sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def check_reread(
    reread: Reread, report: Report, open_id: str | None, limits: Limits
) -> Rejection | None:
    """Return the first reason not to accept a response to a challenge, or None."""
    digest = sample_digest(reread.challenge_id, reread.samples)
    total = sum(sample.count for sample in reread.samples)
    spans = [sample.span for sample in reread.samples]
    is_ordered = all(first.end <= second.start for first, second in pairwise(spans))
    is_inside = not spans or (
        report.span.start <= spans[0].start and spans[-1].end <= report.span.end
    )
    is_slow = not any(is_burst(s.count, max(1.0, s.span.seconds), limits) for s in reread.samples)
    checks: tuple[tuple[bool, str, Any, Any], ...] = (
        (
            open_id == reread.challenge_id,
            "the day has no such challenge",
            reread.challenge_id,
            open_id,
        ),
        (
            digest == reread.digest,
            "sampleDigest is not that of the samples",
            reread.digest,
            digest,
        ),
        (total == report.count, "the samples do not add up to count", total, report.count),
        (is_ordered, "samples overlap or are not in order", len(spans), None),
        (is_inside, "samples are outside sampleSpan", len(spans), None),
        (is_slow, "the step rate of a sample is too high", len(spans), None),
    )
    for is_valid, message, received, expected in checks:
        if not is_valid:
            details = {"received": received, "expected": expected}
            return Rejection(422, "REREAD_INVALID", message, details)
    return None


def _milliseconds(at: datetime) -> int:
    return (at - _EPOCH) // _MILLISECOND
