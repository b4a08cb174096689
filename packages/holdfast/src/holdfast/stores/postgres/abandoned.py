"""Commits that were cut while the server worked on them.

A COMMIT that waits for a standby goes on waiting when its client is gone, and keeps its connection
slot. Without a limit, retries would fill all slots of the server. So the store refuses work while
there are too many, which opens the circuit breaker, and looks once a second if they have ended.
"""

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

from holdfast.errors import StoreUnavailableError

__all__ = ["AbandonedCommits"]

_CHECK_SECONDS: Final = 1.0
# A process id may be used again, by an idle connection for example.
_STILL_RUNNING: Final = """
SELECT pid FROM pg_stat_activity
 WHERE pid = ANY($1::int[]) AND application_name = 'holdfast' AND state = 'active'
"""


class AbandonedCommits:
    """The backends of commits that were cut and may not have ended. May be used in any thread."""

    def __init__(self, limit: int, report: Callable[[int], None]) -> None:
        """Refuse work from ``limit`` on. ``report`` gets the number after each change."""
        self._limit = limit
        self._report = report
        self._backends: set[int] = set()
        self._check_at = 0.0
        # True from ``limit`` on, so that requests read one attribute.
        self.is_full = False

    def __len__(self) -> int:
        return len(self._backends)

    def add(self, backend: int) -> None:
        """Note the process id of a backend whose connection was cut during COMMIT."""
        self._backends.add(backend)
        self._changed()

    def clear(self) -> None:
        """Forget them: they belong to a server that was replaced."""
        self._backends = set()
        self._changed()

    def _changed(self) -> None:
        self.is_full = len(self._backends) >= self._limit
        self._report(len(self._backends))

    async def check(self, connect: Callable[[], Awaitable[Any]]) -> None:
        """Forget those that have ended, on a connection of its own.

        Raises ``StoreUnavailableError`` if too many are left, and what ``connect`` raises.
        """
        now = time.monotonic()
        if now >= self._check_at:
            self._check_at = now + _CHECK_SECONDS
            asked = self._backends
            connection = await connect()
            try:
                rows = await connection.fetch(_STILL_RUNNING, sorted(asked))
            finally:
                with suppress(OSError):
                    connection.terminate()
            running = {row[0] for row in rows}
            self._backends = {
                each for each in self._backends if each in running or each not in asked
            }
            self._changed()
        if self.is_full:
            raise StoreUnavailableError(
                f"{len(self._backends)} commits of this process are still waiting on the server, "
                "for a synchronous standby that is absent, or because it does not respond",
                reason="commits_waiting",
            )
