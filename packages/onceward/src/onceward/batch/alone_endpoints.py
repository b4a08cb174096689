"""Endpoints whose requests run alone for a while, or with savepoints."""

import logging
from typing import Final

from onceward.ports import Clock

_SECONDS: Final = 600.0

_log = logging.getLogger("onceward.request")


class UndoneEndpoints:
    """Endpoints of which a request had to be undone after it had written, in this process.

    Their requests get savepoints for a while.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}

    def add(self, endpoint: str) -> None:
        self._until[endpoint] = self._clock.monotonic() + _SECONDS

    def __contains__(self, endpoint: str) -> bool:
        until = self._until.get(endpoint)
        if until is not None and self._clock.monotonic() >= until:
            del self._until[endpoint]
        return endpoint in self._until


class AloneEndpoints(UndoneEndpoints):
    """Endpoints whose handlers could not share a transaction, in this process."""

    def add(self, endpoint: str) -> None:
        if endpoint not in self._until:
            _log.warning(
                "%s cannot share the transaction of a batch, so it runs alone for %d minutes: it "
                "takes long, or uses another connection. Policy(batch_alone=True) makes it so for "
                "good",
                endpoint,
                _SECONDS // 60,
            )
        super().add(endpoint)
