"""A walk server, devices of walkers, and a fake clock."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import httpx

from onceward import Onceward
from onceward.ports import Row, Store
from onceward.sign_in.jwt_auth import mint_token
from onceward_protocol.clock import SystemClock
from onceward_services.walk.catalogue import bundled_catalogue
from packages.services.tests.conftest import SECRET, Serve

NOON = datetime(2026, 5, 22, 12, 0, tzinfo=UTC)
CATALOGUE = bundled_catalogue()


class HeldClock(SystemClock):
    """A clock that changes only by ``move``."""

    def __init__(self, at: datetime = NOON) -> None:
        self.at = at

    def now(self) -> datetime:
        return self.at

    def move(self, by: timedelta) -> None:
        self.at += by


def text(instant: datetime) -> str:
    """Format an instant as a device does."""
    return instant.astimezone(UTC).isoformat().replace("+00:00", "Z")


def new_key() -> str:
    return str(uuid4())


class Device:
    """One authenticated device. Actions get a new key and the current time by default."""

    def __init__(self, client: httpx.AsyncClient, clock: Any, walker: str = "ada") -> None:
        self._client = client
        self._clock = clock
        self.walker = walker

    def headers(self) -> dict[str, str]:
        token = mint_token(
            SECRET,
            sub=self.walker,
            org=None,
            roles=[],
            lifetime=timedelta(hours=1),
            now=self._clock.now(),
        )
        return {"Authorization": f"Bearer {token}"}

    async def get(self, path: str, **headers: str) -> httpx.Response:
        return await self._client.get(path, headers=self.headers() | headers)

    async def post(
        self, path: str, body: Any, *, key: str | None = None, headers: Mapping[str, str] = {}
    ) -> httpx.Response:
        sent = self.headers() | dict(headers)
        if key is not None:
            sent["Idempotency-Key"] = key
        return await self._client.post(path, json=body, headers=sent)

    # -- actions -----------------------------------------------------------------------------------

    async def allocate(
        self, *node_ids: str, key: str | None = None, at: datetime | None = None, **fields: Any
    ) -> httpx.Response:
        body = {"allocations": [{"nodeId": id_} for id_ in node_ids]} | self.times(at) | fields
        return await self.post("/tree/allocate", body, key=key or new_key())

    async def start(self, quest_id: str, *, key: str | None = None) -> httpx.Response:
        return await self.post("/quest/start", {"questId": quest_id}, key=key)

    async def advance(
        self, quest_id: str, step: Any, *, key: str | None = None, at: datetime | None = None
    ) -> httpx.Response:
        path = f"/quest/{quest_id}/step/{step}/advance"
        return await self.post(path, self.times(at), key=key or new_key())

    async def complete(
        self, quest_id: str, *, key: str | None = None, at: datetime | None = None
    ) -> httpx.Response:
        body = {"questId": quest_id} | self.times(at)
        return await self.post("/quest/complete", body, key=key or new_key())

    def times(self, at: datetime | None = None) -> dict[str, str]:
        return {"clientGeneratedAt": text(at or self._clock.now())}

    # -- whole ways --------------------------------------------------------------------------------

    async def finish(self, *quest_ids: str) -> int:
        """Complete quests; returns the points banked."""
        points = 0
        for quest_id in quest_ids:
            ok(await self.start(quest_id))
            for step in range(1, CATALOGUE.quests[quest_id].steps + 1):
                ok(await self.advance(quest_id, step))
            points = ok(await self.complete(quest_id))["pointsBanked"]
        return points

    # -- reading -----------------------------------------------------------------------------------

    async def tree(self) -> Any:
        return ok(await self.get("/tree/state"))

    async def allocated(self) -> list[str]:
        return [each["nodeId"] for each in (await self.tree())["allocations"]]

    async def points(self) -> int:
        return int((await self.tree())["pointsBanked"])

    async def quests(self) -> dict[str, Any]:
        board = ok(await self.get("/quest/available"))
        return {quest["questId"]: quest for quest in board["quests"]}

    async def me(self) -> Any:
        return ok(await self.get("/walker/me"))

    async def events(self, after: int = 0) -> list[Any]:
        page = ok(await self.get(f"/walker/events?after={after}&limit=500"))
        return list(page["items"])


def ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def refused(response: httpx.Response, status: int, code: str) -> Any:
    """Check an error's status, code and shape; returns its details."""
    assert (response.status_code, response.json()["error"]) == (status, code), response.text
    assert set(response.json()) == {"error", "message", "details", "requestId"}
    assert response.json()["message"]
    assert response.json()["requestId"] == response.headers["x-request-id"]
    assert response.headers["content-type"] == "application/json"
    return response.json()["details"]


class Game:
    """A running server with access to its clients, tables and clock."""

    def __init__(self, client: httpx.AsyncClient, clock: HeldClock, onceward: Onceward) -> None:
        self.client = client
        self.clock = clock
        self.onceward = onceward
        self.ada = Device(client, clock)

    def device(self, walker: str = "ada") -> Device:
        return Device(self.client, self.clock, walker)

    @property
    def store(self) -> Store:
        return self.onceward.store

    async def count(self, table: str) -> int:
        return int((await self.rows(f"SELECT count(*) AS n FROM {table}"))[0]["n"])

    async def rows(self, sql: str, **params: Any) -> list[Row]:
        return list(await self.store.read(self.store.table_names.render(sql), params))

    async def balance_is_the_sum(self, walker: str = "ada") -> int:
        """Check the ledger of a walker and return the balance."""
        entries = await self.rows(
            "SELECT seq, delta, balance_after FROM energy_ledger WHERE tenant = :tenant"
            " ORDER BY seq",
            tenant=walker,
        )
        balance = 0
        for number, entry in enumerate(entries, 1):
            balance += entry["delta"]
            assert (entry["seq"], entry["balance_after"]) == (number, balance)
        found = await self.rows(
            "SELECT energy_balance FROM walkers WHERE tenant = :tenant", tenant=walker
        )
        assert [row["energy_balance"] for row in found] in ([], [balance])
        return balance

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        """Yield a transaction as a job has it; commits at the end."""
        unit = await self.store.begin()
        try:
            yield unit.transaction
        except BaseException:
            await unit.rollback()
            raise
        await unit.commit(None, None)


OpenGame = Callable[..., Any]


def opener(serve: Serve, database_url: str) -> OpenGame:
    @asynccontextmanager
    async def open_game(
        clock: HeldClock | None = None, prepare: Any = None, **settings: Any
    ) -> AsyncIterator[Game]:
        held = clock or HeldClock()
        apps: list[Any] = []

        def keep(app: Any) -> None:
            apps.append(app)
            if prepare is not None:
                prepare(app)

        async with serve(database_url, clock=held, prepare=keep, **settings) as client:
            yield Game(client, held, apps[0].state.onceward)

    return open_game
