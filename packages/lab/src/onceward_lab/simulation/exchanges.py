"""The requests of a drain in virtual time: one after the other, or several at once."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from onceward_outbox.exchanges import Call, Exchanges, Result
from onceward_outbox.transport import NoResponse, Request, Response

__all__ = ["Sends", "Sent", "SimulatedCall", "SimulatedExchanges", "SimulatedTransport"]


class Sent:
    """A request that a process has sent."""

    def __init__(
        self, number: int, request: Request, actions: list[str], *, is_repeat: bool
    ) -> None:
        self.number = number
        self.request = request
        # Of a batch, one per item.
        self.actions = actions
        # On a second connection, while the first one is silent.
        self.is_repeat = is_repeat


class Sends(Protocol):
    """The process that sends."""

    # Requests at once; 0 for one at a time.
    connections: int

    def monotonic(self) -> float:
        """Return the device's monotonic clock."""

    def begin_send(self, request: Request, *, is_repeat: bool = False) -> Sent:
        """Check a request and note it."""

    def carry(self, sent: Sent, on_result: Callable[[Response | NoResponse], None]) -> None:
        """Give a request to the network; only the first call of ``on_result`` counts."""

    def end_send(self, sent: Sent, result: Response | NoResponse | None) -> None:
        """Note the result of a request, as the drain gets it; None if it does not wait for it."""

    def wait_for_result(self, seconds: float | None) -> None:
        """Wait until ``wake_for_result`` is called, or the time is over."""

    def wake_for_result(self) -> None:
        """End the wait for a result."""

    def later(self, seconds: float, step: Callable[[], None]) -> None:
        """Call a function after some virtual seconds."""


class SimulatedTransport:
    """The transport of a drain."""

    def __init__(self, process: Sends) -> None:
        self.process = process
        self.connections = process.connections

    def send(self, request: Request) -> Response | NoResponse:
        """Send a request and wait for its response."""
        process = self.process
        results: list[Response | NoResponse] = []

        def on_result(result: Response | NoResponse) -> None:
            results.append(result)
            process.wake_for_result()

        sent, is_over = process.begin_send(request), False
        process.carry(sent, on_result)
        try:
            while not results:
                process.wait_for_result(None)
            is_over = True
        finally:
            if not is_over:  # the process was killed
                process.end_send(sent, None)
        process.end_send(sent, results[0])
        return results[0]


class SimulatedCall(Call):
    """One request, while the drain does other things."""

    def __init__(self, process: Sends, sent: Sent, timeout_seconds: float) -> None:
        super().__init__(sent.request, timeout_seconds, None)
        self._process = process
        self.sent = sent
        self._began = process.monotonic()
        self.is_done = False

    @property
    def elapsed_seconds(self) -> float:
        """The virtual time since the request was sent."""
        return self._process.monotonic() - self._began

    def abandon(self) -> None:
        """Wait no longer; the result is dropped."""
        super().abandon()
        if not self.is_done:
            self.is_done = True
            self._process.end_send(self.sent, None)


class SimulatedExchanges(Exchanges):
    """Sends several requests at once, without threads."""

    def __init__(self, transport: Any) -> None:
        super().__init__(transport)
        self._process: Sends = transport.process
        self._arrived: deque[tuple[SimulatedCall, Response | NoResponse]] = deque()

    def start_anew(self, request: Request, timeout_seconds: float) -> Call:
        """Send a request on a new connection."""
        return self._begin(request, timeout_seconds, is_repeat=True)

    def receive(self, seconds: float) -> tuple[Call, Result] | None:
        """Return the next result; None if none comes in this time."""
        process = self._process
        ends = process.monotonic() + seconds
        while True:
            while self._arrived:
                call, result = self._arrived.popleft()
                if not call.is_done:
                    call.is_done = True
                    process.end_send(call.sent, result)
                    return call, result
            left = ends - process.monotonic()
            if left <= 0:
                return None
            process.wait_for_result(left)

    def _continue(self, call: Call) -> Call:
        return self._begin(call.request, call.timeout_seconds, is_repeat=False)

    def _begin(self, request: Request, timeout_seconds: float, *, is_repeat: bool) -> Call:
        process = self._process
        sent = process.begin_send(request, is_repeat=is_repeat)
        call = SimulatedCall(process, sent, timeout_seconds)
        arrive = partial(self._arrive, call)
        process.later(timeout_seconds, partial(arrive, NoResponse("the server took too long")))
        process.carry(sent, arrive)
        return call

    def _arrive(self, call: SimulatedCall, result: Response | NoResponse) -> None:
        if not call.is_done:  # only the first result of a call counts: receive() marks it
            self._arrived.append((call, result))
            self._process.wake_for_result()
