"""Routes of a person's own notifications: pages, a stream, and marking them as read."""

from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Header, Query, Response

from onceward.errors import BodyInvalidError
from onceward.frameworks.starlette import Caller, Run, Tx
from onceward_services.auth import CurrentPrincipal
from onceward_services.event_stream import (
    EVENT_STREAM,
    Events,
    EventStream,
    stream_events,
    token_expiry,
    wants_stream,
)
from onceward_services.openapi import errors
from onceward_services.planning.aggregates import AggregateService, json_response
from onceward_services.planning.inbox import (
    CURSOR_GONE,
    Cursor,
    Inbox,
    mark_many_read,
    mark_read,
    notification_view,
    read_inbox,
)
from onceward_services.planning.model import NotificationView, Page, ReadUpTo, ReadUpToResult
from onceward_services.planning.openapi import LIST
from onceward_services.planning.paging import Limit
from onceward_services.settings import Settings
from onceward_services.streams import StreamNotifier, server_is_stopping

__all__ = ["add_routes"]

_STREAM_PAGE: Final = 100
_GONE: Final[dict[str, Any]] = {
    "description": f"The database has lost what the cursor includes: `{CURSOR_GONE}`",
    "content": {
        "application/problem+json": {"schema": {"$ref": "#/components/schemas/OncewardProblem"}}
    },
}

After = Annotated[
    str | None,
    Query(
        max_length=100,
        description="`next` of the previous page, or the `cursor` of the last notification that "
        "was handled; absent at first.",
    ),
]
_encode = msgspec.json.Encoder().encode


def add_routes(api: APIRouter, service: AggregateService, settings: Settings) -> None:
    """Add the routes of notifications."""
    _add_reads(api, service, settings)
    onceward, policy = service.onceward, service.policy

    @api.post(
        "/notifications/{notification_id}/read",
        summary="Mark a notification as read",
        operation_id="mark_notification_read",
        description="One's own. One that is read already keeps `read_at`.",
        responses={200: {"model": NotificationView}, **errors(403, 404)},
    )
    @onceward.guard("POST /v1/notifications/{notification_id}/read", policy=policy)
    async def mark(notification_id: str, tx: Tx, caller: Caller, run: Run) -> Response:
        service.roles.check_own(run)
        inbox = Inbox(caller.tenant, caller.actor)
        row = await mark_read(tx, inbox, notification_id, onceward.clock.now())
        run.describe(resource=f"notification:{notification_id}")
        return json_response(notification_view(row))

    @api.post(
        "/notifications/read",
        summary="Mark notifications as read up to one of them",
        operation_id="mark_notifications_read",
        description="One's own, that one included; at most 1,000 of them. If `more` is true, send "
        "it again with a new key.",
        responses={200: {"model": ReadUpToResult}, **errors(403), 410: _GONE},
    )
    @onceward.guard("POST /v1/notifications/read", policy=policy)
    async def mark_many(up_to: ReadUpTo, tx: Tx, caller: Caller, run: Run) -> Response:
        service.roles.check_own(run)
        cursor = Cursor.parse(up_to.up_to, "up_to")
        inbox = Inbox(caller.tenant, caller.actor)
        marked, more = await mark_many_read(tx, inbox, cursor, onceward.clock.now())
        return json_response({"marked": marked, "more": more})


def _add_reads(api: APIRouter, service: AggregateService, settings: Settings) -> None:
    notifier = StreamNotifier()
    onceward = service.onceward

    @api.get(
        "/notifications",
        summary="List one's own notifications",
        operation_id="list_notifications",
        description="Oldest first, in the order of their commits: a reader that continues from a "
        "`cursor` misses nothing. With `Accept: text/event-stream` the response is a stream of "
        "server-sent events, which `Last-Event-ID` resumes.",
        response_model=Page[NotificationView],
        responses={
            200: {"content": {EVENT_STREAM: {"schema": {"type": "string"}}}},
            **LIST,
            **errors(429),
            410: _GONE,
        },
    )
    async def list_page(
        caller: CurrentPrincipal,
        *,
        limit: Limit = 50,
        after: After = None,
        unread: Annotated[bool, Query(description="Only those that are not read.")] = False,
        accept: Annotated[str, Header(include_in_schema=False)] = "",
        last_event_id: Annotated[str | None, Header()] = None,
    ) -> Response:
        service.roles.check_read(caller)
        inbox = Inbox(caller.tenant, caller.actor)
        if not wants_stream(accept):
            cursor = Cursor.parse(after)
            rows = await read_inbox(onceward.store, inbox, cursor, limit=limit + 1, unread=unread)
            items = [notification_view(row) for row in rows[:limit]]
            following = items[-1]["cursor"] if len(rows) > limit else None
            return json_response({"items": items, "next": following})
        cursor = _resume_after(last_event_id, after)
        close = notifier.open_stream(caller, settings.planning_notifications_streams)
        try:
            # A cursor that is gone is refused before the stream begins.
            await read_inbox(onceward.store, inbox, cursor, limit=1)
        except BaseException:
            close()
            raise

        async def read(position: Cursor) -> Events:
            rows = await read_inbox(
                onceward.store, inbox, position, limit=_STREAM_PAGE, unread=unread
            )
            found = [(Cursor.of(row), _encode_event(notification_view(row))) for row in rows]
            return Events(found, has_more=len(rows) == _STREAM_PAGE)

        events = stream_events(
            read,
            after=cursor,
            tenant=caller.tenant,
            notifier=notifier,
            clock=onceward.clock,
            until=token_expiry(caller),
            is_stopping=server_is_stopping,
        )
        return EventStream(close, events)


def _resume_after(last_event_id: str | None, after: str | None) -> Cursor:
    """Return the cursor to resume after: a reconnecting reader names it in the header."""
    if not last_event_id:
        return Cursor.parse(after)
    try:
        return Cursor.parse(last_event_id)
    except BodyInvalidError:
        raise BodyInvalidError("Last-Event-ID should be the cursor of a notification") from None


def _encode_event(view: dict[str, Any]) -> bytes:
    # JSON on one line: a line break would end the field.
    head = f"id: {view['cursor']}\nevent: {view['kind']}\ndata: "
    return head.encode() + _encode(view) + b"\n\n"
