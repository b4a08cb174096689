"""Reports of requests to metrics and to the log for operators: at once, or after a commit."""

from typing import TYPE_CHECKING, Final, Protocol

from onceward.core.idempotency_record import Record, Response
from onceward.guard.request import GuardedRequest
from onceward.guard.request_log import RequestLog, code_of
from onceward.ports import Metrics, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DeferredReports", "Reports", "RequestReports", "report_committed"]

_FIRST_ERROR: Final = 400


class RequestReports(Protocol):
    """Where the outcome of a request is reported."""

    def outcome(self, endpoint: str, outcome: Outcome) -> None:
        """Count how a request has ended."""

    def expired(self, endpoint: str) -> None:
        """Count an expired record that was found."""

    def note(
        self,
        request: GuardedRequest,
        outcome: Outcome,
        status: int | None,
        record: Record | None = None,
        *,
        code: str | None = None,
    ) -> None:
        """Log a request; ``record`` is that of the first request with its key, if there is one."""

    def note_response(self, request: GuardedRequest, outcome: Outcome, response: Response) -> None:
        """Log a request whose handler ran, and whose response is not stored."""


class Reports:
    """Reports at once."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.log: RequestLog | None = None
        # Not methods: each would be one call more for each request.
        self.outcome = metrics.outcome
        self.expired = metrics.expired

    def log_requests(self, log: RequestLog) -> None:
        """Log requests that do not run, and count all of them, for operators. Idempotent."""
        if self.log is None:
            self.log = log
            self.metrics = log.counting(self.metrics)
            self.outcome, self.expired = self.metrics.outcome, self.metrics.expired

    def note(
        self,
        request: GuardedRequest,
        outcome: Outcome,
        status: int | None,
        record: Record | None = None,
        *,
        code: str | None = None,
    ) -> None:
        """Log a request, if they are logged."""
        if self.log is not None:
            self.log.note(request, outcome, status, record, code=code)

    def note_response(self, request: GuardedRequest, outcome: Outcome, response: Response) -> None:
        """Log a request whose handler ran, and whose response is not stored."""
        if self.log is not None:
            self.log.note_response(request, outcome, response)


class DeferredReports:
    """Reports when a chunk is committed: until then its requests may run again."""

    def __init__(self) -> None:
        self._reports: list[Callable[[Reports], None]] = []

    def outcome(self, endpoint: str, outcome: Outcome) -> None:
        """Count how a request has ended."""
        self._reports.append(lambda reports: reports.outcome(endpoint, outcome))

    def expired(self, endpoint: str) -> None:
        """Count an expired record that was found."""
        self._reports.append(lambda reports: reports.expired(endpoint))

    def note(
        self,
        request: GuardedRequest,
        outcome: Outcome,
        status: int | None,
        record: Record | None = None,
        *,
        code: str | None = None,
    ) -> None:
        """Log a request."""
        self._reports.append(
            lambda reports: reports.note(request, outcome, status, record, code=code)
        )

    def note_response(self, request: GuardedRequest, outcome: Outcome, response: Response) -> None:
        """Log a request whose handler ran, and whose response is not stored."""
        self.note(request, outcome, response.status, code=code_of(response))

    def report_to(self, reports: Reports) -> None:
        """Pass everything on."""
        for report in self._reports:
            report(reports)


def report_committed(
    reports: RequestReports, request: GuardedRequest, response: Response, record: Record | None
) -> None:
    """Report a request whose writes were committed."""
    if response.status < _FIRST_ERROR:
        reports.outcome(request.endpoint, "fresh")
        return
    reports.outcome(request.endpoint, "refused")
    if record is None:
        reports.note_response(request, "refused", response)
