"""The order in which a guarded request is served, for all frameworks and for items of batches.

::

    caller → limit → body → key → claim ──▶ run the app ──▶ commit → reply
                  └──────────────┴─ refused, or replayed ───────────▲

Where the caller is found by a dependency of the framework, the app runs first: its dependencies,
then caller, limit, key and claim (``claim_late``), then the handler.
"""

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from onceward.core.idempotency_record import Response
from onceward.errors import (
    AbortedTransactionError,
    RateLimitedError,
    RequestError,
    ResponseTooLargeError,
    StoreUnavailableError,
    SupersededError,
    UnstoredWritesError,
    UsageError,
)
from onceward.guard.exchange import Exchange
from onceward.guard.execution import Execution, Replay, set_current_execution
from onceward.guard.idempotency import Idempotency
from onceward.guard.limits import QuotaReporter, RateLimiter
from onceward.guard.reply import (
    Reply,
    complete,
    log_outage,
    note_unclaimed,
    refusal,
    render,
    replay,
)
from onceward.guard.request import GuardedRequest, Identify, Principal, hash_payload, parse_request
from onceward.guard.request_body import LARGE_BODY_BYTES, Disconnected, RequestBodies
from onceward.guard.request_log import RequestLog
from onceward.guard.request_transaction import Statements, open_transaction
from onceward.guard.route_table import Match
from onceward.observability.traces import Spans
from onceward.ports import Metrics
from onceward.stores.errors import unstorable_error

__all__ = ["Body", "Front", "Pipeline", "check_response_size"]

_log = logging.getLogger("onceward.request")


