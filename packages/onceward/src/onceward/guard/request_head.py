"""The head of a request: method, path and the headers that Onceward reads."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from onceward.guard.request import GuardedRequest, Principal
from onceward_protocol.correlation import is_traceparent
from onceward_protocol.fingerprint import short_hash
from onceward_protocol.ids import new_request_id
from onceward_protocol.keys import KEY_HEADER

if TYPE_CHECKING:
    from onceward.guard.batch_item import ItemContext
    from onceward.guard.request_transaction import RequestTransaction

__all__ = ["Identify", "RequestHead", "path_in_app"]

_MAX_ID_LENGTH: Final = 128
_READ: Final = frozenset(
    {
        *(b"idempotency-key", b"content-type", b"content-length"),
        *(b"authorization", b"x-request-id", b"x-correlation-id", b"traceparent"),
        b"x-client-generated-at",
    }
)
_VISIBLE: Final = frozenset(range(0x21, 0x7F))


class RequestHead:
    """Method, path and headers of one request, read in one pass."""

    __slots__ = (
        "added_headers",
        "authorization",
        "client_generated_at",
        "content_length",
        "content_type",
        "correlation_id",
        "headers",
        "is_replay",
        "is_started",
        "item",
        "key_headers",
        "limit_headers",
        "method",
        "path",
        "principal",
        "query",
        "request",
        "request_id",
        "traceparent",
        "transaction",
    )

    def __init__(  # noqa: C901 - one case per header
        self, method: str, path: str, query: bytes, headers: Iterable[tuple[bytes, bytes]]
    ) -> None:
        # In upper case.
        self.method = method
        # Decoded, without the query.
        self.path = path
        # The query as it was sent.
        self.query = query
        # Names in lower case, and values.
        self.headers = headers
        # Set while the request is served, for logs and traces.
        self.request: GuardedRequest | None = None
        # Set once the caller is known, for logs.
        self.principal: Principal | None = None
        # ``RateLimit`` and ``RateLimit-Policy`` of the response, on a limited endpoint.
        self.limit_headers: tuple[tuple[bytes, bytes], ...] = ()
        # Headers that every response to it has.
        self.added_headers: tuple[tuple[bytes, bytes], ...] = ()
        # The item of a batch that it is.
        self.item: ItemContext | None = None
        # True once a stored response was found for it.
        self.is_replay = False
        # True once a response of an operation that is not guarded was begun.
        self.is_started = False
        # Opened by the first dependency that needs it, ended by the middleware.
        self.transaction: RequestTransaction | None = None
        # Every ``Idempotency-Key`` header.
        self.key_headers: list[bytes] = []
        self.content_type: str | None = None
        self.content_length: int | None = None
        # The header's value; None if there is none or several differ.
        self.authorization: str | None = None
        # The W3C trace context; None if there is none, or it is not valid.
        self.traceparent: str | None = None
        # ``X-Client-Generated-At``, not checked; None if there is none or several differ.
        self.client_generated_at: str | None = None
        request_id = correlation_id = None
        authorizations: set[bytes] = set()
        generated_at: bytes | None = None
        for name, value in headers:
            if name not in _READ:  # most are not: one look-up in place of six comparisons
                continue
            match name:
                case b"idempotency-key":
                    self.key_headers.append(value)
                case b"content-type":
                    # None without the header.
                    self.content_type = value.decode("latin-1")
                case b"content-length":
                    # int() refuses more than 4300 digits; 18 are enough for any length.
                    self.content_length = int(value[:18]) if value.isdigit() else None
                case b"authorization":
                    authorizations.add(value)
                case b"x-request-id":
                    request_id = _usable_id(value)
                case b"x-correlation-id":
                    correlation_id = _usable_id(value)
                case b"traceparent":
                    text = value.decode("latin-1")
                    self.traceparent = text if is_traceparent(text) else None
                case b"x-client-generated-at":
                    generated_at = value if generated_at in (None, value) else b""
        # Two different ones identify no caller: a proxy may have checked the other one.
        if len(authorizations) == 1:
            self.authorization = authorizations.pop().decode("latin-1")
        if generated_at:
            self.client_generated_at = generated_at.decode("latin-1")
        # From ``X-Request-ID``, or a new one.
        self.request_id = request_id or new_request_id()
        # From ``X-Correlation-ID``, or the request id.
        self.correlation_id = correlation_id or self.request_id

    def facts(self) -> dict[str, str | bool]:
        """Return the fields for logs and traces. The key is included as a hash only."""
        facts: dict[str, str | bool] = {
            "request_id": self.request_id,
            "correlation_id": self.correlation_id,
        }
        if self.request is not None:
            facts |= {
                "endpoint": self.request.endpoint,
                "tenant": self.request.principal.tenant,
                "replayed": self.is_replay,
            }
            if self.request.record_id is not None:
                facts["key_hash"] = short_hash(self.request.record_id.key)
        return facts

    def keys(self, header: str) -> list[bytes]:
        """Return every value of the header that carries the key."""
        if header == KEY_HEADER:
            return self.key_headers
        wanted = header.lower().encode("latin-1")
        return [value for name, value in self.headers if name == wanted]

    def header(self, name: str) -> str | None:
        """Return the first value of a header, or None."""
        wanted = name.lower().encode("latin-1")
        for key, value in self.headers:
            if key == wanted:
                return value.decode("latin-1")
        return None


# Returns the caller, or raises NotAuthenticatedError.
Identify = Callable[[RequestHead], Principal | Awaitable[Principal]]


def path_in_app(scope: Mapping[str, Any]) -> str:
    """Return the path of an ASGI request without the prefix at which the app is mounted."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
        return path[len(root) :]
    return path


def _usable_id(value: bytes) -> str | None:
    """Return a client's request or correlation id if it is short and visible ASCII."""
    if not 0 < len(value) <= _MAX_ID_LENGTH or not _VISIBLE.issuperset(value):
        return None
    return value.decode("ascii")
