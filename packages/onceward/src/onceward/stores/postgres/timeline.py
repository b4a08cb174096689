"""Which of two servers with the same data was promoted last.

A promotion begins a new timeline. A primary that was frozen or cut off while its standby was
promoted still believes that it is the primary when it is back. Once a process has seen the newer
timeline, it does not use a connection to a server on an older one.
"""

import threading
from typing import Any, Final

__all__ = ["READ_TIMELINE", "ReplacedServerError", "Timelines", "replaced"]

# A server in recovery writes no WAL: it has no timeline of its own.
READ_TIMELINE: Final = """
SELECT (SELECT system_identifier FROM pg_control_system())::text,
       CASE WHEN NOT pg_is_in_recovery() THEN
         ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::bigint
       END
"""
_PARTS_OF_IDENTITY: Final = 2


class ReplacedServerError(ConnectionError):
    """The server is on an older timeline than one that was seen before."""


class Timelines:
    """The newest timeline of each cluster that was seen. May be used in any thread."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def is_empty(self) -> bool:
        """Whether no timeline was seen yet."""
        return not self._newest

    def see(self, system: str, timeline: int) -> bool:
        """Note a timeline; return False if a newer one was seen."""
        with self._lock:
            newest = self._newest.get(system, 0)
            self._newest[system] = max(newest, timeline)
        return timeline >= newest

    def see_identity(self, identity: str | None) -> bool:
        """Do the same with the identity of ``read_epoch``, which may have no timeline."""
        parts = [] if identity is None else identity.split("/")
        if len(parts) < _PARTS_OF_IDENTITY or not parts[0].isdigit():
            return True
        return self.see(parts[0], int(parts[1], 16))

    def check(self, row: Any) -> int:
        """Return the timeline that ``READ_TIMELINE`` has read; 0 if there is none.

        Raises ``ReplacedServerError`` if a newer one was seen.
        """
        system, timeline = row
        if timeline is None:
            return 0
        if not self.see(str(system), int(timeline)):
            raise replaced(int(timeline))
        return int(timeline)


def replaced(timeline: int | None = None) -> ReplacedServerError:
    """Return the error for a server that another one has replaced."""
    place = "an older timeline" if timeline is None else f"timeline {timeline}"
    return ReplacedServerError(
        f"this server is on {place}, and a newer one was seen: another server was promoted. After "
        "a restore of older files, restart Onceward"
    )
