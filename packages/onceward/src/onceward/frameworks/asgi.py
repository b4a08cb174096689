"""ASGI middleware that guards an app's operations. Nothing is sent before the commit."""

import inspect
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, Final, Protocol, runtime_checkable

from onceward.batch.options import BatchOptions
from onceward.core.error_formats import ErrorFormatter, render_error
from onceward.core.idempotency_record import Record, Response
from onceward.core.policy import Policy
from onceward.errors import (
    AbortedTransactionError,
    CommitUnknownError,
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
    SupersededError,
    UnstoredWritesError,
    UsageError,
)
from onceward.frameworks.direct_call import DirectCall, PreparedCall, SendResponse
from onceward.guard.batch_item import ITEM_KEY, ItemContext, PostponedError, RequestProcessor
from onceward.guard.execution import Execution, set_current_execution
from onceward.guard.idempotency import Idempotency, Replay
from onceward.guard.pending_request import PENDING_KEY, PendingRequest
from onceward.guard.request import (
    GuardedRequest,
    Principal,
    hash_payload,
    own_fingerprint,
    parse_request,
)
from onceward.guard.request_body import (
    LARGE_BODY_BYTES,
    Disconnected,
    RequestBodies,
    RequestBody,
    check_size,
)
from onceward.guard.request_head import Identify, RequestHead, path_in_app
from onceward.guard.request_log import RequestLog, code_of
from onceward.guard.request_transaction import Statements, open_transaction
from onceward.guard.response_buffer import (
    Message,
    Receive,
    ResponseBuffer,
    ResponseDiscarded,
    Send,
    complete_response,
    remove_response_extensions,
    send_response,
)
from onceward.guard.route_table import SAFE_METHODS, Match
from onceward.observability.traces import Spans
from onceward.ports import Metrics, Outcome, Store
from onceward.stores.errors import unstorable_error
from onceward.stores.sessions.gate import end_visit
from onceward_protocol.error_codes import ErrorFormat
from onceward_protocol.fingerprint import FingerprintInput, short_hash
from onceward_protocol.keys import parse_key
from onceward_protocol.sequence import CLIENT_HEADER, SEQUENCE_HEADER

__all__ = [
    "MIDDLEWARE_KEY",
    "SCOPE_KEY",
    "CountedRequest",
    "GuardMiddleware",
    "QuotaReporter",
    "RateLimiter",
    "RouteTable",
    "log_outage",
    "send_and_close",
]

Scope = MutableMapping[str, Any]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

# The key under which a handler finds its execution in the scope.
SCOPE_KEY: Final = "onceward"
# The key under which dependencies find the middleware in the scope.
MIDDLEWARE_KEY: Final = "onceward.middleware"

_DEFAULT_POLICY: Final = Policy()

# Refusals that point to a broken or greedy client; others are frequent in normal use.
_LOGGED_REFUSALS: Final = frozenset({400, 429})
# Mismatches are logged with their record. A request that runs again is logged then.
_LOGGED_ELSEWHERE: Final = (PayloadMismatchError, InProgressError, PostponedError)
# Refusals that were counted where they were decided.
_COUNTED_ELSEWHERE: Final = (FeatureDisabledError, QuotaExceededError, SequenceViolationError)

_log = logging.getLogger("onceward.request")
_audit_log = logging.getLogger("onceward.audit")


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


class RouteTable(Protocol):
    """Finds the guarded route of a request."""

    def find(self, method: str, path: str) -> Match | None:
        """Return the guarded route, or None if the request is not guarded."""


