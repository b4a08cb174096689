"""Policy: the settings of one guarded endpoint."""

import re
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum
from inspect import iscoroutinefunction
from typing import Final, TypedDict, Unpack

from onceward.errors import ConfigurationError
from onceward.guard.error_formats import ErrorFormatter, check_error_format
from onceward_protocol.error_codes import ErrorFormat
from onceward_protocol.fingerprint import FingerprintInput
from onceward_protocol.keys import KEY_HEADER, KeyFormat
from onceward_protocol.sequence import Ordering

__all__ = [
    "NEVER_REPLAYED",
    "SIGN_IN_PATHS",
    "STORABLE_REDIRECTS",
    "ErrorFormat",
    "ErrorsStored",
    "Fingerprint",
    "Policy",
    "PolicyChanges",
    "Staleness",
]


class ErrorsStored(StrEnum):
    """Which of the handler's error responses are stored and replayed."""

    # No error is stored: a retry runs the handler again.
    NONE = "none"
    # Only ``STALE_ACTION``, which no retry can change.
    STALE_ONLY = "stale_only"
    # Every 4xx of the handler, except 401, 403, 408, 424, 425, 428 and 429.
    HANDLER_4XX = "handler_4xx"


@dataclass(frozen=True, slots=True)
class Staleness:
    """The maximum age of an action by the server's clock, and the clock difference tolerated."""

    # An action older than this is refused.
    cap: timedelta = timedelta(days=7)
    # Added to the cap, for clocks that differ.
    grace: timedelta = timedelta(hours=6)


# These statuses depend on the caller or on the time of the request, so a retry may succeed.
NEVER_STORED = frozenset({401, 403, 408, 424, 425, 428, 429})
# 301, 307 and 308 ask the client to send the request elsewhere: nothing has happened here.
STORABLE_REDIRECTS = frozenset({302, 303})

# Repeating one of these would repeat a session or the framing of another exchange.
NEVER_REPLAYED: Final = frozenset(
    {
        "connection",
        "content-length",
        "date",
        "idempotency-replayed",
        "keep-alive",
        "onceward-batch",
        "onceward-effect",
        "onceward-error",
        "proxy-authenticate",
        "proxy-connection",
        "ratelimit",
        "ratelimit-policy",
        "server",
        "set-cookie",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "www-authenticate",
        "x-correlation-id",
        "x-original-request-id",
        "x-request-id",
    }
)
# An item must not replace the caller's credentials or the framing of the batch.
_NEVER_IN_ITEMS: Final = frozenset(
    {
        *("authorization", "connection", "content-length", "cookie", "host", "idempotency-key"),
        *("proxy-authorization", "transfer-encoding", "x-request-id"),
    }
)
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")

# Returns what identifies a request, apart from its method, endpoint and path parameters.
Fingerprint = Callable[[FingerprintInput], bytes | str]


# Where common frameworks and tutorials have their sign-in page. A trailing slash does not count.
SIGN_IN_PATHS = (
    "/login",
    "/signin",
    "/sign-in",
    "/sign_in",
    "/accounts/login",
    "/auth/login",
    "/users/sign_in",
    "/admin/login",
)


