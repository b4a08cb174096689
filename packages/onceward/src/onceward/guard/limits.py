"""Limits that keep one caller or one tenant from using up a process, and what counts requests."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from onceward.errors import ConfigurationError

__all__ = ["CountedRequest", "Limits", "QuotaReporter", "RateLimiter"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one process, whatever its endpoints. None switches one off.

    ``Policy`` has the limits of an endpoint: the size of a body, its deadline, a rate limit.
    """

    # Bytes of all bodies that are held at once; one tenant may hold half of them. Above it, a body
    # is 503. Not counted: up to 8 KiB, and up to 64 KiB that arrive in one piece.
    body_memory_bytes: int | None = 64 * 1024 * 1024
    # Duplicates of one tenant that wait for a first request. Above it, a duplicate is 409 at once.
    waiting_per_tenant: int | None = 200
    # Records that a tenant may have. Above it, a new key is 429 until some expire. Counted now and
    # then, so a tenant can exceed it by a tenth for each process.
    records_per_tenant: int | None = None

    def __post_init__(self) -> None:
        for name in ("body_memory_bytes", "waiting_per_tenant", "records_per_tenant"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(
                    f"Limits.{name} must be at least 1, or None for no limit, not {value!r}"
                )


class RateLimiter(Protocol):
    """Counts requests per tenant and endpoint."""

    def check(self, limit: str) -> None:
        """Raise ``ConfigurationError`` if this is not a limit it understands."""

    async def seconds_to_wait(self, limit: str, tenant: str, endpoint: str) -> float | None:
        """Count one request; return None if it may pass, else the seconds until it may."""


@runtime_checkable
class QuotaReporter(Protocol):
    """A rate limiter that also reports what is left, for the headers of the response.

    Optional: a limiter that has this method gets this call in place of ``seconds_to_wait``.
    """

    async def count(self, limit: str, tenant: str, endpoint: str) -> "CountedRequest":
        """Count one request."""


class CountedRequest(Protocol):
    """What a ``QuotaReporter`` returns."""

    @property
    def wait_seconds(self) -> float | None:
        """None if the request may pass, else the seconds until it may."""

    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """The headers to send, with names in lower case."""
