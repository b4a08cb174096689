"""Reports of requests to metrics and to the log for operators: at once, or after a commit."""

from typing import Any, Final

from onceward.core.idempotency_record import Record, Response
from onceward.guard.request import GuardedRequest
from onceward.guard.request_log import RequestLog
from onceward.observability.noop import NullMetrics
from onceward.ports import Metrics, Outcome

__all__ = ["DeferredReports", "Reports", "report_committed"]

_FIRST_ERROR: Final = 400


class Reports:
    """Reports at once."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.log: RequestLog | None = None
        # False where nobody reads them: then the most frequent reports are not made.
        self.are_read = type(metrics) is not NullMetrics
        # Not methods: each would be one call more for each request.
        self.outcome = metrics.outcome
        self.expired = metrics.expired

    def log_requests(self, log: RequestLog) -> None:
        """Log requests that do not run, and count all of them, for operators. Idempotent."""
        if self.log is None:
            self.log = log
            self.are_read = True
            self.metrics = log.counting(self.metrics)
            self.outcome, self.expired = self.metrics.outcome, self.metrics.expired

    def note(
        self,
        request: GuardedRequest,
        outcome: Outcome,
        status: int | None,
        record: Record | None = None,
        code: str | None = None,
    ) -> None:
        """Log a request; ``record`` is that of the first request with its key, if there is one."""
        if self.log is not None:
            self.log.note(request, outcome, status, record, code=code)

    def note_response(self, request: GuardedRequest, outcome: Outcome, response: Response) -> None:
        """Log a request whose handler ran, and whose response is not stored."""
        if self.log is not None:
            self.log.note_response(request, outcome, response)


class DeferredReports:
    """Keeps reports until a chunk is committed: until then its requests may run again."""

    def __init__(self, reports: Reports) -> None:
        self.are_read = reports.are_read
        self._reports = reports
        # Names of methods and their arguments.
        self._waiting: list[tuple[str, tuple[Any, ...]]] = []

    def outcome(self, *report: Any) -> None:
        self._waiting.append(("outcome", report))

    def expired(self, *report: Any) -> None:
        self._waiting.append(("expired", report))

    def note(self, *report: Any) -> None:
        self._waiting.append(("note", report))

    def note_response(self, *report: Any) -> None:
        self._waiting.append(("note_response", report))

    def report(self) -> None:
        for name, report in self._waiting:
            getattr(self._reports, name)(*report)


def report_committed(
    reports: Reports | DeferredReports,
    request: GuardedRequest,
    response: Response,
    record: Record | None,
) -> None:
    """Report a request whose writes were committed."""
    if response.status < _FIRST_ERROR:
        reports.outcome(request.endpoint, "fresh")
        return
    reports.outcome(request.endpoint, "refused")
    if record is None:
        reports.note_response(request, "refused", response)