class PolicyChanges(TypedDict, total=False):
    """Settings of ``Policy``, as ``Policy.replace`` takes them."""

    name: str
    key_required: bool
    key_format: KeyFormat
    key_header: str
    key_field: str | None
    success_ttl: timedelta
    error_ttl: timedelta
    errors_stored: ErrorsStored
    redirects_stored: AbstractSet[int]
    sign_in_paths: tuple[str, ...]
    replay_headers: tuple[str, ...] | None
    staleness: Staleness | None
    outlive_staleness: bool
    error_format: ErrorFormat | ErrorFormatter
    volatile_fields: frozenset[str]
    fingerprint: Fingerprint | None
    wait: timedelta
    max_body_bytes: int
    body_deadline: timedelta
    max_response_bytes: int
    rate_limit: str | None
    ietf_statuses: bool
    audit: bool
    batch_headers: tuple[str, ...]
    batch_alone: bool
    ordering: Ordering


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings of one endpoint. ``replace`` returns a copy with some settings changed.

    Raises ConfigurationError for a TTL that is not positive, for a negative wait or size, and for
    a header, redirect or function that cannot be used.
    """

    # The name in logs and error messages.
    name: str = "default"
    # Without a key: 400 if required, otherwise the handler runs unguarded.
    key_required: bool = True
    # What a key may look like.
    key_format: KeyFormat = KeyFormat.OPAQUE
    # Name of the header that carries the key.
    key_header: str = KEY_HEADER
    # Name of the JSON body field that carries the key. None: the header carries it.
    key_field: str | None = None
    # How long the response of a success is stored.
    success_ttl: timedelta = timedelta(hours=24)
    # How long the response of an error is stored.
    error_ttl: timedelta = timedelta(hours=4)
    # Which errors are stored and replayed.
    errors_stored: ErrorsStored = ErrorsStored.HANDLER_4XX
    # Which of 302 and 303 are stored, e.g. {303} for forms that redirect after a success.
    redirects_stored: AbstractSet[int] = frozenset()
    # A redirect to one of these paths by a handler that has written nothing is never stored: it
    # asks the caller to sign in.
    sign_in_paths: tuple[str, ...] = SIGN_IN_PATHS
    # Headers of the response that a replay repeats, besides Content-Type, ETag and Location. None:
    # all but those of the exchange or the session, such as Set-Cookie.
    replay_headers: tuple[str, ...] | None = None
    # The maximum age of an action; None accepts any.
    staleness: Staleness | None = None
    # Keep a success until its action has become stale, even if success_ttl is shorter. Otherwise a
    # retry between the two would run a second time.
    outlive_staleness: bool = True
    # A built-in format, or a function of the app that formats error bodies.
    error_format: ErrorFormat | ErrorFormatter = ErrorFormat.PROBLEM
    # Top-level fields of the body that are new on every send of one action, such as the time of the
    # send. If they were hashed, every retry would be a conflict.
    volatile_fields: frozenset[str] = frozenset()
    # Returns what two sends of one action have in common, in place of query and body.
    fingerprint: Fingerprint | None = None
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
    # Headers that an item of a batch may have, besides Content-Type, If-Match, traceparent,
    # X-Client-Generated-At and X-Correlation-ID.
    batch_headers: tuple[str, ...] = ()
    # In a batch, each request has its own transaction: for handlers that write through another
    # connection, or take seconds.
    batch_alone: bool = False
    # "strict": the requests of a client are numbered, and run in this order without gaps. The
    # numbers of a client count for all its strict endpoints together.
    ordering: Ordering = "none"

    def __post_init__(self) -> None:
        if self.success_ttl <= timedelta(0) or self.error_ttl <= timedelta(0):
            raise ConfigurationError(f"policy {self.name}: a TTL must be positive")
        if self.wait < timedelta(0):
            raise ConfigurationError(f"policy {self.name}: the wait cannot be negative")
        if self.body_deadline <= timedelta(0):
            raise ConfigurationError(f"policy {self.name}: the body's deadline must be positive")
        if self.max_body_bytes < 0 or self.max_response_bytes < 0:
            raise ConfigurationError(f"policy {self.name}: a size limit cannot be negative")
        if self.ordering not in {"none", "strict"}:
            raise ConfigurationError(
                f'policy {self.name}: ordering is "none" or "strict", not {self.ordering!r}'
            )
        if self.ordering == "strict" and not self.key_required:
            raise ConfigurationError(
                f'policy {self.name}: ordering="strict" needs key_required=True: a number is used '
                "for a key"
            )
        check_error_format(self.error_format)
        self._check_headers()
        # A tuple or a set is accepted, too.
        object.__setattr__(self, "redirects_stored", frozenset(self.redirects_stored))
        if not self.redirects_stored <= STORABLE_REDIRECTS:
            raise ConfigurationError(
                f"policy {self.name}: redirects_stored may have 302 and 303, not "
                f"{sorted(self.redirects_stored - STORABLE_REDIRECTS)}: other redirects ask the "
                "client to send the request elsewhere"
            )
        if isinstance(self.sign_in_paths, str) or not all(
            isinstance(path, str) and path.startswith("/") for path in self.sign_in_paths
        ):
            raise ConfigurationError(
                f'policy {self.name}: sign_in_paths are paths such as ("/login",), not '
                f"{self.sign_in_paths!r}"
            )
        if self.fingerprint is not None and (
            not callable(self.fingerprint) or iscoroutinefunction(self.fingerprint)
        ):
            raise ConfigurationError(
                f"policy {self.name}: fingerprint must be a function without await that takes a "
                f"FingerprintInput, not {self.fingerprint!r}"
            )

    def _check_headers(self) -> None:
        if not isinstance(self.key_header, str) or not _HEADER_NAME.fullmatch(self.key_header):
            raise ConfigurationError(
                f"policy {self.name}: key_header must be the name of a header, not "
                f"{self.key_header!r}"
            )
        if isinstance(self.replay_headers, str):
            raise ConfigurationError(
                f'policy {self.name}: replay_headers is a list of names, such as ("vary",), not '
                f"{self.replay_headers!r}"
            )
        for name in self.replay_headers or ():
            if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
                raise ConfigurationError(
                    f"policy {self.name}: {name!r} in replay_headers is not the name of a header"
                )
            if name.lower() in NEVER_REPLAYED:
                raise ConfigurationError(
                    f"policy {self.name}: {name} cannot be replayed: it belongs to the exchange or "
                    "the session it was sent in"
                )
        if self.replay_headers is not None:
            names = tuple(name.lower() for name in self.replay_headers)
            object.__setattr__(self, "replay_headers", names)
        self._check_batch_headers()

    def _check_batch_headers(self) -> None:
        if isinstance(self.batch_headers, str) or not all(
            isinstance(name, str) and _HEADER_NAME.fullmatch(name) for name in self.batch_headers
        ):
            raise ConfigurationError(
                f'policy {self.name}: batch_headers is a list of names, such as ("x-app",), not '
                f"{self.batch_headers!r}"
            )
        names = tuple(name.lower() for name in self.batch_headers)
        for name in names:
            if name in _NEVER_IN_ITEMS:
                raise ConfigurationError(
                    f"policy {self.name}: {name} cannot be a header of an item: the whole batch "
                    "has it"
                )
        object.__setattr__(self, "batch_headers", names)

    def replace(self, **changes: Unpack[PolicyChanges]) -> "Policy":
        """Return a copy of this policy with some settings changed."""
        return replace(self, **changes)

    def ttl_for(self, status: int) -> timedelta | None:
        """Return how long a handler's response is kept; None means that it is not stored.

        ``STALE_ACTION`` does not come from the handler and is stored under ``error_ttl``.
        """
        if status < 300:  # noqa: PLR2004 - the first redirect
            return self.success_ttl
        if status < 400:  # noqa: PLR2004 - the first error status
            return self.success_ttl if status in self.redirects_stored else None
        if status >= 500 or status in NEVER_STORED:  # noqa: PLR2004
            return None
        return self.error_ttl if self.errors_stored is ErrorsStored.HANDLER_4XX else None
