"""HTTP clients for guarded services: one key and one correlation id per action, for all attempts.

::

    with Client("https://api.example", token=current_token) as client:
        response = client.post("/v1/projects", json={"name": "North"})
        if response.replayed: …

Built on httpx. ``_BaseClient`` decides what to send and how long to wait; the two clients do it.
Redirects are never followed, because the key and the token would go to another address.
"""

import asyncio
import inspect
import random
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, Final, Generic, Literal, Self, TypedDict, TypeVar, Unpack, cast
from uuid import UUID, uuid4, uuid5

from onceward_protocol.extras import needs_extra

with needs_extra("client"):
    import httpx
import msgspec

from onceward.errors import OncewardError, UsageError
from onceward_protocol.batch import ItemResult, parse_results
from onceward_protocol.correlation import (
    CORRELATION_HEADER,
    TRACEPARENT_HEADER,
    current_traceparent,
)
from onceward_protocol.effect import EFFECT_HEADER, Effect
from onceward_protocol.error_codes import ERROR_HEADER, error_code
from onceward_protocol.keys import KEY_HEADER
from onceward_protocol.response_classification import BY_CODE, TryLater
from onceward_protocol.retry import CLIENT, RetryPolicy, is_transient, parse_retry_after

__all__ = [
    "Action",
    "ActionOptions",
    "AsyncClient",
    "BatchRefusedError",
    "Client",
    "ClientOptions",
    "GaveUpError",
    "Method",
    "RequestOptions",
    "Response",
]

_METHODS_WITHOUT_KEY: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_JSON: Final = {"Content-Type": "application/json"}
_REFERENCE: Final = re.compile(r"\{(?:local|version):([0-9a-f-]{36})\}")
_SKIPPED: Final = 424
_SKIPPED_CODES: Final = frozenset({"batch.skipped", "BATCH_SKIPPED"})

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


class GaveUpError(OncewardError):
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
        # Of a batch: the responses that came, None for the others, in the order of the actions.
        self.responses: list[Response | None] = []


