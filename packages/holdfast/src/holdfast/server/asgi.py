"""ASGI middleware that guards an app's operations. Nothing is sent before the commit."""

import inspect
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, Protocol

from holdfast.core.error_formats import ErrorFormat, ErrorFormatter, render_error
from holdfast.core.fingerprint import short_hash
from holdfast.core.idempotency_record import Record, Response
from holdfast.core.policy import Policy
from holdfast.errors import (
    BodyTooLargeError,
    RateLimitedError,
    RequestError,
    StoreUnavailableError,
    SupersededError,
    UsageError,
)
from holdfast.observability.traces import Spans
from holdfast.ports import Metrics
from holdfast.server.execution import Execution, set_current_execution
from holdfast.server.guarded_request import GuardedRequest, Principal, parse_request
from holdfast.server.idempotency import Idempotency, Replay
from holdfast.server.request_head import Identify, RequestHead
from holdfast.server.response_buffer import Message, Receive, ResponseBuffer, Send, send_response
from holdfast.server.route_table import SAFE_METHODS, Match

__all__ = ["SCOPE_KEY", "GuardMiddleware", "RateLimiter", "RouteTable", "log_outage"]

Scope = MutableMapping[str, Any]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

# The key under which a handler finds its execution in the scope.
SCOPE_KEY: Final = "holdfast"

_log = logging.getLogger("holdfast.request")
_audit_log = logging.getLogger("holdfast.audit")


class RateLimiter(Protocol):
    """Counts requests per tenant and endpoint."""

    def check(self, limit: str) -> None:
        """Raise ``ConfigurationError`` if this is not a limit it understands."""

    async def seconds_to_wait(self, limit: str, tenant: str, endpoint: str) -> float | None:
        """Count one request; return None if it may pass, else the seconds until it may."""


class RouteTable(Protocol):
    """Finds the guarded route of a request."""

    def find(self, method: str, path: str) -> Match | None:
        """Return the guarded route, or None if the request is not guarded."""


