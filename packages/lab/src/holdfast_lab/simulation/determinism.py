"""What the product takes from the machine without asking, given by the seed while this lasts.

Clocks, transports and fault points are ports and need nothing of this. Ids are made of the
system's randomness, waits of Python's own, and the drain keeps its leases with a thread.
"""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, Self

from holdfast import ids
from holdfast.jobs.engines import relay
from holdfast.outbox import drain, lease_renewer, schema
from holdfast.stores.migrations import load_migrations
from holdfast.stores.sqlite import store

__all__ = ["SteppedKeeper", "possessed"]

_LOOK_SECONDS: Final = 20.0
_load_steps: Final = cache(schema.load_steps)
_load_migrations: Final = cache(load_migrations)


@contextmanager
def possessed(chance: random.Random) -> Iterator[None]:
    """Let the seed decide what chance decides, and leases be kept by the loop."""
    places: tuple[tuple[Any, str, Any], ...] = (
        (os, "urandom", chance.randbytes),
        (drain, "LeaseRenewer", SteppedKeeper),
        # A virtual hour has many seconds, and at each the relay would look and find nothing.
        (relay, "_LOOK_SECONDS", _LOOK_SECONDS),
        # Read once: a process that starts again reads the same files.
        (schema, "load_steps", _load_steps),
        (store, "load_migrations", _load_migrations),
    )
    before = [getattr(module, name) for module, name, _ in places]
    state = random.getstate()
    for module, name, ours in places:
        setattr(module, name, ours)
    random.seed(chance.getrandbits(64))
    ids._entropy._turn_page()  # noqa: SLF001 - else the page of the run before would be used up
    try:
        yield
    finally:
        for (module, name, _), theirs in zip(places, before, strict=True):
            setattr(module, name, theirs)
        random.setstate(state)
        ids._entropy._turn_page()  # noqa: SLF001


class SteppedKeeper(lease_renewer.LeaseRenewer):
    """The keeper of leases, woken by virtual time instead of by a thread of its own."""

    def __init__(self, queue: Any) -> None:
        """Belong to a queue, which knows whose it is."""
        super().__init__(queue)
        self._is_over = False

    def __enter__(self) -> Self:
        """Begin."""
        queue: Any = self._queue
        queue.every(self._every_seconds, self._beat)
        return self

    def __exit__(self, *_: object) -> None:
        """Let go."""
        self._is_over = True

    def _beat(self) -> bool:
        """Renew once; says whether to go on."""
        if not self._is_over:
            self._renew_all()
        return not self._is_over
