"""HTTP clients for guarded services: one key and one correlation id per action, for all attempts.

::

    with Client("https://api.example", token=current_token) as client:
        response = client.post("/v1/projects", json={"name": "North"})
        if response.replayed: …

Built on httpx. Both clients send and sleep; ``_RetryLoop`` decides when.
Redirects are never followed, because the key and the token would go to another address.
"""

import asyncio
import inspect
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal, Self, TypedDict, Unpack, cast
from uuid import UUID, uuid4, uuid5

from holdfast.extras import needs_extra

with needs_extra("client"):
    import httpx
import msgspec

from holdfast.core.correlation import CORRELATION_HEADER, TRACEPARENT_HEADER
from holdfast.core.error_code import ERROR_HEADER, error_code
from holdfast.core.keys import KEY_HEADER
from holdfast.core.response_classification import BY_CODE, TryLater
from holdfast.core.retry import CLIENT, RetryPolicy, is_transient, parse_retry_after
from holdfast.errors import HoldfastError, UsageError
from holdfast.observability.traces import current_traceparent

__all__ = [
    "ActionOptions",
    "AsyncClient",
    "Client",
    "ClientOptions",
    "GaveUpError",
    "Method",
    "RequestOptions",
    "Response",
]

_METHODS_WITHOUT_KEY: Final = frozenset({"GET", "HEAD", "OPTIONS"})

# Correlation ids of actions are derived from their keys in this namespace.
_CORRELATION: Final = UUID("5c1c3e4e-5a0f-4a7e-9b2a-6f1d0c7b8e35")

Token = str | Callable[[], str | Awaitable[str]] | None


class ClientOptions(TypedDict, total=False):
    """Options of ``httpx.Client`` and ``httpx.AsyncClient`` that the clients here pass on."""

    # Another way to sign in than ``token``.
    auth: Any
    # Query parameters of every request.
    params: Mapping[str, Any] | None
    # Headers of every request.
    headers: Mapping[str, str] | None
    # Cookies of every request.
    cookies: dict[str, str] | httpx.Cookies | None
    # Certificates to trust; False trusts any, for tests only.
    verify: ssl.SSLContext | str | bool
    # A client certificate.
    cert: Any
    # Allow HTTP/1.1.
    http1: bool
    # Allow HTTP/2, with httpx's extra.
    http2: bool
    # The URL of a proxy.
    proxy: Any
    # Transports by URL pattern.
    mounts: Any
    # Seconds for one attempt; None waits without end.
    timeout: float | httpx.Timeout | None
    # Size of the connection pool.
    limits: httpx.Limits
    # Functions called with each request and response.
    event_hooks: Any
    # An ``httpx`` transport, for example ``httpx.MockTransport`` in tests.
    transport: Any
    # Read proxies and certificates from the environment.
    trust_env: bool
    # The encoding of texts whose response names none.
    default_encoding: str
    # Refused if true: a redirect would send the key and the token to another address.
    follow_redirects: bool


class RequestOptions(TypedDict, total=False):
    """The content of one request, as httpx takes it."""

    # A value that is sent as JSON.
    json: Any
    # The body as it is.
    content: str | bytes | None
    # Fields of a form.
    data: Mapping[str, Any] | None
    # Files of a multipart form.
    files: Any
    # Query parameters.
    params: Mapping[str, Any] | None
    # Headers of this request.
    headers: Mapping[str, str] | None
    # Cookies of this request.
    cookies: dict[str, str] | httpx.Cookies | None
    # Seconds for one attempt.
    timeout: float | httpx.Timeout | None
    # Extensions of httpx, such as ``sni_hostname``.
    extensions: Mapping[str, Any] | None


class ActionOptions(RequestOptions, total=False):
    """The content of an action, and the key of one that was sent before."""

    # The key of an action that was sent before; a new one is made without it.
    key: str | None


# Methods that a client sends.
Method = Literal["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"]


