"""The options of ``Onceward``, as a type: type checkers find misspelt ones."""

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

from onceward.core.breaker import Breaker
from onceward.core.error_formats import ErrorFormatter
from onceward.core.policy import Policy
from onceward.core.tenants import SingleTenant
from onceward.guard.disabled_endpoints import Disabled
from onceward.guard.limits import Limits, RateLimiter
from onceward.guard.request import Identify
from onceward.maintenance.retention import Retention
from onceward.observability.traces import Spans
from onceward.ports import Clock, FaultPoints, Metrics, RecordCache
from onceward_protocol.error_codes import ErrorFormat

__all__ = ["OncewardOptions"]


class OncewardOptions(TypedDict, total=False):
    """Keyword arguments of ``Onceward``. A test compares them with its signature."""

    policy: Policy | None
    error_format: ErrorFormat | ErrorFormatter
    identify: Identify | None
    principal: Callable[..., Any] | None
    tenants: SingleTenant | None
    cache: RecordCache | None
    limiter: RateLimiter | None
    memory_bytes: int
    sweep_every_seconds: float | None
    retention: Sequence[Retention]
    audit_seal_seconds: float | None
    audit_keys: Sequence[str]
    breaker: Breaker | None
    metrics: Metrics | None
    clock: Clock | None
    spans: Spans | None
    faults: FaultPoints | None
    max_payload_bytes: int
    limits: Limits
    disabled: Disabled
    request_log_seconds: float | None
