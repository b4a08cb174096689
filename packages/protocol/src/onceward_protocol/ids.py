"""Random and time-ordered ids from the randomness of the operating system."""

import os
from datetime import datetime
from typing import Final

from onceward_protocol.uuid_format import format_uuid

__all__ = ["new_id", "new_request_id", "new_uuid4"]

_PAGE_BYTES: Final = 4096
# The digit that carries the variant of RFC 9562 keeps its two random bits.
_VARIANTS: Final = {f"{digit:x}": "89ab"[digit & 3] for digit in range(16)}


class _Entropy:
    """Random digits, read from the system in pages: a system call per id would release the GIL.

    Thread-safe: ``next`` on a list iterator is atomic. Two threads that find the page empty at
    the same time read a page each. A forked child starts with a new page.
    """

    def __init__(self) -> None:
        self._pieces = iter(list[str]())
        os.register_at_fork(after_in_child=self._turn_page)

    def take(self) -> str:
        """Return 16 fresh random bytes as 32 hexadecimal digits."""
        piece = next(self._pieces, None)
        return self._turn_page() if piece is None else piece

    def _turn_page(self) -> str:
        """Read a new page and return its first piece."""
        page = os.urandom(_PAGE_BYTES).hex()
        pieces = iter([page[at : at + 32] for at in range(0, 2 * _PAGE_BYTES, 32)])
        first = next(pieces)
        self._pieces = pieces
        return first


_entropy: Final = _Entropy()


def new_id(now: datetime) -> str:
    """Return a UUID version 7: ids sort by the time they were made at, to the millisecond."""
    time = f"{int(now.timestamp() * 1000):012x}"
    tail = _entropy.take()
    # As ``format_uuid``, without joining the digits first: one id is made for every request.
    return f"{time[:8]}-{time[8:]}-7{tail[1:4]}-{_VARIANTS[tail[4]]}{tail[5:8]}-{tail[8:20]}"


def new_uuid4() -> str:
    """Return a random UUID, version 4."""
    return format_uuid(_entropy.take(), 4)


def new_request_id() -> str:
    """Return 32 random hexadecimal digits, for a request that came without an id."""
    return _entropy.take()
