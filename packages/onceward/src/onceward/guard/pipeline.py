"""The order in which a guarded request is served, for all frameworks and for items of batches.

::

    caller → limit → body → key → claim ──▶ run the app ──▶ commit → reply
                  └──────────────┴─ refused, or replayed ───────────▲

Where the caller is found by a dependency of the framework, the app runs first: its dependencies,
then caller, limit, key and claim (``Pipeline.claim``), then the handler.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import msgspec

from onceward.errors import (
    AbortedTransactionError,
    FeatureDisabledError,
    InProgressError,
    KeyInvalidError,
    PayloadMismatchError,
    QuotaExceededError,
    RateLimitedError,
    RecordUnreadableError,
    RequestError,
    ResponseTooLargeError,
    SequenceViolationError,
    StaleActionError,
    StoreUnavailableError,
    SupersededError,
    UnstoredWritesError,
    UsageError,
)
from onceward.guard.chunk import PostponedError, RequestChunk
from onceward.guard.error_formats import INTERNAL, render_error
from onceward.guard.execution import (
    Exchange,
    Execution,
    Replay,
    RequestProcessor,
    set_current_execution,
)
from onceward.guard.idempotency import Idempotency
from onceward.guard.limits import QuotaReporter, RateLimiter
from onceward.guard.policy import Policy
from onceward.guard.request import (
    GuardedRequest,
    Identify,
    Principal,
    RequestHead,
    hash_payload,
    parse_request,
)
from onceward.guard.request_body import (
    LARGE_BODY_BYTES,
    Disconnected,
    RequestBodies,
    RequestBody,
    WholeBody,
)
from onceward.guard.request_log import RequestLog, code_of
from onceward.guard.request_transaction import Statements, open_transaction
from onceward.guard.route_table import Match
from onceward.observability.traces import Spans
from onceward.ports import Metrics, Outcome
from onceward.records import Record, Response
from onceward.stores.errors import refusal_of
from onceward_protocol.effect import Effect
from onceward_protocol.fingerprint import short_hash
from onceward_protocol.keys import parse_key

REPLAYED_HEADER: Final = b"idempotency-replayed"
"""Whether a response is a stored one."""

_EFFECT_HEADER: Final = b"onceward-effect"
# Set here; another value of the app's would be a second one.
_OWN_HEADERS: Final = frozenset(
    {b"content-length", b"x-request-id", b"x-correlation-id", _EFFECT_HEADER}
)
# What the guard adds to the response of a handler.
ADDED_HEADERS: Final = frozenset(
    {
        *(b"onceward-batch", b"x-request-id", b"x-correlation-id", _EFFECT_HEADER),
        *(b"ratelimit", b"ratelimit-policy"),
    }
)
_FIRST_ERROR: Final = 400
# Stored with the record. Most clients take no more.
_MAX_HEADERS_BYTES: Final = 64 * 1024
_FIRST_SERVER_ERROR: Final = 500
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


Body = RequestBody | WholeBody


class Front(Protocol):
    """How a framework takes part in one request."""

    @property
    def body(self) -> Body:
        """The body of the request."""

    @property
    def misuse(self) -> UsageError | None:
        """Why the response of the app cannot be stored, if it cannot."""

    async def run(self, exchange: Exchange, content: bytes) -> Response | None:
        """Run the app. Return its response, or None if the front commits and sends it itself."""


class Pipeline:
    """Serves guarded requests. Sends nothing: it returns the reply."""

    def __init__(
        self,
        *,
        ready: Callable[[], Awaitable[Idempotency]],
        identify: Identify,
        metrics: Metrics,
        bodies: RequestBodies,
        idempotency: Idempotency | None = None,
        limiter: RateLimiter | None = None,
        spans: Spans | None = None,
        request_log: RequestLog | None = None,
    ) -> None:
        """``ready`` returns the opened ``Idempotency``; it is first called for a request.

        With ``idempotency``, it is not called while that is open in the event loop of the request.
        """
        self.ready = ready
        self._idempotency = idempotency
        # Returns the caller of a request from its head.
        self.identify = identify
        self.bodies = bodies
        self.spans = spans
        self._metrics = metrics
        self._limiter = limiter
        # Looked up once: the check of a protocol takes longer than a hit.
        self._quotas = limiter if isinstance(limiter, QuotaReporter) else None
        self._request_log = request_log

    # -- the steps of one request, in their order -----------------------------------------------

    async def serve(  # noqa: C901, PLR0911, PLR0912 - the steps of a request, top to bottom
        self, exchange: Exchange, front: Front
    ) -> Reply | None:
        """Replay the request, refuse it, or run the app.

        Returns None if the client has left, or if the front has sent the reply already.
        """
        match = exchange.match
        assert match is not None  # noqa: S101 - only guarded requests are served
        if self.spans is not None and exchange.span is None:
            traceparent = exchange.head.traceparent
            with self.spans.request(match.endpoint, {}, traceparent=traceparent) as exchange.span:
                return await self.serve(exchange, front)
        try:
            front.body.check_declared_size()
            if match.is_claimed_late:
                content = await front.body.read(None)
                await self._expect_claim(exchange, match, content)
            else:
                # From the head: a caller who is refused here has used no memory for a body.
                known = None if exchange.item is None else exchange.item.principal
                found = known or exchange.identify(exchange.head)
                # Checked by type first: inspect.isawaitable() takes longer than the rest.
                if not isinstance(found, Principal):
                    found = await found if inspect.isawaitable(found) else found
                exchange.principal = found
                if match.policy.rate_limit is not None:
                    await self._check_rate_limit(exchange, match, found)
                content = await front.body.read(found.tenant)
                request = self._parse(exchange, match, content, found) or (
                    await self._parse_large(exchange, match, content, found)
                )
                processor = exchange.processor = self._open_processor(exchange) or (
                    await self.ready()
                )
                if processor.is_gated and processor.store.gate is not None:
                    processor.store.gate.begin()
                outcome = exchange.outcome = await processor.process(request)
                if isinstance(outcome, Replay):
                    return replay(outcome.record, exchange)
                set_current_execution(outcome)
        except Disconnected:
            return None
        except (RequestError, StoreUnavailableError) as error:
            return self._refuse(error, exchange)
        except Exception as error:
            log_unhandled(error, exchange)
            raise
        try:
            response = await front.run(exchange, content)
            misuse = front.misuse
            if response is not None:
                if len(response.body) <= match.policy.max_response_bytes:
                    return await self.commit(exchange, response)
                misuse = response_too_large(match)
        except Exception as error:
            known_error = None if exchange.has_reply else self._known_error(exchange, error)
            if known_error is None:
                log_unhandled(error, exchange)
                raise
            return await self.commit(exchange, render(known_error, exchange))
        finally:
            # No response, cancelled or raised: roll back and free the key.
            await self._end(exchange)
        if exchange.has_reply:
            return None
        _log.error("%s", misuse or f"the handler of {match.endpoint} sent no complete response")
        return complete(render(INTERNAL, exchange), exchange)

    def _open_processor(self, exchange: Exchange) -> RequestProcessor | None:
        """Return the claimer of a request's key; None if its store may have to be opened."""
        if exchange.item is not None and exchange.item.processor is not None:
            return exchange.item.processor
        found = self._idempotency
        if found is None or found.opened_in is not asyncio.get_running_loop():
            return None
        return found if found.store.schema.is_complete else None

    async def _expect_claim(self, exchange: Exchange, match: Match, content: bytes) -> None:
        exchange.content = content
        # Before the framework parses the body, with its own idea of JSON and its own error.
        if len(content) <= LARGE_BODY_BYTES:
            exchange.payload_hash = hash_payload(exchange.head, content, match.policy)
        else:
            exchange.payload_hash = await self.bodies.run_and_forget(
                len(content), lambda: hash_payload(exchange.head, content, match.policy)
            )
        processor = exchange.processor = self._open_processor(exchange) or await self.ready()
        if processor.is_gated and processor.store.gate is not None:
            await processor.store.gate.enter(match.endpoint)

    async def claim(self, exchange: Exchange, principal: object) -> Execution | Replay:
        """Take the steps from the caller to the claim, after the dependencies of the app.

        Raises what the client gets.
        """
        match, processor = exchange.match, exchange.processor
        assert match is not None  # noqa: S101 - it was found, or nothing is claimed
        assert processor is not None  # noqa: S101 - set before the app runs
        if not isinstance(principal, Principal):
            raise UsageError(
                f"the principal dependency returned {type(principal).__name__}: it must return "
                "onceward.Principal(tenant=…, actor=…)"
            )
        if exchange.outcome is not None:
            raise UsageError("a guarded endpoint ran twice in one request")
        exchange.principal = principal
        sharing: dict[str, Any] = {}
        try:
            if match.policy.rate_limit is not None:
                await self._check_rate_limit(exchange, match, principal)
            request = self._parse(exchange, match, exchange.content, principal) or (
                await self._parse_large(exchange, match, exchange.content, principal)
            )
            if exchange.transaction is not None:
                sharing |= await exchange.transaction.release(match.endpoint)
            outcome = await processor.process(request, **sharing)
        except (RequestError, StoreUnavailableError) as error:
            exchange.outcome = error
            raise
        if isinstance(outcome, Execution):
            if exchange.transaction is not None:
                exchange.transaction.join(outcome)
            set_current_execution(outcome)
        exchange.outcome = outcome
        return outcome

    async def commit(  # noqa: PLR0911 - one per way it can end
        self, exchange: Exchange, response: Response
    ) -> Reply:
        """Commit the complete response of the app; return what the client gets."""
        outcome = exchange.outcome
        if isinstance(outcome, Execution) and not outcome.ended:
            assert exchange.processor is not None  # noqa: S101 - it has claimed
            try:
                _check_headers(outcome, response)
                committed = await exchange.processor.finish(outcome, response)
            except (RequestError, StoreUnavailableError) as error:
                exchange.has_reply = True
                return self._refuse(error, exchange)
            except (
                UnstoredWritesError,
                AbortedTransactionError,
                ResponseTooLargeError,
            ) as misuse:
                exchange.has_reply = True
                _log.error("%s", misuse, extra=exchange.facts())
                return complete(render(INTERNAL, exchange), exchange, may_go_on=False)
            exchange.has_reply, exchange.effect = True, outcome.effect
            if isinstance(committed, Replay):
                return replay(committed.record, exchange)
            return complete(committed, exchange)
        exchange.has_reply = True
        # Claimed by the endpoint: the app ends as after a response of its own.
        if isinstance(outcome, Replay):
            return replay(outcome.record, exchange, may_go_on=True)
        if isinstance(outcome, RequestError | StoreUnavailableError):
            return self._refuse(outcome, exchange, may_go_on=True)
        # Nothing to commit: not claimed, aborted, or the commit raised.
        return complete(response, exchange)

    async def _end(self, exchange: Exchange) -> None:
        """Roll back what was not committed, and end the transaction of dependencies."""
        outcome = exchange.outcome
        try:
            if not isinstance(outcome, Execution):
                exchange.outcome = None  # an error refers, by its frames, to what refers to it
            elif not outcome.ended:
                assert exchange.processor is not None  # noqa: S101 - it has claimed
                await exchange.processor.abort(outcome)
        finally:  # also if a second cancellation has stopped the first step
            if exchange.transaction is not None:
                await exchange.transaction.close()

    def note_unclaimed(self, exchange: Exchange, head: Response) -> None:
        """Log what the app responds without a claim, e.g. to an invalid body; ``head`` has no body.

        Only if the caller is known.
        """
        log = self._request_log
        refused = _FIRST_ERROR <= head.status < _FIRST_SERVER_ERROR
        if log is not None and exchange.principal is not None and refused:
            log.count("refused")
            _add_to_log(log, exchange, "refused", head)
        if exchange.span is not None:
            exchange.span.describe(exchange.facts())
            exchange.span.outcome(head.status, replayed=False)

    def _refuse(
        self,
        error: RequestError | StoreUnavailableError,
        exchange: Exchange,
        *,
        may_go_on: bool = False,
    ) -> Reply:
        assert exchange.match is not None  # noqa: S101 - only guarded requests are refused
        log = self._request_log
        if isinstance(error, StoreUnavailableError):
            self._metrics.outcome(exchange.match.endpoint, "unavailable")
            if log is not None:
                log.count("unavailable")
            log_outage(error, exchange)
        else:
            exchange.effect = error.effect
        response = render(error, exchange)
        if log is not None and not isinstance(error, _LOGGED_ELSEWHERE):
            _note_refusal(log, error, response, exchange)
        if response.status in _LOGGED_REFUSALS or isinstance(error, RecordUnreadableError):
            _log_refusal(error, response, exchange)
        return complete(response, exchange, may_go_on=may_go_on)

    # -- parts of steps ----------------------------------------------------------------------------

    async def _check_rate_limit(
        self, exchange: Exchange, match: Match, principal: Principal
    ) -> None:
        """Count the request. Raises ``RateLimitedError``."""
        limit, item = match.policy.rate_limit, exchange.item
        if limit is None or self._limiter is None:
            return
        if item is not None and item.limit_headers is not None:  # counted before; it runs again
            exchange.limit_headers = item.limit_headers
            if item.limit_error is not None:
                raise item.limit_error
            return
        if self._quotas is not None:
            counted = await self._quotas.count(limit, principal.tenant, match.endpoint)
            wait, exchange.limit_headers = counted.wait_seconds, counted.headers
        else:
            wait = await self._limiter.seconds_to_wait(limit, principal.tenant, match.endpoint)
        error = None
        if wait is not None:
            self._metrics.outcome(match.endpoint, "limited")
            if self._request_log is not None:
                self._request_log.count("limited")
            error = RateLimitedError("too many requests; slow down", retry_after_seconds=wait)
        if item is not None:
            item.limit_headers, item.limit_error = exchange.limit_headers, error
        if error is not None:
            raise error

    @staticmethod
    def _parse(
        exchange: Exchange, match: Match, content: bytes, principal: Principal
    ) -> GuardedRequest | None:
        """Read key and fingerprint; return None if that takes a thread."""
        item, request, known_hash = exchange.item, None, exchange.payload_hash
        if item is not None:
            request = item.take_parsed(content, principal)
        # With its hash known, nothing of the body is read but a key in it.
        if request is None and (known_hash is not None or len(content) <= LARGE_BODY_BYTES):
            request = parse_request(exchange.head, content, match, principal, known_hash)
        exchange.request = request
        return request

    async def _parse_large(
        self, exchange: Exchange, match: Match, content: bytes, principal: Principal
    ) -> GuardedRequest:
        request = exchange.request = await self.bodies.run_and_forget(
            len(content), lambda: parse_request(exchange.head, content, match, principal)
        )
        return request

    def _known_error(
        self, exchange: Exchange, error: Exception
    ) -> RequestError | StoreUnavailableError | str | None:
        """Return the response for an error of the app; None if the app has to respond."""
        known = outage_of(exchange, error) or refusal_of(error) or error
        if isinstance(known, StoreUnavailableError):
            log_outage(known, exchange)
        # A superseded execution ends with a replay, whatever response is given here.
        if isinstance(known, SupersededError):
            return INTERNAL
        return known if isinstance(known, RequestError | StoreUnavailableError) else None

    # -- for dependencies of the app ---------------------------------------------------------------

    async def transaction_of(self, exchange: Exchange) -> Any:
        """Return the transaction or session of a request that is not guarded, or not yet claimed.

        The same one for every dependency of the request.
        """
        if exchange.transaction is None:
            item = exchange.item
            if item is not None and isinstance(item.processor, RequestChunk):
                exchange.transaction = Statements(item.processor)
            else:
                idempotency = await self.ready()
                exchange.transaction = open_transaction(
                    idempotency.store, idempotency.session_store
                )
        return exchange.transaction.handle


