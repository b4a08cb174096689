"""Serves metrics, console and the description of the API on another port than the API itself."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

__all__ = ["OpsPort", "OpsPortMiddleware"]

_OPS: Final = frozenset({"/metrics", "/docs", "/openapi.json", "/redoc", "/console"})
_BELOW_OPS: Final = ("/docs/", "/console/")
_ON_BOTH: Final = frozenset({"/", "/healthz", "/readyz"})
# No route has it, so the response is the 404 of an unknown path.
_NOWHERE: Final = "/%"


class OpsPort:
    """Decides which paths a port serves. Without an ops port, every port serves all of them."""

    def __init__(self, port: int | None) -> None:
        self._port = port

    @property
    def is_set(self) -> bool:
        """Whether there is an ops port."""
        return self._port is not None

    def serves(self, scope: Mapping[str, Any], path: str) -> bool:
        """Return whether the port that a request came in on serves this path."""
        if self._port is None:
            return True
        is_ops_path = path in _OPS or path.startswith(_BELOW_OPS)
        # The address of our socket, which no header can change.
        server = scope.get("server")
        if server is not None and server[1] == self._port:
            return is_ops_path or path in _ON_BOTH
        return not is_ops_path


class OpsPortMiddleware:
    """Responds with 404 to paths that the port does not serve."""

    def __init__(self, app: Callable[..., Awaitable[None]], ports: OpsPort) -> None:
        self._app = app
        self._ports = ports

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        """Handle one ASGI connection; the outer middleware logs the path that was sent."""
        path = scope.get("path", "")
        relative = path.removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or self._ports.serves(scope, relative):
            await self._app(scope, receive, send)
            return
        scope["path"] = _NOWHERE
        try:
            await self._app(scope, receive, send)
        finally:
            scope["path"] = path
