"""Values the server stores about a guarded request: record, fingerprint, response, audit event.

Structs rather than dataclasses: several are created per request, and a frozen dataclass sets its
fields one by one.
"""

from datetime import datetime
from typing import NamedTuple

import msgspec


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