class GuardMiddleware:
    """Guards the routes of an app. Other requests pass through and get a request id."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        idempotency: Callable[[], Awaitable[Idempotency]],
        table: Callable[[], RouteTable],
        identify: Identify,
        metrics: Metrics,
        bodies: RequestBodies,
        limiter: RateLimiter | None = None,
        spans: Spans | None = None,
        error_format: ErrorFormat | ErrorFormatter = ErrorFormat.PROBLEM,
        batch: BatchOptions | None = None,
        direct: Callable[[Any], DirectCall | None] | None = None,
        request_log: RequestLog | None = None,
    ) -> None:
        """Wrap an app. ``idempotency`` and ``table`` are first called when a request arrives.

        ``batch`` are the settings of the app's batch endpoint, which responses then name.
        ``direct`` finds what calls a route without the app around it, if there is such a thing.
        """
        self._app = app
        self._direct = direct
        self._batch = batch
        self._idempotency = idempotency
        self._table = table
        self._identify = identify
        self._metrics = metrics
        self._bodies = bodies
        self._limiter = limiter
        # Looked up once: the check of a protocol takes longer than a hit.
        self._quotas = limiter if isinstance(limiter, QuotaReporter) else None
        self._spans = spans
        self._error_format = error_format
        self._log = request_log
        # The prefix of the app that was last seen, and the header for it.
        self._known_batch_headers: tuple[str, tuple[tuple[bytes, bytes], ...]] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # In upper case by the standard, but not every server converts it, and many apps do.
        method: str = scope["method"].upper()
        path = path_in_app(scope)
        item: ItemContext | None = scope.get(ITEM_KEY)
        head = None if item is None else _head_of(item, scope, path)
        if head is None:
            head = RequestHead(method, path, scope.get("query_string", b""), scope["headers"])
        scope["onceward.head"] = head
        # The format of errors outside guarded operations; set already in an app with several.
        scope.setdefault("onceward.error_format", self._error_format)
        scope[MIDDLEWARE_KEY] = self
        match = None if method in SAFE_METHODS else self._table().find(method, path)
        head.item = item
        if match is not None and self._batch is not None and item is None:
            head.added_headers = self._batch_headers(scope.get("root_path", ""), self._batch)
        elif "onceward.batch" in scope:  # sync frameworks have their own batch endpoint
            head.added_headers = ((b"onceward-batch", scope["onceward.batch"]),)
        if match is None:
            await self._serve_unguarded(head, scope, receive, send)
        elif self._spans is None:
            # As ``_guard``: each coroutine more costs as much as reading the head.
            body = RequestBody(receive, head, match.policy, self._bodies)
            try:
                await self._serve_guarded(match, body, head, scope, receive, send)
            finally:
                body.release()
                end_visit()
        else:
            with self._spans.request(match.endpoint, {}, traceparent=head.traceparent) as span:

                async def send_traced(message: Message) -> None:
                    if message["type"] == "http.response.start":
                        span.describe(head.facts())
                        span.outcome(message["status"], head.is_replay)
                    await send(message)

                await self._guard(match, head, scope, receive, send_traced)

    def _batch_headers(self, root: str, batch: BatchOptions) -> tuple[tuple[bytes, bytes], ...]:
        """Return the header that names the batch endpoint; nearly always the same one."""
        known = self._known_batch_headers
        if known is None or known[0] != root:
            value = f"{root}{batch.path}; items={batch.max_items}".encode("latin-1")
            known = self._known_batch_headers = (root, ((b"onceward-batch", value),))
        return known[1]

    async def transaction_of(self, head: RequestHead) -> Any:
        """Return the transaction or session of a request that is not guarded, or not yet claimed.

        The same one for every dependency of the request.
        """
        if head.transaction is None:
            item = head.item
            if item is not None and item.processor is not None:
                head.transaction = Statements(item.processor)
                return head.transaction.handle
            idempotency = await self._idempotency()
            head.transaction = open_transaction(idempotency.store, idempotency.session_store)
        return head.transaction.handle

    async def principal_of(self, head: RequestHead) -> Principal:
        """Return the caller, or raise ``NotAuthenticatedError``."""
        found = self._identify(head)
        return await found if inspect.isawaitable(found) else found

    async def _serve_unguarded(
        self, head: RequestHead, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            await self._app(scope, receive, _with_ids(send, head))
        except ResponseDiscarded:  # the commit has failed, and the client knows
            pass
        except Exception as error:
            if head.transaction is None or head.is_started:
                raise
            outage = head.transaction.outage_of(error)
            refused = outage or unstorable_error(error)
            if refused is None:
                raise
            if outage is not None:
                log_outage(outage, head)
            response = render_error(refused, scope["onceward.error_format"], head.request_id)
            await send_response(send, response, head)
        finally:
            if head.transaction is not None:
                await head.transaction.close()

    async def _guard(
        self, match: Match, head: RequestHead, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Serve a guarded request, and count its body as long as it is held."""
        body = RequestBody(receive, head, match.policy, self._bodies)
        try:
            await self._serve_guarded(match, body, head, scope, receive, send)
        finally:
            body.release()
            end_visit()

    async def _serve_guarded(  # noqa: PLR0917 - an ASGI call and what was parsed from it
        self,
        match: Match,
        body: RequestBody,
        head: RequestHead,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Replay the request, refuse it, or run the app."""
        try:
            body.check_declared_size()
            if match.is_claimed_late:
                content = await body.read(None)
                idempotency = await self._processor(head)
                await self._guard_late(match, content, idempotency, head, scope, receive, send)
                return
            # From the head: a caller who is refused here has used no memory for a body.
            known = None if head.item is None else head.item.principal
            found = known or self._identify(head)
            # Checked by type first: inspect.isawaitable() takes longer than the rest.
            if isinstance(found, Principal):
                principal = found
            else:
                principal = await found if inspect.isawaitable(found) else found
            head.principal = principal
            if match.policy.rate_limit is not None:
                await self._check_rate_limit(match, head, principal)
            content = await body.read(principal.tenant)
            if len(content) <= LARGE_BODY_BYTES:
                request = head.request = self._parse_now(match, head, content, principal, None)
            else:
                request = await self._parse(match, head, content, principal)
            idempotency = (
                await self._idempotency() if head.item is None else await self._processor(head)
            )
            gate = idempotency.gate
            if gate is not None:
                gate.begin()
            outcome = await idempotency.process(request)
        except Disconnected:
            return
        except (RequestError, StoreUnavailableError) as error:
            if not await body.is_there():
                send = send_and_close(send, body, scope)
            await send_response(send, _refusal(error, match, head, self._metrics, self._log), head)
            return
        if isinstance(outcome, Replay):
            response, extra_headers = _replay(outcome.record, head)
            await send_response(send, response, head, extra_headers)
        else:
            scope[SCOPE_KEY] = outcome
            set_current_execution(outcome)
            receive = _receive_again(content, receive)
            direct = self._prepare_direct(match, head, scope, content)
            await self._run_app(idempotency, outcome, match, head, scope, receive, send, direct)

    def has_direct_call(self, match: Match) -> bool:
        """Return whether ``serve_item`` serves requests of this route, and traces none."""
        return (
            self._direct is not None
            and self._spans is None
            and match.source is not None
            and not match.is_claimed_late
            and self._direct(match.source) is not None
        )

    def parse_ahead(self, match: Match, item: ItemContext, content: bytes) -> None:
        """Read key and fingerprint of an item before its turn; errors are left for that."""
        head, principal = item.head, item.principal
        if (
            isinstance(head, RequestHead)
            and principal is not None
            and match.policy.fingerprint is None  # a function of the app
        ):
            with suppress(RequestError):
                item.parsed = content, self._parse_now(match, head, content, principal, None)

    async def serve_item(  # noqa: C901, PLR0917 - the steps of a request, top to bottom
        self,
        match: Match,
        item: ItemContext,
        processor: RequestProcessor,
        content: bytes,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> Response | None:
        """Serve a request of a batch; return its response, or None if it was sent as messages.

        Does what ``__call__`` does for this route, in the same order, for a body of at most
        ``LARGE_BODY_BYTES`` that is in memory.
        """
        path = path_in_app(scope)
        head = _head_of(item, scope, path)
        if head is None:
            head = RequestHead(scope["method"], path, scope["query_string"], scope["headers"])
        scope["onceward.head"] = head
        scope.setdefault("onceward.error_format", self._error_format)
        scope[MIDDLEWARE_KEY] = self
        head.item = item
        try:
            check_size(len(content), match.policy)
            found = item.principal or self._identify(head)
            if isinstance(found, Principal):
                principal = found
            else:
                principal = await found if inspect.isawaitable(found) else found
            head.principal = principal
            if match.policy.rate_limit is not None:
                await self._check_rate_limit(match, head, principal)
            request = head.request = item.take_parsed(content, principal) or self._parse_now(
                match, head, content, principal, None
            )
            outcome = await processor.process(request)
        except (RequestError, StoreUnavailableError) as error:
            return complete_response(_refusal(error, match, head, self._metrics, self._log), head)
        if isinstance(outcome, Replay):
            response, extra_headers = _replay(outcome.record, head)
            return complete_response(response, head, extra_headers)
        try:
            scope[SCOPE_KEY] = outcome
            set_current_execution(outcome)
            receive = _receive_again(content, receive)
            direct = self._prepare_direct(match, head, scope, content)
            given: Response | SendResponse | Exception | None = None
            if direct is not None:
                try:
                    given = await direct(scope, receive, outcome)
                except Exception as error:  # noqa: BLE001 - raised again by ``_run_app``
                    given = error
            if isinstance(given, Response) and len(given.body) <= match.policy.max_response_bytes:
                responder = _Responder(
                    processor, outcome, match, head, send, self._metrics, self._log
                )
                response, extra_headers, _ = await responder.commit(given)
                return complete_response(response, head, extra_headers)
            again = None if given is None else _repeating(given)
            await self._run_app(processor, outcome, match, head, scope, receive, send, again)
        except BaseException:
            if not outcome.ended:
                await processor.abort(outcome)
            raise
        finally:
            end_visit()
        return None

    def _prepare_direct(
        self, match: Match, head: RequestHead, scope: Scope, content: bytes
    ) -> PreparedCall | None:
        """Return a call of the route's handler; None if the framework has to call it."""
        if self._direct is None or match.source is None:
            return None
        route = self._direct(match.source)
        return None if route is None else route.prepare(scope, head.path, content)

    async def _processor(self, head: RequestHead) -> RequestProcessor:
        """Return what claims the key: that of the whole app, or of a chunk of a batch."""
        if head.item is not None and head.item.processor is not None:
            return head.item.processor
        return await self._idempotency()

    async def _guard_late(  # noqa: PLR0917 - an ASGI call and what was parsed from it
        self,
        match: Match,
        body: bytes,
        idempotency: RequestProcessor,
        head: RequestHead,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Run the app, whose endpoint claims the key after its dependencies have run."""

        # Before the framework parses the body, with its own idea of JSON and its own error.
        def hash_body() -> str:
            if match.policy.fingerprint is None:
                return hash_payload(body, head.content_type, match.policy)
            return _own_fingerprint(match.policy, head, body)

        payload_hash = await self._bodies.run_and_forget(len(body), hash_body)
        gate = idempotency.gate
        if gate is not None:
            await gate.enter(match.endpoint)

        async def claim(principal: Principal) -> Execution | Replay:
            head.principal = principal
            await self._check_rate_limit(match, head, principal)
            request = await self._parse(match, head, body, principal, payload_hash)
            sharing: dict[str, Any] = {}
            if head.transaction is not None:
                sharing |= await head.transaction.release(match.endpoint)
            outcome = await idempotency.process(request, **sharing)
            if isinstance(outcome, Execution):
                if head.transaction is not None:
                    head.transaction.join(outcome)
                scope[SCOPE_KEY] = outcome
                set_current_execution(outcome)
            return outcome

        pending = scope[PENDING_KEY] = PendingRequest(claim)
        receive = _receive_again(body, receive)
        try:
            await self._run_app(idempotency, pending, match, head, scope, receive, send)
        finally:
            # Neither the scope nor an error with its frames may refer to what refers to it.
            scope.pop(PENDING_KEY, None)
            pending.outcome = None
            if head.transaction is not None:
                await head.transaction.close()

    async def _check_rate_limit(
        self, match: Match, head: RequestHead, principal: Principal
    ) -> None:
        """Count the request. Raises ``RateLimitedError``."""
        limit, item = match.policy.rate_limit, head.item
        if limit is None or self._limiter is None:
            return
        if item is not None and item.limit_headers is not None:  # counted before; it runs again
            head.limit_headers = item.limit_headers
            if item.limit_error is not None:
                raise item.limit_error
            return
        wait = await self._count(limit, principal.tenant, match.endpoint, head)
        error = None
        if wait is not None:
            self._metrics.outcome(match.endpoint, "limited")
            if self._log is not None:
                self._log.count("limited")
            error = RateLimitedError("too many requests; slow down", retry_after_seconds=wait)
        if item is not None:
            item.limit_headers, item.limit_error = head.limit_headers, error
        if error is not None:
            raise error

    async def _parse(
        self,
        match: Match,
        head: RequestHead,
        body: bytes,
        principal: Principal,
        payload_hash: str | None = None,
    ) -> GuardedRequest:
        """Read key and fingerprint."""

        def parse() -> GuardedRequest:
            return self._parse_now(match, head, body, principal, payload_hash)

        # With its hash given, nothing of the body is read but a key in it.
        is_small = payload_hash is not None or len(body) <= LARGE_BODY_BYTES
        head.request = request = (
            parse() if is_small else await self._bodies.run_and_forget(len(body), parse)
        )
        return request

    @staticmethod
    def _parse_now(
        match: Match,
        head: RequestHead,
        body: bytes,
        principal: Principal,
        payload_hash: str | None,
    ) -> GuardedRequest:
        policy = match.policy
        if payload_hash is None and policy.fingerprint is not None:
            payload_hash = _own_fingerprint(policy, head, body)
        is_strict = policy.ordering == "strict"
        return parse_request(
            endpoint=match.endpoint,
            policy=policy,
            principal=principal,
            method=head.method,
            path_params=match.path_params,
            query=head.query,
            key_headers=head.keys(policy.key_header),
            content_type=head.content_type,
            body=body,
            request_id=head.request_id,
            correlation_id=head.correlation_id,
            payload_hash=payload_hash,
            path=head.path,
            traceparent=head.traceparent,
            client_generated_at=head.client_generated_at,
            client_ids=head.keys(CLIENT_HEADER) if is_strict else (),
            sequences=head.keys(SEQUENCE_HEADER) if is_strict else (),
        )

    async def _count(
        self, limit: str, tenant: str, endpoint: str, head: RequestHead
    ) -> float | None:
        """Count a request and set the headers that say how many are left."""
        if self._quotas is not None:
            counted = await self._quotas.count(limit, tenant, endpoint)
            head.limit_headers = counted.headers
            return counted.wait_seconds
        assert self._limiter is not None  # noqa: S101 - the caller has checked
        return await self._limiter.seconds_to_wait(limit, tenant, endpoint)

    async def _run_app(  # noqa: PLR0917 - an ASGI call and what was parsed from it
        self,
        idempotency: RequestProcessor,
        claimed: Execution | PendingRequest,
        match: Match,
        head: RequestHead,
        scope: Scope,
        receive: Receive,
        send: Send,
        direct: PreparedCall | None = None,
    ) -> None:
        """Run the app; commit its complete response, then send it."""
        responder = _Responder(idempotency, claimed, match, head, send, self._metrics, self._log)
        limit = match.policy.max_response_bytes
        buffer = ResponseBuffer(match.endpoint, limit, responder.commit_and_send, send)
        send_to: Send = buffer.send
        if isinstance(claimed, PendingRequest):
            send_to = responder.passing_on_unclaimed(buffer.send)
        if scope.get("extensions"):
            remove_response_extensions(scope)
        try:
            if direct is not None and isinstance(claimed, Execution):
                await _call_directly(direct, scope, receive, buffer, claimed)
            else:
                await self._app(scope, receive, send_to)
        except Exception as error:
            if not buffer.is_discarded:
                outage = _outage_of(error, claimed, head, idempotency.session_store)
                known = outage or unstorable_error(error) or error
                if responder.is_sent or not isinstance(
                    known, RequestError | StoreUnavailableError | SupersededError
                ):
                    raise
                if isinstance(known, StoreUnavailableError):
                    log_outage(known, head)
                # A superseded execution ends with a replay, whatever response is given here.
                kind = "internal" if isinstance(known, SupersededError) else known
                await responder.commit_and_send(_render(kind, match.policy, head))
        finally:
            # No response, cancelled or raised: roll back and free the key.
            execution = claimed if isinstance(claimed, Execution) else claimed.outcome
            if isinstance(execution, Execution) and not execution.ended:
                await idempotency.abort(execution)
        if not responder.is_sent:
            misuse = buffer.misuse or UsageError(
                f"the handler of {match.endpoint} sent no complete response"
            )
            _log.error("%s", misuse)
            await send_response(send, _render("internal", match.policy, head), head)


class _Responder:
    """Commits the response of a guarded request and sends it, or what the client gets instead."""

    __slots__ = (
        "_claimed",
        "_head",
        "_idempotency",
        "_log",
        "_match",
        "_metrics",
        "_send",
        "is_sent",
    )

    def __init__(  # noqa: PLR0917
        self,
        idempotency: RequestProcessor,
        claimed: Execution | PendingRequest,
        match: Match,
        head: RequestHead,
        send: Send,
        metrics: Metrics,
        log: RequestLog | None,
    ) -> None:
        self._idempotency = idempotency
        self._claimed = claimed
        self._match = match
        self._head = head
        self._send = send
        self._metrics = metrics
        self._log = log
        self.is_sent = False

    async def commit_and_send(self, response: Response) -> bool:
        """Commit and send; return whether the app may go on, e.g. with background tasks."""
        sent, extra_headers, may_go_on = await self.commit(response)
        self.is_sent = True
        await send_response(self._send, sent, self._head, extra_headers)
        return may_go_on

    async def commit(  # noqa: PLR0911 - one per way it can end
        self, response: Response
    ) -> tuple[Response, tuple[tuple[bytes, bytes], ...], bool]:
        """Commit; return what to send, its extra headers, and whether the app may go on."""
        claimed = self._claimed
        outcome = claimed if isinstance(claimed, Execution) else claimed.outcome
        if isinstance(outcome, Execution) and not outcome.ended:
            try:
                committed = await self._idempotency.finish(outcome, response)
            except (RequestError, StoreUnavailableError) as error:
                return self._refusal(error), (), False
            except (UnstoredWritesError, AbortedTransactionError) as misuse:
                _log.error("%s", misuse, extra=self._head.facts())
                return _render("internal", self._match.policy, self._head), (), False
            if isinstance(committed, Replay):
                return *_replay(committed.record, self._head), False
            return committed, (), True
        if isinstance(outcome, Replay):
            return *_replay(outcome.record, self._head), True
        if isinstance(outcome, RequestError | StoreUnavailableError):
            return self._refusal(outcome), (), True
        # Nothing to commit: not claimed, aborted, or the commit raised.
        return response, (), True

    def _refusal(self, error: RequestError | StoreUnavailableError) -> Response:
        return _refusal(error, self._match, self._head, self._metrics, self._log)

    def passing_on_unclaimed(self, send_claimed: Send) -> Send:
        """Return a ``send`` that passes on what the app sends without a claim, e.g. 401."""
        claimed = self._claimed
        send_unclaimed = _with_ids(self._send, self._head)

        async def send(message: Message) -> None:
            if isinstance(claimed, PendingRequest) and claimed.outcome is None:
                self.is_sent = True
                if message["type"] == "http.response.start":
                    self._note_unclaimed(claimed.caller, message)
                await send_unclaimed(message)
            else:
                await send_claimed(message)

        return send

    def _note_unclaimed(self, caller: Principal | None, start: Message) -> None:
        """Log what the app has refused by itself, e.g. an invalid body, if it knew the caller."""
        status = start["status"]
        if self._log is None or caller is None or not 400 <= status < 500:  # noqa: PLR2004
            return
        self._log.count("refused")
        _add_to_log(
            self._log,
            caller,
            self._match,
            self._head,
            outcome="refused",
            response=Response(status, tuple(start.get("headers", ())), b""),
        )


def _head_of(item: ItemContext, scope: Scope, path: str) -> RequestHead | None:
    """Return the head that was read before, unless middleware has changed the request since.

    If it has, the caller who was found in it does not count, either.
    """
    head, item.head = item.head, None
    if (
        isinstance(head, RequestHead)
        and (head.path, head.query) == (path, scope.get("query_string", b""))
        and item.seen_headers == tuple(scope["headers"])
    ):
        return head
    item.principal = None
    return None


def _outage_of(
    error: Exception,
    claimed: Execution | PendingRequest,
    head: RequestHead,
    store: Store | None,
) -> StoreUnavailableError | None:
    """Return the client's error, if session or connection raised ``error`` in an outage."""
    if head.transaction is not None:
        return head.transaction.outage_of(error)
    execution = claimed if isinstance(claimed, Execution) else claimed.outcome
    if not isinstance(execution, Execution) or execution.ended:
        return None
    if store is not None:
        return store.outage_of(execution.transaction, error)
    return execution.unit.outage_of(error)


def _refusal(
    error: RequestError | StoreUnavailableError,
    match: Match,
    head: RequestHead,
    metrics: Metrics,
    log: RequestLog | None = None,
) -> Response:
    """Log an error of the guard, and return its response."""
    if isinstance(error, StoreUnavailableError):
        metrics.outcome(match.endpoint, "unavailable")
        if log is not None:
            log.count("unavailable")
        log_outage(error, head)
    response = _render(error, match.policy, head)
    if log is not None and not isinstance(error, _LOGGED_ELSEWHERE):
        _note_refusal(log, error, response, match, head)
    if response.status in _LOGGED_REFUSALS or isinstance(error, RecordUnreadableError):
        _log_refusal(error, response, match, head)
    return response


def _note_refusal(
    log: RequestLog,
    error: RequestError | StoreUnavailableError,
    response: Response,
    match: Match,
    head: RequestHead,
) -> None:
    """Log a request that was refused before or after its key was looked up."""
    if head.principal is None:  # a stranger must not fill the log
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
    _add_to_log(log, head.principal, match, head, outcome=outcome, response=response)


def _add_to_log(
    log: RequestLog,
    caller: Principal,
    match: Match,
    head: RequestHead,
    *,
    outcome: Outcome,
    response: Response,
) -> None:
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
    error: RequestError | StoreUnavailableError, response: Response, match: Match, head: RequestHead
) -> None:
    """Log who sent what cannot be served; the key as a hash only."""
    if not _log.isEnabledFor(logging.INFO) and not isinstance(error, RecordUnreadableError):
        return
    code = next((value for name, value in response.headers if name == b"onceward-error"), b"")
    fields: dict[str, Any] = head.facts() | {
        "endpoint": match.endpoint,
        "status": response.status,
        "code": code.decode("latin-1"),
    }
    if head.principal is not None:
        fields["tenant"] = head.principal.tenant
    if isinstance(error, RecordUnreadableError):
        fields["key_hash"] = short_hash(error.record_id[2])
        fields["reason"] = error.reason
        _log.error("a stored record cannot be read", extra=fields)
        return
    keys = head.keys(match.policy.key_header)
    if "key_hash" not in fields and keys:
        fields["key_hash"] = short_hash(_key_or_text(keys, match.policy))
    _log.info("request refused", extra=fields)


def _key_or_text(keys: list[bytes], policy: Policy) -> str:
    """Return the key; if it is malformed, the text that was sent in its place."""
    try:
        return parse_key(keys, policy.key_format) or ""
    except KeyInvalidError:
        return keys[0].decode("latin-1")


def _own_fingerprint(policy: Policy, head: RequestHead, body: bytes) -> str:
    return own_fingerprint(
        policy, FingerprintInput(head.method, head.path, head.query, head.headers, body)
    )


def _replay(record: Record, head: RequestHead) -> tuple[Response, tuple[tuple[bytes, bytes], ...]]:
    """Log the replay for the audit; return the stored response and the headers of a replay."""
    head.is_replay = True
    if _audit_log.isEnabledFor(logging.INFO):
        _audit_log.info(
            "audit.replay",
            extra={
                "tenant": record.id.tenant,
                "actor": None if head.request is None else head.request.principal.actor,
                "endpoint": record.id.endpoint,
                "key_hash": short_hash(record.id.key),
                "original_audit_id": record.audit_id,
                "original_request_id": record.request_id,
                "original_correlation_id": record.correlation_id,
                "request_id": head.request_id,
                "correlation_id": head.correlation_id,
                "status": record.status,
            },
        )
    extra_headers = (
        (b"idempotency-replayed", b"true"),
        (b"x-original-request-id", record.request_id.encode("latin-1")),
    )
    return record.response(), extra_headers


def log_outage(error: StoreUnavailableError, head: RequestHead | None) -> None:
    """Log the message of an outage, unless the client gets it anyway."""
    if not error.is_for_callers:
        _log.warning(
            "the store is unavailable: %s", error, extra={} if head is None else head.facts()
        )


def send_and_close(send: Send, body: RequestBody, scope: Scope) -> Send:
    """Return a ``send`` that responds at once and closes the connection some time later.

    The client is still sending its body. If the connection were closed now, the client would get
    an error of the network in place of the response.
    """

    async def send_and_close(message: Message) -> None:
        if message["type"] == "http.response.start":
            if scope.get("http_version", "1.1").startswith("1"):
                close = (b"connection", b"close")
                message = {**message, "headers": [*message["headers"], close]}
            await send(message)
        else:
            await send({**message, "more_body": True})
            await body.linger()
            await send({"type": "http.response.body", "body": b""})

    return send_and_close


async def _call_directly(
    direct: PreparedCall,
    scope: Scope,
    receive: Receive,
    buffer: ResponseBuffer,
    execution: Execution,
) -> None:
    """Call a handler and pass its response to the buffer."""
    given = await direct(scope, receive, execution)
    if isinstance(given, Response):
        await buffer.take(given)
    else:
        await given(scope, receive, buffer.send)


def _repeating(given: Response | SendResponse | Exception) -> PreparedCall:
    """Return a call that ends as one before it has ended."""

    async def repeat(
        scope: Scope,  # noqa: ARG001
        receive: Receive,  # noqa: ARG001
        execution: Execution,  # noqa: ARG001
    ) -> Response | SendResponse:
        if isinstance(given, Exception):
            raise given
        return given

    return repeat


def _receive_again(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that gives the body once, then the server's own messages."""
    is_given = False

    async def receive_body() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_body


def _render(
    error: RequestError | StoreUnavailableError | str, policy: Policy, head: RequestHead
) -> Response:
    return render_error(
        error, policy.error_format, head.request_id, ietf_statuses=policy.ietf_statuses
    )


def _with_ids(send: Send, head: RequestHead) -> Send:
    """Add the request's ids to the response of an operation that is not guarded.

    The transaction of its dependencies, if there is one, ends before the response is sent.
    """
    is_discarded = False

    async def send_with_ids(message: Message) -> None:
        nonlocal is_discarded
        if is_discarded:
            raise ResponseDiscarded
        if message["type"] == "http.response.start":
            head.is_started = True
            if head.transaction is not None:
                try:
                    is_success = message["status"] < 400  # noqa: PLR2004 - HTTP errors start here
                    await head.transaction.finish(is_success=is_success)
                except (StoreUnavailableError, CommitUnknownError) as error:
                    is_discarded = True
                    down = StoreUnavailableError(str(error))
                    log_outage(down, head)
                    await send_response(send, _render(down, _DEFAULT_POLICY, head), head)
                    raise ResponseDiscarded from error
                except AbortedTransactionError as misuse:
                    is_discarded = True
                    _log.error("%s", misuse, extra=head.facts())
                    await send_response(send, _render("internal", _DEFAULT_POLICY, head), head)
                    raise ResponseDiscarded from misuse
            own = ((b"x-request-id", head.request_id), (b"x-correlation-id", head.correlation_id))
            headers = list(message.get("headers", ()))
            present = {name.lower() for name, _ in headers}
            headers += [(n, v.encode("latin-1")) for n, v in own if n not in present]
            headers += head.added_headers
            message = {**message, "headers": headers}
        await send(message)

    return send_with_ids
