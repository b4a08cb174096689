"""The answer of a guarded request: held back until the commit, then let out. No routing here."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any, Final

from holdfast.core.idempotency_record import Reply
from holdfast.core.policy import Policy
from holdfast.errors import (
    RequestError,
    ResponseTooLargeError,
    StoreUnavailableError,
    StreamingResponseError,
    UsageError,
)
from holdfast.server.execution import Execution, Replay
from holdfast.server.request_head import RequestHead

if TYPE_CHECKING:
    from holdfast.server.asgi import GuardMiddleware

__all__ = ["Answer", "Body", "Message", "Receive", "Send", "Stop", "send_reply"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# RFC 9110 §8.6: these carry no Content-Length.
_WITHOUT_BODY: Final = frozenset({204, 304})


class Stop(BaseException):
    """Raised through the app when its answer is not the one that counts.

    Its background tasks must not run then. Not an ``Exception``, so that no handler of the app
    takes it for one of its own.
    """


class Body:
    """A body already read, told to the app again."""

    __slots__ = ("_body", "_receive", "_told")

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body = body
        self._receive = receive
        self._told = False

    async def receive(self) -> Message:
        """Give the body once; after it, whatever the server has to say."""
        if self._told:
            return await self._receive()
        self._told = True
        return {"type": "http.request", "body": self._body, "more_body": False}


class Answer:
    """Collects the app's answer, has it committed, and only then lets it out."""

    __slots__ = (
        "_execution",
        "_face",
        "_head",
        "_parts",
        "_policy",
        "_send",
        "_size",
        "_start",
        "is_sent",
        "is_stopped",
        "misuse",
    )

    def __init__(
        self,
        face: "GuardMiddleware",
        execution: Execution,
        policy: Policy,
        head: RequestHead,
        send: Send,
    ) -> None:
        self._face = face
        self._execution = execution
        self._policy = policy
        self._head = head
        self._send = send
        self._start: Message | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self.is_sent = False
        self.is_stopped = False
        self.misuse: UsageError | None = None

    async def send(self, message: Message) -> None:
        """Take one message of the app."""
        if self.is_sent:
            await self._send(message)
            return
        kind = message["type"]
        if kind == "http.response.start":
            self._start = message
        elif kind == "http.response.body":
            await self._take_body(message)
        else:
            self._refuse_streaming(kind)

    async def end_with(self, reply: Reply) -> None:
        """End with an answer, whoever made it: commit, then let out what the commit says."""
        if self._execution.ended:
            self.is_sent = True
            await send_reply(self._send, reply, self._head, ())
            return
        try:
            outcome = await self._execution.finish(reply)
        except (RequestError, StoreUnavailableError) as error:
            self.is_sent = self.is_stopped = True
            await self._face.refuse(error, self._execution.call, self._head, self._send)
            raise Stop from error
        self.is_sent = True
        if isinstance(outcome, Replay):
            self.is_stopped = True
            await self._face.replay(outcome.record, self._execution.call, self._head, self._send)
            raise Stop
        await send_reply(self._send, outcome, self._head, ())

    async def _take_body(self, message: Message) -> None:
        chunk = message.get("body", b"")
        start = self._start
        assert start is not None  # noqa: S101 - ASGI: start comes first
        if message.get("more_body", False):
            if not any(name.lower() == b"content-length" for name, _ in start.get("headers", ())):
                self._refuse_streaming("no Content-Length")
            self._parts.append(chunk)
            self._count(len(chunk))
            return
        self._count(len(chunk))
        body = b"".join((*self._parts, chunk)) if self._parts else bytes(chunk)
        headers = tuple((name.lower(), value) for name, value in start.get("headers", ()))
        await self.end_with(Reply(start["status"], headers, body))

    def _count(self, size: int) -> None:
        self._size += size
        if self._size > self._policy.max_response_bytes:
            self.misuse = ResponseTooLargeError(
                f"{self._execution.call.endpoint} answers with more than "
                f"{self._policy.max_response_bytes} bytes: that cannot be stored for a replay. "
                "Store the result and answer with a link to it."
            )
            self.is_stopped = True
            raise Stop

    def _refuse_streaming(self, why: str) -> None:
        self.misuse = StreamingResponseError(
            f"{self._execution.call.endpoint} streams its answer ({why}): a guarded answer is "
            "stored with the transaction and must be complete. Return a plain response."
        )
        self.is_stopped = True
        raise Stop


async def send_reply(
    send: Send, reply: Reply, head: RequestHead, marks: tuple[tuple[bytes, bytes], ...]
) -> None:
    """Let a reply out, with the ids of this request and what marks it."""
    headers = [
        pair
        for pair in reply.headers
        if pair[0] not in (b"content-length", b"x-request-id", b"x-correlation-id")
    ]
    headers += marks
    if reply.body or reply.status not in _WITHOUT_BODY:
        headers.append((b"content-length", str(len(reply.body)).encode()))
    headers += (
        (b"x-request-id", head.request_id.encode("latin-1")),
        (b"x-correlation-id", head.correlation_id.encode("latin-1")),
    )
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
