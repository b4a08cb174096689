"""Sends requests to one guarded operation. The checks decide about the responses."""

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from hashlib import sha256
from typing import Any, Final, Protocol
from uuid import uuid4

import httpx
import msgspec

from onceward.errors import ConfigurationError
from onceward.guard.policy import ErrorFormat
from onceward_lab.conformance.profile import Profile
from onceward_protocol.sequence import CLIENT_HEADER, SEQUENCE_HEADER, SequenceNumber

__all__ = [
    "Check",
    "CheckFailedError",
    "CheckSkippedError",
    "Credentials",
    "Harness",
    "Request",
    "RequestFactory",
    "Response",
    "Result",
    "Verdict",
]

_SHOWN: Final = 60
_BAD_REQUEST: Final = 400
JSON: Final = "application/json"


class CheckFailedError(Exception):
    """The response is not as specified; the message describes it.

    ``change`` says what to change in the server, if it is more specific than the check's own.
    """

    def __init__(self, actual: str, *, change: str | None = None) -> None:
        super().__init__(actual)
        self.change = change


class CheckSkippedError(Exception):
    """The check cannot run here; the message has the reason."""


class Verdict(StrEnum):
    """The outcome of a check."""

    PASS = "pass"  # noqa: S105 - no password
    FAIL = "fail"
    SKIP = "skip"


class Credentials(msgspec.Struct, frozen=True):
    """The headers that authenticate a caller."""

    headers: Mapping[str, str]

    def __post_init__(self) -> None:
        if not all(text.isascii() and text.isprintable() for text in self.headers.values()):
            raise ConfigurationError("tokens may contain only visible ASCII characters")


ANONYMOUS: Final = Credentials({})


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request to the guarded operation; ``other_body`` is another valid body for it."""

    method: str
    path: str
    body: Any
    other_body: Any
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)


class Response(msgspec.Struct, frozen=True):
    """A response of the server."""

    status: int
    headers: httpx.Headers
    body: bytes

    @property
    def is_replay(self) -> bool:
        """Whether it is marked as a replay."""
        marked: str | None = self.headers.get("idempotency-replayed")
        return marked == "true"

    @property
    def is_success(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300  # noqa: PLR2004

    def document(self) -> dict[str, Any]:
        """Return the body, which must be a JSON object."""
        found = self._object()
        if found is None:
            raise CheckFailedError(f"{self.summary()}: the body is not a JSON object")
        return found

    def code(self, error_format: ErrorFormat) -> str | None:
        """Return the error code, if there is one."""
        found = (self._object() or {}).get(
            "error" if error_format is ErrorFormat.ENVELOPE else "code"
        )
        return found if isinstance(found, str) else None

    def text_at(self, path: str) -> str | None:
        """Return the text at a path such as ``error.code``, if there is one."""
        found: Any = self._object()
        for name in path.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        return found if isinstance(found, str) else None

    def summary(self) -> str:
        """Return status, replay mark and error code as text."""
        marks = ", replayed" if self.is_replay else ""
        code = self.code(ErrorFormat.ENVELOPE) or self.code(ErrorFormat.PROBLEM)
        return f"{self.status}{marks}{f' {code[:_SHOWN]}' if code else ''}"

    def any_document(self) -> dict[str, Any] | None:
        """Return the body if it is a JSON object."""
        return self._object()

    def _object(self) -> dict[str, Any] | None:
        try:
            value = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return value if isinstance(value, dict) else None


class RequestFactory(Protocol):
    """Creates requests for the guarded operation."""

    async def new_request(self, harness: "Harness", text: str | None = None) -> Request:
        """Return a valid request that was not sent before.

        ``text`` takes the place of ``{unique}``.
        """

    def other_request(self) -> Request | None:
        """Return a valid request of the second tenant; None if it may send the first one's."""


