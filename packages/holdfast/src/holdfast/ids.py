"""UUIDs and request ids, from time and the operating system's randomness."""

import os
from datetime import datetime
from typing import Final

__all__ = ["new_id", "new_request_id", "new_uuid4"]


class _Entropy:
    """Random digits, fetched by the page: a system call per id would also give up the GIL.

    A page is an iterator, and to take its next piece is one step that no other thread can come
    between. Two that find it empty at once get a page each.
    """

    def __init__(self) -> None:
        self._pieces = iter(list[str]())
        os.register_at_fork(after_in_child=self._turn_page)

    def take(self) -> str:
        """Return 16 fresh random bytes in hexadecimal."""
        piece = next(self._pieces, None)
        return self._turn_page() if piece is None else piece

    def _turn_page(self) -> str:
        """Begin a new page, and take its first piece."""
        page = os.urandom(_PAGE_BYTES).hex()
        pieces = iter([page[at : at + 32] for at in range(0, 2 * _PAGE_BYTES, 32)])
        first = next(pieces)
        self._pieces = pieces
        return first


_PAGE_BYTES: Final = 4096
_entropy: Final = _Entropy()


def new_id(now: datetime) -> str:
    """Make an id that grows with time (UUID version 7), so that pages by id are pages by time."""
    millis = int(now.timestamp() * 1000)
    tail = _entropy.take()
    head = f"{millis:012x}"
    variant = "89ab"[int(tail[4], 16) & 3]
    return f"{head[:8]}-{head[8:]}-7{tail[1:4]}-{variant}{tail[5:8]}-{tail[8:20]}"


def new_uuid4() -> str:
    """Make an id of chance alone (UUID version 4)."""
    digits = _entropy.take()
    variant = "89ab"[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"


def new_request_id() -> str:
    """Make an id for a request that came without one."""
    return _entropy.take()
