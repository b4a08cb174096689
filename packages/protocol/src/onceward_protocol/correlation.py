"""Headers that connect the requests and jobs of one user action: correlation id, trace context."""

import re
from typing import Final

__all__ = ["CORRELATION_HEADER", "TRACEPARENT_HEADER", "is_traceparent"]

CORRELATION_HEADER: Final = "X-Correlation-ID"
"""The same on every attempt at an action; kept by the record, the audit event and its jobs."""

TRACEPARENT_HEADER: Final = "traceparent"
"""The W3C trace context: the trace, and the span before."""

# Version, trace id, id of the span before, flags. Ids of zeros are not valid.
_VALID: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def is_traceparent(value: object) -> bool:
    """Return whether a value is a ``traceparent`` of version 00, the only one so far."""
    return isinstance(value, str) and _VALID.fullmatch(value) is not None
