"""Build the HTTP request of an entry: the same on every send, except for its submission time."""

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime

import msgspec

from holdfast.core.local_ids import replace_in_body, replace_in_headers, replace_in_path
from holdfast.core.outbox_entry import METHODS, Entry
from holdfast.errors import EntryInvalidError, UsageError
from holdfast.outbox.profile import Profile
from holdfast.outbox.sql import instant
from holdfast.outbox.transport import Request

__all__ = ["Token", "bearer_token", "build_request", "entity_path"]

Token = str | Callable[[str], str | None] | None
"""A token, or a function that returns the token of a user at each send; None for none."""

Ids = Mapping[str, str | int]
Mappings = Callable[[str, Iterable[str]], Ids]


def build_request(
    entry: Entry,
    profile: Profile,
    mappings: Mappings,
    *,
    now: Callable[[], datetime],
    extra: Mapping[str, str],
) -> Request:
    """Return the request of an entry; ``extra`` are headers made anew at each send.

    ``now`` returns the server's time, for request formats that carry the submission time. Raises
    ``EntryInvalidError`` if a local id has no server id yet, or one that cannot be written there.
    """
    ids = _resolve_ids(entry, mappings)
    target = replace_in_path(entry.endpoint, ids) if ids else entry.endpoint
    headers = replace_in_headers(entry.headers, ids) if ids else dict(entry.headers)
    headers["Idempotency-Key"] = entry.idempotency_key
    if profile.request_format is None:
        headers["X-Client-Generated-At"] = instant(entry.client_generated_at)
        body = _body(entry, ids)
    else:
        payload = replace_in_body(entry.decoded(), ids)
        # Not before it was made, even if the device's clock was set back in between.
        submitted_at = max(now(), entry.client_generated_at)
        added, value = profile.request_format.build(entry, payload, submitted_at)
        headers |= added
        body = None if value is None else msgspec.json.encode(value)
    if body is not None and not any(name.lower() == "content-type" for name in headers):
        headers["Content-Type"] = "application/json"
    return Request(METHODS[entry.operation], target, headers | dict(extra), body)


def entity_path(entry: Entry, mappings: Mappings) -> str:
    """Return the path of the entity that an entry changes, without a query."""
    ids = _resolve_ids(entry, mappings)
    target = replace_in_path(entry.endpoint, ids) if ids else entry.endpoint
    return target.partition("?")[0]


def bearer_token(token: Token, user_id: str) -> str | None:
    """Return the user's current token; None if they are not signed in."""
    found = token(user_id) if callable(token) else token
    if found is not None and not (found.isascii() and found.isprintable() and " " not in found):
        # Not shown: it was meant to be a secret.
        raise UsageError("token contains whitespace or non-ASCII characters")
    return found


def _resolve_ids(entry: Entry, mappings: Mappings) -> Ids:
    if not entry.local_refs:
        return {}
    ids = mappings(entry.user_id, entry.local_refs)
    missing = [local_id for local_id in entry.local_refs if local_id not in ids]
    if missing:
        raise EntryInvalidError(
            "local_id_resolution_before_replay",
            f"the local id {missing[0]} has no server id yet",
        )
    return ids


def _body(entry: Entry, ids: Ids) -> bytes | None:
    if entry.payload is None:
        return None
    if not ids:
        return entry.payload.encode()
    return msgspec.json.encode(replace_in_body(entry.decoded(), ids))
