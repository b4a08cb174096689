"""The route of changes: documents and tombstones of all kinds in the order of their commits."""

import re
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated, Any, Final, NamedTuple

from fastapi import APIRouter, Query, Request, Response

from onceward import Onceward
from onceward.errors import BodyInvalidError, ServiceError
from onceward.ports import Store
from onceward_services.auth import CurrentPrincipal
from onceward_services.event_stream import POLL_SECONDS
from onceward_services.field.repository import ChangePage, Item, list_branches, list_changes
from onceward_services.openapi import errors
from onceward_services.settings import Settings
from onceward_services.streams import StreamNotifier, server_is_stopping, wait_for_wake_up

__all__ = ["CURSOR_GONE", "Cursor", "add_changes", "parse_cursor", "read_changes"]

CURSOR_GONE: Final = "changes.cursor_gone"

_MAX_LIMIT: Final = 500
# A page ends with the document that exceeds this, so that its size is bounded.
_PAGE_BYTES: Final = 4 * 1024 * 1024
# The branch of users whose last change was made before there were branches.
_FIRST_BRANCH: Final = "0"
_CURSOR: Final = re.compile(r"([0-9a-f]{1,16})-(0|[1-9][0-9]{0,17})")

_PAGE: Final = {
    "type": "object",
    "required": ["items", "next"],
    "properties": {
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["kind", "id", "version", "deleted", "resource"],
                "properties": {
                    "kind": {"type": "string", "enum": ["activities", "contacts", "expenses"]},
                    "id": {"type": "string"},
                    "version": {"type": "integer"},
                    "deleted": {"type": "boolean"},
                    "resource": {
                        "anyOf": [{"type": "object"}, {"type": "null"}],
                        "description": "The document as its own path returns it; null if deleted.",
                    },
                },
            },
        },
        "next": {"type": "string", "description": "The cursor for the next request."},
    },
}
_GONE: Final[dict[str, Any]] = {
    "description": f"The cursor is of a history that the database has lost: `{CURSOR_GONE}`",
    "content": {
        "application/problem+json": {"schema": {"$ref": "#/components/schemas/OncewardProblem"}}
    },
}


class Cursor(NamedTuple):
    """A position in a user's history: everything up to a number, in a branch that has it."""

    branch: str
    seq: int

    def __str__(self) -> str:
        """Return the text of the cursor, which needs no escaping in a URL."""
        return f"{self.branch}-{self.seq}"


_START: Final = Cursor(_FIRST_BRANCH, 0)


def parse_cursor(text: str | None) -> Cursor:
    """Parse the ``next`` of a response; None is the beginning. Raises ``BodyInvalidError``."""
    if text is None:
        return _START
    found = _CURSOR.fullmatch(text)
    if found is None:
        raise BodyInvalidError(
            "after should be the `next` of an earlier response", details={"field": "after"}
        )
    return Cursor(found[1], int(found[2]))


async def read_changes(
    store: Store, tenant: str, after: Cursor, *, limit: int
) -> tuple[ChangePage, Cursor]:
    """Return the changes after a cursor and the next cursor.

    Raises ``ServiceError`` (410) if the history behind the cursor is not the database's any more.
    """
    page = await list_changes(store, tenant, after=after.seq, limit=limit, most_bytes=_PAGE_BYTES)
    if after.seq > page.last_seq or (
        after.seq and after.branch != page.branch and after.seq > await _end(store, tenant, after)
    ):
        raise ServiceError(
            410,
            CURSOR_GONE,
            "the database has lost changes that this cursor includes: fetch all changes again, "
            "without a cursor",
        )
    seq = page.items[-1][1].seq if page.items else after.seq
    return page, Cursor(page.branch or _FIRST_BRANCH, seq)


async def _end(store: Store, tenant: str, cursor: Cursor) -> int:
    """Return the last number of the cursor's branch that is in the current history too."""
    branches = await list_branches(store, tenant)
    starts = {branch: start for start, branch in branches}
    began = -1 if cursor.branch == _FIRST_BRANCH else starts.get(cursor.branch)
    if began is None:
        return 0  # the branch itself is lost
    return min((start for start in starts.values() if start > began), default=cursor.seq)


def add_changes(
    api: APIRouter, onceward: Onceward, settings: Settings, notifier: StreamNotifier
) -> None:
    """Add the route of changes. ``notifier`` wakes waiting requests of this process."""

    @api.get(
        "/api/v1/changes",
        summary="List changes",
        operation_id="list_changes",
        description="Activities, contacts and expenses in the order of their commits, each once, "
        "in its current version; a deleted one is a tombstone. `next` is always a cursor: a device "
        "that continues from it misses nothing. With `wait` the response is sent when there is a "
        "change, or after that time with no items.",
        responses={
            200: {"content": {"application/json": {"schema": _PAGE}}},
            **errors(400, 401, 422, 429, 503),
            410: _GONE,
        },
    )
    async def changes(
        caller: CurrentPrincipal,
        request: Request,
        after: Annotated[
            str | None, Query(description="`next` of the previous response; absent at first.")
        ] = None,
        limit: Annotated[int, Query(ge=1, le=_MAX_LIMIT)] = 100,
        wait: Annotated[
            float,
            Query(
                ge=0,
                allow_inf_nan=False,
                description="Seconds to wait for a change. The server may respond earlier.",
            ),
        ] = 0,
    ) -> Response:
        cursor = parse_cursor(after)
        clock = onceward.clock
        until = clock.monotonic() + min(wait, settings.field_changes_wait_seconds)
        with ExitStack() as waiting:
            if wait:
                close = notifier.open_stream(
                    caller, settings.field_changes_waiting, "waiting requests"
                )
                waiting.callback(close)
            wake_up = waiting.enter_context(notifier.listen(caller.tenant))
            while True:
                wake_up.clear()  # before reading, so that a change made meanwhile sets it again
                page, following = await read_changes(
                    onceward.store, caller.tenant, cursor, limit=limit
                )
                left = until - clock.monotonic()
                if page.items or left <= 0 or server_is_stopping():
                    break
                if await request.is_disconnected():
                    break
                seconds = min(left, POLL_SECONDS)
                await wait_for_wake_up(wake_up, seconds, server_is_stopping)
        return Response(_page_text(page.items, following), media_type="application/json")


def _page_text(items: Sequence[tuple[str, Item]], following: Cursor) -> str:
    """Return the JSON of a page. Documents are not decoded."""
    texts = ",".join(
        f'{{"kind":"{kind}","id":"{item.id}","version":{item.version},'
        + (
            '"deleted":true,"resource":null}'
            if item.is_deleted
            else f'"deleted":false,"resource":{item.as_text()}}}'
        )
        for kind, item in items
    )
    return f'{{"items":[{texts}],"next":"{following}"}}'
