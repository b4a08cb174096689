"""Makes deterministic what has no port: randomness, the lease renewer, the poll of the relay.

Clocks, transports and fault points are ports and are replaced there. Ids use ``os.urandom``, retry
delays use ``random``, and the drain renews its leases and sends requests in threads.
"""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, Self

from onceward.stores import parts
from onceward_lab.simulation.exchanges import SimulatedExchanges
from onceward_nats import relay
from onceward_outbox import database, drain, drain_run
from onceward_outbox.drain_run import LeaseRenewer
from onceward_protocol import ids
from onceward_protocol.storage.migrations import load_migrations

__all__ = ["SimulatedLeaseRenewer", "deterministic"]

_RELAY_POLL_SECONDS: Final = 20.0
_load_migrations: Final = cache(load_migrations)


@contextmanager
def deterministic(rng: random.Random) -> Iterator[None]:
    """Take all randomness from ``rng``, and renew leases as steps of the virtual loop."""
    replacements: tuple[tuple[Any, str, Any], ...] = (
        (os, "urandom", rng.randbytes),
        (drain_run, "LeaseRenewer", SimulatedLeaseRenewer),
        (drain, "Exchanges", SimulatedExchanges),
        # Polling every virtual second would be slow and find nothing.
        (relay, "_LOOK_SECONDS", _RELAY_POLL_SECONDS),
        # Read once: a restarted process would read the same files.
        (database, "load_migrations", _load_migrations),
        (parts, "load_migrations", _load_migrations),
    )
    before = [getattr(module, name) for module, name, _ in replacements]
    state = random.getstate()
    for module, name, value in replacements:
        setattr(module, name, value)
    random.seed(rng.getrandbits(64))
    ids._entropy._turn_page()  # noqa: SLF001 - drop buffered random bytes
    try:
        yield
    finally:
        for (module, name, _), value in zip(replacements, before, strict=True):
            setattr(module, name, value)
        random.setstate(state)
        ids._entropy._turn_page()  # noqa: SLF001


class SimulatedLeaseRenewer(LeaseRenewer):
    """Renews leases in virtual time, without a thread."""

    def __init__(self, queue: Any) -> None:
        super().__init__(queue)
        self._is_stopped = False

    def __enter__(self) -> Self:
        queue: Any = self._queue
        queue.every(self._every_seconds, self._renew)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopped = True

    def _renew(self) -> bool:
        """Renew once; returns whether to continue."""
        if not self._is_stopped:
            self._renew_all()
        return not self._is_stopped
