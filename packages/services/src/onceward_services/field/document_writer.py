"""Writes documents of one kind in the transaction of a guarded request."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

from onceward import Execution, Onceward
from onceward.errors import NotFoundError
from onceward.guard.request_body import LARGE_BODY_BYTES
from onceward_protocol.ids import new_uuid4
from onceward_services.field.model import Kind, check_size, encode, references
from onceward_services.field.repository import (
    Change,
    Item,
    add,
    add_next,
    begin_change,
    change,
    find,
    next_change,
    remove,
)
from onceward_services.streams import StreamNotifier

__all__ = ["DocumentWriter", "Fields"]

Fields = dict[str, Any]


class DocumentWriter:
    """Every write locks the user's counter first, so that numbers follow the order of commits."""

    def __init__(
        self, onceward: Onceward, notifier: StreamNotifier, kind: Kind, noun: str, max_bytes: int
    ) -> None:
        """``noun`` is the singular of the kind, for error messages."""
        self._clock = onceward.clock
        self._bodies = onceward.runtime.bodies
        self._has_functions = onceward.store.name == "postgresql"
        self._notifier = notifier
        self._kind = kind
        self._noun = noun
        self._max_bytes = max_bytes

    async def encode(self, run: Execution, old_bytes: int, work: Callable[[], Fields]) -> str:
        """Encode what ``work`` returns, a large document in a thread, and check its size."""
        size = old_bytes + len(run.request.body)
        if size <= LARGE_BODY_BYTES:
            document = encode(work())
        else:
            document = await self._bodies.run(size, lambda: encode(work()))
        check_size(document, self._max_bytes)
        return document

    async def add(
        self, run: Execution, fields: Fields, document: str, occurred_at: datetime | None
    ) -> Item:
        """Insert a document. Raises ``NotFoundError`` if it refers to one that does not exist."""
        tx, tenant = run.transaction, run.request.principal.tenant
        now, item_id, referred = self._clock.now(), new_uuid4(), references(self._kind, fields)
        run.after_commit(lambda: self._notifier.notify(tenant))
        if self._has_functions:
            added = await add_next(
                tx,
                tenant,
                self._kind,
                item_id=item_id,
                document=document,
                now=now,
                epoch=run.database_epoch,
                occurred_at=occurred_at,
                references=referred,
            )
            if isinstance(added, str):
                raise _no_document(added)
            return added
        at = await next_change(tx, tenant, now, run.database_epoch)
        await self.check_references(run, fields)
        return await add(
            tx,
            tenant,
            self._kind,
            item_id=item_id,
            document=document,
            at=at,
            occurred_at=occurred_at,
        )

    async def begin(self, run: Execution, item_id: str) -> tuple[Change, Item]:
        """Return the next change and the current version. Raises ``NotFoundError``."""
        tx, tenant = run.transaction, run.request.principal.tenant
        now, epoch = self._clock.now(), run.database_epoch
        run.after_commit(lambda: self._notifier.notify(tenant))
        if self._has_functions:
            at, item = await begin_change(tx, tenant, self._kind, item_id, now=now, epoch=epoch)
        else:
            at = await next_change(tx, tenant, now, epoch)
            item = await find(tx, tenant, self._kind, item_id)
        if item is None:
            raise NotFoundError(f"there is no such {self._noun}")
        return at, item

    async def check_references(self, run: Execution, fields: Fields) -> None:
        """Raise ``NotFoundError`` if a field refers to a document that does not exist."""
        for field, of_kind, item_id in references(self._kind, fields):
            tenant = run.request.principal.tenant
            if await find(run.transaction, tenant, of_kind, item_id) is None:
                raise _no_document(field)

    async def change(self, run: Execution, item: Item, document: str, at: Change) -> Item:
        """Save the next version of a document."""
        tenant = run.request.principal.tenant
        return await change(
            run.transaction, tenant, self._kind, item=item, document=document, at=at
        )

    async def remove(self, run: Execution, item: Item, at: Change) -> None:
        """Replace a document by a tombstone."""
        await remove(run.transaction, run.request.principal.tenant, self._kind, item, at)


def _no_document(field: str) -> NotFoundError:
    return NotFoundError(f"{field}: there is no such document")
