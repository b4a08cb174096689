"""The chain of seals over a tenant's audit events: hashes, signatures, and the check of a chain.

A seal lists events with the SHA-256 of each, and the hash of the seal before. To change, remove or
add a sealed event without a trace, its seal and all later ones have to be replaced, too.
"""

import hmac
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any, Final, Literal, Self

import msgspec

from onceward.errors import ConfigurationError

NO_PREVIOUS: Final = "0" * 64
"""The previous hash in the first seal of a tenant."""

EVENT_FIELDS: Final = (
    "tenant",
    "id",
    "actor",
    "endpoint",
    "payload_hash",
    "status",
    "resource",
    "version",
    "request_id",
    "correlation_id",
    "created_at",
    "reason",
)
"""Columns in the digest of an event: every column except the number of its seal."""

LATE: Final = timedelta(hours=1)
"""How far an event may be behind those sealed before it: long transactions, clocks."""

_MIN_KEY_BYTES: Final = 32
_KEY_ID_DIGITS: Final = 16

FindingCode = Literal[
    "event_changed",
    "event_removed",
    "event_inserted",
    "event_moved",
    "seal_changed",
    "seal_removed",
    "chain_broken",
    "signature_wrong",
    "signature_missing",
    "head_missing",
    "head_changed",
]


class Finding(msgspec.Struct, frozen=True):
    """Something that a chain without tampering does not have."""

    code: FindingCode
    tenant: str
    detail: str
    # The number of the seal.
    seal: int | None = None
    # The id of the event.
    event: str | None = None


class Seal(msgspec.Struct, frozen=True):
    """One link of the chain of a tenant."""

    tenant: str
    # From 1, without gaps.
    number: int
    # The hash of the seal before.
    previous: str
    # The id and the digest of each event.
    events: tuple[tuple[str, str], ...]
    # The time of the newest event; None if there is none.
    newest_at: datetime | None
    # The lowest number that retention had not deleted when this seal was made.
    first_kept: int
    # How many sealed events retention had deleted.
    swept: int
    sealed_at: datetime
    hash: str = ""
    # Which key signed the hash, and the HMAC; None without a key.
    key_id: str | None = None
    mac: str | None = None

    def document(self) -> dict[str, Any]:
        """Return the bytes that the hash covers."""
        return {
            "tenant": self.tenant,
            "number": self.number,
            "previous": self.previous,
            "events": [list(pair) for pair in self.events],
            "newest_at": None if self.newest_at is None else instant_text(self.newest_at),
            "first_kept": self.first_kept,
            "swept": self.swept,
            "sealed_at": instant_text(self.sealed_at),
        }

    def actual_hash(self) -> str:
        """Compute the hash from the content."""
        return sha256(_canonical(self.document())).hexdigest()


class AuditKeys:
    """Keys that sign seals: the first one signs, all of them verify. None are needed."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        """Raise ``ConfigurationError`` if a key is too short."""
        if any(len(key.encode()) < _MIN_KEY_BYTES for key in keys):
            raise ConfigurationError(
                f"a key for audit seals is shorter than {_MIN_KEY_BYTES} bytes: use a random one, "
                "for example of `openssl rand -hex 32`"
            )
        self._by_id = {_key_id(key): key.encode() for key in keys}
        self._signing = next(iter(self._by_id), None)

    @classmethod
    def parse(cls, text: str | None) -> Self:
        """Read keys that are separated by commas."""
        return cls([part.strip() for part in (text or "").split(",") if part.strip()])

    def __bool__(self) -> bool:
        return bool(self._by_id)

    def signed(self, seal: Seal) -> Seal:
        """Return the seal with a signature, if there is a key."""
        if self._signing is None:
            return seal
        return msgspec.structs.replace(
            seal, key_id=self._signing, mac=self._mac(self._signing, seal)
        )

    def verify(self, seal: Seal) -> bool | None:
        """Return whether the signature is right; None if there is none."""
        if seal.mac is None or seal.key_id is None:
            return None
        if seal.key_id not in self._by_id:
            return False
        return hmac.compare_digest(self._mac(seal.key_id, seal), seal.mac)

    def _mac(self, key_id: str, seal: Seal) -> str:
        return hmac.new(self._by_id[key_id], seal.hash.encode(), sha256).hexdigest()


NO_KEYS: Final = AuditKeys()


def make_seal(
    tenant: str,
    events: Iterable[Mapping[str, Any]],
    *,
    after: Seal | None,
    now: datetime,
    keys: AuditKeys = NO_KEYS,
    first_kept: int | None = None,
    newly_swept: int = 0,
) -> Seal:
    """Return the seal that follows ``after`` and covers the rows ``events``."""
    rows = list(events)
    times = [instant_of(row["created_at"]) for row in rows]
    kept = 1 if after is None else after.first_kept
    seal = Seal(
        tenant=tenant,
        number=1 if after is None else after.number + 1,
        previous=NO_PREVIOUS if after is None else after.hash,
        events=tuple((row["id"], event_digest(row)) for row in rows),
        newest_at=max((time for time in times if time is not None), default=None),
        first_kept=kept if first_kept is None else first_kept,
        swept=(0 if after is None else after.swept) + newly_swept,
        sealed_at=now,
    )
    return keys.signed(msgspec.structs.replace(seal, hash=seal.actual_hash()))


def event_document(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an event as its digest covers them and an export has them."""
    fields = {name: row[name] for name in EVENT_FIELDS}
    return fields | {"created_at": instant_text(row["created_at"])}


