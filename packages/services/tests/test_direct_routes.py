"""Handlers called directly respond as those called by FastAPI, on every guarded route."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from onceward.frameworks.fastapi_direct import DirectRoute
from onceward.sign_in.jwt_auth import mint_token

from .conftest import SECRET, Serve
from .test_isolation import Person, _body, _document, _filled, _named, _operations
from .walk.fixtures import HeldClock

ID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
# Seconds until the rate limit is full again, of ``RateLimit``.
RESET = re.compile(rb"(?<=;t=)\d+")
# The held clock has no fractions; what is made before the requests has.
INSTANT = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z")
# Hashes include the ids of the path.
SECRETS = re.compile(rb'whsec_[A-Za-z0-9+/=_-]+|\b[0-9a-f]{64}\b|(?<="cursor":")[^"]+')
# In place of the key of each request.
KEY = b"(key)"
JSON = {"content-type": "application/json"}

Case = tuple[bytes, dict[str, str], str]


class _Server:
    """One of the two servers, with its own ids."""

    def __init__(self, client: httpx.AsyncClient, app: Any) -> None:
        self._client = client
        self._app = app
        self._store = app.state.onceward.store
        self._ids: dict[bytes, bytes] = {}
        self.person = self.sign_in("ada")

    def sign_in(self, sub: str) -> Person:
        """Send as another person from now on."""
        person = self.person = Person(self._client, sub, f"{sub}s", self._store)
        token = mint_token(
            SECRET,
            sub=sub,
            org=person.org,
            roles=["admin"],
            lifetime=timedelta(hours=1),
            # The time of the server, whose clock is held.
            now=self._app.state.onceward.clock.now(),
        )
        person.signed_in = {"Authorization": f"Bearer {token}"}
        return person

    async def send(
        self, method: str, path: str, case: Case, key: str
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Return what was sent, with ids in the order of their first appearance."""
        body, headers, query = case
        body = body.replace(KEY, key.encode())
        sent = self.person.signed_in | {
            "Idempotency-Key": key,
            "X-Request-ID": f"r-{key}",
            "X-Correlation-ID": "c",
            **headers,
        }
        response = await self._client.request(method, path + query, content=body, headers=sent)
        found = [
            (name, RESET.sub(b"(seconds)", self._plain(value)))
            for name, value in response.headers.raw
        ]
        return response.status_code, found, self._plain(response.content)

    def _plain(self, text: bytes) -> bytes:
        text = INSTANT.sub(b"(instant)", SECRETS.sub(b"(secret)", text))
        return ID.sub(lambda m: self._ids.setdefault(m[0], b"id-%d" % len(self._ids)), text)


def _cases(body: dict[str, Any], *, is_walk: bool) -> Iterator[Case]:
    """Yield bodies, headers and queries: valid, and wrong in one way each."""
    text = json.dumps(body).encode()
    yield text, JSON, ""
    for name in list(body)[:1]:
        yield json.dumps({k: v for k, v in body.items() if k != name}).encode(), JSON, ""
        yield json.dumps(body | {name: {"no": ["such"]}}).encode(), JSON, "?limit=x"
    yield json.dumps(body | {"surplus": "ü"}).encode(), JSON, "?a=1&a=2"
    for wrong in (b'["a"]', b'{"a":', b"\xff{}", b"  "):
        yield wrong, JSON, ""
    yield b"", {}, ""
    for content_type in ("text/plain", "application/merge-patch+json; charset=utf-8", ""):
        yield text, {"content-type": content_type}, ""
    yield text, JSON | {"If-Match": '"7"', "X-Client-Generated-At": "yesterday"}, ""
    yield text, JSON | {"X-Firebase-AppCheck": "a", "Cookie": "a=b"}, ""
    if is_walk:
        old = json.dumps(body | {"clientGeneratedAt": "2020-01-01T00:00:00Z"}).encode()
        yield old, JSON, ""


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the calls of handlers that FastAPI did not make, by endpoint."""
    found: Counter[str] = Counter()
    run = DirectRoute.run

    async def counted(self: DirectRoute, request: Any, *rest: Any) -> Any:
        found[request.execution.request.endpoint] += 1
        return await run(self, request, *rest)

    monkeypatch.setattr(DirectRoute, "run", counted)
    return found


async def test_every_guarded_route_responds_as_by_fastapi(
    serve: Serve, tmp_path: Path, called: Counter[str]
) -> None:
    clock = HeldClock(datetime.now(UTC).replace(microsecond=0))
    document = _document()
    operations = {(method, path): each for method, path, each in _operations(document)}
    async with AsyncExitStack() as stack:
        servers = []
        for name, is_direct in (("direct", True), ("fastapi", False)):
            apps: list[Any] = []
            client = await stack.enter_async_context(
                serve(
                    f"sqlite:///{tmp_path}/{name}.db",
                    clock=clock,
                    prepare=apps.append,
                    direct_routes=is_direct,
                    home=tmp_path,
                )
            )
            servers.append(_Server(client, apps[0]))
        routes = apps[0].state.onceward.runtime.routes.table().routes
        statuses: dict[str, set[int]] = {}
        for number, route in enumerate(routes):
            method, template = route.method, route.path
            body = _body(document, operations[method, template])
            if "idempotencyKey" in body:
                body["idempotencyKey"] = KEY.decode()
            is_walk = route.guard.policy.name == "walk"
            paths = []
            for server in servers:
                server.sign_in(f"person-{number}")
                ids = await _named(template)[1].make(server.person) if "{" in template else {}
                paths.append(_filled(template, ids))
            cases = [(paths, case) for case in _cases(body, is_walk=is_walk)]
            if "contacts" in template or "expenses" in template:
                cases = cases[::4]  # the same handlers as those of activities
            elif "{" in template:
                for odd in ("nothing", "0", "%C3%BC"):
                    names = dict.fromkeys(re.findall(r"{(\w+)}", template), odd)
                    cases.append(
                        ([_filled(template, names)] * 2, next(_cases(body, is_walk=False)))
                    )
            for where, case in cases:
                key = str(uuid4())
                direct, normal = [
                    await server.send(method, path, case, key)
                    for server, path in zip(servers, where, strict=True)
                ]
                assert direct == normal, (method, where, case)
                statuses.setdefault(route.endpoint, set()).add(direct[0])
            # Replays and mismatches of what was stored by either.
            for each in (cases[0], cases[1]):
                assert await servers[0].send(method, paths[0], each[1], key) == (
                    await servers[1].send(method, paths[1], each[1], key)
                )
    # Keys that are claimed after the dependencies are claimed by FastAPI's way.
    early = {route.endpoint for route in routes if not route.guard.is_claimed_late}
    assert set(called) == early
    # The others need what a new person does not have, such as points.
    successful = [name for name, found in statuses.items() if min(found) < 300]
    assert len(successful) >= 25, successful
