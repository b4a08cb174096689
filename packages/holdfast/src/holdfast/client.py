"""For callers of guarded services: one key per action, kept across retries. Built on httpx.

::

    with Client("https://api.example", token=current_token) as client:
        answer = client.post("/v1/projects", json={"name": "North"})
        if answer.replayed: …

What decides about retries is written once (``_conversation``); ``Client`` and ``AsyncClient`` only
send and sleep. Redirects are never followed: a key and a token go nowhere else by themselves.
"""

import asyncio
import inspect
import random
import time
from collections.abc import Awaitable, Callable, Generator
from datetime import UTC, datetime
from typing import Any, Final, Self, cast
from uuid import uuid4

import httpx
import msgspec

from holdfast.core.retry import CLIENT, RetryPolicy, is_transient, parse_retry_after
from holdfast.errors import HoldfastError, UsageError

__all__ = ["Answer", "AsyncClient", "Client", "GaveUpError"]

_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_KEY: Final = "Idempotency-Key"
# Still running under this key: not an answer yet.
_IN_PROGRESS: Final = frozenset({"idempotency.in_progress", "IDEMPOTENCY_IN_PROGRESS"})

Token = str | Callable[[], str | Awaitable[str]] | None


class GaveUpError(HoldfastError):
    """No answer after the last attempt. Try again later with the same ``key``: nothing doubles."""

    def __init__(self, message: str, *, key: str | None, attempts: int) -> None:
        """Keep the key, which is what a later attempt needs."""
        super().__init__(message)
        self.key = key
        self.attempts = attempts


class Answer:
    """What the service said, and whether it said so for the first time."""

    def __init__(self, response: httpx.Response, *, key: str | None, attempts: int) -> None:
        """Wrap the last response."""
        self.response = response
        self.key = key
        self.attempts = attempts

    @property
    def status(self) -> int:
        """The status."""
        return self.response.status_code

    @property
    def ok(self) -> bool:
        """True for a 2xx."""
        return self.response.is_success

    @property
    def replayed(self) -> bool:
        """True when the service answered from its memory: it had been done before."""
        return bool(self.response.headers.get("idempotency-replayed") == "true")

    @property
    def request_id(self) -> str | None:
        """The id of this exchange; of the first one too, where this is a replay."""
        return _text(self.response.headers.get("x-request-id"))

    @property
    def original_request_id(self) -> str | None:
        """The id of the exchange that did it, where this is a replay."""
        return _text(self.response.headers.get("x-original-request-id"))

    @property
    def code(self) -> str | None:
        """The machine's code of an error, in either dialect."""
        return _code(self.response)

    def json(self) -> Any:
        """Return the body as JSON."""
        return self.response.json()

    def raise_for_status(self) -> Self:
        """Raise ``httpx.HTTPStatusError`` for a 4xx or 5xx."""
        self.response.raise_for_status()
        return self


class _Send(msgspec.Struct, frozen=True):
    request: httpx.Request


class _Sleep(msgspec.Struct, frozen=True):
    seconds: float


_Heard = httpx.Response | httpx.TransportError | None
_Conversation = Generator[_Send | _Sleep, _Heard, Answer]


