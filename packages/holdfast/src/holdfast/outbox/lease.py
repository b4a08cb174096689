"""Holding a claim for as long as its send takes."""

import logging
from threading import Event, Thread
from typing import Self

from holdfast.core.outbox_entry import Claimed
from holdfast.errors import ClaimLostError, HoldfastError
from holdfast.outbox.queue import OutboxQueue

__all__ = ["LeaseKeeper"]

_log = logging.getLogger(__name__)


class LeaseKeeper:
    """Renews the leases of the claims it is told to hold, three times per lease."""

    def __init__(self, queue: OutboxQueue) -> None:
        """Keep leases in this queue."""
        self._queue = queue
        self._held: tuple[Claimed, ...] = ()
        self._ended = Event()
        self._every_seconds = queue.settings.lease_seconds / 3
        self._thread = Thread(target=self._keep, name="outbox-lease", daemon=True)

    def hold(self, claims: tuple[Claimed, ...]) -> None:
        """Keep these claims from now on, and no others."""
        self._held = claims

    def __enter__(self) -> Self:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Let go."""
        self._ended.set()
        self._thread.join()

    def _keep(self) -> None:
        while not self._ended.wait(self._every_seconds):
            self._renew_all()

    def _renew_all(self) -> None:
        for held in self._held:
            try:
                self._queue.renew(held)
            except ClaimLostError:
                # Its outcome was recorded this moment, or another process has it: whoever
                # records finds out.
                continue
            except HoldfastError:
                _log.warning("a lease could not be renewed", exc_info=True)