class Body(Protocol):
    """The body of one request: ``RequestBody``, or ``WholeBody`` where it is in memory."""

    def check_declared_size(self) -> None:
        """Raise ``BodyTooLargeError`` if the head says that the body is too large."""

    async def read(self, tenant: str | None) -> bytes:
        """Return the whole body. ``tenant`` is None if the caller has not signed in yet."""


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
        limiter: RateLimiter | None = None,
        spans: Spans | None = None,
        request_log: RequestLog | None = None,
    ) -> None:
        """``ready`` returns the opened ``Idempotency``; it is first called for a request."""
        self.ready = ready
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
                shared = None if exchange.item is None else exchange.item.processor
                processor = exchange.processor = shared or await self.ready()
                gate = processor.gate
                if gate is not None:
                    gate.begin()
                outcome = exchange.outcome = await processor.process(request)
                if isinstance(outcome, Replay):
                    return replay(outcome.record, exchange)
                set_current_execution(outcome)
        except Disconnected:
            return None
        except (RequestError, StoreUnavailableError) as error:
            return refusal(error, exchange, self._metrics, self._request_log)
        try:
            response = await front.run(exchange, content)
            misuse = front.misuse
            if response is not None:
                misuse = check_response_size(match, len(response.body))
                if misuse is None:
                    return await self.commit(exchange, response)
        except Exception as error:
            known_error = None if exchange.has_reply else self._known_error(exchange, error)
            if known_error is None:
                raise
            return await self.commit(exchange, render(known_error, exchange))
        finally:
            # No response, cancelled or raised: roll back and free the key.
            await self._end(exchange)
        if exchange.has_reply:
            return None
        _log.error("%s", misuse or f"the handler of {match.endpoint} sent no complete response")
        return complete(render("internal", exchange), exchange)

    async def _expect_claim(self, exchange: Exchange, match: Match, content: bytes) -> None:
        """Prepare a claim after the dependencies of the app."""
        exchange.content = content
        # Before the framework parses the body, with its own idea of JSON and its own error.
        exchange.payload_hash = await self.bodies.run_and_forget(
            len(content), lambda: hash_payload(exchange.head, content, match.policy)
        )
        item = exchange.item
        shared = None if item is None else item.processor
        processor = exchange.processor = shared or await self.ready()
        if processor.gate is not None:
            await processor.gate.enter(match.endpoint)

    async def claim_late(self, exchange: Exchange, principal: Principal) -> Execution | Replay:
        """Take the steps from the caller to the claim, after the dependencies of the app."""
        match, processor = exchange.match, exchange.processor
        assert match is not None  # noqa: S101 - it was found, or nothing is claimed
        assert processor is not None  # noqa: S101 - set before the app runs
        exchange.principal = principal
        if match.policy.rate_limit is not None:
            await self._check_rate_limit(exchange, match, principal)
        request = self._parse(exchange, match, exchange.content, principal) or (
            await self._parse_large(exchange, match, exchange.content, principal)
        )
        sharing: dict[str, Any] = {}
        if exchange.transaction is not None:
            sharing |= await exchange.transaction.release(match.endpoint)
        outcome = await processor.process(request, **sharing)
        if isinstance(outcome, Execution):
            if exchange.transaction is not None:
                exchange.transaction.join(outcome)
            set_current_execution(outcome)
        return outcome

    async def commit(  # noqa: PLR0911 - one per way it can end
        self, exchange: Exchange, response: Response
    ) -> Reply:
        """Commit the complete response of the app; return what the client gets."""
        outcome = exchange.outcome
        if isinstance(outcome, Execution) and not outcome.ended:
            assert exchange.processor is not None  # noqa: S101 - it has claimed
            try:
                committed = await exchange.processor.finish(outcome, response)
            except (RequestError, StoreUnavailableError) as error:
                exchange.has_reply = True
                return refusal(error, exchange, self._metrics, self._request_log)
            except (UnstoredWritesError, AbortedTransactionError) as misuse:
                exchange.has_reply = True
                _log.error("%s", misuse, extra=exchange.facts())
                return complete(render("internal", exchange), exchange, may_go_on=False)
            exchange.has_reply = True
            if isinstance(committed, Replay):
                return replay(committed.record, exchange)
            return complete(committed, exchange)
        exchange.has_reply = True
        # Claimed by the endpoint: the app ends as after a response of its own.
        if isinstance(outcome, Replay):
            return replay(outcome.record, exchange, may_go_on=True)
        if isinstance(outcome, RequestError | StoreUnavailableError):
            return refusal(outcome, exchange, self._metrics, self._request_log, may_go_on=True)
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

    def note_unclaimed(self, exchange: Exchange, response: Response) -> None:
        """Log the head of a response that the app sends without a claim."""
        note_unclaimed(self._request_log, exchange, response)
        if exchange.span is not None:
            exchange.span.describe(exchange.facts())
            exchange.span.outcome(response.status, replayed=False)

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
        """Return what the client gets for an error of the app; None if the app has to respond."""
        known = outage_of(exchange, error) or unstorable_error(error) or error
        if isinstance(known, StoreUnavailableError):
            log_outage(known, exchange)
        # A superseded execution ends with a replay, whatever response is given here.
        if isinstance(known, SupersededError):
            return "internal"
        return known if isinstance(known, RequestError | StoreUnavailableError) else None

    # -- for dependencies of the app ---------------------------------------------------------------

    async def transaction_of(self, exchange: Exchange) -> Any:
        """Return the transaction or session of a request that is not guarded, or not yet claimed.

        The same one for every dependency of the request.
        """
        if exchange.transaction is None:
            item = exchange.item
            if item is not None and item.processor is not None:
                exchange.transaction = Statements(item.processor)
            else:
                idempotency = await self.ready()
                exchange.transaction = open_transaction(
                    idempotency.store, idempotency.session_store
                )
        return exchange.transaction.handle


def check_response_size(match: Match, size: int) -> ResponseTooLargeError | None:
    """Return the error for a response that is too large to be stored; None if it is not."""
    most = match.policy.max_response_bytes
    if size <= most:
        return None
    return ResponseTooLargeError(
        f"{match.endpoint} sent a response of more than {most} bytes, which cannot be stored for a "
        "replay. Store the result and respond with a link to it."
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
