"""Replies to guarded requests: complete responses, replays and refusals, and their log lines."""

import logging
from typing import Any, Final

import msgspec

from onceward.core.error_formats import render_error
from onceward.core.idempotency_record import Record, Response
from onceward.core.policy import Policy
from onceward.errors import (
    FeatureDisabledError,
    InProgressError,
    KeyInvalidError,
    PayloadMismatchError,
    QuotaExceededError,
    RateLimitedError,
    RecordUnreadableError,
    RequestError,
    SequenceViolationError,
    StaleActionError,
    StoreUnavailableError,
)
from onceward.guard.exchange import Exchange, Headers, PostponedError
from onceward.guard.request_log import RequestLog, code_of
from onceward.ports import Metrics, Outcome
from onceward_protocol.fingerprint import short_hash
from onceward_protocol.keys import parse_key

__all__ = [
    "ADDED_HEADERS",
    "REPLAYED_HEADER",
    "Reply",
    "complete",
    "log_outage",
    "note_unclaimed",
    "refusal",
    "render",
    "replay",
]

REPLAYED_HEADER: Final = b"idempotency-replayed"
"""Whether a response is a stored one."""

# Set here; another value of the app's would be a second one.
_OWN_HEADERS: Final = frozenset({b"content-length", b"x-request-id", b"x-correlation-id"})
# What the guard adds to the response of a handler.
ADDED_HEADERS: Final = frozenset(
    {
        *(b"onceward-batch", b"x-request-id", b"x-correlation-id"),
        *(b"ratelimit", b"ratelimit-policy"),
    }
)
# RFC 9110 §8.6: these carry no Content-Length.
_WITHOUT_BODY: Final = frozenset({204, 304})
# Refusals that point to a broken or greedy client; others are frequent in normal use.
_LOGGED_REFUSALS: Final = frozenset({400, 429})
# Mismatches are logged with their record. A request that runs again is logged then.
_LOGGED_ELSEWHERE: Final = (PayloadMismatchError, InProgressError, PostponedError)
# Refusals that were counted where they were decided.
_COUNTED_ELSEWHERE: Final = (FeatureDisabledError, QuotaExceededError, SequenceViolationError)

_log = logging.getLogger("onceward.request")
_audit_log = logging.getLogger("onceward.audit")