def response_too_large(match: Match) -> ResponseTooLargeError:
    """Return the error for a response that is too large to be stored."""
    most = match.policy.max_response_bytes
    return ResponseTooLargeError(
        f"{match.endpoint} sent a response of more than {most} bytes, which cannot be stored for a "
        "replay. Store the result and respond with a link to it."
    )


def _check_headers(execution: Execution, response: Response) -> None:
    if sum(len(value) for _, value in response.headers) > _MAX_HEADERS_BYTES:
        raise ResponseTooLargeError(
            f"{execution.request.endpoint} sent headers of more than {_MAX_HEADERS_BYTES} bytes, "
            "which cannot be stored for a replay"
        )


def outage_of(exchange: Exchange, error: Exception) -> StoreUnavailableError | None:
    """Return the client's error, if session or connection raised ``error`` in an outage."""
    if exchange.transaction is not None:
        return exchange.transaction.outage_of(error)
    execution, processor = exchange.outcome, exchange.processor
    if not isinstance(execution, Execution) or execution.ended or processor is None:
        return None
    if processor.session_store is not None:
        return processor.session_store.outage_of(execution.transaction, error)
    return execution.unit.outage_of(error)


# -- replies -------------------------------------------------------------------------------------


def complete(response: Response, exchange: Exchange, *, may_go_on: bool = True) -> Reply:
    """Return a response with the ids of its request and the headers that the guard adds."""
    headers = [pair for pair in response.headers if pair[0] not in _OWN_HEADERS]
    return _reply(response.status, headers, response.body, exchange, may_go_on=may_go_on)


