"""The head of a request: what guards, sign-in and limits read before the body is looked at."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from holdfast.core.fingerprint import short_hash
from holdfast.ids import new_request_id
from holdfast.server.guarded_request import GuardedRequest, Principal

__all__ = ["Identify", "RequestHead", "anonymous"]

_MAX_ID_LENGTH: Final = 128
_VISIBLE: Final = frozenset(range(0x21, 0x7F))


class RequestHead:
    """Method, path and headers, read once."""

    __slots__ = (
        "authorization",
        "call",
        "content_length",
        "content_type",
        "correlation_id",
        "headers",
        "is_replay",
        "key_headers",
        "method",
        "path",
        "query",
        "request_id",
    )

    def __init__(
        self, method: str, path: str, query: bytes, headers: Iterable[tuple[bytes, bytes]]
    ) -> None:
        """Read the headers this library cares about in one pass."""
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        # Filled in on the way, for logs and traces.
        self.call: GuardedRequest | None = None
        self.is_replay = False
        self.key_headers: list[bytes] = []
        self.content_type: str | None = None
        self.content_length: int | None = None
        self.authorization: str | None = None
        request_id = correlation_id = None
        signs_in: set[bytes] = set()
        for name, value in headers:
            match name:
                case b"idempotency-key":
                    self.key_headers.append(value)
                case b"content-type":
                    self.content_type = value.decode("latin-1")
                case b"content-length":
                    # More digits than these are no length, and int() would refuse them at 4300.
                    self.content_length = int(value[:18]) if value.isdigit() else None
                case b"authorization":
                    signs_in.add(value)
                case b"x-request-id":
                    request_id = _usable_id(value)
                case b"x-correlation-id":
                    correlation_id = _usable_id(value)
        # Two different ones are nobody: a proxy may have checked the other.
        if len(signs_in) == 1:
            self.authorization = signs_in.pop().decode("latin-1")
        self.request_id = request_id or new_request_id()
        self.correlation_id = correlation_id or self.request_id

    def facts(self) -> dict[str, str | bool]:
        """Return what logs and traces may know of a guarded request: no key, only its hash."""
        facts: dict[str, str | bool] = {
            "request_id": self.request_id,
            "correlation_id": self.correlation_id,
        }
        if self.call is not None:
            facts |= {
                "endpoint": self.call.endpoint,
                "tenant": self.call.principal.tenant,
                "replayed": self.is_replay,
            }
            if self.call.record_id is not None:
                facts["key_hash"] = short_hash(self.call.record_id.key)
        return facts

    def header(self, name: str) -> str | None:
        """Return the first value of a header, or None."""
        wanted = name.lower().encode("latin-1")
        for key, value in self.headers:
            if key == wanted:
                return value.decode("latin-1")
        return None


# Says who is calling, or raises NotAuthenticatedError.
Identify = Callable[[RequestHead], Principal | Awaitable[Principal]]

_EVERYONE = Principal(tenant="everyone", actor="anonymous")


def anonymous(_head: RequestHead) -> Principal:
    """Put all callers into one tenant: for apps without sign-in, and for a first try."""
    return _EVERYONE


def _usable_id(value: bytes) -> str | None:
    """Take a caller's request or correlation id if it is short and visible ASCII."""
    if not 0 < len(value) <= _MAX_ID_LENGTH or not _VISIBLE.issuperset(value):
        return None
    return value.decode("ascii")
