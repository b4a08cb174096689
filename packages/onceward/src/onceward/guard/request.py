"""A guarded request, independent of the framework: head, key, fingerprint, caller and times."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from hashlib import sha256
from types import MappingProxyType
from typing import Any, Final

import msgspec

from onceward.errors import (
    BodyInvalidError,
    ConfigurationError,
    KeyInvalidError,
    KeyRequiredError,
    PrincipalInvalidError,
    StaleActionError,
)
from onceward.guard.policy import NEVER_REPLAYED, Policy
from onceward.guard.route_table import Match
from onceward.records import Record, RecordId, RequestFingerprint, Response
from onceward.stores.rows import check_storable
from onceward.tenants import SYSTEM_TENANT, is_reserved
from onceward_protocol.correlation import is_traceparent
from onceward_protocol.fingerprint import FingerprintInput, body_hash, request_fingerprint
from onceward_protocol.ids import new_request_id
from onceward_protocol.keys import KEY_HEADER, check_key, parse_key
from onceward_protocol.sequence import (
    CLIENT_HEADER,
    SEQUENCE_HEADER,
    SequenceNumber,
    Stream,
    parse_sequence,
)
from onceward_protocol.staleness import (
    check_not_stale,
    check_submitted_after_generated,
    parse_instant,
)

__all__ = [
    "SHARED_PRINCIPAL",
    "GuardedRequest",
    "Headers",
    "Identify",
    "NewId",
    "Principal",
    "RequestHead",
    "client_times",
    "generated_at",
    "hash_payload",
    "mismatch_details",
    "new_record",
    "parse_request",
    "stale_error",
    "stored_headers",
]


_TIMES: Final = ("clientGeneratedAt", "clientSubmittedAt")
# Bodies without it are not decoded.
_GENERATED_AT: Final = b'"clientGeneratedAt"'
# Longer than any key or time, with every character escaped.
_MAX_SHORT_BYTES: Final = 1024
_MAX_ID_LENGTH: Final = 128
_FIRST_ERROR: Final = 400
# The staleness limit is inclusive and expiry is exclusive, so the record must live one second
# longer.
_ONE_SECOND: Final = timedelta(seconds=1)
# Some drivers return instants in the zone of the session, up to a day away, as a ``datetime``.
_STORED_YEARS: Final = range(2, 9999)
_READ: Final = frozenset(
    {
        *(b"idempotency-key", b"content-type", b"content-length"),
        *(b"authorization", b"x-request-id", b"x-correlation-id", b"traceparent"),
        b"x-client-generated-at",
    }
)
# Headers that every record keeps. The encoding belongs to the bytes: without it a compressed body
# could not be read.
_STORED_NAMES: Final = frozenset({"content-type", "content-encoding", "etag", "location"})
# Common names begin so, too: X-RateLimit-Remaining.
_RATE_LIMITS: Final = ("ratelimit", "x-ratelimit", "x-rate-limit")
_VISIBLE: Final = frozenset(range(0x21, 0x7F))


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller and its tenant. A tenant never sees another tenant's records.

    Raises ``PrincipalInvalidError`` if tenant or actor is empty or not text: all callers without
    a tenant would share their keys.
    """

    # Keys, records and jobs of tenants are separate.
    tenant: str
    # Who acted, for the audit log.
    actor: str
    # What the caller may do; the app checks them.
    roles: frozenset[str] = frozenset()
    # Everything else that is known about the caller, such as the claims of a token.
    claims: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("tenant", self.tenant), ("actor", self.actor)):
            if not isinstance(value, str) or not value.strip():
                raise PrincipalInvalidError(
                    f"the {name} of a Principal must be text that is not empty, not {value!r}: "
                    "raise NotAuthenticatedError for a caller who is not known"
                )
        if self.tenant.startswith(SYSTEM_TENANT) and is_reserved(self.tenant):
            raise PrincipalInvalidError(f"the tenant {self.tenant!r} is Onceward's own")


# The caller of every request with ``tenants=SINGLE_TENANT``.
SHARED_PRINCIPAL: Final = Principal(tenant="everyone", actor="anonymous")


