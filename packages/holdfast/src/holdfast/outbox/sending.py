"""From an entry to the request that is sent for it: the same on every send but for the time."""

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime

import msgspec

from holdfast.core.local_ids import replace_in_body, replace_in_headers, replace_in_path
from holdfast.core.outbox_entry import METHODS, Entry
from holdfast.errors import EntryInvalidError, UsageError
from holdfast.outbox.exchange import Request
from holdfast.outbox.profile import Profile
from holdfast.outbox.rows import instant

__all__ = ["Token", "bearer", "reading", "request_for", "target_of"]

Token = str | Callable[[str], str | None] | None
"""A token, or what gives the one of a user when something is sent; None where there is none."""

Ids = Mapping[str, str | int]
Mappings = Callable[[str, Iterable[str]], Ids]


def request_for(
    entry: Entry,
    profile: Profile,
    mappings: Mappings,
    *,
    now: Callable[[], datetime],
    extra: Mapping[str, str],
) -> Request:
    """Write the request of an entry; ``extra`` are headers that are made anew at each send.

    ``now`` gives the server's time, for request formats that say when it is sent.

    Raises ``EntryInvalidError`` if a local id has no server id yet, or one that fits nowhere.
    """
    ids = _resolved(entry, mappings)
    target = replace_in_path(entry.endpoint, ids) if ids else entry.endpoint
    headers = replace_in_headers(entry.headers, ids) if ids else dict(entry.headers)
    headers["Idempotency-Key"] = entry.idempotency_key
    if profile.request_format is None:
        headers["X-Client-Generated-At"] = instant(entry.client_generated_at)
        body = _body(entry, ids)
    else:
        payload = replace_in_body(entry.decoded(), ids)
        # Never before it was made, whatever the device's clock was set to in between.
        submitted_at = max(now(), entry.client_generated_at)
        added, value = profile.request_format.build(entry, payload, submitted_at)
        headers |= added
        body = None if value is None else msgspec.json.encode(value)
    if body is not None and not any(name.lower() == "content-type" for name in headers):
        headers["Content-Type"] = "application/json"
    return Request(METHODS[entry.operation], target, headers | dict(extra), body)


def target_of(entry: Entry, mappings: Mappings) -> str:
    """Return the path of the entity that an entry changes."""
    ids = _resolved(entry, mappings)
    target = replace_in_path(entry.endpoint, ids) if ids else entry.endpoint
    return target.partition("?")[0]


def reading(target: str, extra: Mapping[str, str]) -> Request:
    """Write a request that only reads."""
    return Request("GET", target, extra)


def bearer(token: Token, user_id: str) -> str | None:
    """Return the user's token of this moment; None if they are not signed in."""
    found = token(user_id) if callable(token) else token
    if found is not None and not (found.isascii() and found.isprintable() and " " not in found):
        # Not shown: whatever it is, it was meant to be a secret.
        raise UsageError("the token has a character that no token has")
    return found


def _resolved(entry: Entry, mappings: Mappings) -> Ids:
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
