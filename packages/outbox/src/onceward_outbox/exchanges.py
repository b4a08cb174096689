"""HTTP exchanges of a drain: several at once, each on its own connection, and what waits for them.

A request whose response comes at once is sent on the drain's thread, at the cost of a plain send.
One that takes longer is finished by a thread of its own, which only does HTTP.
"""

from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any, Final

from onceward_outbox.entry import Claimed
from onceward_outbox.outcome import Outcome
from onceward_outbox.requests import BatchRequest
from onceward_outbox.responses import Reading
from onceward_outbox.sender import Received
from onceward_outbox.transport import (
    Exchange,
    HttpTransport,
    NoResponse,
    Request,
    Response,
    Transport,
)

_UNDECIDED: Final = frozenset({401, 408, 409, 425, 429})
"""Responses to a repeated request that say nothing about the first one, which may still run."""

_SERVER_ERROR: Final = 500

AT_ONCE_SECONDS: Final = 0.02
"""How long to wait for a response before the next lane's request is sent."""

Result = Response | NoResponse | BaseException
"""Result of a request; an exception is a bug of the transport."""


class Call:
    """One request that a thread is sending."""

    def __init__(self, request: Request, timeout_seconds: float, exchange: Exchange | None) -> None:
        self.request = request
        self.timeout_seconds = timeout_seconds
        self._started = monotonic()
        self.exchange = exchange
        self.is_abandoned = False

    @property
    def elapsed_seconds(self) -> float:
        return monotonic() - self._started

    def abandon(self) -> None:
        """Send or wait no longer; the result is dropped."""
        self.is_abandoned = True
        exchange = self.exchange
        if exchange is not None:
            exchange.abandon()


class Exchanges:
    """Sends requests over a transport. Used by one thread."""

    def __init__(self, transport: Transport) -> None:
        self._transport: Any = transport
        self._results: SimpleQueue[tuple[Call, Result]] = SimpleQueue()
        # How many requests the transport can send at once; 0 if only one, on the caller's thread.
        self.connections: int = getattr(transport, "connections", 0)
        is_http = isinstance(transport, HttpTransport) and transport.is_direct
        self._http: HttpTransport | None = transport if is_http else None  # type: ignore[assignment]

    def start(self, request: Request, timeout_seconds: float) -> Call | Result:
        """Send a request. Returns the result if it came at once, else the call that continues."""
        if not self.connections:
            try:
                return self._transport.send(request)  # type: ignore[no-any-return]
            except BaseException as error:  # noqa: BLE001 - passed to the sender of the entry
                return error
        exchange = None
        if self._http is not None:
            exchange = self._http.begin_at_once(request, timeout_seconds=timeout_seconds)
            if exchange is not None and exchange.is_ready(min(AT_ONCE_SECONDS, timeout_seconds)):
                return self._checked(exchange.finish())
        return self._continue(Call(request, timeout_seconds, exchange))

    def start_anew(self, request: Request, timeout_seconds: float) -> Call:
        if self._http is not None:
            self._http.reset()
        return self._continue(Call(request, timeout_seconds, None))

    def receive(self, seconds: float) -> tuple[Call, Result] | None:
        """Return the next result; None if none comes in this time."""
        ends = monotonic() + seconds
        while True:
            try:
                call, result = self._results.get(timeout=max(0.0, ends - monotonic()))
            except Empty:
                return None
            if not call.is_abandoned:
                return call, self._checked(result)

    def _continue(self, call: Call) -> Call:
        Thread(target=self._finish, args=(call,), name="outbox-send", daemon=True).start()
        return call

    def _finish(self, call: Call) -> None:
        try:
            result: Result = self._send(call)
        except BaseException as error:  # noqa: BLE001 - passed to the sender of the entry
            result = error
        self._results.put((call, result))

    def _send(self, call: Call) -> Response | NoResponse:
        http, seconds = self._http, call.timeout_seconds
        if http is None:
            return self._transport.send(call.request, timeout_seconds=seconds)  # type: ignore[no-any-return]
        if call.exchange is None:
            begun = http.begin(call.request, timeout_seconds=seconds)
            if isinstance(begun, NoResponse):
                return begun
            call.exchange = begun
            if call.is_abandoned:
                begun.abandon()
        return call.exchange.finish()

    def _checked(self, result: Result) -> Result:
        if self._http is not None and isinstance(result, NoResponse):
            # The network may have changed, and other connections may be as dead.
            self._http.reset()
        return result


class Flight:
    """The sending of entries while it waits for a response, perhaps over two connections."""

    def __init__(
        self,
        claimed: Claimed,
        sending: Reading[Outcome] | Reading[Received],
        batch: BatchRequest | None = None,
    ) -> None:
        # The first of them.
        self.claimed = claimed
        # None for a single entry.
        self.batch = batch
        self.claims = (claimed,) if batch is None else tuple(part.claimed for part in batch.parts)
        self.path = claimed.entry.endpoint if batch is None else batch.path
        self._sending = sending
        self._call: Call | None = None
        # When to send the request once more on another connection; None for never.
        self.repeat_at: float | None = None
        self.repeat: Call | None = None
        # A response to the repeat that decides nothing, such as "in progress".
        self._undecided: Response | None = None
        self.started = 0.0

    def resume(self, result: Result | None) -> Request | Outcome | Received:
        """Continue the sending with a result; returns its next request, or what came of it.

        Raises what the app's functions raise.
        """
        try:
            if result is None:
                return next(self._sending)
            if isinstance(result, BaseException):
                return self._sending.throw(result)
            return self._sending.send(result)
        except StopIteration as ended:
            return ended.value  # type: ignore[no-any-return]
        except RuntimeError as error:
            # A StopIteration of the app's function, which no generator raises as it is.
            if isinstance(error.__cause__, StopIteration):
                raise error.__cause__ from None
            raise

    def wait_for(self, call: Call, started: float, repeat_at: float | None) -> None:
        self._call, self.repeat, self._undecided = call, None, None
        self.started, self.repeat_at = started, repeat_at

    def has(self, call: Call) -> bool:
        return call in (self._call, self.repeat)

    def receive(self, call: Call, result: Result) -> Result | None:
        """Return the final result; None while the other connection may bring a better one."""
        if call is self._call:
            self._call, other = None, self.repeat
            if not isinstance(result, NoResponse):
                self.abandon_calls()
                return result
        else:
            self.repeat, other = None, self._call
            if isinstance(result, Response):
                if result.status not in _UNDECIDED and result.status < _SERVER_ERROR:
                    self.abandon_calls()
                    return result
                self._undecided = result
        return None if other is not None else self._undecided or result

    def abandon(self) -> None:
        self.abandon_calls()
        self._sending.close()

    def abandon_calls(self) -> None:
        for call in (self._call, self.repeat):
            if call is not None:
                call.abandon()
        self._call = self.repeat = self.repeat_at = None
