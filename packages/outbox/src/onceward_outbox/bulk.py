"""Decisions about many entries at once: retry or discard all that failed for one reason."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Final

import msgspec

from onceward_outbox import resolution
from onceward_outbox.entry import Entry, Reason, Status
from onceward_outbox.transaction import Transaction

__all__ = ["Filter", "discard_all", "retry_all"]

Write = Callable[[str], AbstractContextManager[Transaction]]
"""Begins a transaction of its own for the named operation."""

_BATCH: Final = 500
"""Entries per commit."""


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Which entries of a user are meant. None matches every value."""

    user_id: str
    statuses: tuple[Status, ...] = (Status.FAILED,)
    reason: Reason | None = None
    code: str | None = None

    def page(self, tx: Transaction, after: int) -> list[Entry]:
        """Return the next entries that match, after a sequence number."""
        return tx.entries(
            "stuck_like",
            user_id=self.user_id,
            statuses=msgspec.json.encode(self.statuses).decode(),
            reason=self.reason,
            code=self.code,
            after=after,
            limit=_BATCH,
        )


def retry_all(write: Write, wanted: Filter, *, dry_run: bool) -> list[Entry]:
    """Retry the failed entries that match, except those that wait for one that will not succeed."""

    def retry(tx: Transaction, found: Iterable[Entry]) -> Iterator[Entry]:
        # Decided for the whole batch first, so that a dry run finds the same ones.
        ready = [entry for entry in found if not tx.rows("dead_waits", id=entry.id)]
        for entry in ready:
            yield entry if dry_run else resolution.retry(tx, entry.id)

    return _in_batches(write, "retry_all", wanted, retry)


def discard_all(
    write: Write, wanted: Filter, *, with_dependents: bool, dry_run: bool
) -> list[Entry]:
    """Discard the entries that match."""

    def discard(tx: Transaction, found: Iterable[Entry]) -> Iterator[Entry]:
        for entry in found:
            # One that depends on an earlier one may have been discarded with it.
            if dry_run or tx.entry(entry.id).status is Status.DISCARDED:
                yield entry
            else:
                yield resolution.discard(
                    tx, entry.id, reason=Reason.PERSON, with_dependents=with_dependents
                )

    return _in_batches(write, "discard_all", wanted, discard)


def _in_batches(
    write: Write,
    operation: str,
    wanted: Filter,
    decide: Callable[[Transaction, Iterable[Entry]], Iterable[Entry]],
) -> list[Entry]:
    done: list[Entry] = []
    after, has_more = 0, True
    while has_more:
        with write(operation) as tx:
            page = wanted.page(tx, after)
            done += decide(tx, page)
        has_more = len(page) == _BATCH
        after = page[-1].sequence_number if page else after
    return done