class RequestHead:
    """Method, path and headers of one request, read in one pass. Not changed afterwards."""

    __slots__ = (
        "authorization",
        "client_generated_at",
        "content_length",
        "content_type",
        "correlation_id",
        "headers",
        "key_headers",
        "method",
        "path",
        "query",
        "request_id",
        "traceparent",
    )

    def __init__(  # noqa: C901 - one case per header
        self, method: str, path: str, query: bytes, headers: Iterable[tuple[bytes, bytes]]
    ) -> None:
        # In upper case.
        self.method = method
        # Decoded, without the query.
        self.path = path
        # The query as it was sent.
        self.query = query
        # Names in lower case, and values.
        self.headers = headers
        # Every ``Idempotency-Key`` header.
        self.key_headers: list[bytes] = []
        # The header's value.
        self.content_type: str | None = None
        # In bytes; None without the header.
        self.content_length: int | None = None
        # The header's value; None if there is none or several differ.
        self.authorization: str | None = None
        # The W3C trace context; None if there is none, or it is not valid.
        self.traceparent: str | None = None
        # ``X-Client-Generated-At``, not checked; None if there is none or several differ.
        self.client_generated_at: str | None = None
        request_id = correlation_id = None
        authorizations: set[bytes] = set()
        generated_at: bytes | None = None
        for name, value in headers:
            if name not in _READ:  # most are not: one look-up in place of six comparisons
                continue
            match name:
                case b"idempotency-key":
                    self.key_headers.append(value)
                case b"content-type":
                    self.content_type = value.decode("latin-1")
                case b"content-length":
                    # int() refuses more than 4300 digits; 18 are enough for any length.
                    self.content_length = int(value[:18]) if value.isdigit() else None
                case b"authorization":
                    authorizations.add(value)
                case b"x-request-id":
                    request_id = _usable_id(value)
                case b"x-correlation-id":
                    correlation_id = _usable_id(value)
                case b"traceparent":
                    text = value.decode("latin-1")
                    self.traceparent = text if is_traceparent(text) else None
                case b"x-client-generated-at":
                    generated_at = value if generated_at in (None, value) else b""
        # Two different ones identify no caller: a proxy may have checked the other one.
        if len(authorizations) == 1:
            self.authorization = authorizations.pop().decode("latin-1")
        if generated_at:
            self.client_generated_at = generated_at.decode("latin-1")
        # From ``X-Request-ID``, or a new one.
        self.request_id = request_id or new_request_id()
        # From ``X-Correlation-ID``, or the request id.
        self.correlation_id = correlation_id or self.request_id

    def keys(self, header: str) -> list[bytes]:
        """Return every value of the header that carries the key."""
        if header == KEY_HEADER:
            return self.key_headers
        wanted = header.lower().encode("latin-1")
        return [value for name, value in self.headers if name == wanted]

    def header(self, name: str) -> str | None:
        """Return the first value of a header, or None."""
        wanted = name.lower().encode("latin-1")
        for key, value in self.headers:
            if key == wanted:
                return value.decode("latin-1")
        return None


# Names in lower case, and values.
Headers = tuple[tuple[bytes, bytes], ...]
# Returns an id that begins with its time.
NewId = Callable[[datetime], str]
# Returns the caller, or raises NotAuthenticatedError.
Identify = Callable[[RequestHead], Principal | Awaitable[Principal]]


_NO_PARAMS: Final[Mapping[str, str]] = MappingProxyType({})


class GuardedRequest(msgspec.Struct, frozen=True, gc=False):
    """One request to a guarded operation: all that ``Idempotency`` needs to decide about it."""

    # The stable name of the operation.
    endpoint: str
    # Its settings.
    policy: Policy
    # The caller.
    principal: Principal
    # None where the policy makes the key optional and none was sent.
    record_id: RecordId | None
    # What two sends of one request have in common.
    fingerprint: RequestFingerprint
    # As it was sent.
    body: bytes
    # From ``X-Request-ID``, or a new one.
    request_id: str
    # From ``X-Correlation-ID``, or the request id.
    correlation_id: str
    # Decoded, without the query.
    path: str = ""
    # The W3C trace context that was sent, if it is valid.
    traceparent: str | None = None
    # The header ``X-Client-Generated-At`` as sent, not checked.
    client_generated_at: str | None = None
    # None, unless the policy has a strict order.
    sequence: SequenceNumber | None = None
    # What the fingerprint was made of, beside the body: method, path parameters, query.
    method: str = ""
    # Of the route's template.
    path_params: Mapping[str, str] = _NO_PARAMS
    # As it was sent.
    query: bytes = b""

    @property
    def stream(self) -> Stream:
        """The stream of the client. Only with a ``sequence``."""
        assert self.sequence is not None  # noqa: S101 - the caller has checked
        return Stream(self.principal.tenant, self.sequence.client_id)