class GaveUpError(HoldfastError):
    """No response after the last attempt.

    It is not known whether the action happened. Send it again later with the same ``key``: it will
    happen at most once.
    """

    def __init__(
        self,
        message: str,
        *,
        key: str | None,
        attempts: int,
        correlation_id: str | None = None,
    ) -> None:
        super().__init__(message)
        # Send the action again later with this key.
        self.key = key
        # The ``X-Correlation-ID`` of every attempt.
        self.correlation_id = correlation_id
        # How often it was sent.
        self.attempts = attempts


class Response:
    """The last response to an action, with its key and the number of attempts."""

    def __init__(self, http_response: httpx.Response, *, key: str | None, attempts: int) -> None:
        # The response of httpx.
        self.http_response = http_response
        # The key of the action; None for reads.
        self.key = key
        # How often it was sent, at least 1.
        self.attempts = attempts

    @property
    def status(self) -> int:
        """The HTTP status code."""
        return self.http_response.status_code

    @property
    def ok(self) -> bool:
        """True for a 2xx status."""
        return self.http_response.is_success

    @property
    def replayed(self) -> bool:
        """True if the service replayed a stored response: an earlier request did the action."""
        return bool(self.http_response.headers.get("idempotency-replayed") == "true")

    @property
    def request_id(self) -> str | None:
        """The id of this request."""
        return _text(self.http_response.headers.get("x-request-id"))

    @property
    def correlation_id(self) -> str:
        """The ``X-Correlation-ID`` of every attempt, which the server's records and jobs keep."""
        return str(self.http_response.request.headers[CORRELATION_HEADER])

    @property
    def original_request_id(self) -> str | None:
        """The id of the request that did the action, if this response is a replay."""
        return _text(self.http_response.headers.get("x-original-request-id"))

    @property
    def code(self) -> str | None:
        """The error code of a 4xx or 5xx, from its header or its body."""
        return _error_code(self.http_response)

    def json(self) -> Any:
        """Return the body, decoded from JSON."""
        return self.http_response.json()

    def raise_for_status(self) -> Self:
        """Raise ``httpx.HTTPStatusError`` for a 4xx or 5xx; return self otherwise."""
        self.http_response.raise_for_status()
        return self


class _Send(msgspec.Struct, frozen=True):
    request: httpx.Request


class _Sleep(msgspec.Struct, frozen=True):
    seconds: float


_Result = httpx.Response | httpx.TransportError
# Yields what to do next, receives the result of each _Send and None after each _Sleep.
_Steps = Generator[_Send | _Sleep, _Result | None, Response]


class _RetryLoop:
    """Decides which request to send and how long to wait, without doing either."""

    def __init__(
        self,
        retry: RetryPolicy,
        max_seconds: float,
        jitter: Callable[[], float],
        monotonic: Callable[[], float],
        key_header: str,
    ) -> None:
        self._key_header = key_header
        self._retry = retry
        self._max_seconds = max_seconds
        self._jitter = jitter
        self._monotonic = monotonic

    def steps(self, request: httpx.Request, key: str | None) -> _Steps:
        """Send until there is a final response. Raises ``GaveUpError`` if there is none."""
        if key is not None:
            request.headers[self._key_header] = key
        _correlate(request, key)
        deadline = self._monotonic() + self._max_seconds
        attempt = 0
        while True:
            attempt += 1
            result = yield _Send(request)
            assert result is not None  # noqa: S101 - both clients send a result after a _Send
            if isinstance(result, httpx.Response) and not _is_temporary(result):
                return Response(result, key=key, attempts=attempt)
            delay = self._delay_after(attempt, result, deadline)
            if delay is None:
                if isinstance(result, httpx.Response):
                    return Response(result, key=key, attempts=attempt)
                raise GaveUpError(
                    f"no response to {request.method} {request.url.path} after {attempt} "
                    f"attempts: {str(result) or type(result).__name__}",
                    key=key,
                    attempts=attempt,
                    correlation_id=request.headers[CORRELATION_HEADER],
                ) from result
            yield _Sleep(delay)

    def _delay_after(self, attempt: int, result: _Result, deadline: float) -> float | None:
        """Return the seconds to wait before the next attempt, or None if there is none."""
        if self._retry.gives_up_after(attempt):
            return None
        retry_after = None
        if isinstance(result, httpx.Response):
            retry_after = parse_retry_after(result.headers.get("retry-after"), datetime.now(UTC))
        delay = self._retry.delay_seconds(
            attempt, random=self._jitter(), retry_after_seconds=retry_after
        )
        return delay if self._monotonic() + delay <= deadline else None


