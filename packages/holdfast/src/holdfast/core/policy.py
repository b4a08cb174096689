"""Policy: what one guarded endpoint demands of its callers, and how long it remembers."""

from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum

from holdfast.core.keys import KeyFormat
from holdfast.errors import ConfigurationError

__all__ = [
    "FIELD",
    "PLANNING",
    "ROUTES",
    "WALK",
    "ErrorFormat",
    "ErrorsStored",
    "Policy",
    "Staleness",
]


class ErrorFormat(StrEnum):
    """In which words errors are told."""

    ENVELOPE = "envelope"
    PROBLEM = "problem"


class ErrorsStored(StrEnum):
    """Which of the handler's error answers are remembered and replayed."""

    NONE = "none"
    STALE_ONLY = "stale_only"
    HANDLER_4XX = "handler_4xx"


@dataclass(frozen=True, slots=True)
class Staleness:
    """How old an action may be, on the server's clock, and how far clocks may disagree."""

    cap: timedelta = timedelta(days=7)
    grace: timedelta = timedelta(hours=6)


# New on every send of the same action; to hash them would turn each retry into a conflict.
VOLATILE_FIELDS = frozenset({"clientSubmittedAt", "attestationToken"})

# Answers about the moment or the caller, not about the action: the retry must be free to do better.
NEVER_STORED = frozenset({401, 403, 408, 425, 429})


@dataclass(frozen=True, slots=True)
class Policy:
    """One endpoint's settings. Start from a preset and change what differs with ``but``."""

    name: str = "default"
    key_required: bool = True
    key_format: KeyFormat = KeyFormat.OPAQUE
    # Name of the JSON body field that carries the key, where it is not in the header.
    key_field: str | None = None
    success_ttl: timedelta = timedelta(hours=24)
    error_ttl: timedelta = timedelta(hours=4)
    errors_stored: ErrorsStored = ErrorsStored.HANDLER_4XX
    staleness: Staleness | None = None
    # Keep a success until its action is too old to be taken for a new one, whatever its TTL says.
    outlive_staleness: bool = True
    error_format: ErrorFormat = ErrorFormat.PROBLEM
    volatile_fields: frozenset[str] = VOLATILE_FIELDS
    # How long a duplicate waits for the first one before it is told "in progress".
    wait: timedelta = timedelta(seconds=10)
    max_body_bytes: int = 1024 * 1024
    # A stored answer is read back into memory on every replay; larger ones belong behind a link.
    # Twice the body: many answers are what was sent with an id and times added, and a limit that
    # is not above the body's would turn the largest valid request into a 500.
    max_response_bytes: int = 2 * 1024 * 1024
    # Requests per period and tenant, e.g. "50/minute"; None is off.
    rate_limit: str | None = None
    # Statuses of the IETF draft (422 for a mismatch) in place of the contract's.
    ietf_statuses: bool = False
    # Write an audit event with each first execution.
    audit: bool = True

    def __post_init__(self) -> None:
        """Refuse what cannot work, at start-up rather than at the first request."""
        if self.success_ttl <= timedelta(0) or self.error_ttl <= timedelta(0):
            raise ConfigurationError(f"policy {self.name}: a TTL must be positive")
        if self.wait < timedelta(0):
            raise ConfigurationError(f"policy {self.name}: the wait cannot be negative")
        if self.max_body_bytes < 0 or self.max_response_bytes < 0:
            raise ConfigurationError(f"policy {self.name}: a size limit cannot be negative")

    def replace(self, **changes: object) -> "Policy":
        """Return this policy with some settings changed."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def ttl_for(self, status: int) -> timedelta | None:
        """Say how long the handler's answer is kept; None means it is not kept.

        ``STALE_ACTION`` is not the handler's answer: the intake stores it under ``error_ttl``.
        """
        if status < 400:  # noqa: PLR2004 - where HTTP's errors begin
            return self.success_ttl
        if status >= 500 or status in NEVER_STORED:  # noqa: PLR2004
            return None
        return self.error_ttl if self.errors_stored is ErrorsStored.HANDLER_4XX else None


_WEEK = timedelta(days=7)

WALK = Policy(
    name="walk",
    key_format=KeyFormat.UUID4,
    success_ttl=_WEEK,
    error_ttl=_WEEK,
    errors_stored=ErrorsStored.STALE_ONLY,
    staleness=Staleness(),
    error_format=ErrorFormat.ENVELOPE,
)
PLANNING = Policy(name="planning")
ROUTES = Policy(
    name="routes",
    key_required=False,
    key_format=KeyFormat.UUID4,
    errors_stored=ErrorsStored.NONE,
)
FIELD = Policy(name="field", key_format=KeyFormat.UUID4, success_ttl=_WEEK)
