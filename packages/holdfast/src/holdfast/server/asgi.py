"""The ASGI face of the intake: any ASGI app, no framework. Nothing leaves before the commit."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, Final, Protocol

from holdfast.core.error_formats import render_error
from holdfast.core.fingerprint import short_hash
from holdfast.core.idempotency_record import Record, Reply
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
from holdfast.server.execution import Execution, Replay, running_as
from holdfast.server.guarded_request import GuardedRequest, Principal, make_call
from holdfast.server.idempotency import Idempotency
from holdfast.server.request_head import Identify, RequestHead
from holdfast.server.response_buffer import Answer, Body, Message, Receive, Send, Stop, send_reply
from holdfast.server.route_table import SAFE_METHODS, GuardTable, Match

__all__ = ["SCOPE_KEY", "GuardMiddleware", "RateLimiter", "log_outage"]

Scope = MutableMapping[str, Any]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

# Where a handler finds its execution.
SCOPE_KEY: Final = "holdfast"

_log = logging.getLogger("holdfast.request")
_audit_log = logging.getLogger("holdfast.audit")


class RateLimiter(Protocol):
    """Counts requests; asked before anything is stored."""

    def check(self, limit: str) -> None:
        """Raise ``ConfigurationError`` if this is not a limit it understands."""

    async def seconds_to_wait(self, limit: str, tenant: str, endpoint: str) -> float | None:
        """Count one request; return None if it may pass, else how long to stay away."""


class Disconnected(Exception):  # noqa: N818 - an event, not a fault
    """The client went away before its body was complete; nothing has begun."""


class GuardMiddleware:
    """Guards the routes of an app. Everything else passes through with its request id."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        idempotency: Callable[[], Awaitable[Idempotency]],
        table: Callable[[], GuardTable],
        identify: Identify,
        metrics: Metrics,
        limiter: RateLimiter | None = None,
        spans: Spans | None = None,
    ) -> None:
        """Wrap an app. Idempotency and table are asked for at the first request, not before."""
        self._app = app
        self._idempotency = idempotency
        self._table = table
        self._identify = identify
        self._metrics = metrics
        self._limiter = limiter
        self._spans = spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection of the app."""
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
        match = None if method in SAFE_METHODS else self._table().find(method, path)
        if match is None:
            await self._app(scope, receive, _with_ids(send, head))
        elif self._spans is None:
            await self._guarded(match, head, scope, receive, send)
        else:
            await self._traced(self._spans, match, head, scope, receive, send)

    async def _traced(  # noqa: PLR0917 - the shape of an ASGI call, with what was found out
        self,
        spans: Spans,
        match: Match,
        head: RequestHead,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Serve a guarded request inside a span of its own."""

        async def note_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.describe(head.facts())
                span.outcome(message["status"], head.is_replay)
            await send(message)

        with spans.request(match.endpoint, {}) as span:
            await self._guarded(match, head, scope, receive, note_status)

    async def _guarded(
        self, match: Match, head: RequestHead, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            body = await _read_body(receive, head, match.policy.max_body_bytes)
            call = head.call = await self._call(match, head, body)
            admitted = await (await self._idempotency()).admit(call)
        except Disconnected:
            return
        except (RequestError, StoreUnavailableError) as error:
            await self.refuse(error, match, head, send)
            return
        if isinstance(admitted, Replay):
            await self.replay(admitted.record, call, head, send)
            return
        await self._run(admitted, head, scope, Body(body, receive), send)

    async def _call(self, match: Match, head: RequestHead, body: bytes) -> GuardedRequest:
        """Sign in, count, read the key, hash: in the contract's order."""
        found = self._identify(head)
        principal: Principal = await found if inspect.isawaitable(found) else found
        policy = match.policy
        if policy.rate_limit is not None and self._limiter is not None:
            wait = await self._limiter.seconds_to_wait(
                policy.rate_limit, principal.tenant, match.endpoint
            )
            if wait is not None:
                raise RateLimitedError("too many requests; slow down", retry_after_seconds=wait)
        return make_call(
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

    async def _run(
        self, execution: Execution, head: RequestHead, scope: Scope, body: Body, send: Send
    ) -> None:
        """Run the app with its answer held back until the commit."""
        policy = execution.call.policy
        answer = Answer(self, execution, policy, head, send)
        scope[SCOPE_KEY] = execution
        running_as(execution)
        try:
            await self._app(scope, body.receive, answer.send)
        except (RequestError, StoreUnavailableError, SupersededError) as error:
            if answer.is_sent:
                raise
            if isinstance(error, StoreUnavailableError):
                log_outage(error, head)
            # A superseded execution is answered with the other's record, whatever is given here.
            told = "internal" if isinstance(error, SupersededError) else error
            with suppress(Stop):
                await answer.end_with(_render(told, policy, head))
        except BaseException as error:
            if not answer.is_stopped or isinstance(error, asyncio.CancelledError):
                raise
        finally:
            # Unanswered, cancelled or raised: undone, and the key is free again.
            await execution.abort()
        if not answer.is_sent:
            misuse = answer.misuse or UsageError(
                f"the handler of {execution.call.endpoint} sent no complete answer"
            )
            _log.error("%s", misuse)
            await send_reply(send, _render("internal", policy, head), head, ())

    async def replay(
        self, record: Record, call: GuardedRequest, head: RequestHead, send: Send
    ) -> None:
        """Answer from the record, and say so in the audit log."""
        head.is_replay = True
        if _audit_log.isEnabledFor(logging.INFO):
            _audit_log.info(
                "audit.replay",
                extra={
                    "tenant": record.id.tenant,
                    "actor": call.principal.actor,
                    "endpoint": record.id.endpoint,
                    "key_hash": short_hash(record.id.key),
                    "original_audit_id": record.audit_id,
                    "original_request_id": record.request_id,
                    "request_id": head.request_id,
                    "correlation_id": head.correlation_id,
                    "status": record.status,
                },
            )
        marks = (
            (b"idempotency-replayed", b"true"),
            (b"x-original-request-id", record.request_id.encode("latin-1")),
        )
        await send_reply(send, record.reply(), head, marks)

    async def refuse(
        self,
        error: RequestError | StoreUnavailableError,
        asked: Match | GuardedRequest,
        head: RequestHead,
        send: Send,
    ) -> None:
        """Answer with an error of the caller's or of the store's."""
        if isinstance(error, StoreUnavailableError):
            self._metrics.outcome(asked.endpoint, "unavailable")
            log_outage(error, head)
        await send_reply(send, _render(error, asked.policy, head), head, ())


def log_outage(error: StoreUnavailableError, head: RequestHead | None) -> None:
    """Leave in the log what the caller is not told."""
    if not error.is_for_callers:
        _log.warning("the store is away: %s", error, extra={} if head is None else head.facts())


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


def _render(
    error: RequestError | StoreUnavailableError | str, policy: Policy, head: RequestHead
) -> Reply:
    return render_error(
        error, policy.error_format, head.request_id, ietf_statuses=policy.ietf_statuses
    )


def _with_ids(send: Send, head: RequestHead) -> Send:
    """Add the request's ids to an answer that is not ours."""

    async def send_with_ids(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = ((b"x-request-id", head.request_id), (b"x-correlation-id", head.correlation_id))
            headers = list(message.get("headers", ()))
            present = {name.lower() for name, _ in headers}
            headers += [(n, v.encode("latin-1")) for n, v in own if n not in present]
            message = {**message, "headers": headers}
        await send(message)

    return send_with_ids
