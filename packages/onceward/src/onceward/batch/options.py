"""The settings of the batch endpoint of an app."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from onceward.errors import ConfigurationError
from onceward_protocol.endpoint_validation import check_endpoint
from onceward_protocol.errors import EntryInvalidError

if TYPE_CHECKING:
    from collections.abc import Callable

    from onceward.guard.execution import Exchange
    from onceward.guard.request import RequestHead

__all__ = ["MAX_CHUNK_ITEMS", "BatchOptions", "ItemReport", "batch_header"]

MAX_CHUNK_ITEMS: Final = 64
"""PostgreSQL keeps so many savepoints of a transaction in memory; more slow all others down."""


@dataclass(frozen=True, slots=True)
class ItemReport:
    """One request of a batch, for the app's own log of requests."""

    # Its request id, endpoint, tenant and the like.
    exchange: "Exchange | None"
    # In upper case.
    method: str
    # Decoded, without the query.
    path: str
    # Of its response.
    status: int
    # From its start to its response, without the commit.
    seconds: float

    @property
    def head(self) -> "RequestHead | None":
        """Its head: ids and headers."""
        return None if self.exchange is None else self.exchange.head


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Where the batch endpoint is and what it accepts. Raises ``ConfigurationError``."""

    # The path to which batches are posted.
    path: str = "/batch"
    # A batch with more items is 413.
    max_items: int = 200
    # A batch with a larger body is 413.
    max_bytes: int = 1024 * 1024
    # When the results have reached this size, the rest of the items is left to another batch.
    max_response_bytes: int = 4 * 1024 * 1024
    # When a batch has taken this long, the rest of the items is left to another batch.
    max_seconds: float = 20.0
    # How many items share a transaction. None: 50 on PostgreSQL, 16 on SQLite. 1: none do.
    chunk_items: int | None = None
    # A request that takes longer, in a transaction that it shares, is cancelled and rolled back,
    # and then runs alone: it may wait for another connection, which waits for this transaction.
    stall_seconds: float = 5.0
    # True: requests that share a transaction go from the batch to the guard, and the middleware
    # around the guard gets the batch only. False: each passes through the whole app. None: as True
    # if the app has no such middleware.
    direct: bool | None = None
    # Called after the commit for each request that did not pass through the whole app.
    on_item: "Callable[[ItemReport], None] | None" = None

    def __post_init__(self) -> None:
        try:
            check_endpoint(self.path)
        except EntryInvalidError:
            raise ConfigurationError(
                f"BatchOptions.path must be a path such as /batch, not {self.path!r}"
            ) from None
        if "?" in self.path or "{" in self.path:
            raise ConfigurationError(
                f"BatchOptions.path must be a path without parameters, not {self.path!r}"
            )
        for name in ("max_items", "max_bytes", "max_response_bytes"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"BatchOptions.{name} must be at least 1")
        for name in ("max_seconds", "stall_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"BatchOptions.{name} must be above 0")
        if self.chunk_items is not None and not 1 <= self.chunk_items <= MAX_CHUNK_ITEMS:
            raise ConfigurationError(
                f"BatchOptions.chunk_items must be from 1 to {MAX_CHUNK_ITEMS}, or None"
            )

    def header(self, root: str) -> tuple[bytes, bytes]:
        """Return the header that names the batch endpoint of an app mounted at ``root``."""
        return batch_header(f"{root}{self.path}", self.max_items)


def batch_header(path: str, max_items: int) -> tuple[bytes, bytes]:
    """Return the header that names the batch endpoint, whose path has the prefix of the app."""
    return b"onceward-batch", f"{path}; items={max_items}".encode("latin-1")
