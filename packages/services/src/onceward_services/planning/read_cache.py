"""An in-memory cache of response bodies by version.

A reader first reads the current version from the database, which is one lookup by primary key, and
uses a cached body only if it has that version. So no reader in any process sees less than what was
acknowledged before its request. The cache saves reading and encoding the row.
"""

from collections import OrderedDict
from typing import Final, Literal, NamedTuple

__all__ = ["Kind", "ReadCache", "ReadKey"]

Kind = Literal["project", "mission", "assignment", "dashboard"]

# The approximate overhead of an entry.
_ENTRY_BYTES: Final = 512


class ReadKey(NamedTuple):
    """Identifies an aggregate."""

    tenant: str
    kind: Kind
    id: str


class ReadCache:
    """An LRU cache limited in bytes. With ``max_bytes=0`` it stores nothing."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[ReadKey, tuple[int, bytes]] = OrderedDict()
        self.size_bytes = 0
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: ReadKey) -> bool:
        return key in self._entries

    def get(self, key: ReadKey, version: int) -> bytes | None:
        """Return the body of exactly this version, or None."""
        entry = self._entries.get(key)
        if entry is None or entry[0] != version:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return entry[1]

    def put(self, key: ReadKey, version: int, body: bytes) -> None:
        """Add a body, evicting the least recently used; never replaces a newer version."""
        entry = self._entries.get(key)
        if _cost(body) > self._max_bytes or (entry is not None and entry[0] > version):
            return
        self.remove(key)
        self._entries[key] = (version, body)
        self.size_bytes += _cost(body)
        while self.size_bytes > self._max_bytes:
            self.remove(next(iter(self._entries)))

    def remove(self, key: ReadKey) -> None:
        """Remove the body of an aggregate that has changed."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.size_bytes -= _cost(entry[1])


def _cost(body: bytes) -> int:
    return _ENTRY_BYTES + len(body)
