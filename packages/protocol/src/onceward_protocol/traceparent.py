"""The W3C trace context that a request carries from the device to the server."""

import sys

__all__ = ["current_traceparent"]


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
