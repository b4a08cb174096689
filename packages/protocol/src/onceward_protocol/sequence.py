"""Strict sequences: the numbers of a client's requests, and which number may run. Pure."""

import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final, Literal, NamedTuple

from onceward_protocol.errors import SequenceInvalidError, SequenceViolationError

__all__ = [
    "CLIENT_HEADER",
    "KNOWN_NUMBERS",
    "MAX_SEQUENCE",
    "SEQUENCE_HEADER",
    "Ordering",
    "Position",
    "SequenceNumber",
    "Stream",
    "key_hash",
    "parse_sequence",
    "violation",
]

# Whether the requests of a client run in the order of their numbers, without gaps.
Ordering = Literal["none", "strict"]

# The header that names a client's stream.
CLIENT_HEADER: Final = "X-Client-ID"
# The header with the number of a request in its stream.
SEQUENCE_HEADER: Final = "X-Sequence"
# The keys of this many numbers are kept for each client.
KNOWN_NUMBERS: Final = 1000
MAX_SEQUENCE: Final = 2**63 - 1

# No comma: WSGI servers join two headers with one, and two ids must not become a third.
_CLIENT_ID: Final = re.compile(r"[\x21-\x2b\x2d-\x7e]{1,128}")
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,18}")
_HASH_DIGITS: Final = 32


class SequenceNumber(NamedTuple):
    """The place of a request in the stream of its client."""

    client_id: str
    number: int


class Stream(NamedTuple):
    """The requests of one client; their numbers have no gaps."""

    tenant: str
    client_id: str


class Position(NamedTuple):
    """How far a stream has come, and the key that one number of it was used for."""

    # 0 before the first request.
    last_number: int
    # The hash of the key; None if the number was not used, or is too long ago.
    key_hash: str | None

    @property
    def expected(self) -> int:
        """The number that may run."""
        return self.last_number + 1


def parse_sequence(client_ids: Sequence[bytes], numbers: Sequence[bytes]) -> SequenceNumber:
    """Read the two headers. Raises ``SequenceInvalidError``; no message contains what was sent."""
    client_id = _only(CLIENT_HEADER, client_ids)
    if _CLIENT_ID.fullmatch(client_id) is None:
        raise SequenceInvalidError(
            f"{CLIENT_HEADER} must be 1 to 128 visible ASCII characters, without commas"
        )
    number = _only(SEQUENCE_HEADER, numbers)
    if _NUMBER.fullmatch(number) is None or int(number) > MAX_SEQUENCE:
        raise SequenceInvalidError(
            f"{SEQUENCE_HEADER} must be a whole number from 1 to {MAX_SEQUENCE}, without sign and "
            "leading zeros"
        )
    return SequenceNumber(client_id, int(number))


def _only(header: str, values: Sequence[bytes]) -> str:
    found = {value.decode("latin-1").strip(" \t") for value in values}
    if not found:
        raise SequenceInvalidError(
            f"this operation needs the header {header}: a client's requests are numbered",
            details={"required_headers": [CLIENT_HEADER, SEQUENCE_HEADER]},
        )
    if len(found) > 1:
        raise SequenceInvalidError(f"{header} was sent with two different values")
    return found.pop()


def key_hash(key: str) -> str:
    """Return the stored part of a key: 32 hex digits of its SHA-256."""
    return sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_DIGITS]


def violation(
    number: int, hashed_key: str, position: Position, *, key_number: int | None = None
) -> SequenceViolationError:
    """Return the error for a request that may neither run nor be replayed.

    ``key_number`` is another number that its key was used for, if there is one.
    """
    details: dict[str, Any] = {"expected": position.expected}
    if position.key_hash is not None:
        is_own = position.key_hash == hashed_key
        details["used_by"] = "this_key" if is_own else "other_key"
        message = (
            "this number was used for this key, whose stored response has expired"
            if is_own
            else "this number was used for another key"
        )
    elif number < position.expected:
        message = "this number was used too long ago to know for which key"
    elif number == position.expected:
        message = "this key has a stored response, but it was not used with this number"
    else:
        message = "requests with lower numbers are missing"
    if key_number is not None and key_number != number:
        details["key_sequence"] = key_number
    return SequenceViolationError(
        f"{message}; the next number of this client is {position.expected}", details=details
    )