class Reply(msgspec.Struct, frozen=True, gc=False):
    """A complete response, with the headers of this exchange. Header names are lower-case."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    # Whether the app may go on after it, e.g. with background tasks.
    may_go_on: bool = True


def complete(
    response: Response, exchange: Exchange, extra_headers: Headers = (), *, may_go_on: bool = True
) -> Reply:
    """Return a response with the ids of its request and the headers that the guard adds."""
    headers = [pair for pair in response.headers if pair[0] not in _OWN_HEADERS]
    headers += extra_headers
    headers += exchange.limit_headers
    headers += exchange.added_headers
    if response.body or response.status not in _WITHOUT_BODY:
        headers.append((b"content-length", str(len(response.body)).encode()))
    head = exchange.head
    request_id, correlation_id = head.request_id, head.correlation_id
    raw_id = request_id.encode("latin-1")
    headers += (
        (b"x-request-id", raw_id),
        (
            b"x-correlation-id",
            raw_id if correlation_id is request_id else correlation_id.encode("latin-1"),
        ),
    )
    if exchange.span is not None:
        exchange.span.describe(exchange.facts())
        exchange.span.outcome(response.status, exchange.is_replay)
    return Reply(response.status, headers, response.body, may_go_on)


def replay(record: Record, exchange: Exchange, *, may_go_on: bool = False) -> Reply:
    """Log a replay for the audit, and return the stored response."""
    exchange.is_replay = True
    if _audit_log.isEnabledFor(logging.INFO):
        request = exchange.request
        _audit_log.info(
            "audit.replay",
            extra={
                "tenant": record.id.tenant,
                "actor": None if request is None else request.principal.actor,
                "endpoint": record.id.endpoint,
                "key_hash": short_hash(record.id.key),
                "original_audit_id": record.audit_id,
                "original_request_id": record.request_id,
                "original_correlation_id": record.correlation_id,
                "request_id": exchange.head.request_id,
                "correlation_id": exchange.head.correlation_id,
                "status": record.status,
            },
        )
    extra_headers = (
        (REPLAYED_HEADER, b"true"),
        (b"x-original-request-id", record.request_id.encode("latin-1")),
    )
    return complete(record.response(), exchange, extra_headers, may_go_on=may_go_on)


def refusal(
    error: RequestError | StoreUnavailableError,
    exchange: Exchange,
    metrics: Metrics,
    log: RequestLog | None,
    *,
    may_go_on: bool = False,
) -> Reply:
    """Log an error of the guard, and return its response."""
    assert exchange.match is not None  # noqa: S101 - only guarded requests are refused
    if isinstance(error, StoreUnavailableError):
        metrics.outcome(exchange.match.endpoint, "unavailable")
        if log is not None:
            log.count("unavailable")
        log_outage(error, exchange)
    response = render(error, exchange)
    if log is not None and not isinstance(error, _LOGGED_ELSEWHERE):
        _note_refusal(log, error, response, exchange)
    if response.status in _LOGGED_REFUSALS or isinstance(error, RecordUnreadableError):
        _log_refusal(error, response, exchange)
    return complete(response, exchange, may_go_on=may_go_on)


def render(error: RequestError | StoreUnavailableError | str, exchange: Exchange) -> Response:
    """Render an error, or a kind of error, in the format of the operation."""
    match, request_id = exchange.match, exchange.head.request_id
    if match is None:
        return render_error(error, exchange.error_format, request_id)
    policy = match.policy
    return render_error(error, policy.error_format, request_id, ietf_statuses=policy.ietf_statuses)


def log_outage(error: StoreUnavailableError, exchange: Exchange | None) -> None:
    """Log the message of an outage, unless the client gets it anyway."""
    if not error.is_for_callers:
        facts = {} if exchange is None else exchange.facts()
        _log.warning("the store is unavailable: %s", error, extra=facts)


def note_unclaimed(log: RequestLog | None, exchange: Exchange, response: Response) -> None:
    """Log what the app has refused before the claim, e.g. an invalid body, if it knew the caller.

    ``response`` need not have its body.
    """
    refused = 400 <= response.status < 500  # noqa: PLR2004
    if log is not None and exchange.principal is not None and refused:
        log.count("refused")
        _add_to_log(log, exchange, "refused", response)


def _note_refusal(
    log: RequestLog,
    error: RequestError | StoreUnavailableError,
    response: Response,
    exchange: Exchange,
) -> None:
    """Log a request that was refused before or after its key was looked up."""
    if exchange.principal is None:  # a stranger must not fill the log
        return
    outcome: Outcome = "refused"
    if isinstance(error, StoreUnavailableError):
        outcome = "unavailable"
    elif isinstance(error, RateLimitedError):
        outcome = "limited"
    elif isinstance(error, StaleActionError):
        outcome = "stale"
    if outcome == "refused" and not isinstance(error, _COUNTED_ELSEWHERE):
        log.count("refused")
    _add_to_log(log, exchange, outcome, response)


def _add_to_log(log: RequestLog, exchange: Exchange, outcome: Outcome, response: Response) -> None:
    match, head, caller = exchange.match, exchange.head, exchange.principal
    assert match is not None  # noqa: S101
    assert caller is not None  # noqa: S101 - the callers have checked
    keys = head.keys(match.policy.key_header)
    log.add(
        tenant=caller.tenant,
        endpoint=match.endpoint,
        key=_key_or_text(keys, match.policy) if keys else "",
        request_id=head.request_id,
        correlation_id=head.correlation_id,
        outcome=outcome,
        status=response.status,
        code=code_of(response),
    )


def _log_refusal(
    error: RequestError | StoreUnavailableError, response: Response, exchange: Exchange
) -> None:
    """Log who sent what cannot be served; the key as a hash only."""
    if not _log.isEnabledFor(logging.INFO) and not isinstance(error, RecordUnreadableError):
        return
    match = exchange.match
    assert match is not None  # noqa: S101 - only guarded requests are refused
    code = next((value for name, value in response.headers if name == b"onceward-error"), b"")
    fields: dict[str, Any] = exchange.facts() | {
        "endpoint": match.endpoint,
        "status": response.status,
        "code": code.decode("latin-1"),
    }
    if exchange.principal is not None:
        fields["tenant"] = exchange.principal.tenant
    if isinstance(error, RecordUnreadableError):
        fields["key_hash"] = short_hash(error.record_id[2])
        fields["reason"] = error.reason
        _log.error("a stored record cannot be read", extra=fields)
        return
    keys = exchange.head.keys(match.policy.key_header)
    if "key_hash" not in fields and keys:
        fields["key_hash"] = short_hash(_key_or_text(keys, match.policy))
    _log.info("request refused", extra=fields)


def _key_or_text(keys: list[bytes], policy: Policy) -> str:
    """Return the key; if it is malformed, the text that was sent in its place."""
    try:
        return parse_key(keys, policy.key_format) or ""
    except KeyInvalidError:
        return keys[0].decode("latin-1")
