"""``GuardConfig``: the options of ``Onceward`` that most apps leave as they are."""

from collections.abc import Sequence
from dataclasses import dataclass

from onceward.guard.error_formats import ErrorFormatter
from onceward.guard.limits import Limits, RateLimiter
from onceward.guard.route_table import Disabled
from onceward.jobs.enqueue import MAX_PAYLOAD_BYTES
from onceward.maintenance.retention import Retention
from onceward.observability.traces import Spans
from onceward.ports import Clock, FaultPoints, Metrics, RecordCache
from onceward.stores.breaker import Breaker
from onceward_protocol.error_codes import ErrorFormat

__all__ = ["GuardConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardConfig:
    """How an app is guarded, stored, swept and observed."""

    # The format of all errors, except those of policies that have the envelope format or a function
    # of their own.
    error_format: ErrorFormat | ErrorFormatter = ErrorFormat.PROBLEM
    # Endpoints that are switched off: their names, or a function that gets a name.
    disabled: Disabled = ()
    # Counts requests against ``Policy.rate_limit``.
    limiter: RateLimiter | None = None
    # Keep one tenant from using up the process.
    limits: Limits = Limits()  # noqa: RUF009 - immutable
    # Records that processes share, beside those in memory.
    cache: RecordCache | None = None
    # Memory for records of this process.
    memory_bytes: int = 32 * 1024 * 1024
    # Opens after failures of the store.
    breaker: Breaker | None = None
    # Between two sweeps, which delete expired records; None never sweeps in this process.
    sweep_every_seconds: float | None = 3600.0
    # How long audit events, dead letters and rows of the app are kept; the sweep deletes older
    # ones once a day.
    retention: Sequence[Retention] = ()
    # Audit events are sealed in the background, so often; None does not seal them.
    audit_seal_seconds: float | None = 60.0
    # Sign the seals of audit events: the first one signs, all verify. Each has at least 32 bytes.
    audit_keys: Sequence[str] = ()
    # Replays, mismatches and refusals are logged in a table for so long, without payloads, so that
    # operators can find them; 0 never logs them. None: an app with a console logs them for 7
    # days, and others do not.
    request_log_seconds: float | None = None
    # The largest payload of a job.
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    # Counts requests, and jobs if it can.
    metrics: Metrics | None = None
    # OpenTelemetry spans; None without.
    spans: Spans | None = None
    # The time, which tests may replace.
    clock: Clock | None = None
    # For tests.
    faults: FaultPoints | None = None
