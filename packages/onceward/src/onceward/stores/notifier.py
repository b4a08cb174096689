"""A notifier for the workers of one process."""

import asyncio


class LocalNotifier:
    """Wakes waiting workers of this process only."""

    def __init__(self) -> None:
        self._notified = asyncio.Event()

    async def open(self) -> None:
        """Make a new event for this event loop; a pending notification is kept."""
        was_notified = self._notified.is_set()
        self._notified = asyncio.Event()
        if was_notified:
            self._notified.set()

    async def close(self) -> None:
        """Do nothing."""

    def notify(self) -> None:
        """Wake all waiting tasks."""
        self._notified.set()

    async def wait(self, seconds: float) -> bool:
        """Wait for a notification. One that came before the call counts, once."""
        if not self._notified.is_set():
            try:
                async with asyncio.timeout(max(0.0, seconds)):
                    await self._notified.wait()
            except TimeoutError:
                return False
        self._notified.clear()
        return True
