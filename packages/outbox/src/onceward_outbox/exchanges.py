"""HTTP exchanges of a drain: several at once, each on its own connection.

A request whose response comes at once is sent on the drain's thread, at the cost of a plain send.
One that takes longer is finished by a thread of its own, which only does HTTP.
"""

from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any, Final

from onceward_outbox.transport import (
    Exchange,
    HttpTransport,
    NoResponse,
    Request,
    Response,
    Transport,
)

__all__ = ["Call", "Exchanges", "Result"]

AT_ONCE_SECONDS: Final = 0.02
"""How long to wait for a response before the next lane's request is sent."""

Result = Response | NoResponse | BaseException
"""What came of a request; an exception is a bug of the transport."""


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
        """The time since the request was sent."""
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
        """Send a request on a new connection."""
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
