"""What an answer tells beside its status: whose it is, what it settles, where it points to."""

from typing import Any, Final
from urllib.parse import urlsplit

from holdfast.core.outbox_entry import Entry, Operation
from holdfast.outbox.exchange import Answer

__all__ = ["facts", "is_within", "server_id_in", "settles", "speaks_for_the_service"]

_ABOUT_THE_KEY: Final = frozenset({409, 422})
_GONE: Final = frozenset({404, 410})
_SERVER_ERROR: Final = 500
_LARGEST: Final = 2**63


def facts(answer: Answer) -> dict[str, Any]:
    """Return what the history keeps of an answer."""
    return {"http_status": answer.status, "code": answer.code, "request_id": answer.request_id}


def server_id_in(entry: Entry, answer: Answer) -> str | int | None:
    """Return the server's id of what was created; None for everything else."""
    if entry.operation is not Operation.CREATE:
        return None
    body = answer.json()
    found = body.get("id") if isinstance(body, dict) else None
    if isinstance(found, bool) or not isinstance(found, str | int):
        return None
    # SQLite has no larger numbers; as a text it is at least the same id in a path.
    return str(found) if isinstance(found, int) and not -_LARGEST <= found < _LARGEST else found


def settles(answer: Answer) -> bool:
    """Say whether a refusal was made with the key looked up: then the send before has not happened.

    A token without the right, a body too large, a path that is not there are found out earlier.
    """
    if answer.status in _GONE:
        return speaks_for_the_service(answer)
    return answer.status in _ABOUT_THE_KEY or "idempotency-replayed" in answer.headers


def speaks_for_the_service(answer: Answer) -> bool:
    """Tell the service from whatever stands in front of it, whose clock may be anything."""
    if answer.status >= _SERVER_ERROR or 300 <= answer.status < 400:  # noqa: PLR2004
        return False
    headers = answer.headers
    return "x-request-id" in headers or "json" in headers.get("content-type", "") or not answer.body


def is_within(location: str, origin: str | None, target: str) -> bool:
    """Say whether a redirect only spells the same path of the same server otherwise."""
    try:
        parts = urlsplit(location)
    except ValueError:
        return False
    if (parts.scheme or parts.netloc) and f"{parts.scheme}://{parts.netloc}".lower() != origin:
        return False
    asked = target.partition("?")[0].rstrip("/")
    return parts.path.rstrip("/").lower().endswith(asked.lower())
