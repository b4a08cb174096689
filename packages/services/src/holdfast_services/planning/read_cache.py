"""Answers of reads, kept in memory. Never the truth: a hit counts only for the version asked for.

Whoever reads asks the database for the current version first, which costs one probe of the primary
key, and takes a kept answer only if it has that version. So no reader, in any process, sees less
than what was acknowledged before it asked. What is saved is reading and writing out the row.
"""

from collections import OrderedDict
from typing import Final, Literal, NamedTuple

__all__ = ["Kind", "ReadCache", "ReadKey"]

Kind = Literal["project", "mission", "assignment", "dashboard"]

# Roughly what an entry takes beside its bytes.
_ENTRY_BYTES: Final = 512


class ReadKey(NamedTuple):
    """Whose, what, which. The tenant always comes first."""

    tenant: str
    kind: Kind
    id: str


class ReadCache:
    """Least recently used answers, bounded in bytes. Zero bytes switches it off."""

    def __init__(self, max_bytes: int) -> None:
        """Start empty."""
        self._max_bytes = max_bytes
        self._answers: OrderedDict[ReadKey, tuple[int, bytes]] = OrderedDict()
        self.size_bytes = 0
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        """Return how many answers are kept."""
        return len(self._answers)

    def __contains__(self, key: ReadKey) -> bool:
        """Tell whether it is worth asking for the version."""
        return key in self._answers

    def get(self, key: ReadKey, version: int) -> bytes | None:
        """Return the answer of exactly this version, or None."""
        kept = self._answers.get(key)
        if kept is None or kept[0] != version:
            self.misses += 1
            return None
        self.hits += 1
        self._answers.move_to_end(key)
        return kept[1]

    def put(self, key: ReadKey, version: int, answer: bytes) -> None:
        """Keep an answer, letting go of the least recently used; never one that is older."""
        kept = self._answers.get(key)
        if _cost(answer) > self._max_bytes or (kept is not None and kept[0] > version):
            return
        self.forget(key)
        self._answers[key] = (version, answer)
        self.size_bytes += _cost(answer)
        while self.size_bytes > self._max_bytes:
            self.forget(next(iter(self._answers)))

    def forget(self, key: ReadKey) -> None:
        """Let go of an answer that nobody can want any more: its aggregate has moved on."""
        kept = self._answers.pop(key, None)
        if kept is not None:
            self.size_bytes -= _cost(kept[1])


def _cost(answer: bytes) -> int:
    return _ENTRY_BYTES + len(answer)
