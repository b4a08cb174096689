"""Decodes the large JSON bodies of requests in Holdfast's thread, one at a time.

FastAPI would decode them on the event loop, where all other requests wait for it: 50 ms for 1 MB of
numbers, during which the interpreter's lock is held.
"""

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute

from holdfast.core.canonical_json import decode_json
from holdfast.server.request_body import LARGE_BODY_BYTES
from holdfast.server.route_table import SAFE_METHODS

if TYPE_CHECKING:
    from holdfast import Holdfast

__all__ = ["LargeBodyRoute"]


class LargeBodyRoute(APIRoute):
    """A route whose handler gets the same values as with FastAPI's own."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of the route."""
        handle = super().get_route_handler()

        async def handle_request(request: Request) -> Response:
            if request.method in SAFE_METHODS:  # without a body; it may be a stream of events
                return await handle(request)
            request = _Request(request.scope, request.receive)
            if len(await request.body()) <= LARGE_BODY_BYTES:
                return await handle(request)
            # Only one decoded at a time: the garbage collector examines all of them again and
            # again, and everything waits for it.
            async with request.app.state.large_body_slot:
                return await handle(request)

        return handle_request


class _Request(Request):
    _large: Any = None

    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= LARGE_BODY_BYTES:
            return await super().json()
        if self._large is None:
            holdfast: Holdfast = self.app.state.holdfast
            try:
                self._large = await holdfast.bodies.run(len(body), lambda: decode_json(body))
            except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError):
                return await super().json()  # which raises the error that FastAPI expects
        return self._large
