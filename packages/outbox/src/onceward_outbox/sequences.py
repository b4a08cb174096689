"""Strict sequences on the device: entries get numbers, and other ones if the server asks for them.

A profile names the endpoints whose server has ``ordering="strict"``. Their entries share a lane:
one request or batch of them is outstanding, and an unknown outcome holds the rest. An entry gets
its number with the claim before its first send, and keeps it on every retry. If the profile numbers
on demand, a stream begins when the server refuses a request because it has no number.
"""

from typing import Any, Final

import msgspec

from onceward_outbox.entry import Claimed, Entry
from onceward_outbox.events import EventKind
from onceward_outbox.profile import Profile
from onceward_outbox.transaction import Transaction
from onceward_outbox.transport import Response
from onceward_protocol.ids import new_uuid4
from onceward_protocol.sequence import MAX_SEQUENCE, SEQUENCE_HEADER, SequenceNumber

VIOLATION_CODES: Final = frozenset({"ORDERING_VIOLATION", "sequence.violation"})
OUTCOME_UNKNOWN: Final = "outcome_unknown"
"""The error of an entry whose number the server has used for it, and whose response is lost."""

_BAD_REQUEST: Final = 400
_UNPROCESSABLE: Final = 422


class Violation(msgspec.Struct, frozen=True):
    """What the server says about a number that it refuses."""

    # The number that the server expects next.
    expected: int
    # The number to send the entry with; None if it may have happened, so that it must not be sent.
    number: int | None
    # The server cannot have used this number, or a higher one.
    is_gap: bool


def number_claim(tx: Transaction, entry: Entry, profile: Profile | None) -> SequenceNumber | None:
    """Return the number to send an entry with, a new one if it has none; None for no number."""
    if profile is None or not profile.is_strict_endpoint(entry.endpoint):
        return None
    stream = {"user_id": entry.user_id, "stream": profile.stream_name}
    found = tx.rows("find_stream", **stream)
    if not found and profile.numbers_on_demand:
        return None
    if not found:
        begin_stream(tx, entry)
        found = tx.rows("find_stream", **stream)
    client_id, number, _ = found[0]
    known = tx.rows("number_of", id=entry.id)
    if known:
        return SequenceNumber(client_id, known[0][0])
    tx.rows("take_number", id=entry.id, number=number, **stream)
    tx.rows("set_next_number", number=number + 1, **stream)
    return SequenceNumber(client_id, number)


def begin_stream(tx: Transaction, entry: Entry) -> None:
    """Give numbers to the entry and those behind it, from their next claim on."""
    tx.rows("begin_stream", client_id=new_uuid4(), **_stream_of(tx, entry))


def requires_number(response: Response) -> bool:
    """Return whether the server has refused a request because it has no number."""
    if response.status != _BAD_REQUEST:
        return False
    required = _details_of(response).get("required_headers")
    return isinstance(required, list) and SEQUENCE_HEADER in required


def acknowledge(tx: Transaction, claimed: Claimed, http_status: int | None) -> None:
    """Note that the server has used a number. A success that it reports as an error has none."""
    is_success = http_status is not None and 200 <= http_status < 300  # noqa: PLR2004
    if claimed.sequence is not None and is_success:
        tx.rows("acknowledge", number=claimed.sequence.number, **_stream_of(tx, claimed.entry))


def renumber(tx: Transaction, claimed: Claimed, violation: Violation) -> Entry:
    """Give an entry the number that the server asks for. Its claim has ended.

    Entries behind it lose theirs, and get new ones when they are claimed again.
    """
    assert claimed.sequence is not None  # noqa: S101 - the server has refused its number
    entry = claimed.entry
    stream = _stream_of(tx, entry)
    note_rewind(tx, claimed, violation)
    if violation.number is None:
        return entry
    tx.rows("take_number", id=entry.id, number=violation.number, **stream)
    above = claimed.sequence.number if violation.is_gap else MAX_SEQUENCE
    if violation.number == violation.expected:
        tx.rows("forget_later_numbers", id=entry.id, above=above, **stream)
        tx.rows("set_next_number", number=violation.expected + 1, **stream)
    return tx.changed("not_happened", id=entry.id)


def note_rewind(tx: Transaction, claimed: Claimed, violation: Violation) -> None:
    """Report that the server has lost numbers that it had acknowledged."""
    stream = _stream_of(tx, claimed.entry)
    acknowledged = tx.rows("find_stream", **stream)[0][2]
    if violation.expected <= acknowledged:
        tx.rows("rewind", number=violation.expected - 1, **stream)
        tx.emit(
            EventKind.SERVER_REWOUND,
            claimed.entry,
            detail=f"the server expects {violation.expected}, after it has acknowledged "
            f"{acknowledged}",
        )


def read_violation(response: Response, sent: SequenceNumber) -> Violation | None:
    """Return what a 422 says about a number; None for every other response."""
    if response.status != _UNPROCESSABLE or response.code not in VIOLATION_CODES:
        return None
    details = _details_of(response)
    expected = _number(details.get("expected"))
    if expected is None:
        return None
    key_number = _number(details.get("key_sequence"))
    is_gap = sent.number > expected
    used_by = details.get("used_by")
    number: int | None = None
    if key_number is not None and key_number != sent.number:
        number = key_number  # the key was used with it: the replay says what happened
    elif used_by == "other_key" or (used_by is None and is_gap):
        number = expected
    return Violation(expected, number, is_gap)


def _details_of(response: Response) -> dict[str, Any]:
    body = response.json()
    details = body.get("details") if isinstance(body, dict) else None
    return details if isinstance(details, dict) else {}


def _stream_of(tx: Transaction, entry: Entry) -> dict[str, Any]:
    profile = tx.profiles.get(entry.profile)
    return {"user_id": entry.user_id, "stream": profile.stream_name}


def _number(value: Any) -> int | None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and 1 <= value <= MAX_SEQUENCE else None