class Harness:
    """Sends the requests of the checks to one server."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        profile: Profile,
        factory: RequestFactory,
        *,
        credentials: Credentials,
        other_credentials: Credentials | None,
    ) -> None:
        """``other_credentials`` belong to another tenant."""
        self.client = client
        self.profile = profile
        self.credentials = credentials
        self._factory = factory
        # The header Onceward-Batch of a response; None if none has had it.
        self.batch_offer: str | None = None
        # Whether the operation demands numbers. Requests of other checks then get 1, each key as
        # a client of its own.
        self.is_strict = profile.ordering == "strict"
        self._other_credentials = other_credentials

    @property
    def other_credentials(self) -> Credentials:
        """Credentials of another tenant; raises ``CheckSkippedError`` if there are none."""
        if self._other_credentials is None:
            raise CheckSkippedError(
                "needs a second tenant: --secret, --other-token or other_sign_in"
            )
        return self._other_credentials

    async def new_request(self, text: str | None = None) -> Request:
        """Return a valid request that was not sent before.

        ``text`` takes the place of ``{unique}``.
        """
        return await self._factory.new_request(self, text)

    def other_request(self) -> Request | None:
        """Return a valid request of the second tenant; None if it may send the first one's."""
        return self._factory.other_request()

    def code_of(self, response: Response) -> str | None:
        """Return the error code where the profile says it is; None if only statuses count."""
        if self.profile.statuses_only:
            return None
        if self.profile.code_at is None:
            return response.code(self.profile.error_format)
        return response.text_at(self.profile.code_at)

    def new_key(self) -> str:
        """Return an unused key; a UUID version 4 is valid in both formats."""
        return str(uuid4())

    def number_of(self, key: str | bytes | None) -> SequenceNumber | None:
        """Return the first number of a client that has this key only; None if none is demanded."""
        if key is None or not self.is_strict:
            return None
        raw = key if isinstance(key, bytes) else key.encode()
        hashed = sha256(raw.strip(b' "')).hexdigest()  # bare and quoted keys are equal
        return SequenceNumber(f"key-{hashed}", 1)

    def requires_number(self, response: Response) -> bool:
        """Return whether the operation was refused because it has no number."""
        if response.status != _BAD_REQUEST:
            return False
        details = (response.any_document() or {}).get("details")
        required = details.get("required_headers") if isinstance(details, dict) else None
        return isinstance(required, list) and SEQUENCE_HEADER in required

    def location_of(self, response: Response) -> str | None:
        """Return the absolute Location, or None; raises if it is on another server."""
        location = response.headers.get("location")
        if location is None:
            return None
        # The token must not be sent to another server.
        target = self.client.base_url.join(location)
        base = self.client.base_url
        if (target.scheme, target.host, target.port) != (base.scheme, base.host, base.port):
            raise CheckFailedError("Location is on another server")
        # Absolute, because httpx would resolve a path relative to the path of the base URL.
        return str(target)

    async def send(
        self,
        request: Request,
        key: str | bytes | None = None,
        *,
        credentials: Credentials | None = None,
        content: bytes | AsyncIterator[bytes] | None = None,
        keys: Sequence[str | bytes] = (),
        headers: Mapping[str, str] | None = None,
        query: str = "",
        is_numbered: bool = True,
    ) -> Response:
        """Send a request, optionally with other credentials, several keys or another body."""
        sent = [*request.headers.items(), *(headers or {}).items()]
        if is_numbered and CLIENT_HEADER not in (headers or {}):
            number = self.number_of(key if key is not None else next(iter(keys), None))
            if number is not None:
                sent += ((CLIENT_HEADER, number.client_id), (SEQUENCE_HEADER, str(number.number)))
        sent += (credentials or self.credentials).headers.items()
        if request.body is not None or content is not None:
            sent.append(("content-type", JSON))
        all_keys = keys if key is None else (key, *keys)
        raw = [(name.encode(), value.encode("latin-1")) for name, value in sent]
        raw += [
            (
                self.profile.key_header.lower().encode(),
                value if isinstance(value, bytes) else value.encode(),
            )
            for value in all_keys
        ]
        body: Any = content
        if body is None and request.body is not None:
            body = msgspec.json.encode(request.body)
        response = await self.client.request(
            request.method, request.path + query, content=body, headers=raw
        )
        self.batch_offer = response.headers.get("onceward-batch", self.batch_offer)
        return Response(response.status_code, response.headers, response.content)

    async def send_cut(
        self, request: Request, key: str, content: bytes, at: int, *, has_length: bool
    ) -> Response | None:
        """Send a part of a body and break off. Return None if there was no response."""

        async def body() -> AsyncIterator[bytes]:
            yield content[:at]
            raise ConnectionAbortedError  # the connection is closed

        headers = {"content-length": str(len(content))} if has_length else None
        try:
            return await self.send(request, key, content=body(), headers=headers)
        except (ConnectionAbortedError, httpx.TransportError):
            return None

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        key: str | None = None,
        credentials: Credentials | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Send a request to any other endpoint."""
        request = Request(method=method, path=path, body=body, other_body=None)
        return await self.send(request, key, credentials=credentials, headers=headers)


def unique() -> str:
    """Return a random text."""
    return secrets.token_hex(8)


class Check(msgspec.Struct, frozen=True):
    """One check. ``run`` returns a description of the response or raises ``CheckFailedError``.

    ``section`` is a heading of docs/reference/protocol.md, or empty. ``why`` and ``change`` explain
    a failure: why the rule matters, and what to change in the server.
    """

    name: str
    section: str
    expected: str
    run: Callable[[Harness], Awaitable[str]]
    why: str
    change: str
    applies: Callable[[Profile], bool] = lambda _profile: True


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one check. ``why`` and ``change`` are set if it failed."""

    service: str
    check: str
    section: str
    expected: str
    actual: str
    verdict: Verdict
    why: str | None = None
    change: str | None = None