def parse_request(
    head: RequestHead,
    body: bytes,
    match: Match,
    principal: Principal,
    payload_hash: str | None = None,
) -> GuardedRequest:
    """Read the key, then compute the fingerprint. Errors of the key are raised first.

    ``payload_hash`` is the result of ``hash_payload``, if it was called before.
    """
    endpoint, policy, path_params = match.endpoint, match.policy, match.path_params
    names = f"{principal.tenant}{principal.actor}{endpoint}"
    if not names.isascii() or "\x00" in names:  # nearly all are storable: no call for them
        check_storable(names)
    key_headers = head.keys(policy.key_header)
    if policy.key_field is None:
        key = parse_key(key_headers, policy.key_format)
    else:
        key = _key_in_body(body, policy)
        if key and key_headers and parse_key(key_headers, policy.key_format) != key:
            raise KeyInvalidError(f"{policy.key_field} and {policy.key_header} are different keys")
    if key is None and policy.key_required:
        where = f"header {policy.key_header}" if policy.key_field is None else policy.key_field
        raise KeyRequiredError(f"this operation needs an idempotency key ({where})")
    sequence = None
    if policy.ordering == "strict":
        sequence = parse_sequence(head.keys(CLIENT_HEADER), head.keys(SEQUENCE_HEADER))
    if payload_hash is None:
        payload_hash = hash_payload(head, body, policy)
    request_hash = request_fingerprint(
        method=head.method,
        endpoint=endpoint,
        path_params=path_params,
        # A fingerprint of the policy decides about the query, too.
        query=head.query if policy.fingerprint is None else b"",
        body_hash=payload_hash,
    )
    return GuardedRequest(
        endpoint=endpoint,
        policy=policy,
        principal=principal,
        record_id=None if key is None else RecordId(principal.tenant, endpoint, key),
        fingerprint=RequestFingerprint(payload_hash, request_hash),
        body=body,
        request_id=head.request_id,
        correlation_id=head.correlation_id,
        path=head.path,
        traceparent=head.traceparent,
        client_generated_at=head.client_generated_at,
        sequence=sequence,
        method=head.method,
        path_params=path_params,
        query=head.query,
    )


def hash_payload(head: RequestHead, body: bytes, policy: Policy) -> str:
    """Return the hash of a body, or of the result of ``Policy.fingerprint``.

    Raises ``BodyInvalidError`` for JSON that cannot be read, and what the function raises: a
    ``RequestError`` refuses the request.
    """
    if policy.fingerprint is None:
        return body_hash(body, head.content_type, volatile=policy.volatile_fields)
    found: object = policy.fingerprint(
        FingerprintInput(head.method, head.path, head.query, head.headers, body)
    )
    if isinstance(found, str):
        found = found.encode("utf-8", "surrogatepass")
    if not isinstance(found, bytes):
        raise ConfigurationError(
            f"policy {policy.name}: fingerprint must return bytes or text, not "
            f"{type(found).__name__}"
        )
    return sha256(found).hexdigest()


def _key_in_body(body: bytes, policy: Policy) -> str | None:
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        raw = fields.get(policy.key_field or "")
        if raw is not None and len(bytes(raw)) > _MAX_SHORT_BYTES and bytes(raw)[:1] != b'"':
            raise BodyInvalidError(f"{policy.key_field} must be a string")
        value = None if raw is None else msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BodyInvalidError("the body is not a JSON object that can be read") from error
    if value is None:
        return None
    if not isinstance(value, str):
        raise KeyInvalidError(f"{policy.key_field} must be a string")
    return check_key(value, policy.key_format)


def mismatch_details(request: GuardedRequest, expected: str, received: str) -> dict[str, str]:
    """Return the hashes for a 409. That of the stored request is only for its own tenant.

    With ``SINGLE_TENANT`` the caller may be anybody, and could guess a short body by its hash.
    """
    if request.principal == SHARED_PRINCIPAL:
        return {"receivedHash": received}
    return {"expectedHash": expected, "receivedHash": received}


def stale_error(request: GuardedRequest, now: datetime) -> StaleActionError | None:
    """Return the error if the action is too old, None if not or if the policy has no such rule."""
    rule = request.policy.staleness
    if rule is None:
        return None
    fields = _fields(request.body)
    made_at = parse_instant(fields.get("clientGeneratedAt"), "clientGeneratedAt")
    if fields.get("clientSubmittedAt") is not None:
        submitted_at = parse_instant(fields["clientSubmittedAt"], "clientSubmittedAt")
        check_submitted_after_generated(submitted_at, made_at, grace=rule.grace)
    try:
        check_not_stale(made_at, now, cap=rule.cap, grace=rule.grace)
    except StaleActionError as error:
        return error
    return None