class _Talk:
    """What both clients share: how a request is made, and when it is made again."""

    def __init__(
        self,
        token: Token,
        retry: RetryPolicy,
        max_seconds: float,
        chance: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self.token = token
        self._retry = retry
        self._max_seconds = max_seconds
        self._chance = chance
        self._monotonic = monotonic

    def key_for(self, method: str, key: str | None) -> str | None:
        """Make the key of an action, once. Reading needs none."""
        if method.upper() in _SAFE:
            if key is not None:
                raise UsageError(f"{method} changes nothing and takes no key")
            return None
        return key or str(uuid4())

    def conversation(self, request: httpx.Request, key: str | None) -> _Conversation:
        """Send until there is an answer, or no attempt is left."""
        if key is not None:
            request.headers[_KEY] = key
        deadline = self._monotonic() + self._max_seconds
        attempt = 0
        while True:
            attempt += 1
            heard = yield _Send(request)
            assert heard is not None  # noqa: S101 - a send is always answered
            if isinstance(heard, httpx.Response) and not _is_passing(heard):
                return Answer(heard, key=key, attempts=attempt)
            wait = self._wait_after(attempt, heard, deadline)
            if wait is None:
                if isinstance(heard, httpx.Response):
                    return Answer(heard, key=key, attempts=attempt)
                raise GaveUpError(
                    f"no answer to {request.method} {request.url.path} after {attempt} attempts: "
                    f"{str(heard) or type(heard).__name__}",
                    key=key,
                    attempts=attempt,
                ) from heard
            yield _Sleep(wait)

    def _wait_after(
        self, attempt: int, heard: httpx.Response | httpx.TransportError, deadline: float
    ) -> float | None:
        """Return how long to wait, or None when it is over."""
        if self._retry.gives_up_after(attempt):
            return None
        floor = None
        if isinstance(heard, httpx.Response):
            floor = parse_retry_after(heard.headers.get("retry-after"), datetime.now(UTC))
        wait = self._retry.delay_seconds(attempt, random=self._chance(), retry_after_seconds=floor)
        return wait if self._monotonic() + wait <= deadline else None


class Client:
    """A client for guarded services, blocking."""

    def __init__(
        self,
        base_url: str,
        *,
        token: Token = None,
        retry: RetryPolicy = CLIENT,
        max_seconds: float = 60.0,
        sleep: Callable[[float], None] = time.sleep,
        chance: Callable[[], float] = random.random,
        **options: Any,
    ) -> None:
        """Take where the service is and how to sign in; other options go to ``httpx.Client``."""
        _refuse_redirects(options)
        self._talk = _Talk(token, retry, max_seconds, chance, time.monotonic)
        self._sleep = sleep
        self._http = httpx.Client(base_url=base_url, **options)

    def __enter__(self) -> Self:
        """Open with a ``with``."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections."""
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def request(self, method: str, path: str, *, key: str | None = None, **content: Any) -> Answer:
        """Send one action, as often as it takes. ``content`` is what httpx takes, e.g. ``json``."""
        key = self._talk.key_for(method, key)
        request = self._http.build_request(method, path, **content)
        talk = self._talk.conversation(request, key)
        heard: _Heard = None
        try:
            while True:
                step = talk.send(heard)
                heard = None
                if isinstance(step, _Sleep):
                    self._sleep(step.seconds)
                    continue
                self._sign(step.request)
                try:
                    heard = self._http.send(step.request)
                except httpx.TransportError as error:
                    heard = error
        except StopIteration as end:
            return cast("Answer", end.value)

    def get(self, path: str, **content: Any) -> Answer:
        """Read."""
        return self.request("GET", path, **content)

    def post(self, path: str, **content: Any) -> Answer:
        """Create, or do."""
        return self.request("POST", path, **content)

    def put(self, path: str, **content: Any) -> Answer:
        """Replace."""
        return self.request("PUT", path, **content)

    def patch(self, path: str, **content: Any) -> Answer:
        """Change."""
        return self.request("PATCH", path, **content)

    def delete(self, path: str, **content: Any) -> Answer:
        """Remove."""
        return self.request("DELETE", path, **content)

    def _sign(self, request: httpx.Request) -> None:
        """Ask for the token at each send: it may have been renewed meanwhile."""
        token = self._talk.token() if callable(self._talk.token) else self._talk.token
        if inspect.isawaitable(token):
            raise UsageError("an async token needs AsyncClient")
        if token is not None:
            request.headers["Authorization"] = f"Bearer {token}"


class AsyncClient:
    """The same client for asyncio."""

    def __init__(
        self,
        base_url: str,
        *,
        token: Token = None,
        retry: RetryPolicy = CLIENT,
        max_seconds: float = 60.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
        **options: Any,
    ) -> None:
        """Take where the service is; other options go to ``httpx.AsyncClient``."""
        _refuse_redirects(options)
        self._talk = _Talk(token, retry, max_seconds, chance, time.monotonic)
        self._sleep = sleep
        self._http = httpx.AsyncClient(base_url=base_url, **options)

    async def __aenter__(self) -> Self:
        """Open with an ``async with``."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections."""
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def request(
        self, method: str, path: str, *, key: str | None = None, **content: Any
    ) -> Answer:
        """Send one action, as often as it takes. ``content`` is what httpx takes, e.g. ``json``."""
        key = self._talk.key_for(method, key)
        request = self._http.build_request(method, path, **content)
        talk = self._talk.conversation(request, key)
        heard: _Heard = None
        try:
            while True:
                step = talk.send(heard)
                heard = None
                if isinstance(step, _Sleep):
                    await self._sleep(step.seconds)
                    continue
                await self._sign(step.request)
                try:
                    heard = await self._http.send(step.request)
                except httpx.TransportError as error:
                    heard = error
        except StopIteration as end:
            return cast("Answer", end.value)

    async def get(self, path: str, **content: Any) -> Answer:
        """Read."""
        return await self.request("GET", path, **content)

    async def post(self, path: str, **content: Any) -> Answer:
        """Create, or do."""
        return await self.request("POST", path, **content)

    async def put(self, path: str, **content: Any) -> Answer:
        """Replace."""
        return await self.request("PUT", path, **content)

    async def patch(self, path: str, **content: Any) -> Answer:
        """Change."""
        return await self.request("PATCH", path, **content)

    async def delete(self, path: str, **content: Any) -> Answer:
        """Remove."""
        return await self.request("DELETE", path, **content)

    async def _sign(self, request: httpx.Request) -> None:
        token = self._talk.token() if callable(self._talk.token) else self._talk.token
        if inspect.isawaitable(token):
            token = await token
        if token is not None:
            request.headers["Authorization"] = f"Bearer {token}"


def _refuse_redirects(options: dict[str, Any]) -> None:
    if options.get("follow_redirects"):
        raise UsageError("redirects are not followed: they would take the key and token elsewhere")


def _is_passing(response: httpx.Response) -> bool:
    """Tell what may be over by itself from an answer."""
    if is_transient(response.status_code):
        return True
    return response.status_code == httpx.codes.CONFLICT and _code(response) in _IN_PROGRESS


def _code(response: httpx.Response) -> str | None:
    if response.status_code < httpx.codes.BAD_REQUEST:
        return None
    try:
        body = msgspec.json.decode(response.content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not isinstance(body, dict):
        return None
    code = body.get("code", body.get("error"))
    return code if isinstance(code, str) else None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
