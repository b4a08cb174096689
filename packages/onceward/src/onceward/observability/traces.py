"""OpenTelemetry spans of guarded requests and jobs. They contain names and hashes, never bodies."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final

from onceward.observability.logs import is_secret
from onceward_protocol.correlation import current_traceparent
from onceward_protocol.extras import needs_extra

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, TracerProvider

__all__ = ["SpanHandle", "Spans", "continued_traceparent"]

_PREFIX: Final = "onceward."
# As many as in logs, so that a search for one finds the other.
_KEY_HASH_CHARS: Final = 12
_FIRST_SERVER_ERROR: Final = 500
# Characters of version and trace id in a traceparent.
_TRACE_ID: Final = 35


def continued_traceparent(received: str | None) -> str | None:
    """Return the trace context to pass on: the current span, unless it belongs to another trace.

    ``received`` came with the request or the job.
    """
    current = current_traceparent()
    if received is None or (current is not None and current[:_TRACE_ID] == received[:_TRACE_ID]):
        return current
    return received


def _named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes with the names that a span has, without those of secrets."""
    short = {name.removeprefix(_PREFIX): value for name, value in attributes.items()}
    return {_PREFIX + name: value for name, value in short.items() if not is_secret(name)}


class SpanHandle:
    """The span of one guarded request."""

    __slots__ = ("_error_status", "_span")

    def __init__(self, span: "Span", error_status: Any) -> None:
        self._span = span
        self._error_status = error_status

    def describe(self, attributes: Mapping[str, Any]) -> None:
        """Add attributes, named as in the logs. Names of secrets are left out."""
        self._span.set_attributes(_named(attributes))

    def outcome(self, status: int, replayed: bool) -> None:
        """Set the status of the response. Only a 5xx marks the span as an error."""
        self._span.set_attribute("http.response.status_code", status)
        self._span.set_attribute("onceward.replayed", replayed)
        if status >= _FIRST_SERVER_ERROR:
            self._span.set_status(self._error_status)


class Spans:
    """Creates a span for each guarded request.

    Uses the global tracer provider unless one is given. Raises ``ConfigurationError`` if
    OpenTelemetry is not installed.
    """

    def __init__(self, tracer_provider: "TracerProvider | None" = None) -> None:
        with needs_extra("otel"):
            from opentelemetry import trace  # noqa: PLC0415 - an optional dependency
        self._trace = trace
        self._tracer = trace.get_tracer("onceward", tracer_provider=tracer_provider)
        self._error = trace.StatusCode.ERROR

    def request(
        self, endpoint: str, attributes: Mapping[str, str], *, traceparent: str | None = None
    ) -> AbstractContextManager[SpanHandle]:
        """Return a context manager for the span of a request.

        Its parent is the current span, for example that of a framework's instrumentation; without
        one, the span that ``traceparent`` names.

        ``attributes`` are named without prefix: ``tenant``, ``key_hash``, ``request_id``,
        ``correlation_id``. Names of secrets (``idempotency_key``, ``token``, …) are left
        out.
        """
        values = _named({"endpoint": endpoint, **attributes})
        if (key_hash := _PREFIX + "key_hash") in values:
            values[key_hash] = values[key_hash][:_KEY_HASH_CHARS]
        is_traced = self._trace.get_current_span().get_span_context().is_valid
        return self._open(f"onceward {endpoint}", values, None if is_traced else traceparent)

    def job(
        self, job_type: str, attributes: Mapping[str, Any], *, traceparent: str | None = None
    ) -> AbstractContextManager[SpanHandle]:
        """Return a context manager for the span of one attempt at a job.

        ``traceparent`` is that of the request that enqueued it. ``attributes`` as in ``request``.
        """
        return self._open(f"onceward job {job_type}", _named(attributes), traceparent)

    @contextmanager
    def _open(
        self, name: str, attributes: Mapping[str, Any], traceparent: str | None
    ) -> Iterator[SpanHandle]:
        # Only the type of the exception is recorded: its text may quote the body of the request.
        with self._tracer.start_as_current_span(
            name,
            context=self._parent(traceparent),
            attributes=attributes,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield SpanHandle(span, self._error)
            except BaseException as error:
                span.set_attribute("error.type", type(error).__qualname__)
                span.set_status(self._error)
                raise

    def _parent(self, traceparent: str | None) -> "Context | None":
        """Return the context of a remote span; None for the current one."""
        trace = self._trace
        if traceparent is None:
            return None
        _, trace_id, span_id, flags = traceparent.split("-")
        remote = trace.SpanContext(
            int(trace_id, 16),
            int(span_id, 16),
            is_remote=True,
            trace_flags=trace.TraceFlags(int(flags, 16)),
        )
        context: Context = trace.set_span_in_context(trace.NonRecordingSpan(remote))
        return context
