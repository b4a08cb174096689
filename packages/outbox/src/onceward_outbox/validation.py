"""Validation of new entries: every rule that can be checked without the queue.

Rules that need the queue (known user, next number, existing dependencies) are checked in the
transaction that writes the entry.
"""

import json
import re
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final

import msgspec

from onceward_outbox.entry import ConflictResolution, NewEntry
from onceward_outbox.errors import EntryInvalidError
from onceward_outbox.profile import Profile, ProfileRegistry
from onceward_outbox.settings import QueueSettings
from onceward_protocol.correlation import current_traceparent, is_traceparent
from onceward_protocol.endpoint_validation import check_endpoint
from onceward_protocol.errors import BodyInvalidError, KeyInvalidError
from onceward_protocol.fingerprint import MAX_DEPTH, canonical_json
from onceward_protocol.ids import new_uuid4
from onceward_protocol.keys import check_key
from onceward_protocol.local_ids import References, is_local_id, references
from onceward_protocol.operation import Operation
from onceward_protocol.versions import ANY_TAG, as_tag, if_match_in, is_weak

_NAME: Final = re.compile(r"[\x20-\x7e\u00a0-\ud7ff\ue000-\U0010ffff]{1,200}")
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,100}")
_HEADER_VALUE: Final = re.compile(r"[\x20-\x7e]{0,4096}")
_MAY_REFER: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-|\{local:|\\u")

_NOT_OURS: Final = frozenset(
    {
        # Tokens are fetched at each send, and never stored in the queue.
        "authorization",
        "proxy-authorization",
        "cookie",
        # Set by the drain and the transport at each send.
        "idempotency-key",
        "x-client-generated-at",
        "x-correlation-id",
        "traceparent",
        "host",
        "connection",
        "content-length",
        "transfer-encoding",
        "te",
        "upgrade",
        "expect",
    }
)
_MAX_INT: Final = 2**63 - 1

_OPERATIONS: Final = {member.value: member for member in Operation}
_STRATEGIES: Final[dict[str | None, ConflictResolution]] = {
    member.value: member for member in ConflictResolution
}
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder().decode


class Request(msgspec.Struct, frozen=True, gc=False):
    """The request of an entry, as it is stored."""

    endpoint: str
    payload: str | None
    headers: Mapping[str, str]
    refers_to: References


class Draft(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A new entry that has passed validation."""

    new: NewEntry
    request: Request
    operation: Operation
    profile: Profile
    conflict_resolution: ConflictResolution | None
    key: str
    priority: int
    local_id: str | None
    base: str | None
    base_version: str | None
    payload_version: int
    traceparent: str | None


def check_new(new: NewEntry, settings: QueueSettings, profiles: ProfileRegistry) -> Draft:
    """Return the entry as it will be stored, or raise ``EntryInvalidError``."""
    operation = _OPERATIONS.get(new.operation)
    if operation is None:
        raise _unknown("operation_must_be_valid_verb", "operation", Operation)
    check_name(new.profile, "profile_must_be_known", "profile")
    profile = profiles.get(new.profile)
    strategy = _STRATEGIES.get(new.conflict_resolution)
    if strategy is None and new.conflict_resolution is not None:
        raise _unknown(
            "conflict_resolution_must_be_known", "conflict_resolution", ConflictResolution
        )
    check_name(new.user_id, "user_id_must_reference_existing_user", "user_id")
    check_name(new.entity_type, "entity_type_must_be_text", "entity_type")
    if new.local_id is not None and not is_local_id(new.local_id):
        raise EntryInvalidError("local_id_must_be_uuid", "local_id must be a lowercase UUID")
    if new.id is not None and not is_local_id(new.id):
        raise EntryInvalidError("id_must_be_uuid", "id must be a lowercase UUID")
    if new.once is not None:
        check_name(new.once, "once_must_be_text", "once")
    if new.traceparent is not None and not is_traceparent(new.traceparent):
        raise EntryInvalidError(
            "traceparent_must_be_w3c",
            "traceparent must look like 00-(32 hex digits)-(16 hex digits)-01, in lowercase",
        )
    _check_numbers(new)
    return Draft(
        new=new,
        request=check_request(
            profile, new.endpoint, new.payload, new.headers, settings.max_payload_bytes
        ),
        operation=operation,
        profile=profile,
        conflict_resolution=strategy,
        key=new_uuid4() if new.key is None else _checked_key(new.key, profile),
        priority=profile.priority_of(new.entity_type) if new.priority is None else new.priority,
        local_id=new.local_id or _entity_in_path(operation, new.endpoint),
        base=None if new.base is None else json_of(new.base, settings.max_payload_bytes),
        base_version=_named(new) if operation is Operation.CREATE else _base_version(new),
        payload_version=settings.payload_version,
        traceparent=new.traceparent or current_traceparent(),
    )


def _base_version(new: NewEntry) -> str | None:
    """Return the version that the app has based the change on; a header counts as one."""
    if new.headers:
        check_if_match(new.headers)
    named = if_match_in(new.headers) if new.headers else None
    if named is not None and named != ANY_TAG:
        return named
    version = _named(new)
    if version is None:
        return None
    if not isinstance(version, str) or _HEADER_VALUE.fullmatch(version) is None:
        raise EntryInvalidError(
            "base_version_must_be_text",
            "base_version must be the version as the server writes it, such as '\"3\"' or 3",
        )
    _check_strong(version, "base_version")
    return as_tag(version)


def _named(new: NewEntry) -> str | None:
    """Return ``base_version``; a number, as bodies have it, becomes the tag that names it."""
    version = new.base_version
    if isinstance(version, int) and not isinstance(version, bool):
        return f'"{version}"'
    return version  # type: ignore[return-value]  # other types are refused by the caller


def check_if_match(headers: Mapping[str, str]) -> None:
    """Raise ``EntryInvalidError`` if ``If-Match`` has a weak tag."""
    for name, value in headers.items():
        if isinstance(name, str) and name.lower() == "if-match" and isinstance(value, str):
            _check_strong(value, name)


def _check_strong(version: str, what: str) -> None:
    if is_weak(version):
        # Without it the edit would be sent unchecked, and could overwrite another client's write.
        raise EntryInvalidError(
            "base_version_must_be_strong",
            f"{what} is the weak tag {version}, which no If-Match matches. A proxy that compresses "
            "responses may have weakened it: use the version in the body of the response, or have "
            "the proxy keep ETag as it is",
        )


def check_request(
    profile: Profile, endpoint: str, payload: Any, headers: Mapping[str, str], max_bytes: int
) -> Request:
    """Return the request as it will be stored, or raise ``EntryInvalidError``."""
    refers_to = _in_path(endpoint)
    text = None if payload is None else json_of(payload, max_bytes)
    if (
        profile.payload_must_be_object
        and text is not None
        and not text.lstrip(" \t\r\n").startswith("{")
    ):
        raise EntryInvalidError(
            "payload_must_be_valid_json",
            f"the payload must be a JSON object: profile {profile.name!r} adds fields to it",
        )
    if headers:
        check_headers(headers)
    # The payload is decoded again only if it may contain a local id.
    body = None
    if text is not None and ("-" in text or "\\u" in text) and _MAY_REFER.search(text) is not None:
        body = msgspec.json.decode(text)
    if headers or body is not None:
        refers_to = references(body, headers, endpoint)
    return Request(endpoint, text, dict(headers), refers_to)


@lru_cache(maxsize=512)
def _in_path(endpoint: str) -> References:
    """Check an endpoint and find its references. Cached, because apps have few endpoints."""
    return references(None, {}, check_endpoint(endpoint))


def json_of(value: Any, max_bytes: int) -> str:
    """Return a JSON value, or the bytes of a JSON text, as text; raise ``EntryInvalidError``.

    Rejects what a Onceward server would reject, while the user can still correct it.
    """
    try:
        raw = _checked(value) if isinstance(value, bytes) else _written(value)
        text = raw.decode()
    except BodyInvalidError as error:
        raise _not_json(f"the payload cannot be sent: {error.message}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise _not_json(f"the payload is not JSON: {error}") from None
    if len(raw) > max_bytes:
        raise _not_json(f"the payload has {len(raw)} bytes, more than the {max_bytes} allowed")
    return text


def _written(value: Any) -> bytes:
    """Encode with the fast encoder, then decode and compare, to make sure the value is plain JSON.

    The encoder alone would silently convert dates, sets and NaN.
    """
    try:
        raw = _encode(value)
        if _decode(raw) == value and raw.count(b"{") + raw.count(b"[") <= MAX_DEPTH:
            return raw
    except Exception:  # noqa: BLE001, S110 - the slow encoder below names the problem
        pass
    _check_member_names(value)
    slowly = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _checked(slowly.encode())


def _checked(raw: bytes) -> bytes:
    canonical_json(raw)
    return raw


def _check_member_names(value: Any) -> None:
    waiting = [value]
    # Larger values are refused anyway, and a value may contain itself.
    for _ in range(1_000_000):
        if not waiting:
            return
        current = waiting.pop()
        if isinstance(current, dict):
            if not all(isinstance(name, str) for name in current):
                raise TypeError("names of members must be strings")
            waiting.extend(current.values())
        elif isinstance(current, list | tuple):
            waiting.extend(current)


def _checked_key(key: str, profile: Profile) -> str:
    try:
        return check_key(key, profile.key_format)
    except KeyInvalidError as error:
        raise EntryInvalidError("idempotency_key_must_be_uuid4", error.message) from None


def _entity_in_path(operation: Operation, endpoint: str) -> str | None:
    """Return the local id at the end of the path, which is the entity of a change."""
    if operation is Operation.CREATE:
        return None
    last = endpoint.partition("?")[0].rpartition("/")[2]
    return last[len("{local:") : -1] if last.startswith("{local:") else None


def _check_numbers(new: NewEntry) -> None:
    if new.max_attempts < 1:
        raise EntryInvalidError("max_attempts_must_be_positive", "max_attempts must be at least 1")
    if new.sequence_number is not None and not 1 <= new.sequence_number <= _MAX_INT:
        raise EntryInvalidError(
            "sequence_number_must_be_monotonic", "a sequence number is at least 1"
        )
    if new.priority is not None and not -_MAX_INT <= new.priority <= _MAX_INT:
        raise EntryInvalidError("priority_must_be_a_number", "the priority is too large a number")
    made_at = new.client_generated_at
    if made_at is not None and (not isinstance(made_at, datetime) or made_at.tzinfo is None):
        raise EntryInvalidError(
            "client_generated_at_must_be_aware", "client_generated_at needs a time zone"
        )


@lru_cache(maxsize=512)
def check_name(value: str, rule: str, what: str) -> None:
    """Raise ``EntryInvalidError`` unless this is 1 to 200 printable characters."""
    if not isinstance(value, str) or _NAME.fullmatch(value) is None:
        raise EntryInvalidError(rule, f"{what} must be 1 to 200 printable characters")


def check_headers(headers: Mapping[str, str]) -> None:
    """Raise ``EntryInvalidError`` for an invalid header, or one that is set at each send."""
    rule = "headers_must_be_plain_fields"
    for name, value in headers.items():
        if not isinstance(name, str) or _HEADER_NAME.fullmatch(name) is None:
            raise EntryInvalidError(rule, "the name of a header contains an invalid character")
        if name.lower() in _NOT_OURS:
            raise EntryInvalidError(
                rule, f"the header {name} is set at each send and cannot be queued"
            )
        if not isinstance(value, str) or _HEADER_VALUE.fullmatch(value) is None:
            raise EntryInvalidError(rule, f"the header {name} must be printable ASCII on one line")


def _unknown(rule: str, what: str, kind: type[StrEnum]) -> EntryInvalidError:
    return EntryInvalidError(rule, f"{what} must be one of {', '.join(kind)}")


def _not_json(message: str) -> EntryInvalidError:
    return EntryInvalidError("payload_must_be_valid_json", message)
