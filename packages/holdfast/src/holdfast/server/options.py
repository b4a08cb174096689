"""The options of ``Holdfast``, as a type: type checkers find misspelt ones."""

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

from holdfast.core.breaker import Breaker
from holdfast.core.error_formats import ErrorFormat, ErrorFormatter
from holdfast.core.policy import Policy
from holdfast.core.tenants import SingleTenant
from holdfast.observability.traces import Spans
from holdfast.ports import Clock, FaultPoints, Metrics, RecordCache
from holdfast.server.asgi import RateLimiter
from holdfast.server.disabled_endpoints import Disabled
from holdfast.server.limits import Limits
from holdfast.server.request_head import Identify
from holdfast.stores.retention import Retention

__all__ = ["HoldfastOptions"]


class HoldfastOptions(TypedDict, total=False):
    """Keyword arguments of ``Holdfast``. A test compares them with its signature."""

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
