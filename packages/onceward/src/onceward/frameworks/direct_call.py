"""How the guard calls the handler of a route without the framework's own way to it."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from onceward.core.idempotency_record import Response
from onceward.guard.execution import Execution
from onceward.guard.response_buffer import Receive, Send

__all__ = ["DirectCall", "PreparedCall", "SendResponse"]

# Sends a response as ASGI messages.
SendResponse = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class PreparedCall(Protocol):
    """A request that may be called directly."""

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Receive,
        execution: Execution,
    ) -> Response | SendResponse:
        """Call the handler; return its response, or what sends it.

        The latter raises what the app would raise, or sends the response of an exception handler.
        """


class DirectCall(Protocol):
    """Calls the handler of one route."""

    def prepare(
        self, scope: MutableMapping[str, Any], path: str, body: bytes
    ) -> PreparedCall | None:
        """Return the call; None if this request has to take the framework's way.

        Nothing of the app is called before. ``path`` is that in the app, without its prefix.
        """
