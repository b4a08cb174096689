"""A walker's events as a stream of server-sent events."""

import json
from collections.abc import AsyncIterator
from typing import Any, Final

from onceward.ports import Store
from onceward_services import event_stream
from onceward_services.event_stream import Events
from onceward_services.streams import StreamNotifier, server_is_stopping
from onceward_services.walk.events import WalkerEvent, list_events

__all__ = ["StreamNotifier", "server_is_stopping", "stream_events"]

_PAGE: Final = 100


def stream_events(store: Store, tenant: str, *, after: int, **options: Any) -> AsyncIterator[bytes]:
    """Yield the events after one; options as in ``onceward_services.event_stream``."""

    async def read(last: int) -> Events:
        events = await list_events(store, tenant, after=last, limit=_PAGE)
        found = [(event.seq, _encode_event(event)) for event in events]
        return Events(found, has_more=len(events) == _PAGE)

    return event_stream.stream_events(read, after=after, tenant=tenant, **options)


def _encode_event(event: WalkerEvent) -> bytes:
    # JSON on one line: a line break would end the field.
    data = json.dumps(
        {
            "id": event.seq,
            "type": event.type,
            "data": event.data,
            "createdAt": event.created_at.isoformat().replace("+00:00", "Z"),
        },
        separators=(",", ":"),
    )
    return f"id: {event.seq}\nevent: {event.type}\ndata: {data}\n\n".encode()
