"""Adds security headers to every response of the server, where the response has none itself."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

__all__ = ["STRICT_POLICY", "SecurityHeadersMiddleware"]

# Nothing may be loaded, framed or submitted. Pages that load something have their own policy.
STRICT_POLICY: Final = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", STRICT_POLICY.encode()),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_NAMES: Final = frozenset(name for name, _ in _HEADERS)
_NO_STORE: Final = (b"cache-control", b"no-store")
# A client may keep a response that has a version, and revalidates it before each use.
_REVALIDATE: Final = (b"cache-control", b"private, no-cache")


class SecurityHeadersMiddleware:
    """The outermost middleware, so that responses to errors get the headers too."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        """Handle one ASGI connection; other types than HTTP are passed on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_read = scope["method"] in ("GET", "HEAD")

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                present = {name.lower() for name, _ in headers}
                if _NAMES.isdisjoint(present):
                    headers += _HEADERS
                else:
                    headers += [header for header in _HEADERS if header[0] not in present]
                if b"cache-control" not in present:
                    headers.append(_REVALIDATE if is_read and b"etag" in present else _NO_STORE)
                message["headers"] = headers
            await send(message)

        await self._app(scope, receive, send_with_headers)
