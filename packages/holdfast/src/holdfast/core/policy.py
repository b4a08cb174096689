"""Policy: the settings of one guarded endpoint."""

from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum
from typing import TypedDict, Unpack

from holdfast.core.error_formats import ErrorFormat, ErrorFormatter, check_error_format
from holdfast.core.keys import KeyFormat
from holdfast.errors import ConfigurationError

__all__ = ["ErrorFormat", "ErrorsStored", "Policy", "PolicyChanges", "Staleness"]


class ErrorsStored(StrEnum):
    """Which of the handler's error responses are stored and replayed."""

    # No error is stored: a retry runs the handler again.
    NONE = "none"
    # Only ``STALE_ACTION``, which no retry can change.
    STALE_ONLY = "stale_only"
    # Every 4xx of the handler, except 401, 403, 408, 425 and 429.
    HANDLER_4XX = "handler_4xx"


@dataclass(frozen=True, slots=True)
class Staleness:
    """The maximum age of an action by the server's clock, and the clock difference tolerated."""

    # An action older than this is refused.
    cap: timedelta = timedelta(days=7)
    # Added to the cap, for clocks that differ.
    grace: timedelta = timedelta(hours=6)


# These fields change on every send of the same action. If they were hashed, every retry would be a
# conflict.
VOLATILE_FIELDS = frozenset({"clientSubmittedAt", "attestationToken"})

# These statuses depend on the caller or on the time of the request, so a retry may succeed.
NEVER_STORED = frozenset({401, 403, 408, 425, 429})


class PolicyChanges(TypedDict, total=False):
    """Settings of ``Policy``, as ``Policy.replace`` takes them."""

    name: str
    key_required: bool
    key_format: KeyFormat
    key_field: str | None
    success_ttl: timedelta
    error_ttl: timedelta
    errors_stored: ErrorsStored
    staleness: Staleness | None
    outlive_staleness: bool
    error_format: ErrorFormat | ErrorFormatter
    volatile_fields: frozenset[str]
    wait: timedelta
    max_body_bytes: int
    body_deadline: timedelta
    max_response_bytes: int
    rate_limit: str | None
    ietf_statuses: bool
    audit: bool


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings of one endpoint. ``replace`` returns a copy with some settings changed.

    Raises ConfigurationError for a TTL that is not positive, and for a negative wait or size.
    """

    # The name in logs and error messages.
    name: str = "default"
    # Without a key: 400 if required, otherwise the handler runs unguarded.
    key_required: bool = True
    # What a key may look like.
    key_format: KeyFormat = KeyFormat.OPAQUE
    # Name of the JSON body field that carries the key. None: the Idempotency-Key header carries it.
    key_field: str | None = None
    # How long the response of a success is stored.
    success_ttl: timedelta = timedelta(hours=24)
    # How long the response of an error is stored.
    error_ttl: timedelta = timedelta(hours=4)
    # Which errors are stored and replayed.
    errors_stored: ErrorsStored = ErrorsStored.HANDLER_4XX
    # The maximum age of an action; None accepts any.
    staleness: Staleness | None = None
    # Keep a success until its action has become stale, even if success_ttl is shorter. Otherwise a
    # retry between the two would run a second time.
    outlive_staleness: bool = True
    # A built-in format, or a function of the app that formats error bodies.
    error_format: ErrorFormat | ErrorFormatter = ErrorFormat.PROBLEM
    # Top-level fields of the body that may differ between sends of one action.
    volatile_fields: frozenset[str] = VOLATILE_FIELDS
    # How long a duplicate waits for the first request before it gets the "in progress" error.
    wait: timedelta = timedelta(seconds=10)
    # A larger body is 413.
    max_body_bytes: int = 1024 * 1024
    # How long a client may take to send the body. More is 408, and the connection is closed.
    body_deadline: timedelta = timedelta(seconds=30)
    # Every replay reads the stored response into memory. The default is twice the body's limit:
    # many responses repeat the request with an id and times added, and with the same limit the
    # largest valid request would fail with a 500.
    max_response_bytes: int = 2 * 1024 * 1024
    # Requests per period and tenant, e.g. "50/minute". None: no limit.
    rate_limit: str | None = None
    # Use the statuses of the IETF draft: 422 instead of 409 for a mismatch.
    ietf_statuses: bool = False
    # Write an audit event with each first execution.
    audit: bool = True

    def __post_init__(self) -> None:
        if self.success_ttl <= timedelta(0) or self.error_ttl <= timedelta(0):
            raise ConfigurationError(f"policy {self.name}: a TTL must be positive")
        if self.wait < timedelta(0):
            raise ConfigurationError(f"policy {self.name}: the wait cannot be negative")
        if self.body_deadline <= timedelta(0):
            raise ConfigurationError(f"policy {self.name}: the body's deadline must be positive")
        if self.max_body_bytes < 0 or self.max_response_bytes < 0:
            raise ConfigurationError(f"policy {self.name}: a size limit cannot be negative")
        check_error_format(self.error_format)

    def replace(self, **changes: Unpack[PolicyChanges]) -> "Policy":
        """Return a copy of this policy with some settings changed."""
        return replace(self, **changes)

    def ttl_for(self, status: int) -> timedelta | None:
        """Return how long a handler's response is kept; None means that it is not stored.

        ``STALE_ACTION`` does not come from the handler and is stored under ``error_ttl``.
        """
        if status < 400:  # noqa: PLR2004 - the first error status
            return self.success_ttl
        if status >= 500 or status in NEVER_STORED:  # noqa: PLR2004
            return None
        return self.error_ttl if self.errors_stored is ErrorsStored.HANDLER_4XX else None