def _reply(
    status: int,
    headers: list[tuple[bytes, bytes]],
    body: bytes,
    exchange: Exchange,
    *,
    may_go_on: bool,
) -> Reply:
    headers += exchange.limit_headers
    headers += exchange.added_headers
    if exchange.effect is not None:
        headers.append((_EFFECT_HEADER, exchange.effect.encode()))
    if body or status not in _WITHOUT_BODY:
        headers.append((b"content-length", b"%d" % len(body)))
    headers += id_headers(exchange.head)
    if exchange.span is not None:
        exchange.span.describe(exchange.facts())
        exchange.span.outcome(status, exchange.is_replay)
    return Reply(status, headers, body, may_go_on)


def id_headers(head: RequestHead) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers with the ids of a request."""
    request_id, correlation_id = head.request_id, head.correlation_id
    raw_id = request_id.encode("latin-1")
    return (
        (b"x-request-id", raw_id),
        (
            b"x-correlation-id",
            raw_id if correlation_id is request_id else correlation_id.encode("latin-1"),
        ),
    )


def replay(record: Record, exchange: Exchange, *, may_go_on: bool = False) -> Reply:
    """Log a replay for the audit, and return the stored response."""
    exchange.is_replay, exchange.effect = True, Effect.STORED
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
    # As ``Record.response``: what is stored has none of the guard's own headers.
    headers = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in record.headers.items()]
    headers.append((REPLAYED_HEADER, b"true"))
    headers.append((b"x-original-request-id", record.request_id.encode("latin-1")))
    return _reply(record.status, headers, record.body, exchange, may_go_on=may_go_on)


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


def log_unhandled(error: Exception, exchange: Exchange) -> None:
    """Log the traceback of an error that becomes a 500, with the request that it belongs to."""
    head, match, caller = exchange.head, exchange.match, exchange.principal
    endpoint = f"{head.method} {head.path}" if match is None else match.endpoint
    facts: dict[str, Any] = {**exchange.facts(), "endpoint": endpoint}
    if caller is not None:
        facts["tenant"] = caller.tenant
    _log.error(
        "unhandled error in %s (tenant %s, request id %s)",
        endpoint,
        facts.get("tenant", "unknown"),
        head.request_id,
        exc_info=error,
        extra=facts,
    )


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
