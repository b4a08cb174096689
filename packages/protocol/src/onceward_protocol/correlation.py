"""Headers that connect the requests and jobs of one user action: correlation id, trace context."""

import re
import sys
from typing import Final

__all__ = ["CORRELATION_HEADER", "TRACEPARENT_HEADER", "current_traceparent", "is_traceparent"]

CORRELATION_HEADER: Final = "X-Correlation-ID"
"""The same on every attempt at an action; kept by the record, the audit event and its jobs."""

TRACEPARENT_HEADER: Final = "traceparent"
"""The W3C trace context: the trace, and the span before."""

# Version, trace id, id of the span before, flags. Ids of zeros are not valid.
_VALID: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def is_traceparent(value: object) -> bool:
    """Return whether a value is a ``traceparent`` of version 00, the only one so far."""
    return isinstance(value, str) and _VALID.fullmatch(value) is not None


def current_traceparent() -> str | None:
    """Return the W3C trace context of the current span; None without OpenTelemetry or a span."""
    # Not imported here: an app that has a span has imported it.
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
