"""How the guard calls the handler of a route without the framework's own way to it."""

from collections.abc import MutableMapping
from typing import Any, Protocol

from holdfast.server.execution import Execution
from holdfast.server.response_buffer import Receive, ResponseBuffer

__all__ = ["DirectCall", "PreparedCall"]


class PreparedCall(Protocol):
    """A request that may be called directly."""

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Receive,
        buffer: ResponseBuffer,
        execution: Execution,
    ) -> None:
        """Call the handler and pass its response, or that of an exception handler, to the buffer.

        Raises what the app would raise.
        """


class DirectCall(Protocol):
    """Calls the handler of one route."""

    def prepare(
        self, scope: MutableMapping[str, Any], path: str, body: bytes
    ) -> PreparedCall | None:
        """Return the call; None if this request has to take the framework's way.

        Nothing of the app is called before. ``path`` is that in the app, without its prefix.
        """
