"""Renews the leases of claims while their entries are sent."""

import logging
from threading import Event as Flag
from threading import Thread
from typing import Self

from onceward_outbox.entry import Claimed
from onceward_outbox.errors import OncewardError
from onceward_outbox.queue import OutboxQueue

__all__ = ["LeaseRenewer"]

_log = logging.getLogger(__name__)


class LeaseRenewer:
    """Renews the leases of the claims it holds, three times per lease, on a thread."""

    def __init__(self, queue: OutboxQueue) -> None:
        self._queue = queue
        self._held: tuple[Claimed, ...] = ()
        self._ended = Flag()
        self._every_seconds = queue.settings.lease_seconds / 3
        self._thread = Thread(target=self._run, name="outbox-lease", daemon=True)

    def hold(self, claims: tuple[Claimed, ...]) -> None:
        """Renew these claims from now on, and no others."""
        self._held = claims

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._every_seconds):
            self._renew_all()

    def _renew_all(self) -> None:
        if not self._held:
            return
        try:
            # Without those whose outcome was just recorded, or that another process has: recording
            # finds out.
            self._queue.renew_all(self._held)
        except OncewardError:
            _log.warning("leases could not be renewed", exc_info=True)
