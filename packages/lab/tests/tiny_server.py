"""A small server that implements the protocol in memory, with switches that each break one rule.

It shows that the conformance checks work on another server, and that they can fail.
"""

import asyncio
import json
import re
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any
from uuid import uuid4

from onceward.errors import (
    BatchSkippedError,
    BatchTooLargeError,
    BodyInvalidError,
    KeyRequiredError,
    NotAuthenticatedError,
    NotFoundError,
    PayloadMismatchError,
    RequestError,
    SequenceInvalidError,
    SequenceViolationError,
)
from onceward.guard.error_formats import render_error
from onceward.guard.policy import ErrorFormat
from onceward_protocol.fingerprint import canonical_json
from onceward_protocol.keys import KeyFormat, parse_key
from onceward_protocol.sequence import parse_sequence

TENANTS = {"Bearer one-token": "one", "Bearer two-token": "two"}
PROFILE: dict[str, Any] = {
    "version": 1,
    "name": "tiny",
    "request": {"path": "/orders", "body": {"item": "boots {unique}", "at": "{now}"}},
    "takes_any_member": True,
    "volatile_fields": ["clientSubmittedAt"],
    "sign_in": {"Authorization": "Bearer one-token"},
    "other_sign_in": {"Authorization": "Bearer two-token"},
}

_MISMATCH = 409


@dataclass
class Record:
    """The stored response of a key."""

    fingerprint: str
    body_hash: str
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    request_id: str


