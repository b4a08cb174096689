"""Headers that connect every request about an entry with its user action.

They are the same on every attempt, and no part of the fingerprint.
"""

from collections.abc import Mapping
from typing import Final

from onceward_outbox.entry import Entry
from onceward_protocol.correlation import CORRELATION_HEADER, TRACEPARENT_HEADER

__all__ = ["correlation_headers", "without_correlation"]

_NAMES: Final = frozenset({CORRELATION_HEADER.lower(), TRACEPARENT_HEADER})


def correlation_headers(entry: Entry) -> dict[str, str]:
    """Return the entry's id as correlation id, and its trace context if it has one."""
    headers = {CORRELATION_HEADER: entry.id}
    if entry.traceparent is not None:
        headers[TRACEPARENT_HEADER] = entry.traceparent
    return headers


def without_correlation(headers: Mapping[str, str]) -> dict[str, str]:
    """Return headers without those of ``correlation_headers``, in any case of their letters."""
    return {name: value for name, value in headers.items() if name.lower() not in _NAMES}
