"""Decodes the large JSON bodies of requests in Onceward's thread, one at a time.

FastAPI would decode them on the event loop, where all other requests wait for it: 50 ms for 1 MB of
numbers, during which the interpreter's lock is held.
"""

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute

from onceward.guard.request_body import LARGE_BODY_BYTES
from onceward.guard.route_table import SAFE_METHODS
from onceward_protocol.fingerprint import decode_json, encode_again, split_object

if TYPE_CHECKING:
    from onceward import Onceward

__all__ = ["LargeBodyRoute", "LargeDocumentRoute", "decode_document"]

_SMALL_MEMBER_BYTES: Final = 4096


def decode_document(body: bytes) -> Any:
    """Decode a JSON text, but the large members of an object only to ``msgspec.Raw``.

    Such a member is the text that msgspec would encode for its value, and is never decoded as a
    whole: a million arrays take 50 ms to decode and as long to free, and the interpreter's lock is
    held. For a text that was hashed.
    """
    members = split_object(body)
    if members is None:
        return decode_json(body)
    return {name: _member(bytes(raw)) for name, raw in members.items()}


def _member(raw: bytes) -> Any:
    if len(raw) <= _SMALL_MEMBER_BYTES:
        return decode_json(raw)
    return msgspec.Raw(encode_again(raw))


class _Request(Request):
    _large: Any = None

    @staticmethod
    def _decode(body: bytes) -> Any:
        return decode_json(body)

    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= LARGE_BODY_BYTES:
            return await super().json()
        if self._large is None:
            onceward: Onceward = self.app.state.onceward
            try:
                self._large = await onceward.runtime.bodies.run(
                    len(body), lambda: self._decode(body)
                )
            except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError):
                return await super().json()  # which raises the error that FastAPI expects
        return self._large


class _DocumentRequest(_Request):
    @staticmethod
    def _decode(body: bytes) -> Any:
        return decode_document(body)


class LargeBodyRoute(APIRoute):
    """A route whose handler gets the same values as with FastAPI's own."""

    request_class: ClassVar[type[_Request]] = _Request
    # Smaller bodies are handled as by FastAPI.
    onceward_direct_bytes: ClassVar[int] = LARGE_BODY_BYTES

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of the route."""
        handle = super().get_route_handler()

        async def handle_request(request: Request) -> Response:
            if request.method in SAFE_METHODS:  # without a body; it may be a stream of events
                onceward: Onceward = request.app.state.onceward
                response: Response = await onceward.runtime.idempotency.call_store(
                    None, handle(request)
                )
                return response
            request = self.request_class(request.scope, request.receive)
            if len(await request.body()) <= LARGE_BODY_BYTES:
                return await handle(request)
            # Only one decoded at a time: the garbage collector examines all of them again and
            # again, and everything waits for it.
            async with request.app.state.large_body_slot:
                return await handle(request)

        return handle_request


class LargeDocumentRoute(LargeBodyRoute):
    """A route whose handler gets the large members of a large object as ``msgspec.Raw``."""

    request_class = _DocumentRequest