class BatchRefusedError(OncewardError):
    """The server refuses a batch as a whole, or has no such endpoint. The rest was not run."""

    def __init__(
        self, message: str, *, response: "Response", responses: "list[Response | None]"
    ) -> None:
        super().__init__(message)
        # The response to the batch.
        self.response = response
        # The responses to actions that came before, None for the others.
        self.responses = responses


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One action of a batch. ``{local:…}`` and ``{version:…}`` refer to earlier actions."""

    # POST, PUT, PATCH or DELETE.
    method: str
    # The path, with the query.
    path: str
    # A value that is sent as JSON; without one there is no body.
    json: Any = msgspec.UNSET
    # The key of an action that was sent before; a new one is made without it.
    key: str = msgspec.field(default_factory=lambda: str(uuid4()))
    # Headers that items of a batch may have, such as ``If-Match``.
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    # After an action that did not succeed, later actions of the same lane are not run.
    lane: str | None = None
    # A lowercase UUID by which later actions refer to this one.
    local_id: str | None = None


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
    def effect(self) -> Effect | None:
        """The server's knowledge of the key; None if it does not say.

        ``Effect.NONE``: nothing has happened under it, whatever the status.
        """
        found = self.http_response.headers.get(EFFECT_HEADER)
        return Effect(found) if found in set(Effect) else None

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


_Result = httpx.Response | httpx.TransportError


class _Batch:
    """The actions of a batch, and the responses that have come so far."""

    def __init__(self, actions: Sequence[Action], max_items: int) -> None:
        self._actions = list(actions)
        self._max_items = max_items
        self._final: list[Response | None] = [None] * len(self._actions)
        # Responses after which the action is sent again.
        self._last: list[Response | None] = [None] * len(self._actions)
        self._attempts = [0] * len(self._actions)
        self._sent: list[int] = []
        # Whether the last request has brought a final response.
        self.has_progress = False

    @property
    def is_open(self) -> bool:
        return any(response is None for response in self._final)

    @property
    def responses(self) -> list[Response | None]:
        return [final or last for final, last in zip(self._final, self._last, strict=True)]

    def begin(self) -> bytes:
        """Return the body of the next request: what is open, and what that refers to.

        An action that has succeeded and is sent again is a replay.
        """
        chosen: set[int] = set()
        for index, final in enumerate(self._final):
            if final is not None:
                continue
            needed = {index, *self._referred(index)}
            if chosen and len(chosen | needed) > self._max_items:
                break
            chosen |= needed
        self._sent = sorted(chosen)
        for index in self._sent:
            self._attempts[index] += self._final[index] is None
        return msgspec.json.encode({"items": [_item(self._actions[i]) for i in self._sent]})

    def _referred(self, position: int) -> set[int]:
        """Return the earlier actions with a response that one refers to, directly or not."""
        text = msgspec.json.encode(_item(self._actions[position])).decode()
        names = set(_REFERENCE.findall(text))
        found: set[int] = set()
        for index in range(position if names else 0):
            if self._actions[index].local_id in names and self._final[index] is not None:
                found |= {index, *self._referred(index)}
        return found

    def receive(self, result: _Result) -> float | None:
        """Take the results of the last request; returns the server's pause, None without one."""
        self.has_progress = False
        if not isinstance(result, httpx.Response):
            return None
        if result.status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE and len(self._sent) > 1:
            self._max_items, self.has_progress = len(self._sent) // 2, True
            return 0.0
        is_ok = result.status_code == httpx.codes.OK
        found = parse_results(result.content, len(self._sent)) if is_ok else None
        if found is None:
            return None
        results, retry_after = found
        is_waiting = False
        for index, each in zip(self._sent, results, strict=False):
            if self._final[index] is not None:
                continue  # sent again for the others
            response = self._response(index, each, result)
            # What was skipped behind an action that is sent again is sent again, too.
            is_skipped = response.status == _SKIPPED and response.code in _SKIPPED_CODES
            if _is_temporary(response.http_response) or (is_skipped and is_waiting):
                self._last[index] = None if is_skipped else response
                is_waiting = True
            else:
                self._final[index] = response
                self.has_progress = True
        is_prefix = len(results) < len(self._sent)
        return retry_after or 0.0 if is_prefix or self.has_progress else None

    def is_refused(self, result: _Result) -> bool:
        """Return whether the server refuses the batch, and would refuse it again."""
        if not isinstance(result, httpx.Response) or self.has_progress:
            return False
        return not result.is_success and not _is_temporary(result)

    def last_responses(self, result: _Result | None) -> list[Response]:
        """Return the last response to each action. Raises ``GaveUpError`` if one has none."""
        found = [response for response in self.responses if response is not None]
        if len(found) == len(self._actions):
            return found
        missing = self.responses.index(None)
        action = self._actions[missing]
        error = GaveUpError(
            f"no response to {action.method} {action.path} in a batch after "
            f"{self._attempts[missing]} attempts",
            key=action.key,
            attempts=self._attempts[missing],
            correlation_id=_correlation_id(action.key),
        )
        error.responses = self.responses
        raise error from (result if isinstance(result, httpx.TransportError) else None)

    def _response(self, index: int, result: ItemResult, batch: httpx.Response) -> Response:
        action = self._actions[index]
        url = batch.request.url.copy_with(raw_path=action.path.encode("ascii", "replace"))
        headers = {CORRELATION_HEADER: _correlation_id(action.key), **action.headers}
        request = httpx.Request(action.method, url, headers=headers)
        response = httpx.Response(
            result.status, headers=result.headers, content=result.body, request=request
        )
        return Response(response, key=action.key, attempts=self._attempts[index])


def _item(action: Action) -> dict[str, Any]:
    headers = {CORRELATION_HEADER: _correlation_id(action.key), **action.headers}
    trace = current_traceparent()
    if trace is not None:
        headers.setdefault(TRACEPARENT_HEADER, trace)
    item = {
        "method": action.method,
        "path": action.path,
        "key": action.key,
        "headers": headers,
        "lane": action.lane,
        "local_id": action.local_id,
    }
    if action.json is not msgspec.UNSET:
        item["body"] = action.json
    return {name: value for name, value in item.items() if value is not None}


def _check_actions(actions: Iterable[Action]) -> list[Action]:
    found = list(actions)
    for action in found:
        if action.method.upper() in _METHODS_WITHOUT_KEY:
            raise UsageError(f"{action.method} changes nothing and cannot be in a batch")
    return found


