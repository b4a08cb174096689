"""The class of cause of a failed entry: what an app can react to without knowing every code."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from onceward_outbox.entry import Reason

PAYLOAD_MISMATCH: Final = "payload_mismatch"
"""The key was used for another payload: an error of the app."""

BAD_REQUEST: Final = "bad_request"
"""The server cannot read the request: an error of the app."""

_BY_CODE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "IDEMPOTENCY_CONFLICT": PAYLOAD_MISMATCH,
        "idempotency.payload_mismatch": PAYLOAD_MISMATCH,
    }
)
_BY_REASON: Final[Mapping[Reason | None, str]] = MappingProxyType(
    {
        Reason.DEPENDENCY: "dependency",
        Reason.ATTEMPTS: "attempts",
        Reason.MIGRATION: "migration",
        Reason.UNKNOWN: "unknown",
    }
)
_BY_STATUS: Final[Mapping[int | None, str]] = MappingProxyType(
    {
        400: BAD_REQUEST,
        403: "forbidden",
        404: "not_found",
        409: "conflict",
        410: "not_found",
        412: "conflict",
        413: "too_large",
        428: "conflict",
    }
)


def failure_cause(
    reason: Reason | None, code: str | None, status: int | None, causes: Mapping[str, str]
) -> str:
    """Return why an entry is failed; ``causes`` are the classes of the profile, by code.

    A reason of the device comes first, then the code, then the status. ``refused`` if none of them
    says more.
    """
    found = _BY_REASON.get(reason)
    if found is None and code is not None:
        found = causes.get(code) or _BY_CODE.get(code)
    if found is None and reason is Reason.REBUILD:
        found = "out_of_order"
    return found or _BY_STATUS.get(status, "refused")


def is_client_bug(cause: str) -> bool:
    """Return whether the app has to be corrected: no user can do anything about it."""
    return cause in (PAYLOAD_MISMATCH, BAD_REQUEST)
