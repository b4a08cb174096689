"""A bell for the workers of one process."""

import asyncio

__all__ = ["LocalNotifier"]


class LocalNotifier:
    """Wakes whoever waits in this process, and nobody else."""

    def __init__(self) -> None:
        """Be silent."""
        self._rung = asyncio.Event()

    async def open(self) -> None:
        """Begin anew: an event stays with the event loop it was waited for in."""
        was_rung = self._rung.is_set()
        self._rung = asyncio.Event()
        if was_rung:
            self._rung.set()

    async def close(self) -> None:
        """Do nothing."""

    def notify(self) -> None:
        """Wake whoever waits."""
        self._rung.set()

    async def wait(self, seconds: float) -> bool:
        """Wait for a ring. One that came before counts, once."""
        if not self._rung.is_set():
            try:
                async with asyncio.timeout(max(0.0, seconds)):
                    await self._rung.wait()
            except TimeoutError:
                return False
        self._rung.clear()
        return True
