"""What the server remembers of a guarded request, and what it answers. Values only.

Structs rather than dataclasses: several are made per request, and a frozen dataclass sets its
fields one by one.
"""

from datetime import datetime
from typing import NamedTuple

import msgspec

__all__ = ["AuditEvent", "Record", "RecordId", "Reply", "RequestFingerprint"]

# The headers a replay repeats; everything else belongs to the one exchange it was sent in.
# The encoding belongs to the bytes: without it a compressed body could not be read.
STORED_HEADERS = (b"content-type", b"content-encoding", b"etag", b"location")


class RecordId(NamedTuple):
    """Whose key, for which operation. The tenant always comes first."""

    tenant: str
    endpoint: str
    key: str


class RequestFingerprint(NamedTuple):
    """What a request is, in two hashes: its body, and the body with everything around it."""

    body_hash: str
    fingerprint: str


class Reply(msgspec.Struct, frozen=True, gc=False):
    """An HTTP answer, free of any framework."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    def stored_headers(self) -> dict[str, str]:
        """Return the headers that belong to the record."""
        return {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in self.headers
            if name in STORED_HEADERS
        }


class Record(msgspec.Struct, frozen=True, gc=False):
    """The memory of one guarded request. Once committed it never changes, it only expires."""

    id: RecordId
    mark: RequestFingerprint
    status: int
    headers: dict[str, str]
    body: bytes
    created_at: datetime
    expires_at: datetime
    request_id: str
    correlation_id: str
    audit_id: str | None = None

    @property
    def cost_bytes(self) -> int:
        """Roughly what this record takes in memory: its body and everything around it."""
        return 2048 + len(self.body)

    def reply(self) -> Reply:
        """Return the stored answer, byte for byte."""
        headers = tuple((k.encode("latin-1"), v.encode("latin-1")) for k, v in self.headers.items())
        return Reply(self.status, headers, self.body)


class AuditEvent(msgspec.Struct, frozen=True, gc=False):
    """Who did what, once. Written with the first execution; a replay only refers to it."""

    id: str
    tenant: str
    actor: str
    endpoint: str
    payload_hash: str
    status: int
    request_id: str
    correlation_id: str
    created_at: datetime
    resource: str | None = None
    version: int | None = None
