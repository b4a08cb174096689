"""A guarded call: everything the intake needs to know of a request, whatever framework it is in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.core.fingerprint import body_hash, request_fingerprint
from holdfast.core.idempotency_record import RecordId, RequestFingerprint
from holdfast.core.keys import check_key, parse_key
from holdfast.core.policy import Policy
from holdfast.errors import BodyInvalidError, KeyInvalidError, KeyRequiredError

__all__ = ["GuardedRequest", "Principal", "make_call"]


@dataclass(frozen=True, slots=True)
class Principal:
    """Who is calling, and for which tenant: the hard boundary of everything stored."""

    tenant: str
    actor: str
    roles: frozenset[str] = frozenset()
    claims: Mapping[str, Any] = field(default_factory=dict)


class GuardedRequest(msgspec.Struct, frozen=True, gc=False):
    """One request to a guarded operation, reduced to what decides its fate."""

    endpoint: str
    policy: Policy
    principal: Principal
    # None where the policy leaves the key to the caller and none was sent.
    record_id: RecordId | None
    mark: RequestFingerprint
    body: bytes
    request_id: str
    correlation_id: str


def make_call(
    *,
    endpoint: str,
    policy: Policy,
    principal: Principal,
    method: str,
    path_params: Mapping[str, str],
    query: bytes,
    key_headers: Sequence[bytes],
    content_type: str | None,
    body: bytes,
    request_id: str,
    correlation_id: str,
) -> GuardedRequest:
    """Read the key, then the fingerprint. Raises the caller's errors in the contract's order."""
    if policy.key_field is None:
        key = parse_key(key_headers, policy.key_format)
    else:
        key = _key_in_body(body, policy)
        if key and key_headers and parse_key(key_headers, policy.key_format) != key:
            raise KeyInvalidError(f"{policy.key_field} and Idempotency-Key are different keys")
    if key is None and policy.key_required:
        where = "header Idempotency-Key" if policy.key_field is None else policy.key_field
        raise KeyRequiredError(f"this operation needs an idempotency key ({where})")
    payload_hash = body_hash(body, content_type, volatile=policy.volatile_fields)
    fingerprint = request_fingerprint(
        method=method,
        endpoint=endpoint,
        path_params=path_params,
        query=query,
        body_hash=payload_hash,
    )
    return GuardedRequest(
        endpoint=endpoint,
        policy=policy,
        principal=principal,
        record_id=None if key is None else RecordId(principal.tenant, endpoint, key),
        mark=RequestFingerprint(payload_hash, fingerprint),
        body=body,
        request_id=request_id,
        correlation_id=correlation_id,
    )


def _key_in_body(body: bytes, policy: Policy) -> str | None:
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        raw = fields.get(policy.key_field or "")
        value = None if raw is None else msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BodyInvalidError("the body is not a JSON object that can be read") from error
    if value is None:
        return None
    if not isinstance(value, str):
        raise KeyInvalidError(f"{policy.key_field} must be a string")
    return check_key(value, policy.key_format)