_ResponseT = TypeVar("_ResponseT")
_ResponsesT = TypeVar("_ResponsesT")
_Value = TypeVar("_Value")
# Yields what to do next, and receives its result: a request to send (a ``_Result``), a token to
# wait for (the token), or seconds to sleep.
_Steps = Generator[httpx.Request | Awaitable[str] | float, Any, _Value]


class _BaseClient(Generic[_ResponseT, _ResponsesT]):
    """The part of both clients that does no I/O."""

    _http_class: ClassVar[type[httpx.Client | httpx.AsyncClient]]
    _http: httpx.Client | httpx.AsyncClient
    _default_sleep: ClassVar[Any]

    def __init__(
        self,
        base_url: str,
        *,
        token: Token = None,
        retry: RetryPolicy = CLIENT,
        max_seconds: float = 60.0,
        key_header: str = KEY_HEADER,
        sleep: Callable[[float], Any] | None = None,
        jitter: Callable[[], float] = random.random,
        **options: Unpack[ClientOptions],
    ) -> None:
        if options.get("follow_redirects"):
            raise UsageError(
                "follow_redirects is not supported: a redirect would send the key and the token to "
                "another address"
            )
        self._token = token
        self._retry = retry
        self._max_seconds = max_seconds
        self._key_header = key_header
        self._sleep: Callable[[float], Any] = sleep or self._default_sleep
        self._jitter = jitter
        self._http = self._http_class(base_url=base_url, **options)

    def _run(self, steps: _Steps[Any]) -> Any:
        """Take these steps; return what they return."""
        raise NotImplementedError

    def request(
        self,
        method: Method,
        path: str,
        *,
        key: str | None = None,
        **content: Unpack[RequestOptions],
    ) -> _ResponseT:
        """Send an action and retry until there is a final response.

        ``key`` continues an action that was sent before; without it a new key is made, except for
        GET, HEAD and OPTIONS. ``content`` are the arguments of httpx, such as ``json``. Raises
        ``GaveUpError`` if no attempt got a response.
        """
        key = _key_for(method, key)
        request = self._http.build_request(method, path, **content)
        return cast("_ResponseT", self._run(self._steps(request, key)))

    def batch(
        self, actions: Iterable[Action], *, path: str = "/batch", max_items: int = 200
    ) -> _ResponsesT:
        """Send actions in as few requests as possible; return their responses, in this order.

        Each has its own key, and happens at most once, however often it is sent. What the server
        has not got to, and what may get another response later, is sent again as by ``request``.
        An action that an earlier one kept from running has a response with status 424.

        Raises ``BatchRefusedError`` if the server refuses the batch as a whole, and
        ``GaveUpError`` if an action got no response; both have the ``responses`` that came.
        """
        batch = _Batch(_check_actions(actions), max_items)
        return cast("_ResponsesT", self._run(self._batch_steps(batch, path)))

    def get(self, path: str, **content: Unpack[RequestOptions]) -> _ResponseT:
        """Send a GET, without a key."""
        return self.request("GET", path, **content)

    def post(self, path: str, **content: Unpack[ActionOptions]) -> _ResponseT:
        """Send a POST with a key."""
        return self.request("POST", path, **content)

    def put(self, path: str, **content: Unpack[ActionOptions]) -> _ResponseT:
        """Send a PUT with a key."""
        return self.request("PUT", path, **content)

    def patch(self, path: str, **content: Unpack[ActionOptions]) -> _ResponseT:
        """Send a PATCH with a key."""
        return self.request("PATCH", path, **content)

    def delete(self, path: str, **content: Unpack[ActionOptions]) -> _ResponseT:
        """Send a DELETE with a key."""
        return self.request("DELETE", path, **content)

    def _steps(self, request: httpx.Request, key: str | None) -> _Steps[Response]:
        """Send until there is a final response. Raises ``GaveUpError`` if there is none."""
        if key is not None:
            request.headers[self._key_header] = key
        _correlate(request, key)
        deadline = time.monotonic() + self._max_seconds
        attempt = 0
        while True:
            attempt += 1
            result = yield from self._send(request)
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
            yield delay

    def _batch_steps(self, batch: _Batch, path: str) -> _Steps[list[Response]]:
        """Send batches until every action has a final response. Raises ``GaveUpError``."""
        deadline = time.monotonic() + self._max_seconds
        attempt = 0
        while batch.is_open:
            request = self._http.build_request("POST", path, content=batch.begin(), headers=_JSON)
            result = yield from self._send(request)
            pause = batch.receive(result)
            attempt = 1 if batch.has_progress else attempt + 1
            if not batch.is_open:
                break
            if batch.is_refused(result):
                assert isinstance(result, httpx.Response)  # noqa: S101 - only a response refuses
                raise BatchRefusedError(
                    f"the server responded {result.status_code} to the batch: "
                    f"{_error_code(result) or 'no code'}",
                    response=Response(result, key=None, attempts=attempt),
                    responses=batch.responses,
                )
            delay: float | None = pause
            if pause is None or not batch.has_progress:
                delay = self._delay_after(attempt, result, deadline, pause)
            if delay is None or time.monotonic() + delay > deadline:
                return batch.last_responses(result)
            if delay > 0:
                yield delay
        return batch.last_responses(None)

    def _send(self, request: httpx.Request) -> _Steps[_Result]:
        """Send once, with the token of now: it may have been renewed since the last attempt."""
        token = self._token() if callable(self._token) else self._token
        if inspect.isawaitable(token):
            token = yield token
        if token is not None:
            request.headers["Authorization"] = f"Bearer {token}"
        result: _Result = yield request
        return result

    def _delay_after(
        self, attempt: int, result: _Result, deadline: float, least: float | None = None
    ) -> float | None:
        """Return the seconds to wait before the next attempt, or None if there is none."""
        if self._retry.gives_up_after(attempt):
            return None
        retry_after = None
        if isinstance(result, httpx.Response):
            retry_after = parse_retry_after(result.headers.get("retry-after"), datetime.now(UTC))
        if least is not None:
            retry_after = max(least, retry_after or 0.0)
        delay = self._retry.delay_seconds(
            attempt, random=self._jitter(), retry_after_seconds=retry_after
        )
        return delay if time.monotonic() + delay <= deadline else None


