"""Holds back the app's response until it is complete, and sends responses to the client."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from onceward.core.idempotency_record import Response
from onceward.errors import ResponseTooLargeError, StreamingResponseError, UsageError
from onceward.guard.request_head import RequestHead

__all__ = [
    "ADDED_HEADERS",
    "Message",
    "Receive",
    "ResponseBuffer",
    "ResponseDiscarded",
    "Send",
    "complete_response",
    "remove_response_extensions",
    "send_response",
]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

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
# Extensions of ASGI servers that add messages to a response: files sent by their path, trailers,
# pushed and early responses.
_RESPONSE_EXTENSIONS: Final = "http.response."
# Sends nothing to the client: test clients read the template and its context from it.
_DEBUG: Final = "http.response.debug"


class ResponseDiscarded(Exception):  # noqa: N818 - stops the app; not an error of it
    """Raised in the app by ``send`` when its response is not the one the client gets.

    Frameworks run background tasks after ``send`` of the last message returns; raising keeps
    them from running. An ordinary exception is enough: the response has started, so error
    handlers of a framework may run but send nothing (Starlette raises the exception again), and
    every message that an app sends after it is refused in the same way.
    """


class ResponseBuffer:
    """Collects the messages of one response and passes it, complete, to ``commit_and_send``.

    That function returns whether this response is the one that was sent.
    """

    __slots__ = (
        "_commit_and_send",
        "_endpoint",
        "_max_bytes",
        "_parts",
        "_send",
        "_size",
        "_start",
        "is_complete",
        "is_discarded",
        "misuse",
    )

    def __init__(
        self,
        endpoint: str,
        max_bytes: int,
        commit_and_send: Callable[[Response], Awaitable[bool]],
        send: Send,
    ) -> None:
        self._endpoint = endpoint
        self._max_bytes = max_bytes
        self._commit_and_send = commit_and_send
        self._send = send
        self._start: Message | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self.is_complete = False
        self.is_discarded = False
        # Why the response cannot be stored, if it cannot.
        self.misuse: UsageError | None = None

    async def send(self, message: Message) -> None:
        """Take one ASGI message of the app; its last one waits for the commit."""
        if self.is_discarded:
            raise ResponseDiscarded
        if self.is_complete:
            # Passed on: the ASGI server rejects what is invalid.
            await self._send(message)
            return
        kind = message["type"]
        if kind == "http.response.start":
            self._start = message
            if self._parts:
                self._parts, self._size = [], 0
        elif kind == "http.response.body":
            response = self._add_body(message)
            if response is None:
                return
            self.is_discarded = not await self._commit_and_send(response)
            self.is_complete = True
            if self.is_discarded:
                raise ResponseDiscarded
        elif kind == _DEBUG:
            await self._send(message)
        else:
            self._refuse_streaming(kind)

    def _add_body(self, message: Message) -> Response | None:
        """Return the response once it is complete."""
        chunk = message.get("body", b"")
        start = self._start
        assert start is not None  # noqa: S101 - ASGI: start comes first
        if message.get("more_body", False):
            if not any(name.lower() == b"content-length" for name, _ in start.get("headers", ())):
                self._refuse_streaming("no Content-Length")
            self._parts.append(chunk)
            self._count(len(chunk))
            return None
        self._count(len(chunk))
        body = b"".join((*self._parts, chunk)) if self._parts else bytes(chunk)
        headers = tuple([(name.lower(), value) for name, value in start.get("headers", ())])
        return Response(start["status"], headers, body)

    async def take(self, response: Response) -> None:
        """Take a complete response, in place of its messages; wait for the commit."""
        self._count(len(response.body))
        self.is_discarded = not await self._commit_and_send(response)
        self.is_complete = True
        if self.is_discarded:
            raise ResponseDiscarded

    def _count(self, size: int) -> None:
        self._size += size
        if self._size > self._max_bytes:
            self._discard(
                ResponseTooLargeError(
                    f"{self._endpoint} sent a response of more than {self._max_bytes} bytes, "
                    "which cannot be stored for a replay. Store the result and respond with a "
                    "link to it."
                )
            )

    def _refuse_streaming(self, why: str) -> None:
        self._discard(
            StreamingResponseError(
                f"{self._endpoint} streams its response ({why}). The response of a guarded "
                "operation is stored with the transaction and must be complete: return a plain "
                "response."
            )
        )

    def _discard(self, misuse: UsageError) -> None:
        self.misuse = misuse
        self.is_discarded = True
        raise ResponseDiscarded


def remove_response_extensions(scope: MutableMapping[str, Any]) -> None:
    """Remove what the server offers for responses and a buffer cannot hold back or store.

    An app then uses plain messages: the bytes of a file in place of its path.
    """
    offered = scope.get("extensions")
    if offered:
        scope["extensions"] = {
            name: value
            for name, value in offered.items()
            if name == _DEBUG or not name.startswith(_RESPONSE_EXTENSIONS)
        }


async def send_response(
    send: Send,
    response: Response,
    head: RequestHead,
    extra_headers: tuple[tuple[bytes, bytes], ...] = (),
) -> None:
    """Send a response with the ids of this request."""
    headers = _complete_headers(response, head, extra_headers)
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body})


def complete_response(
    response: Response, head: RequestHead, extra_headers: tuple[tuple[bytes, bytes], ...] = ()
) -> Response:
    """Return what ``send_response`` sends."""
    headers = _complete_headers(response, head, extra_headers)
    return Response(response.status, tuple(headers), response.body)


def _complete_headers(
    response: Response, head: RequestHead, extra_headers: tuple[tuple[bytes, bytes], ...]
) -> list[tuple[bytes, bytes]]:
    headers = [pair for pair in response.headers if pair[0] not in _OWN_HEADERS]
    headers += extra_headers
    headers += head.limit_headers
    headers += head.added_headers
    if response.body or response.status not in _WITHOUT_BODY:
        headers.append((b"content-length", str(len(response.body)).encode()))
    request_id, correlation_id = head.request_id, head.correlation_id
    raw_id = request_id.encode("latin-1")
    headers += (
        (b"x-request-id", raw_id),
        (
            b"x-correlation-id",
            raw_id if correlation_id is request_id else correlation_id.encode("latin-1"),
        ),
    )
    return headers