def event_digest(row: Mapping[str, Any]) -> str:
    """Return the SHA-256 of an event in canonical JSON, the same for each database."""
    return sha256(_canonical(event_document(row))).hexdigest()


def instant_text(value: datetime | str) -> str:
    """Return an instant in UTC with microseconds. Text that is none stays, and is found changed."""
    instant = instant_of(value)
    if instant is None:
        return str(value)
    return instant.isoformat(timespec="microseconds")[:26] + "Z"


class ChainCheck:
    """Checks the chain of one tenant, seal by seal in the order of their numbers.

    ``known_heads`` are hashes that seals had earlier, by number, from a place outside the database.
    """

    def __init__(
        self,
        tenant: str,
        *,
        keys: AuditKeys = NO_KEYS,
        known_heads: Mapping[int, str] | None = None,
        allow_unsigned: bool = False,
        is_partial: bool = False,
    ) -> None:
        """With ``is_partial``, the first seals need not be there."""
        self.tenant = tenant
        self.findings: list[Finding] = []
        # How many seals, events in them, and events without a seal were seen.
        self.seals = self.events = self.unsealed = 0
        # The first and the last seal.
        self.first: Seal | None = None
        self.head: Seal | None = None
        self._keys = keys
        self._known = dict(known_heads or {})
        self._allow_unsigned = allow_unsigned
        self._is_partial = is_partial
        self._newest: datetime | None = None
        self._signed_through = 0

    @property
    def swept(self) -> int:
        """How many sealed events retention has deleted, as the last seal says."""
        return 0 if self.head is None else self.head.swept

    def add_seal(self, seal: Seal, events: Mapping[str, Mapping[str, Any]]) -> None:
        """Check the next seal against the one before, and the rows ``events`` by id against it."""
        self._check_link(seal)
        if seal.hash != seal.actual_hash():
            self._report("seal_changed", "its content does not have its hash", seal=seal.number)
        if self._keys:
            is_signed = self._keys.verify(seal)
            if is_signed is False:
                self._report(
                    "signature_wrong", "it is not signed by one of these keys", seal=seal.number
                )
            elif is_signed:
                self._signed_through = seal.number
        known = self._known.pop(seal.number, None)
        if known is not None and known != seal.hash:
            self._report(
                "head_changed", f"its hash was {known}, and is {seal.hash} now", seal=seal.number
            )
        for event_id, digest in seal.events:
            self._check_event(seal, event_id, digest, events.get(event_id))
        if seal.newest_at is not None:
            # A clock that is ahead must not make all later events look late.
            newest = min(seal.newest_at, seal.sealed_at)
            self._newest = max(self._newest or newest, newest)
        self.first = self.first or seal
        self.head = seal
        self.seals += 1
        self.events += len(seal.events)

    def add_unsealed(self, row: Mapping[str, Any]) -> None:
        """Check an event that no seal covers yet."""
        self.unsealed += 1
        if self._is_late(row):
            self._report_late(row["id"], None, row)

    def report_not_listed(self, event_id: str, seal: int) -> None:
        """Report an event that names a seal which does not list it."""
        detail = f"it says that seal {seal} covers it, which does not list it"
        self._report("event_inserted", detail, seal=seal, event=event_id)

    def report_without_seal(self, event_id: str, seal: int) -> None:
        """Report an event whose seal does not exist."""
        if self.head is not None and seal < self.head.first_kept:
            detail = f"it says that seal {seal} covers it, whose events retention has deleted"
            self._report("event_inserted", detail, seal=seal, event=event_id)
        else:
            detail = f"seal {seal}, which event {event_id} names, does not exist"
            self._report("seal_removed", detail, seal=seal, event=event_id)

    def finish(self) -> None:
        """Check what only the end of the chain shows."""
        if self.head is not None and self.first is not None:
            start = self.head.first_kept
            if self.first.number != start and not self._is_partial:
                missing = f"seals {start} to {self.first.number - 1} are missing"
                extra = f"seals {self.first.number} to {start - 1} were deleted by retention before"
                detail = missing if self.first.number > start else extra
                self._report(
                    "seal_removed" if self.first.number > start else "chain_broken", detail
                )
            if self._keys and not self._allow_unsigned and self._signed_through < self.head.number:
                self._report(
                    "signature_missing",
                    f"seals {self._signed_through + 1} to {self.head.number} are not signed",
                    seal=self.head.number,
                )
        for number, known in sorted(self._known.items()):
            if self.head is None or number >= self.head.first_kept:
                self._report(
                    "head_missing", f"seal {number} with the hash {known} is gone", seal=number
                )

    def _check_link(self, seal: Seal) -> None:
        if self.head is None:
            if seal.number == 1 and seal.previous != NO_PREVIOUS:
                self._report("chain_broken", "the first seal names one before it", seal=1)
        elif seal.number != self.head.number + 1:
            missing = f"seals {self.head.number + 1} to {seal.number - 1} are missing"
            self._report("seal_removed", missing, seal=seal.number - 1)
        elif seal.previous != self.head.hash:
            detail = f"it does not follow the seal {self.head.number} that is stored"
            self._report("chain_broken", detail, seal=seal.number)

    def _check_event(
        self, seal: Seal, event_id: str, digest: str, row: Mapping[str, Any] | None
    ) -> None:
        if row is None:
            self._report("event_removed", "it was sealed", seal=seal.number, event=event_id)
            return
        if event_digest(row) != digest:
            self._report(
                "event_changed", "it is not as it was sealed", seal=seal.number, event=event_id
            )
        elif row["seal"] != seal.number:
            detail = f"seal {seal.number} covers it, but it names seal {row['seal']}"
            self._report("event_moved", detail, seal=seal.number, event=event_id)
        elif self._is_late(row):
            self._report_late(event_id, seal.number, row)

    def _is_late(self, row: Mapping[str, Any]) -> bool:
        created_at = instant_of(row["created_at"])
        return (
            created_at is not None and self._newest is not None and created_at < self._newest - LATE
        )

    def _report_late(self, event_id: str, seal: int | None, row: Mapping[str, Any]) -> None:
        newest = "" if self._newest is None else instant_text(self._newest)
        detail = (
            f"it is dated {instant_text(row['created_at'])}, but events up to {newest} were sealed "
            "before it: it was inserted later, or written by a clock or a transaction that is more "
            "than an hour behind"
        )
        self._report("event_inserted", detail, seal=seal, event=event_id)

    def _report(
        self, code: FindingCode, detail: str, *, seal: int | None = None, event: str | None = None
    ) -> None:
        self.findings.append(Finding(code, self.tenant, detail, seal, event))


def _key_id(key: str) -> str:
    return sha256(b"onceward audit key " + key.encode()).hexdigest()[:_KEY_ID_DIGITS]


def _canonical(value: Any) -> bytes:
    """Return RFC 8785 JSON: names are ASCII, and numbers integers."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


def instant_of(value: datetime | str) -> datetime | None:
    """Return an instant in UTC; SQLite has text. None if that is damaged."""
    if isinstance(value, datetime):
        return value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)
    try:
        parsed = datetime.fromisoformat(value)
    except ValueError:
        return None
    return instant_of(parsed)
