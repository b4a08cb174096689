"""A guarded ASGI app without a framework. Run: ``uvicorn examples.bare_asgi:app``."""

import json
import sqlite3
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import closing
from typing import Any

from onceward import Execution, Onceward, Principal
from onceward.sign_in.identify import ApiKeyIdentify, hash_api_key

with closing(sqlite3.connect("notes.db")) as database:
    database.execute("CREATE TABLE IF NOT EXISTS notes (text TEXT NOT NULL)")

# An app keeps only the hashes, e.g. in its settings.
api_keys = {
    hash_api_key("token-1"): Principal(tenant="ada", actor="ada"),
    hash_api_key("token-2"): Principal(tenant="bob", actor="bob"),
}
onceward = Onceward("sqlite:///notes.db", identify=ApiKeyIdentify(api_keys, header="X-Token"))
onceward.guard_path("POST", "/notes", endpoint="notes.create")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


async def notes(scope: Scope, receive: Receive, send: Send) -> None:
    """Store a note. The guard has read the body already, so it arrives in one message."""
    if scope["type"] == "lifespan":
        await _lifespan(receive, send)
        return
    execution = scope.get("onceward")
    if not isinstance(execution, Execution):  # not a guarded path
        await _respond(send, 404, {"error": "not found"})
        return
    message = await receive()
    text = message["body"].decode()
    await execution.transaction.execute("INSERT INTO notes VALUES (:text)", {"text": text})
    await _respond(send, 201, {"kept": text})


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def _respond(send: Send, status: int, content: dict[str, str]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


app = onceward.wrap(notes)
