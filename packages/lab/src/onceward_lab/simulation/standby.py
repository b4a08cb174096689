"""The synchronous standby of the server's database, and its promotion.

While it is away, a COMMIT is applied on the primary and waits: it is not acknowledged. Either the
standby comes back and gets everything, or it is promoted, and what it has not got is lost. So what
was acknowledged is never lost.
"""

import asyncio
from typing import Final

from onceward.errors import CommitUnknownError
from onceward.stores.replication import unconfirmed
from onceward_lab.simulation.database import Contents, ServerDatabase

__all__ = ["Standby"]

_POLL_SECONDS: Final = 0.1
_COMMIT_SECONDS: Final = 5.0
"""How long a COMMIT may wait before its connection is cut."""

_CONFIRM_SECONDS: Final = 0.001


class Standby:
    """A copy of the database that has everything, unless it is away."""

    def __init__(self, database: ServerDatabase) -> None:
        self._database = database
        # What it has while it is away.
        self._contents: Contents | None = None

    @property
    def is_away(self) -> bool:
        """True while commits are not replicated."""
        return self._contents is not None

    def leave(self) -> None:
        """Get nothing from now on."""
        if self._contents is None:
            self._contents = self._database.back_up()

    def come_back(self) -> None:
        """Get everything that is committed on the primary."""
        self._contents = None

    def promote(self, epoch: str) -> set[str] | None:
        """Replace the primary; returns the effects that are lost, None while a process writes.

        The next standby begins with the same contents.
        """
        if self._contents is None:
            return set()
        kept = {action for _, _, action in self._contents["effects"]}
        rows = self._database.reader.execute("SELECT action_id FROM effects").fetchall()
        if not self._database.restore(self._contents, epoch):
            return None
        self._contents = None
        return {action for (action,) in rows} - kept

    async def wait_for_commit(self) -> None:
        """Return once a commit that was applied is replicated.

        Raises ``CommitUnknownError`` if that takes too long: the connection is cut.
        """
        contents = self._contents
        left = _COMMIT_SECONDS
        while self._contents is not None and left > 0:
            await asyncio.sleep(_POLL_SECONDS)
            left -= _POLL_SECONDS
        if contents is not None:
            # Also after a promotion: the connection was to the old primary.
            raise CommitUnknownError("the standby did not confirm the commit", is_cut=True)

    async def confirm(self) -> None:
        """Commit something, as is done before a record that was read is replayed."""
        await asyncio.sleep(_CONFIRM_SECONDS)
        if self.is_away:
            raise unconfirmed("the standby is away")
