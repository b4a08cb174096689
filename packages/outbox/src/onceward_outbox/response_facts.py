"""What a response says: whose it is, which id it gave, and whether its server looked the key up."""

from typing import Final
from urllib.parse import urlsplit

from onceward_outbox.entry import Entry
from onceward_outbox.outcome import AttemptResult
from onceward_outbox.profile import Profile
from onceward_outbox.transport import Response
from onceward_protocol.operation import Operation
from onceward_protocol.response_classification import UNRECOGNISED, counts_as_attempt

__all__ = [
    "has_server_time",
    "is_conclusive",
    "is_recognised",
    "other_spelling",
    "outage_result",
    "result_of",
    "server_id_in",
]

_SERVER_ERROR: Final = 500
_ABOUT_THE_KEY: Final = frozenset({409, 422})
_GONE: Final = frozenset({404, 410})
_MAX_INTEGER: Final = 2**63


def result_of(response: Response, error: str | None = None) -> AttemptResult:
    """Return what is recorded of an attempt with this response."""
    return AttemptResult(response.status, response.code, response.request_id, error)


def outage_result(response: Response) -> AttemptResult:
    """Return what is recorded of an attempt during an outage; it does not count."""
    result = result_of(response, response.error_body)
    # The status of a gateway's page does not say that it is one.
    counts = counts_as_attempt(result.http_status, result.code)
    return result._replace(code=UNRECOGNISED) if counts else result


def server_id_in(entry: Entry, response: Response) -> str | int | None:
    """Return the server's id of what was created; None for other operations."""
    if entry.operation is not Operation.CREATE:
        return None
    body = response.json()
    found = body.get("id") if isinstance(body, dict) else None
    if isinstance(found, bool) or not isinstance(found, str | int):
        return None
    # SQLite has no larger numbers; as text it is the same id in a path.
    is_large = isinstance(found, int) and not -_MAX_INTEGER <= found < _MAX_INTEGER
    return str(found) if is_large else found


def is_recognised(response: Response, profile: Profile) -> bool:
    """Return whether this is a response of the service, not the page of a proxy or a portal."""
    return profile.recognise(response.status, response.headers, response.body)


def is_conclusive(response: Response, profile: Profile) -> bool:
    """Return whether the server looked up the key before it refused, so no earlier send succeeded.

    A missing permission, a body that is too large or an unknown path are found before that.
    """
    if response.status in _GONE:
        return is_recognised(response, profile)
    return response.status in _ABOUT_THE_KEY or "idempotency-replayed" in response.headers


def has_server_time(response: Response, profile: Profile) -> bool:
    """Return whether this is a response of the service, not of a proxy with its own clock."""
    if response.status >= _SERVER_ERROR or 300 <= response.status < 400:  # noqa: PLR2004
        return False
    return is_recognised(response, profile)


def other_spelling(location: str, origin: str | None, path: str) -> str | None:
    """Return the path if a redirect leads to the same one of the same server, spelt otherwise.

    Like ``path`` it has no prefix that the URL of the server has.
    """
    try:
        parts = urlsplit(location)
    except ValueError:
        return None
    if (parts.scheme or parts.netloc) and f"{parts.scheme}://{parts.netloc}".lower() != origin:
        return None
    target, asked = parts.path.rstrip("/"), path.rstrip("/")
    if not target.lower().endswith(asked.lower()):
        return None
    return parts.path[len(target) - len(asked) :]
