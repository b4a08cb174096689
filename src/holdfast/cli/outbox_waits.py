"""Shorter waits for a drain of ``holdfast outbox``. The rest of each profile's rules stays."""

from dataclasses import replace
from typing import Final

from holdfast.core.entry import Entry
from holdfast.core.retry import DEVICE, RetryPolicy
from holdfast.device.dispatch import Dispatcher
from holdfast.device.drain import Drain
from holdfast.device.exchange import Transport
from holdfast.device.queue import OutboxQueue
from holdfast.device.sending import Token

__all__ = ["HastyDrain"]

_CEILING: Final = DEVICE.ceiling_seconds / DEVICE.first_seconds
"""How many times the first wait the longest is."""


class HastyDrain(Drain):
    """A drain that waits less between tries, and gives up when any other would.

    Not the ``retry`` of ``Drain``: one policy for all profiles would have the attempts of one of
    them for all, and entries of the others would never fail, or fail where they should not.
    """

    def __init__(
        self, queue: OutboxQueue, transport: Transport, token: Token, *, first_seconds: float
    ) -> None:
        """Take what to drain, and how long to wait before the second try."""
        super().__init__(queue, transport, token)
        self._dispatcher = _Hasty(
            queue,
            transport,
            token,
            merge=None,
            at_send=None,
            retry=None,
            clock=self._clock,
            fault_points=None,
        )
        self._dispatcher.first_seconds = first_seconds


class _Hasty(Dispatcher):
    first_seconds = DEVICE.first_seconds

    def _policy(self, entry: Entry) -> RetryPolicy:
        return replace(
            super()._policy(entry),
            first_seconds=self.first_seconds,
            ceiling_seconds=self.first_seconds * _CEILING,
        )