class Client(_BaseClient[Response, list[Response]]):
    """A blocking client for guarded services.

    ``token`` is a bearer token or a function that returns one; the function is called for every
    attempt. ``max_seconds`` limits the time from the first attempt to the last. ``key_header`` is
    the server's, if it has another than ``Idempotency-Key``. Other options are those of
    ``httpx.Client``.
    """

    _http_class = httpx.Client
    _http: httpx.Client
    _default_sleep = staticmethod(time.sleep)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def _run(self, steps: _Steps[_Value]) -> _Value:
        result: Any = None
        while True:
            try:
                step = steps.send(result)
            except StopIteration as end:
                return cast("_Value", end.value)
            if isinstance(step, httpx.Request):
                try:
                    result = self._http.send(step)
                except httpx.TransportError as error:
                    result = error
            elif inspect.isawaitable(step):
                raise UsageError("the token is awaitable: use AsyncClient")
            else:
                self._sleep(step)
                result = None


class AsyncClient(_BaseClient[Coroutine[Any, Any, Response], Coroutine[Any, Any, list[Response]]]):
    """A client for guarded services on asyncio. Arguments are those of ``Client``.

    ``token`` may also be an async function. Other options are those of ``httpx.AsyncClient``.
    """

    _http_class = httpx.AsyncClient
    _http: httpx.AsyncClient
    _default_sleep = staticmethod(asyncio.sleep)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _run(self, steps: _Steps[_Value]) -> _Value:
        result: Any = None
        while True:
            try:
                step = steps.send(result)
            except StopIteration as end:
                return cast("_Value", end.value)
            if isinstance(step, httpx.Request):
                try:
                    result = await self._http.send(step)
                except httpx.TransportError as error:
                    result = error
            elif inspect.isawaitable(step):
                result = await step
            else:
                await self._sleep(step)
                result = None


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
        made = str(uuid4()) if key is None else _correlation_id(key)
        request.headers[CORRELATION_HEADER] = made
    trace = current_traceparent()
    if trace is not None and TRACEPARENT_HEADER not in request.headers:
        request.headers[TRACEPARENT_HEADER] = trace


def _correlation_id(key: str) -> str:
    return str(uuid5(_CORRELATION, key))


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
