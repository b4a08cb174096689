"""The intake contract in a hundred lines of memory, and switches that break it in one place each.

It shows that the kit fits a server that is not ours, and that it can fail.
"""

import asyncio
import json
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any
from uuid import uuid4

from holdfast.core.canonical_json import canonical_json
from holdfast.core.error_formats import render_error
from holdfast.core.keys import KeyFormat, parse_key
from holdfast.core.policy import VOLATILE_FIELDS, ErrorFormat
from holdfast.errors import (
    BodyInvalidError,
    KeyRequiredError,
    NotAuthenticatedError,
    NotFoundError,
    PayloadMismatchError,
    RequestError,
)

PEOPLE = {"Bearer one-token": "one", "Bearer two-token": "two"}
PROFILE: dict[str, Any] = {
    "version": 1,
    "name": "tiny",
    "request": {"path": "/orders", "body": {"item": "boots {unique}", "at": "{now}"}},
    "takes_any_member": True,
    "sign_in": {"Authorization": "Bearer one-token"},
    "other_sign_in": {"Authorization": "Bearer two-token"},
}


@dataclass
class Kept:
    """What is remembered of a key."""

    mark: str
    body_hash: str
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    request_id: str


@dataclass
class TinyServer:
    """An ASGI app. ``broken`` names the one thing it does wrong."""

    broken: str = ""
    # What stands before the path of an order, in its Location.
    prefix: str = ""
    records: dict[tuple[str, str], Kept] = field(default_factory=dict)
    orders: dict[str, str] = field(default_factory=dict)
    locks: dict[tuple[str, str], asyncio.Lock] = field(default_factory=dict)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        request_id = dict(headers).get(b"x-request-id", uuid4().hex.encode()).decode()
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        try:
            status, answered, out = await self.serve(scope, headers, body, request_id)
        except RequestError as error:
            reply = render_error(error, ErrorFormat.PROBLEM, request_id)
            status, answered, out = reply.status, list(reply.headers), reply.body
            if self.broken == "tells errors as plain JSON":
                answered = [(b"content-type", b"application/json")]
        own = [(b"x-request-id", request_id.encode()), (b"x-correlation-id", b"c")]
        if not any(name == b"x-request-id" for name, _ in answered):
            answered = answered + own
        await send({"type": "http.response.start", "status": status, "headers": answered})
        await send({"type": "http.response.body", "body": out})

    async def serve(
        self, scope: Any, headers: list[tuple[bytes, bytes]], body: bytes, request_id: str
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        tenant = PEOPLE.get(dict(headers).get(b"authorization", b"").decode())
        if tenant is None and self.broken != "replays to strangers":
            raise NotAuthenticatedError("sign in")
        if scope["method"] == "GET":
            return self.read(scope["path"], tenant or "")
        key = self.key(headers)
        mark, body_hash = self.hashes(scope, body, tenant or "", key)
        place = ("everyone" if self.broken == "forgets the tenant" else tenant or "one", key)
        if self.broken == "looks before it locks":
            return await self.settle(place, mark, body_hash, tenant or "", request_id)
        async with self.locks.setdefault(place, asyncio.Lock()):
            return await self.settle(place, mark, body_hash, tenant or "", request_id)

    def read(self, path: str, tenant: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        if self.orders.get(path) != tenant and self.broken != "shows orders to everyone":
            raise NotFoundError("there is no such order")
        return 200, [(b"content-type", b"application/json")], b"{}"

    def key(self, headers: list[tuple[bytes, bytes]]) -> str:
        values = [value for name, value in headers if name == b"idempotency-key"]
        if self.broken == "takes the first of two keys":
            values = values[:1]
        if self.broken == "takes any text for a key" and values:
            return values[0].decode("latin-1")
        if self.broken == "knows no quotes" and values:
            return values[0].decode("latin-1").replace('"', "'") or "none"
        key = parse_key(values, KeyFormat.OPAQUE)
        if key is None:
            if self.broken == "makes a key up":
                return uuid4().hex
            raise KeyRequiredError("a key is needed")
        return key

    def hashes(self, scope: Any, body: bytes, tenant: str, key: str) -> tuple[str, str]:
        volatile = frozenset() if self.broken == "hashes volatile fields" else VOLATILE_FIELDS
        try:
            canonical = canonical_json(body, volatile=volatile)
        except BodyInvalidError:
            if self.broken == "burns the key of a bad body":
                self.records[tenant, key] = Kept("bad", "bad", 400, [], b"{}", "r")
            if self.broken == "dies of bad JSON":
                return self.die()
            if self.broken != "takes the last of duplicate keys" or b"twice" not in body:
                raise
            canonical = json.dumps(json.loads(body)).encode()
        if self.broken == "hashes the bytes as they came":
            canonical = body
        if self.broken == "hashes the top level only":
            canonical = json.dumps(dict.fromkeys(json.loads(canonical))).encode()
        if self.broken == "reads integers as doubles":
            canonical = json.dumps(json.loads(canonical, parse_int=float)).encode()
        query = b"" if self.broken == "forgets the query" else scope["query_string"]
        body_hash = sha256(canonical).hexdigest()
        return sha256(scope["path"].encode() + query + body_hash.encode()).hexdigest(), body_hash

    def die(self) -> tuple[str, str]:
        raise BrokenServerError(500, "server.internal", "oh")

    async def settle(
        self,
        place: tuple[str, str],
        mark: str,
        body_hash: str,
        tenant: str,
        request_id: str,
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        kept = self.records.get(place)
        if kept is not None:
            return self.again(kept, mark, body_hash, request_id)
        await asyncio.sleep(0)  # where a database would be
        order = uuid4().hex
        path = f"{self.prefix}/orders/{order}"
        self.orders[path] = tenant
        headers = [
            (b"content-type", b"application/json"),
            (b"location", path.encode()),
            (b"etag", b'"1"'),
        ]
        body = json.dumps({"id": order}).encode()
        self.records[place] = Kept(mark, body_hash, 201, headers, body, request_id)
        return 201, headers, body

    def again(
        self, kept: Kept, mark: str, body_hash: str, request_id: str
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        if kept.mark != mark and self.broken != "replays whatever is sent":
            details = {"expectedHash": kept.body_hash, "receivedHash": body_hash}
            if self.broken == "gives no hashes":
                details = {}
            raise PayloadMismatchError("the key was used", details=details)
        if self.broken == "answers with a new body":
            kept.body = json.dumps({"id": uuid4().hex}).encode()
        headers = list(kept.headers)
        if self.broken == "forgets the stored headers":
            headers = headers[:1]
        if self.broken != "does not mark replays":
            headers.append((b"idempotency-replayed", b"true"))
        if self.broken != "does not say which request it was":
            headers.append((b"x-original-request-id", kept.request_id.encode()))
        if self.broken == "gives the first request's id for its own":
            headers.append((b"x-request-id", kept.request_id.encode()))
        return kept.status, headers, kept.body


class BrokenServerError(RequestError):
    """What nobody should see."""

    kind = "internal"

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code