class Disconnected(Exception):  # noqa: N818 - an event, not an error
    """The client disconnected before its body was complete; nothing has been done."""


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
        limiter: RateLimiter | None = None,
        spans: Spans | None = None,
        error_format: ErrorFormat | ErrorFormatter = ErrorFormat.PROBLEM,
    ) -> None:
        """Wrap an app. ``idempotency`` and ``table`` are first called when a request arrives."""
        self._app = app
        self._idempotency = idempotency
        self._table = table
        self._identify = identify
        self._metrics = metrics
        self._limiter = limiter
        self._spans = spans
        self._error_format = error_format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method: str = scope["method"]
        path: str = scope["path"]
        root: str = scope.get("root_path", "")
        if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
            path = path[len(root) :]
        head = RequestHead(method, path, scope.get("query_string", b""), scope["headers"])
        scope["holdfast.head"] = head
        # The format of errors outside guarded operations; set already in an app with several.
        scope.setdefault("holdfast.error_format", self._error_format)
        match = None if method in SAFE_METHODS else self._table().find(method, path)
        if match is None:
            await self._app(scope, receive, _with_ids(send, head))
        elif self._spans is None:
            await self._guard(match, head, scope, receive, send)
        else:
            with self._spans.request(match.endpoint, {}) as span:

                async def send_traced(message: Message) -> None:
                    if message["type"] == "http.response.start":
                        span.describe(head.facts())
                        span.outcome(message["status"], head.is_replay)
                    await send(message)

                await self._guard(match, head, scope, receive, send_traced)

    async def _guard(
        self, match: Match, head: RequestHead, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Serve a guarded request: replay it, refuse it, or run the app."""
        try:
            body = await _read_body(receive, head, match.policy.max_body_bytes)
            request = head.request = await self._parse(match, head, body)
            idempotency = await self._idempotency()
            outcome = await idempotency.process(request)
        except Disconnected:
            return
        except (RequestError, StoreUnavailableError) as error:
            await self._refuse(error, match.endpoint, match.policy, head, send)
            return
        if isinstance(outcome, Replay):
            await _send_replay(outcome.record, request, head, send)
        else:
            receive = _receive_again(body, receive)
            await self._run_app(idempotency, outcome, head, scope, receive, send)

    async def _parse(self, match: Match, head: RequestHead, body: bytes) -> GuardedRequest:
        """Identify the caller, check the rate limit, then read key and fingerprint."""
        found = self._identify(head)
        principal: Principal = await found if inspect.isawaitable(found) else found
        policy = match.policy
        if policy.rate_limit is not None and self._limiter is not None:
            wait = await self._limiter.seconds_to_wait(
                policy.rate_limit, principal.tenant, match.endpoint
            )
            if wait is not None:
                raise RateLimitedError("too many requests; slow down", retry_after_seconds=wait)
        return parse_request(
            endpoint=match.endpoint,
            policy=policy,
            principal=principal,
            method=head.method,
            path_params=match.path_params,
            query=head.query,
            key_headers=head.key_headers,
            content_type=head.content_type,
            body=body,
            request_id=head.request_id,
            correlation_id=head.correlation_id,
        )

    async def _run_app(  # noqa: PLR0917 - an ASGI call and what was parsed from it
        self,
        idempotency: Idempotency,
        execution: Execution,
        head: RequestHead,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Run the app; commit its complete response, then send it."""
        request = execution.request
        policy = request.policy
        is_sent = False

        async def commit_and_send(response: Response) -> bool:
            """Commit and send; return whether ``response`` is what was sent."""
            nonlocal is_sent
            if execution.ended:  # aborted by the handler, or the commit raised: nothing to store
                outcome: Response | Replay = response
            else:
                try:
                    outcome = await idempotency.finish(execution, response)
                except (RequestError, StoreUnavailableError) as error:
                    is_sent = True
                    await self._refuse(error, request.endpoint, policy, head, send)
                    return False
            is_sent = True
            if isinstance(outcome, Replay):
                await _send_replay(outcome.record, request, head, send)
                return False
            await send_response(send, outcome, head)
            return True

        buffer = ResponseBuffer(request.endpoint, policy.max_response_bytes, commit_and_send, send)
        scope[SCOPE_KEY] = execution
        set_current_execution(execution)
        try:
            await self._app(scope, receive, buffer.send)
        except Exception as error:
            if not buffer.is_discarded:
                if is_sent or not isinstance(
                    error, RequestError | StoreUnavailableError | SupersededError
                ):
                    raise
                if isinstance(error, StoreUnavailableError):
                    log_outage(error, head)
                # A superseded execution ends with a replay, whatever response is given here.
                kind = "internal" if isinstance(error, SupersededError) else error
                await commit_and_send(_render(kind, policy, head))
        finally:
            # No response, cancelled or raised: roll back and free the key.
            await idempotency.abort(execution)
        if not is_sent:
            misuse = buffer.misuse or UsageError(
                f"the handler of {request.endpoint} sent no complete response"
            )
            _log.error("%s", misuse)
            await send_response(send, _render("internal", policy, head), head)

    async def _refuse(
        self,
        error: RequestError | StoreUnavailableError,
        endpoint: str,
        policy: Policy,
        head: RequestHead,
        send: Send,
    ) -> None:
        if isinstance(error, StoreUnavailableError):
            self._metrics.outcome(endpoint, "unavailable")
            log_outage(error, head)
        await send_response(send, _render(error, policy, head), head)


async def _send_replay(
    record: Record, request: GuardedRequest, head: RequestHead, send: Send
) -> None:
    """Send the stored response and log the replay for the audit."""
    head.is_replay = True
    if _audit_log.isEnabledFor(logging.INFO):
        _audit_log.info(
            "audit.replay",
            extra={
                "tenant": record.id.tenant,
                "actor": request.principal.actor,
                "endpoint": record.id.endpoint,
                "key_hash": short_hash(record.id.key),
                "original_audit_id": record.audit_id,
                "original_request_id": record.request_id,
                "request_id": head.request_id,
                "correlation_id": head.correlation_id,
                "status": record.status,
            },
        )
    extra_headers = (
        (b"idempotency-replayed", b"true"),
        (b"x-original-request-id", record.request_id.encode("latin-1")),
    )
    await send_response(send, record.response(), head, extra_headers)


def log_outage(error: StoreUnavailableError, head: RequestHead | None) -> None:
    """Log the message of an outage, unless the client gets it anyway."""
    if not error.is_for_callers:
        _log.warning(
            "the store is unavailable: %s", error, extra={} if head is None else head.facts()
        )


async def _read_body(receive: Receive, head: RequestHead, limit: int) -> bytes:
    if head.content_length is not None and head.content_length > limit:
        raise BodyTooLargeError(f"the body may have at most {limit} bytes")
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body", False):
        body: bytes = message.get("body", b"")
        if len(body) > limit:
            raise BodyTooLargeError(f"the body may have at most {limit} bytes")
        return body
    parts = bytearray()
    while True:
        if message["type"] == "http.disconnect":
            raise Disconnected
        parts += message.get("body", b"")
        if len(parts) > limit:
            raise BodyTooLargeError(f"the body may have at most {limit} bytes")
        if not message.get("more_body", False):
            return bytes(parts)
        message = await receive()


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
    """Add the request's ids to the response of an operation that is not guarded."""

    async def send_with_ids(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = ((b"x-request-id", head.request_id), (b"x-correlation-id", head.correlation_id))
            headers = list(message.get("headers", ()))
            present = {name.lower() for name, _ in headers}
            headers += [(n, v.encode("latin-1")) for n, v in own if n not in present]
            message = {**message, "headers": headers}
        await send(message)

    return send_with_ids