def generated_at(request: GuardedRequest) -> datetime | None:
    """Return when the user acted, by the device's clock; None if the request does not say.

    With a rule of staleness the body says it in ``clientGeneratedAt``; otherwise the header
    ``X-Client-Generated-At`` does, or the same field. It is only informative then: a value that
    is not valid is None. A handler that uses it refuses it.
    """
    if request.policy.staleness is not None:
        return _generated_at_in_body(request.body)
    if request.client_generated_at is None and _GENERATED_AT not in request.body:
        return None
    with suppress(BodyInvalidError):
        if request.client_generated_at is not None:
            return parse_instant(request.client_generated_at, "X-Client-Generated-At")
        return _generated_at_in_body(request.body)
    return None


def _generated_at_in_body(body: bytes) -> datetime:
    return parse_instant(_fields(body).get("clientGeneratedAt"), "clientGeneratedAt")


def client_times(request: GuardedRequest) -> dict[str, str]:
    """Return the device's times in a body, for logs. Without those that are not valid."""
    found = {}
    with suppress(BodyInvalidError):
        for name, value in _fields(request.body).items():
            with suppress(BodyInvalidError):
                found[name] = parse_instant(value, name).isoformat()
    return found


def _fields(body: bytes) -> dict[str, Any]:
    """Return the times in a body. The rest of it is not decoded: it may be large."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        return {name: _decode_short(fields[name]) for name in _TIMES if name in fields}
    except msgspec.ValidationError:  # not an object
        return {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BodyInvalidError("the body is not JSON that can be read") from error


def _decode_short(raw: msgspec.Raw) -> Any:
    """Decode a short value; a long one becomes an empty list, which is as invalid."""
    return msgspec.json.decode(raw) if len(bytes(raw)) <= _MAX_SHORT_BYTES else []


def _usable_id(value: bytes) -> str | None:
    """Return a client's request or correlation id if it is short and visible ASCII."""
    if not 0 < len(value) <= _MAX_ID_LENGTH or not _VISIBLE.issuperset(value):
        return None
    return value.decode("ascii")


def new_record(
    request: GuardedRequest,
    response: Response,
    ttl: timedelta | None,
    created_at: datetime,
    new_id: NewId,
) -> Record | None:
    """Return the record of a response; None without a key or a TTL."""
    if request.record_id is None or ttl is None:
        return None
    succeeded = response.status < _FIRST_ERROR
    made_at = generated_at(request)
    return Record(
        id=request.record_id,
        fingerprint=request.fingerprint,
        status=response.status,
        headers=stored_headers(response, request.policy.replay_headers),
        body=response.body,
        created_at=created_at,
        expires_at=_expires_at(request, created_at, ttl, made_at, succeeded=succeeded),
        request_id=request.request_id,
        correlation_id=request.correlation_id,
        audit_id=new_id(created_at) if request.policy.audit and succeeded else None,
        client_generated_at=made_at if made_at and made_at.year in _STORED_YEARS else None,
    )


def stored_headers(response: Response, named: tuple[str, ...] | None = None) -> dict[str, str]:
    """Return the headers that are kept in the record: ``named`` ones, in lower case; None: all.

    Never those of the exchange or the session. Several values of one become one, with commas, as
    RFC 9110 §5.3 allows.
    """
    stored: dict[str, str] = {}
    hops = ""
    for raw, value in response.headers:
        name, text = raw.decode("latin-1"), value.decode("latin-1")
        if name in _STORED_NAMES:
            stored[name] = text
        elif name in NEVER_REPLAYED:
            if name == "connection":
                hops = f"{hops},{text.lower()}"
        elif not name.startswith(_RATE_LIMITS) if named is None else name in named:
            stored[name] = f"{stored[name]}, {text}" if name in stored else text
    if hops:  # names of further headers of this connection, RFC 9110 §7.6.1
        for name in hops.split(","):
            stored.pop(name.strip(), None)
    return stored


def _expires_at(
    request: GuardedRequest,
    created_at: datetime,
    ttl: timedelta,
    made_at: datetime | None,
    *,
    succeeded: bool,
) -> datetime:
    """Return when the record expires: never before its action is stale.

    An action counts for cap + grace from its ``clientGeneratedAt``, which may be longer than the
    TTL. It must not run again in between, unless the policy sets ``outlive_staleness`` to False.
    """
    expires_at = created_at + ttl
    rule = request.policy.staleness
    if rule is None or made_at is None or not request.policy.outlive_staleness or not succeeded:
        return expires_at
    return max(expires_at, made_at + rule.cap + rule.grace + _ONE_SECOND)
