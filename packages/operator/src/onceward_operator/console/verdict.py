"""Verdict of a record about an action, in a few sentences, before the details. Pure.

"I was charged twice" is answered by the first line: how often it was executed, and when.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal

from onceward.ports import Row
from onceward.records import Record
from onceward_operator.console.rendering import capped

__all__ = ["Sentence", "Verdict", "verdict_of"]

Tone = Literal["good", "warn", "bad"]

_FIRST_ERROR: Final = 400
_TONES: Final[Sequence[Tone]] = ("good", "warn", "bad")


@dataclass(frozen=True, slots=True)
class Sentence:
    """One line, and whether it needs attention."""

    text: str
    tone: Tone = "good"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The first sentence, what belongs to it, and the worst tone of all."""

    headline: str
    points: Sequence[Sentence]
    tone: Tone


def verdict_of(
    record: Record,
    *,
    repeats: Sequence[Row],
    most_repeats: int,
    jobs: Sequence[Row],
    most_jobs: int,
    code: str | None,
    is_logged: bool,
    now: datetime,
) -> Verdict:
    """Return the verdict about a record.

    ``repeats`` are logged requests with its key, up to ``most_repeats``; ``jobs`` those that its
    request has caused, up to ``most_jobs``. ``is_logged`` says whether there is a log at all.
    """
    headline = _headline(record, code)
    points = [
        *_about_repeats(record, repeats, most_repeats, is_logged=is_logged),
        *_about_jobs(jobs, most_jobs),
        _about_expiry(record, now),
    ]
    tones: list[Tone] = [headline.tone, *(point.tone for point in points)]
    return Verdict(headline.text, points, max(tones, key=_TONES.index))


def _headline(record: Record, code: str | None) -> Sentence:
    at = _text(record.created_at)
    if not record.status:
        return Sentence(
            "This record cannot be read: requests with its key get 500 until it is removed.", "bad"
        )
    if record.status < _FIRST_ERROR:
        return Sentence(
            f"This request was executed once, at {at}, and responded with {record.status}."
        )
    with_code = f" ({code})" if code else ""
    return Sentence(
        f"This request was refused with {record.status}{with_code}, at {at}. Its changes were "
        "undone, unless the app keeps them on errors.",
        "warn",
    )


def _about_repeats(
    record: Record, repeats: Sequence[Row], most: int, *, is_logged: bool
) -> list[Sentence]:
    """Return the outcomes of the other requests with the key."""
    own = [row for row in repeats if row["original_request_id"] in {None, record.request_id}]
    counts = Counter(row["outcome"] for row in own)
    is_cut = len(repeats) >= most
    found = []
    replayed, mismatched = counts.pop("replayed", 0), counts.pop("mismatched", 0)
    if not is_logged and not repeats:
        found.append(Sentence("Replays and refusals are not logged by this app."))
    else:
        found.append(
            Sentence(
                f"{_number(replayed, 'replay', is_cut)} got the same response; nothing ran again."
                if replayed
                else "No replay is in the log."
            )
        )
    if mismatched:
        text = _number(mismatched, "other request", is_cut)
        found.append(
            Sentence(f"{text} with this key differed, got an error, and did not run.", "warn")
        )
    waiting = counts.pop("in_progress", 0)
    if waiting:
        text = _number(waiting, "request", is_cut)
        found.append(Sentence(f"{text} arrived while another one ran, and did not run."))
    lost = [row for row in own if row["outcome"] == "unavailable" and _is_of(row, record)]
    if lost:
        counts["unavailable"] -= len(lost)
        found.append(
            Sentence(
                "Its client got 503, although the request was executed: the connection to the "
                "database was lost. A retry gets the stored response.",
                "warn",
            )
        )
    # The refusal that the record stores is logged as well.
    counts["stale"] -= sum(row["outcome"] == "stale" and _is_of(row, record) for row in own)
    failed = sum(number for number in counts.values() if number > 0)
    if failed:
        text = _number(failed, "attempt", is_cut)
        found.append(Sentence(f"{text} with this key failed or got an error that is not stored."))
    earlier = {row["original_request_id"] for row in repeats} - {None, record.request_id}
    if earlier:
        ids = ", ".join(sorted(earlier)[:3])
        found.append(
            Sentence(
                f"The key was executed before, by the request {ids}: that record had expired, or "
                "was removed. These are two executions.",
                "bad",
            )
        )
    return found


def _about_jobs(jobs: Sequence[Row], most: int) -> list[Sentence]:
    if not jobs:
        return [
            Sentence(
                "No job of it is stored: it enqueued none, a job of another request did the same "
                "work, or they were completed and deleted since."
            )
        ]
    states = Counter(job["state"] for job in jobs)
    total = _number(len(jobs), "job", len(jobs) >= most)
    parts = ", ".join(f"{states[name]} {name}" for name in sorted(states))
    dead = states["dead"]
    if dead:
        given_up = "is a dead letter" if dead == 1 else "are dead letters"
        return [Sentence(f"It enqueued {total}: {parts}. {dead} {given_up}: not done.", "bad")]
    failed = "; no job has failed for good"
    return [Sentence(f"It enqueued {total}: {parts}{failed}.")]


def _about_expiry(record: Record, now: datetime) -> Sentence:
    at = _text(record.expires_at)
    if record.expires_at <= now:
        return Sentence(
            f"This record has expired, at {at}: the next request with its key runs.", "warn"
        )
    return Sentence(f"Until it expires, at {at}, requests with its key get the same response.")


def _is_of(row: Row, record: Record) -> bool:
    return bool(row["request_id"] == record.request_id)


def _number(number: int, noun: str, is_cut: bool) -> str:
    """Return a number with its noun; of cut lists with a plus sign."""
    plural = "" if number == 1 and not is_cut else "s"
    return f"{capped(number, number if is_cut else None)} {noun}{plural}"


def _text(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
