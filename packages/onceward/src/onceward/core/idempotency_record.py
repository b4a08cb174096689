"""Values the server stores about a guarded request: record, fingerprint, response, audit event.

Structs rather than dataclasses: several are created per request, and a frozen dataclass sets its
fields one by one.
"""

from datetime import datetime
from typing import NamedTuple

import msgspec

__all__ = ["AuditEvent", "Record", "RecordId", "RequestFingerprint", "Response"]

# The headers a replay repeats; all others belong to the exchange they were sent in. The encoding
# belongs to the bytes: without it a compressed body could not be read.
STORED_HEADERS = (b"content-type", b"content-encoding", b"etag", b"location")
_STORED_NAMES = {name: name.decode("ascii") for name in STORED_HEADERS}


class RecordId(NamedTuple):
    """The primary key of a record. The tenant always comes first."""

    tenant: str
    endpoint: str
    key: str


class RequestFingerprint(NamedTuple):
    """Two SHA-256 hashes: of the body, and of the body with method, endpoint, path and query."""

    body_hash: str
    request_hash: str


class Response(msgspec.Struct, frozen=True, gc=False):
    """A complete HTTP response, independent of any framework. Header names are lower-case."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    def stored_headers(self, extra: tuple[str, ...] = ()) -> dict[str, str]:
        """Return the headers that are kept in the record; ``extra`` are names in lower case.

        Several values of an extra one become one, with commas, as RFC 9110 §5.3 allows.
        """
        stored = {
            _STORED_NAMES[name]: value.decode("latin-1")
            for name, value in self.headers
            if name in _STORED_NAMES
        }
        for name in extra:
            raw = name.encode("latin-1")
            values = [value.decode("latin-1") for other, value in self.headers if other == raw]
            if values and raw not in STORED_HEADERS:
                stored[name] = ", ".join(values)
        return stored


class Record(msgspec.Struct, frozen=True, gc=False):
    """The stored outcome of one guarded request. Never changes after its commit; only expires."""

    id: RecordId
    fingerprint: RequestFingerprint
    status: int
    headers: dict[str, str]
    body: bytes
    created_at: datetime
    expires_at: datetime
    request_id: str
    correlation_id: str
    audit_id: str | None = None
    # When the user acted, by the device's clock; None if the request did not say.
    client_generated_at: datetime | None = None

    @property
    def cost_bytes(self) -> int:
        """Approximate memory use: the body plus a fixed overhead."""
        return 2048 + len(self.body)

    def response(self) -> Response:
        """Return the stored response, byte for byte."""
        headers = tuple((k.encode("latin-1"), v.encode("latin-1")) for k, v in self.headers.items())
        return Response(self.status, headers, self.body)


class AuditEvent(msgspec.Struct, frozen=True, gc=False):
    """Who changed what. Written with the first execution; replays write none."""

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
    # Why an operator did it; None for requests.
    reason: str | None = None
