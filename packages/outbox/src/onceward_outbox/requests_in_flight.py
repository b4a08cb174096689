"""Requests that wait for their response: of one entry, perhaps over two connections, or a batch."""

from typing import Final

from onceward_outbox.batch_request import BatchRequest
from onceward_outbox.entry import Claimed
from onceward_outbox.exchanges import Call, Result
from onceward_outbox.outcome import Outcome
from onceward_outbox.sender import Sending
from onceward_outbox.transport import NoResponse, Request, Response

__all__ = ["BatchInFlight", "RequestInFlight"]

_UNDECIDED: Final = frozenset({401, 408, 409, 425, 429})
"""Responses to a repeated request that say nothing about the first one, which may still run."""

_SERVER_ERROR: Final = 500


class RequestInFlight:
    """The sending of an entry while it waits for a response, perhaps over two connections."""

    def __init__(self, claimed: Claimed, sending: Sending) -> None:
        self.claimed = claimed
        self.claims = (claimed,)
        self._sending = sending
        self._call: Call | None = None
        # When to send the request once more on another connection; None for never.
        self.repeat_at: float | None = None
        self.repeat: Call | None = None
        # A response to the repeat that decides nothing, such as "in progress".
        self._undecided: Response | None = None
        self.started = 0.0

    def resume(self, result: Result | None) -> Request | Outcome:
        """Continue the sending with a result; returns its next request, or its outcome.

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
        """Wait for the response to a request."""
        self._call, self.repeat, self._undecided = call, None, None
        self.started, self.repeat_at = started, repeat_at

    def has(self, call: Call) -> bool:
        """Return whether this waits for the call."""
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
        """Wait no longer."""
        self.abandon_calls()
        self._sending.close()

    def abandon_calls(self) -> None:
        """End the connections."""
        for call in (self._call, self.repeat):
            if call is not None:
                call.abandon()
        self._call = self.repeat = self.repeat_at = None


class BatchInFlight:
    """A batch while it waits for its response."""

    # It is not repeated on another connection: its keys are claimed by the first copy.
    repeat_at = None

    def __init__(self, batch: BatchRequest, call: Call, started: float) -> None:
        self.batch = batch
        self.call = call
        self.started = started
        self.claims = tuple(part.claimed for part in batch.parts)

    def has(self, call: Call) -> bool:
        """Return whether this waits for the call."""
        return call is self.call