class Client:
    """A blocking client for guarded services.

    ``token`` is a bearer token or a function that returns one; the function is called for every
    attempt. ``max_seconds`` limits the time from the first attempt to the last. ``key_header`` is
    the server's, if it has another than ``Idempotency-Key``. Other options are those of
    ``httpx.Client``.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: Token = None,
        retry: RetryPolicy = CLIENT,
        max_seconds: float = 60.0,
        key_header: str = KEY_HEADER,
        sleep: Callable[[float], None] = time.sleep,
        jitter: Callable[[], float] = random.random,
        **options: Unpack[ClientOptions],
    ) -> None:
        _check_options(options)
        self._token = token
        self._retry_loop = _RetryLoop(retry, max_seconds, jitter, time.monotonic, key_header)
        self._sleep = sleep
        self._http = httpx.Client(base_url=base_url, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def request(
        self,
        method: Method,
        path: str,
        *,
        key: str | None = None,
        **content: Unpack[RequestOptions],
    ) -> Response:
        """Send an action and retry until there is a final response.

        ``key`` continues an action that was sent before; without it a new key is made, except for
        GET, HEAD and OPTIONS. ``content`` are the arguments of httpx, such as ``json``. Raises
        ``GaveUpError`` if no attempt got a response.
        """
        key = _key_for(method, key)
        request = self._http.build_request(method, path, **content)
        steps = self._retry_loop.steps(request, key)
        result: _Result | None = None
        try:
            while True:
                step = steps.send(result)
                result = None
                if isinstance(step, _Sleep):
                    self._sleep(step.seconds)
                    continue
                self._authorize(step.request)
                try:
                    result = self._http.send(step.request)
                except httpx.TransportError as error:
                    result = error
        except StopIteration as end:
            return cast("Response", end.value)

    def get(self, path: str, **content: Unpack[RequestOptions]) -> Response:
        """Send a GET, without a key."""
        return self.request("GET", path, **content)

    def post(self, path: str, **content: Unpack[ActionOptions]) -> Response:
        """Send a POST with a key."""
        return self.request("POST", path, **content)

    def put(self, path: str, **content: Unpack[ActionOptions]) -> Response:
        """Send a PUT with a key."""
        return self.request("PUT", path, **content)

    def patch(self, path: str, **content: Unpack[ActionOptions]) -> Response:
        """Send a PATCH with a key."""
        return self.request("PATCH", path, **content)

    def delete(self, path: str, **content: Unpack[ActionOptions]) -> Response:
        """Send a DELETE with a key."""
        return self.request("DELETE", path, **content)

    def _authorize(self, request: httpx.Request) -> None:
        """Set the token for each attempt: it may have been renewed since the last one."""
        token = self._token() if callable(self._token) else self._token
        if inspect.isawaitable(token):
            raise UsageError("the token is awaitable: use AsyncClient")
        if token is not None:
            request.headers["Authorization"] = f"Bearer {token}"


class AsyncClient:
    """A client for guarded services on asyncio. Arguments are those of ``Client``.

    ``token`` may also be an async function. Other options are those of ``httpx.AsyncClient``.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: Token = None,
        retry: RetryPolicy = CLIENT,
        max_seconds: float = 60.0,
        key_header: str = KEY_HEADER,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
        **options: Unpack[ClientOptions],
    ) -> None:
        _check_options(options)
        self._token = token
        self._retry_loop = _RetryLoop(retry, max_seconds, jitter, time.monotonic, key_header)
        self._sleep = sleep
        self._http = httpx.AsyncClient(base_url=base_url, **options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def request(
        self,
        method: Method,
        path: str,
        *,
        key: str | None = None,
        **content: Unpack[RequestOptions],
    ) -> Response:
        """Send an action and retry until there is a final response. See ``Client.request``."""
        key = _key_for(method, key)
        request = self._http.build_request(method, path, **content)
        steps = self._retry_loop.steps(request, key)
        result: _Result | None = None
        try:
            while True:
                step = steps.send(result)
                result = None
                if isinstance(step, _Sleep):
                    await self._sleep(step.seconds)
                    continue
                await self._authorize(step.request)
                try:
                    result = await self._http.send(step.request)
                except httpx.TransportError as error:
                    result = error
        except StopIteration as end:
            return cast("Response", end.value)

    async def get(self, path: str, **content: Unpack[RequestOptions]) -> Response:
        """Send a GET, without a key."""
        return await self.request("GET", path, **content)

    async def post(self, path: str, **content: Unpack[ActionOptions]) -> Response:
        """Send a POST with a key."""
        return await self.request("POST", path, **content)

    async def put(self, path: str, **content: Unpack[ActionOptions]) -> Response:
        """Send a PUT with a key."""
        return await self.request("PUT", path, **content)

    async def patch(self, path: str, **content: Unpack[ActionOptions]) -> Response:
        """Send a PATCH with a key."""
        return await self.request("PATCH", path, **content)

    async def delete(self, path: str, **content: Unpack[ActionOptions]) -> Response:
        """Send a DELETE with a key."""
        return await self.request("DELETE", path, **content)

    async def _authorize(self, request: httpx.Request) -> None:
        token = self._token() if callable(self._token) else self._token
        if inspect.isawaitable(token):
            token = await token
        if token is not None:
            request.headers["Authorization"] = f"Bearer {token}"


def _check_options(options: ClientOptions) -> None:
    if options.get("follow_redirects"):
        raise UsageError(
            "follow_redirects is not supported: a redirect would send the key and the token to "
            "another address"
        )


def _key_for(method: str, key: str | None) -> str | None:
    """Return the key of an action: the given one, a new one, or None for reads."""
    if method.upper() in _METHODS_WITHOUT_KEY:
        if key is not None:
            raise UsageError(f"{method} changes nothing and takes no key")
        return None
    return key or str(uuid4())


def _correlate(request: httpx.Request, key: str | None) -> None:
    """Set the correlation id and the trace context, unless the app has set its own.

    An action that is continued with its key has the same correlation id as before.
    """
    if CORRELATION_HEADER not in request.headers:
        made = uuid4() if key is None else uuid5(_CORRELATION, key)
        request.headers[CORRELATION_HEADER] = str(made)
    trace = current_traceparent()
    if trace is not None and TRACEPARENT_HEADER not in request.headers:
        request.headers[TRACEPARENT_HEADER] = trace


def _is_temporary(response: httpx.Response) -> bool:
    """Return whether the same request may get another response later."""
    if is_transient(response.status_code):
        return True
    if response.status_code != httpx.codes.CONFLICT:
        return False
    known = BY_CODE.get(_error_code(response) or "")
    if known is not None:
        return isinstance(known, TryLater)
    # No code of the protocol: a conflict does not pass by waiting, but a first request does.
    return "retry-after" in response.headers


def _error_code(response: httpx.Response) -> str | None:
    if response.status_code < httpx.codes.BAD_REQUEST:
        return None
    return error_code(response.headers.get(ERROR_HEADER), response.content)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