@dataclass
class TinyServer:
    """An ASGI app. ``broken`` names the rule that it breaks."""

    broken: str = ""
    # Prepended to the path in Location headers.
    prefix: str = ""
    # The body must name an account of the tenant.
    has_accounts: bool = False
    # Requests are numbered.
    is_strict: bool = False
    # By tenant and client: the keys of its numbers, the first one of number 1.
    streams: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    records: dict[tuple[str, str], Record] = field(default_factory=dict)
    orders: dict[str, str] = field(default_factory=dict)
    locks: dict[tuple[str, str], asyncio.Lock] = field(default_factory=dict)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        request_id = dict(headers).get(b"x-request-id", uuid4().hex.encode()).decode()
        body = await self._read(receive)
        serve = TinyBatch(self).serve if scope["path"] == "/batch" else self.serve
        try:
            status, response_headers, out = await serve(scope, headers, body, request_id)
        except RequestError as error:
            rendered = render_error(error, ErrorFormat.PROBLEM, request_id)
            status, out = rendered.status, rendered.body
            response_headers = list(rendered.headers)
            if self.broken == "denies effects" and status == _MISMATCH:
                response_headers.append((b"onceward-effect", b"none"))
            if self.broken == "sends errors as plain JSON":
                response_headers = [(b"content-type", b"application/json")]
        if self.broken == "makes its own request id":
            request_id = uuid4().hex
        own = [(b"x-request-id", request_id.encode()), (b"x-correlation-id", b"c")]
        if not any(name == b"x-request-id" for name, _ in response_headers):
            response_headers = response_headers + own
        if scope["path"].startswith("/orders"):
            is_wrong = self.broken == "names no limit of batches"
            offer = b"/batch" if is_wrong else b"/batch; items=20"
            response_headers = [*response_headers, (b"onceward-batch", offer)]
        await send({"type": "http.response.start", "status": status, "headers": response_headers})
        await send({"type": "http.response.body", "body": out})

    async def _read(self, receive: Any) -> bytes:
        body: bytes = b""
        while True:
            try:
                message = await receive()
            except ConnectionAbortedError:
                if self.broken == "runs bodies that broke off":
                    return body
                raise
            body += message.get("body", b"")
            if not message.get("more_body"):
                return body

    async def serve(
        self, scope: Any, headers: list[tuple[bytes, bytes]], body: bytes, request_id: str
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        token = dict(headers).get(b"authorization", b"").decode()
        tenant = TENANTS.get(token)
        if self.broken == "accepts forged tokens" and token:
            tenant = tenant or "one"
        if tenant is None and self.broken != "replays to anonymous callers":
            raise NotAuthenticatedError("sign in")
        if scope["method"] == "GET":
            if self.broken == "replays reads" and dict(headers).get(b"idempotency-key"):
                return 200, [(b"idempotency-replayed", b"true")], b"{}"
            return self.read(scope["path"], tenant or "")
        key = self.key(headers)
        if self.has_accounts and json.loads(body or b"{}").get("account") != tenant:
            raise NotFoundError("no such account")
        fingerprint, body_hash = self.hashes(scope, body, tenant or "", key)
        record_id = ("all" if self.broken == "ignores the tenant" else tenant or "one", key)
        if self.broken == "checks before it locks" or (
            self.broken == "runs batches without locks" and "-" in request_id
        ):
            return await self.process(record_id, fingerprint, body_hash, tenant or "", request_id)
        async with self.locks.setdefault(record_id, asyncio.Lock()):
            if not self.is_strict:
                return await self.process(
                    record_id, fingerprint, body_hash, tenant or "", request_id
                )
            numbers = TinySequence(self, headers, tenant or "", key)
            if self.broken == "uses numbers without locks":
                return await numbers.process(record_id, fingerprint, body_hash, request_id)
            async with self.locks.setdefault(numbers.stream, asyncio.Lock()):
                return await numbers.process(record_id, fingerprint, body_hash, request_id)

    def read(self, path: str, tenant: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        if self.orders.get(path) != tenant and self.broken != "shows orders to all tenants":
            raise NotFoundError("no such order")
        return 200, [(b"content-type", b"application/json")], b"{}"

    def key(self, headers: list[tuple[bytes, bytes]]) -> str:
        values = [value for name, value in headers if name == b"idempotency-key"]
        if self.broken == "joins repeated headers" and len(values) > 1:
            values = [b",".join(values)]
        if self.broken == "treats an empty key as missing" and values == [b""]:
            values = []
        if self.broken == "uses the first of two keys":
            values = values[:1]
        if self.broken == "accepts any text as a key" and values:
            return values[0].decode("latin-1")
        if self.broken == "does not parse quotes" and values:
            return values[0].decode("latin-1").replace('"', "'") or "none"
        key = parse_key(values, KeyFormat.OPAQUE)
        if key is None:
            if self.broken == "generates missing keys":
                return uuid4().hex
            raise KeyRequiredError("a key is needed")
        return key

    def hashes(self, scope: Any, body: bytes, tenant: str, key: str) -> tuple[str, str]:
        names = () if self.broken == "hashes volatile fields" else PROFILE["volatile_fields"]
        try:
            canonical = canonical_json(body, volatile=frozenset(names))
        except BodyInvalidError:
            if self.broken == "stores the key of a bad body":
                self.records[tenant, key] = Record("bad", "bad", 400, [], b"{}", "r")
            if self.broken == "fails on malformed JSON":
                return self.fail()
            if self.broken == "parses JSON leniently" and b"unfinished" not in body:
                canonical = body
            elif self.broken == "accepts duplicate members" and b"twice" in body:
                canonical = json.dumps(json.loads(body)).encode()
            else:
                raise
        if self.broken == "hashes numbers as written":
            text = json.loads(body, parse_float=str, parse_int=str)
            canonical = json.dumps(text, sort_keys=True).encode()
        if self.broken == "hashes the raw bytes":
            canonical = body
        if self.broken == "hashes the top level only":
            canonical = json.dumps(dict.fromkeys(json.loads(canonical))).encode()
        if self.broken == "reads integers as doubles":
            canonical = json.dumps(json.loads(canonical, parse_int=float)).encode()
        query = b"" if self.broken == "ignores the query" else scope["query_string"]
        body_hash = sha256(canonical).hexdigest()
        return sha256(scope["path"].encode() + query + body_hash.encode()).hexdigest(), body_hash

    def fail(self) -> tuple[str, str]:
        raise BrokenServerError(500, "server.internal", "internal error")

    async def process(
        self,
        record_id: tuple[str, str],
        fingerprint: str,
        body_hash: str,
        tenant: str,
        request_id: str,
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        record = self.records.get(record_id)
        if record is not None:
            return self.replay(record, fingerprint, body_hash, request_id)
        await asyncio.sleep(0)  # in place of a database round trip
        order = uuid4().hex
        path = f"{self.prefix}/orders/{order}"
        self.orders[path] = tenant
        headers = [
            (b"content-type", b"application/json"),
            (b"location", path.encode()),
            (b"etag", b'"1"'),
        ]
        body = json.dumps({"id": order}).encode()
        self.records[record_id] = Record(fingerprint, body_hash, 201, headers, body, request_id)
        return 201, headers, body

    def replay(
        self, record: Record, fingerprint: str, body_hash: str, request_id: str
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        if record.fingerprint != fingerprint and self.broken != "replays any body":
            details = {"expectedHash": record.body_hash, "receivedHash": body_hash}
            if self.broken == "sends no hashes":
                details = {}
            raise PayloadMismatchError("the key was used", details=details)
        if self.broken == "replays with a new body":
            record.body = json.dumps({"id": uuid4().hex}).encode()
        headers = list(record.headers)
        if self.broken == "drops the stored headers":
            headers = headers[:1]
        if self.broken == "denies effects of replays":
            headers.append((b"onceward-effect", b"none"))
        if self.broken != "does not mark replays":
            headers.append((b"idempotency-replayed", b"true"))
        if self.broken != "does not send the original request id":
            headers.append((b"x-original-request-id", record.request_id.encode()))
        if self.broken == "sends the first request's id as its own":
            headers.append((b"x-request-id", record.request_id.encode()))
        return record.status, headers, record.body


class TinySequence:
    """The number of one request to a tiny server with a strict order."""

    def __init__(
        self, server: TinyServer, headers: list[tuple[bytes, bytes]], tenant: str, key: str
    ) -> None:
        self.server, self.broken = server, server.broken
        self.tenant, self.key = tenant, key
        self.client_ids = [value for name, value in headers if name == b"x-client-id"]
        self.numbers = [value for name, value in headers if name == b"x-sequence"]
        owner = "all" if self.broken == "shares clients between tenants" else tenant
        self.stream = (f"client {owner}", b",".join(self.client_ids).decode("latin-1"))

    async def process(
        self, record_id: tuple[str, str], fingerprint: str, body_hash: str, request_id: str
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        used = self.server.streams.setdefault(self.stream, [])
        number = self.parse(used)
        self.check(number, used, self.server.records.get(record_id), fingerprint)
        response = await self.server.process(
            record_id, fingerprint, body_hash, self.tenant, request_id
        )
        if number == len(used) + 1:
            used.append(self.key)
        return response

    def parse(self, used: list[str]) -> int:
        try:
            return parse_sequence(self.client_ids, self.numbers).number
        except SequenceInvalidError as error:
            if self.broken == "numbers what has no number":
                return len(used) + 1
            if self.broken == "names no required headers":
                raise BodyInvalidError(error.message) from None
            raise

    def check(self, number: int, used: list[str], record: Record | None, request: str) -> None:
        """Raise unless the request may run or be replayed."""
        expected = len(used) + 1
        if self.broken == "begins with any number" and expected == 1:
            return
        is_known = number < expected
        if record is not None and record.fingerprint != request:
            return
        if is_known and used[number - 1] == self.key and self.broken != "forgets used numbers":
            return
        if number == expected and record is None and self.broken != "runs no second number":
            return
        if number == expected and record is None and expected == 1:
            return
        if self.broken in {"ignores gaps", "replays with any number", "reuses numbers"} and (
            {"ignores gaps": number > expected, "reuses numbers": is_known}.get(
                self.broken, record is not None
            )
        ):
            return
        details: dict[str, Any] = {"expected": expected}
        if is_known:
            details["used_by"] = "this_key" if used[number - 1] == self.key else "other_key"
        if self.key in used and used.index(self.key) + 1 != number:
            details["key_sequence"] = used.index(self.key) + 1
        raise SequenceViolationError("not the next number", details=details)


class TinyBatch:
    """The batch endpoint of a tiny server: runs the items one after another."""

    def __init__(self, server: TinyServer) -> None:
        self.server = server
        self.broken = server.broken
        # By local id: the id in the latest result, or None if it was no success.
        self.ids: dict[str, str | None] = {}
        self.failed_lanes: set[str] = set()
        self.keys: set[str] = set()

    async def serve(
        self, _scope: Any, headers: list[tuple[bytes, bytes]], body: bytes, request_id: str
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        given = [pair for pair in headers if pair[0] == b"authorization"]
        if not given and self.broken == "signs in no sender of batches":
            given = [(b"authorization", b"Bearer one-token")]
        if not given:
            raise NotAuthenticatedError("sign in")
        results = [
            await self.run(item, given, f"{request_id}-{number}")
            for number, item in enumerate(self.items(body))
        ]
        content = json.dumps({"results": results, "retry_after": None}).encode()
        return 200, [(b"content-type", b"application/json")], content

    def items(self, body: bytes) -> Any:
        is_lenient = self.broken == "reads any batch"
        try:
            batch = json.loads(body, object_pairs_hook=None if is_lenient else only_once)
            items = batch["items"]
            is_valid = isinstance(items, list) and len(batch) == 1
        except (ValueError, TypeError, KeyError):
            is_valid = False
        if not is_valid:
            if is_lenient:
                return []
            raise BodyInvalidError("this is no batch")
        if len(items) > 20 and self.broken != "counts no items":
            raise BatchTooLargeError("too many items")
        return items

    async def run(
        self, item: Any, given: list[tuple[bytes, bytes]], request_id: str
    ) -> dict[str, Any]:
        try:
            status, headers, body = await self.respond(item, given, request_id)
        except RequestError as error:
            rendered = render_error(error, ErrorFormat.PROBLEM, request_id)
            status, headers, body = rendered.status, list(rendered.headers), rendered.body
        content = json.loads(body)
        if isinstance(item, dict):
            is_done = status < 300
            if "local_id" in item:
                self.ids[item["local_id"]] = content["id"] if is_done else None
            if not is_done:
                self.failed_lanes |= self.lanes_of(item)
        return {
            "status": status,
            "headers": {name.decode(): value.decode() for name, value in headers},
            "body": content,
            "replayed": any(name == b"idempotency-replayed" for name, _ in headers),
        }

    async def respond(
        self, item: Any, given: list[tuple[bytes, bytes]], request_id: str
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        check_item(item)
        key = item["key"]
        if self.lanes_of(item) & self.failed_lanes and self.broken != "runs lanes to their end":
            if self.broken == "stores what it skips":
                tenant = TENANTS[given[0][1].decode()]
                self.server.records[tenant, key] = Record("", "", 424, [], b"{}", request_id)
            raise BatchSkippedError("the lane has failed")
        path, sent = self.resolve(item)
        is_path = (item["method"], path) == ("POST", "/orders")
        if not is_path and self.broken != "accepts any path in a batch":
            raise BodyInvalidError("this path is not guarded")
        if key in self.keys and self.broken == "runs one key twice":
            key += "-again"
        self.keys.add(key)
        if self.broken == "keeps records of batches apart":
            key += "-batch"
        scope = {"method": "POST", "path": "/orders", "query_string": b""}
        headers = [*given, (b"idempotency-key", key.encode())]
        if "client_id" in item:
            headers.append((b"x-client-id", item["client_id"].encode()))
            headers.append((b"x-sequence", str(item["sequence"]).encode()))
        try:
            return await self.server.serve(scope, headers, sent, request_id)
        except PayloadMismatchError:
            if self.broken == "ends after a conflict":
                raise BrokenServerError(500, "server.internal", "the batch has failed") from None
            raise

    def lanes_of(self, item: dict[str, Any]) -> set[str]:
        names = ("lane",) if self.broken == "runs clients to their end" else ("lane", "client_id")
        return {f"{name} {item[name]}" for name in names if name in item}

    def resolve(self, item: dict[str, Any]) -> tuple[str, bytes]:
        text = json.dumps([item["path"], item.get("body")])
        for local_id in re.findall(r"\{(?:local|version):([0-9a-f-]{36})\}", text):
            if local_id not in self.ids:
                raise BodyInvalidError("no earlier item has this id")
            value = self.ids[local_id]
            if value is None:
                is_unknown = self.broken == "forgets failed items"
                raise (BodyInvalidError if is_unknown else BatchSkippedError)("it has failed")
            if self.broken != "hashes placeholders":
                text = text.replace(f"{{local:{local_id}}}", value)
        path, body = json.loads(text)
        return path, json.dumps(body).encode()


def check_item(item: Any) -> None:
    """Raise for an item that cannot be read."""
    members = {"method", "path", "key", "headers", "body", "lane", "local_id"}
    members |= {"client_id", "sequence"}
    if not isinstance(item, dict) or not {"method", "path"} <= set(item) <= members:
        raise BodyInvalidError("this is no item")
    for name, value in item.get("headers", {}).items():
        if name.lower() != "if-match" or "\n" in value:
            raise BodyInvalidError("this header is not allowed")


def only_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; raises for a name that is there twice."""
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name is there twice")
    return dict(pairs)


class BrokenServerError(RequestError):
    """An internal error that reaches the client."""

    kind = "internal"

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code
