"""Commits that were cut while the server worked on them.

A COMMIT that waits for a standby goes on waiting when its client is gone, and keeps its connection
slot. Without a limit, retries would fill all slots of the server. So the store refuses work while
there are too many, which opens the circuit breaker, and looks once a second if they have ended.
"""

import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, Final

from onceward.errors import StoreUnavailableError

__all__ = ["STILL_RUNNING", "AbandonedCommits"]

_CHECK_SECONDS: Final = 1.0
# If a store's connections have no limit: half of the default of the stores with their own pool.
_LIMIT: Final = 8
# Which of the backends are left. A process id may be used again, by another app or an idle
# connection for example.
STILL_RUNNING: Final = """
SELECT pid FROM pg_stat_activity
 WHERE pid = ANY($1::int[]) AND state = 'active'
   AND application_name = current_setting('application_name')
"""


class AbandonedCommits:
    """The backends of commits that were cut and may not have ended. May be used in any thread."""

    def __init__(self, connections: int | None = None) -> None:
        """Refuse work from half of ``connections`` on; as many again may wait on the server."""
        # Gets the number after each change.
        self.report: Callable[[int], None] | None = None
        self._limit = _LIMIT
        self._backends: set[int] = set()
        self._check_at = 0.0
        # True from the limit on, so that requests read one attribute.
        self.is_full = False
        self.limit_to_half_of(connections)

    def __len__(self) -> int:
        return len(self._backends)

    def limit_to_half_of(self, connections: int | None) -> None:
        """Refuse work from half of ``connections`` on; None is no limit of connections."""
        self._limit = _LIMIT if connections is None else max(1, connections // 2)

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
        if self.report is not None:
            self.report(len(self._backends))

    async def check(self, connect: Callable[[], Awaitable[Any]]) -> None:
        """Forget those that have ended, on a connection of its own.

        Raises ``StoreUnavailableError`` if too many are left, and what ``connect`` raises.
        """

        async def read(asked: list[int]) -> Any:
            connection = await connect()
            try:
                return await connection.fetch(STILL_RUNNING, asked)
            finally:
                with suppress(OSError):
                    connection.terminate()

        await self.check_by(read)

    async def check_by(self, read: Callable[[list[int]], Awaitable[Iterable[Any]]]) -> None:
        """Do the same with ``read``, which runs ``STILL_RUNNING`` with its argument."""
        if self._is_due():
            asked = self._backends
            self._forget_ended(asked, await read(sorted(asked)))
        self._refuse_if_full()

    def check_blocking(self, read: Callable[[list[int]], Iterable[Any]]) -> None:
        """Do the same with a driver that blocks."""
        if self._is_due():
            asked = self._backends
            self._forget_ended(asked, read(sorted(asked)))
        self._refuse_if_full()

    def _is_due(self) -> bool:
        now = time.monotonic()
        if now < self._check_at:
            return False
        self._check_at = now + _CHECK_SECONDS
        return True

    def _forget_ended(self, asked: set[int], rows: Iterable[Any]) -> None:
        running = {row[0] for row in rows}
        self._backends = {each for each in self._backends if each in running or each not in asked}
        self._changed()

    def _refuse_if_full(self) -> None:
        if self.is_full:
            raise StoreUnavailableError(
                f"{len(self._backends)} commits of this process are still waiting on the server, "
                "for a synchronous standby that is absent, or because it does not respond",
                reason="commits_waiting",
            )
