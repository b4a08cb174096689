"""A planning server, and authenticated members of organizations."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import httpx

from onceward import Onceward
from onceward.ports import Row
from onceward.sign_in.jwt_auth import mint_token
from onceward_services.planning import api
from onceward_services.planning.read_cache import ReadCache
from packages.services.tests.conftest import SECRET, Serve

NOWHERE = "01970000-0000-7000-8000-000000000000"


def token(sub: str, org: str | None, roles: Sequence[str] = ()) -> dict[str, str]:
    """Return the Authorization header of a member."""
    now, lifetime = datetime.now(UTC), timedelta(hours=1)
    made = mint_token(SECRET, sub=sub, org=org, roles=roles, lifetime=lifetime, now=now)
    return {"Authorization": f"Bearer {made}"}


def tag(version: int) -> dict[str, str]:
    return {"If-Match": f'"{version}"'}


class Member:
    """One person of one organization."""

    def __init__(
        self, client: httpx.AsyncClient, sub: str = "ada", org: str = "acme", *roles: str
    ) -> None:
        self._client = client
        self._signed_in = token(sub, org, roles)

    async def send(
        self, method: str, path: str, body: Any = None, *, key: str | None = None, **headers: Any
    ) -> httpx.Response:
        """Send a request; ``If_Match`` and the like become headers."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        keyed = {} if method == "GET" else {"Idempotency-Key": key or str(uuid4())}
        json = {} if body is None else {"json": body}
        return await self._client.request(
            method, path, headers=self._signed_in | keyed | named, **json
        )

    async def get(self, path: str, **headers: Any) -> httpx.Response:
        return await self.send("GET", path, **headers)

    async def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return await self.send("POST", path, body, **more)

    async def patch(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return await self.send("PATCH", path, body, **more)

    async def put(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return await self.send("PUT", path, body, **more)

    async def delete(self, path: str, **more: Any) -> httpx.Response:
        return await self.send("DELETE", path, **more)

    # -- making -----------------------------------------------------------------------------------

    async def project(self, name: str = "Harbour") -> str:
        """Create a project and return its path."""
        return made(await self.post("/v1/projects", {"name": name}))

    async def mission(self, project: str | None = None, **fields: Any) -> str:
        """Create a mission and return its path."""
        project = project or await self.project()
        return made(await self.post(f"{project}/missions", {"title": "Survey"} | fields))

    async def assignment(self, mission: str | None = None, assignee: str = "bob") -> str:
        """Create an assignment and return its path."""
        mission = mission or await self.mission()
        return made(await self.post(f"{mission}/assignments", {"assignee": assignee}))

    async def read(self, path: str) -> Any:
        return ok(await self.get(path))

    async def pages(self, path: str, limit: int) -> list[list[Any]]:
        """Read all pages of a list."""
        glue = "&" if "?" in path else "?"
        found, cursor = [], ""
        while True:
            page = await self.read(f"{path}{glue}limit={limit}{cursor}")
            found.append(page["items"])
            if page["next"] is None:
                return found
            cursor = f"&after={page['next']}"


class PlanningServer(Member):
    """A running server with access to its clients, tables and workers."""

    def __init__(self, client: httpx.AsyncClient, onceward: Onceward, cache: ReadCache) -> None:
        super().__init__(client)
        self.client = client
        self.onceward = onceward
        self.cache = cache

    def member(self, sub: str = "eve", org: str = "globex", *roles: str) -> Member:
        return Member(self.client, sub, org, *roles)

    async def rows(self, sql: str, **params: Any) -> list[Row]:
        store = self.onceward.store
        return list(await store.read(store.table_names.render(sql), params))

    async def count(self, table: str) -> int:
        return int((await self.rows(f"SELECT count(*) AS n FROM {table}"))[0]["n"])

    @asynccontextmanager
    async def working(self, **options: Any) -> AsyncIterator[Any]:
        """Run a worker of the server."""
        worker = self.onceward.worker(queues=["planning", "planning-webhooks"], **options)
        await worker.start()
        try:
            yield worker
        finally:
            await worker.stop()

    async def all_jobs_done(self, **options: Any) -> None:
        """Run a worker until there are no jobs."""
        async with self.working(**options), asyncio.timeout(30):
            while await self.count("onceward_jobs"):
                await asyncio.sleep(0.01)


def made(response: httpx.Response) -> str:
    assert response.status_code == 201, response.text
    return response.headers["location"]


def ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def refused(response: httpx.Response, status: int, code: str) -> Any:
    """Check an error's status, code and shape; returns its details."""
    assert (response.status_code, response.json()["code"]) == (status, code), response.text
    assert response.headers["content-type"] == "application/problem+json"
    assert set(response.json()) == {
        "type", "title", "status", "detail", "code", "details", "requestId",
    }  # fmt: skip
    assert response.json()["detail"]
    return response.json()["details"]


OpenPlanning = Callable[..., Any]


def opener(serve: Serve, database_url: str, monkeypatch: Any) -> OpenPlanning:
    caches: list[ReadCache] = []

    class Watched(ReadCache):
        def __init__(self, max_bytes: int) -> None:
            super().__init__(max_bytes)
            caches.append(self)

    monkeypatch.setattr(api, "ReadCache", Watched)

    @asynccontextmanager
    async def open_planning(**settings: Any) -> AsyncIterator[PlanningServer]:
        apps: list[Any] = []
        async with serve(database_url, prepare=apps.append, **settings) as client:
            yield PlanningServer(client, apps[0].state.onceward, caches[-1])

    return open_planning
