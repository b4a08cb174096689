"""The request of an entry: path, headers and body as they are sent, with the ids of the server."""

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime

import msgspec

from onceward_outbox.correlation import correlation_headers, without_correlation
from onceward_outbox.entry import Entry
from onceward_outbox.errors import EntryInvalidError
from onceward_outbox.profile import Profile
from onceward_outbox.sql import instant
from onceward_outbox.transport import Request
from onceward_protocol.local_ids import replace_in_body, replace_in_headers, replace_in_path
from onceward_protocol.operation import METHODS
from onceward_protocol.sequence import CLIENT_HEADER, SEQUENCE_HEADER, SequenceNumber
from onceward_protocol.versions import ANY_TAG, if_match_in, without_if_match

__all__ = ["Mappings", "build_request", "entity_path"]

_Ids = Mapping[str, str | int]
Mappings = Callable[[str, Iterable[str]], _Ids]
"""Returns the server ids of a user's local ids, those that have one."""


def build_request(
    entry: Entry,
    profile: Profile,
    mappings: Mappings,
    *,
    now: Callable[[], datetime],
    extra: Mapping[str, str],
    version: str | None = None,
    sequence: SequenceNumber | None = None,
) -> Request:
    """Return the request of an entry; ``extra`` are headers made anew at each send.

    ``version`` is sent as ``If-Match``, unless the entry itself has ``If-Match: *``. ``sequence``
    is its number in a strict sequence.

    ``now`` returns the server's time, for request formats that carry the submission time. Raises
    ``EntryInvalidError`` if a local id has no server id yet, or one that cannot be written there.
    """
    ids = _resolve_ids(entry, mappings)
    target = replace_in_path(entry.endpoint, ids) if ids else entry.endpoint
    headers = replace_in_headers(entry.headers, ids) if ids else dict(entry.headers)
    if version is not None and if_match_in(headers) != ANY_TAG:
        headers = without_if_match(headers) | {"If-Match": version}
    headers = without_correlation(headers) | correlation_headers(entry)
    headers[profile.key_header] = entry.idempotency_key
    if sequence is not None:
        headers[CLIENT_HEADER] = sequence.client_id
        headers[SEQUENCE_HEADER] = str(sequence.number)
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


def _resolve_ids(entry: Entry, mappings: Mappings) -> _Ids:
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


def _body(entry: Entry, ids: _Ids) -> bytes | None:
    if entry.payload is None:
        return None
    if not ids:
        return entry.payload.encode()
    return msgspec.json.encode(replace_in_body(entry.decoded(), ids))
