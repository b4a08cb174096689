"""Databases and caches that go away under load, between real processes.

Clients keep sending and send again with their keys, as devices do: nothing lost, nothing doubled,
no response about an effect that is missing, and no restart of the server.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from onceward_testing.servers import RealPostgres, RealRedis
from packages.onceward.tests.support.serving import ShopProcess

CLIENTS = 8
TIMEOUT_SECONDS = 30


class Crowd:
    """Clients that each place one order after the other, and retry until it succeeds."""

    def __init__(self, shop: ShopProcess) -> None:
        self._url = shop.url
        self._enough = asyncio.Event()
        self.statuses: Counter[int] = Counter()
        self.without_retry_after = 0
        self.wrong_replays: list[str] = []
        # The id in the response to each order.
        self.confirmed: dict[str, str] = {}

    async def run(self, work: Callable[[], Any], *, replay: bool = False) -> None:
        """Keep ordering while the work is done, and until every order that was begun is through."""
        clients = [asyncio.create_task(self._shop(n, replay=replay)) for n in range(CLIENTS)]
        await asyncio.sleep(0.4)
        await work()
        await asyncio.sleep(0.4)
        self._enough.set()
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await asyncio.gather(*clients)

    async def _shop(self, number: int, *, replay: bool) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT_SECONDS) as client:
            order = 0
            while not self._enough.is_set():
                item = f"{number}/{order}"
                body = await self._order(client, item)
                if replay and await self._order(client, item) != body:
                    self.wrong_replays.append(item)
                order += 1

    async def _order(self, client: httpx.AsyncClient, item: str) -> bytes:
        while True:
            response = await client.post(
                "/orders", json={"item": item}, headers={"Idempotency-Key": f"key-of-{item}"}
            )
            self.statuses[response.status_code] += 1
            if response.status_code == 201:
                self.confirmed[item] = response.json()["id"]
                return response.content
            if "retry-after" not in response.headers:
                self.without_retry_after += 1
            await asyncio.sleep(0.05)

    async def assert_one_effect_each(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT_SECONDS) as client:
            rows = (await client.get("/orders")).json()
        assert len(rows) == len({row["item"] for row in rows}), "an effect was doubled"
        assert {row["item"]: row["id"] for row in rows} == self.confirmed, (
            "a response without an effect"
        )
        assert self.wrong_replays == []


# -- PostgreSQL ---------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["fast", "immediate", "kill"])
async def test_postgres_stops_and_starts_under_load(
    postgres: RealPostgres, postgres_url: str, way: str
) -> None:
    def end() -> None:
        if way == "kill":
            postgres.kill()
        else:
            postgres.stop("fast" if way == "fast" else "immediate")

    with ShopProcess(postgres_url) as shop:
        crowd = Crowd(shop)

        async def outage() -> None:
            await asyncio.to_thread(end)
            before = crowd.statuses[503]
            await asyncio.sleep(0.7)
            assert crowd.statuses[503] > before, "no response reported the outage"
            async with httpx.AsyncClient(base_url=shop.url, timeout=10) as client:
                started = time.monotonic()
                response = await client.post(
                    "/orders", json={"item": "x"}, headers={"Idempotency-Key": "while-down"}
                )
                assert response.status_code == 503
                assert response.json()["code"] == "idempotency.store_unavailable"
                assert int(response.headers["retry-after"]) >= 1
                assert time.monotonic() - started < 5, "an outage must not become a queue"
            await asyncio.to_thread(postgres.start)

        await crowd.run(outage)
        assert set(crowd.statuses) == {201, 503}, crowd.statuses
        assert crowd.without_retry_after == 0
        await crowd.assert_one_effect_each()


async def test_two_processes_see_the_same_outage_and_agree_afterwards(
    postgres: RealPostgres, postgres_url: str
) -> None:
    """Each order is begun at one process and sent again to the other, with the same key."""
    with ShopProcess(postgres_url) as one, ShopProcess(postgres_url) as other:
        enough = asyncio.Event()
        confirmed: dict[str, set[str]] = {}
        statuses: Counter[int] = Counter()

        async def shop_at_both(number: int) -> None:
            async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS) as client:
                order = 0
                while not enough.is_set():
                    item = f"{number}/{order}"
                    order += 1
                    turn = number
                    while len(confirmed.get(item, ())) == 0 or turn % 2 == number % 2:
                        url = (one.url, other.url)[turn % 2]
                        response = await client.post(
                            f"{url}/orders", json={"item": item}, headers={"Idempotency-Key": item}
                        )
                        statuses[response.status_code] += 1
                        if response.status_code == 201:
                            confirmed.setdefault(item, set()).add(response.json()["id"])
                        else:
                            await asyncio.sleep(0.05)
                        turn += 1

        clients = [asyncio.create_task(shop_at_both(n)) for n in range(CLIENTS)]
        await asyncio.sleep(0.4)
        for _ in range(2):
            await asyncio.to_thread(postgres.stop, "immediate")
            await asyncio.sleep(0.2)
            await asyncio.to_thread(postgres.start)
            await asyncio.sleep(0.5)
        enough.set()
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await asyncio.gather(*clients)
        # 409 is allowed: the first process may still run the request when the second gets it.
        assert set(statuses) <= {201, 409, 503}, statuses
        rows = httpx.get(f"{one.url}/orders", timeout=10).json()
        assert len(rows) == len({row["item"] for row in rows})
        assert {row["item"]: {row["id"]} for row in rows} == confirmed


# -- Redis --------------------------------------------------------------------------------------


@pytest.fixture
def cached_shop(redis_url: str, tmp_path: Path) -> Any:
    """Disable the memory cache, so that every replay uses Redis."""
    database = f"sqlite:///{tmp_path}/shop.db"
    with ShopProcess(database, SHOP_REDIS=redis_url, SHOP_MEMORY_BYTES="0") as shop:
        yield shop


def order(shop: ShopProcess, item: str, key: str | None = None) -> httpx.Response:
    headers = {"Idempotency-Key": key or f"key-of-{item}"}
    return httpx.post(f"{shop.url}/orders", json={"item": item}, headers=headers, timeout=10)


def cached(key: str) -> bytes:
    return f"idempo:test:everyone:orders.create:{key}".encode()


def test_no_response_is_wrong_whatever_redis_contains(
    cached_shop: ShopProcess, redis_url: str
) -> None:
    items = [f"item-{n}" for n in range(8)]
    first = {item: order(cached_shop, item) for item in items}
    with redis.Redis.from_url(redis_url) as client:
        names = {item: cached(f"key-of-{item}") for item in items}
        deadline = time.monotonic() + 5
        while not all(client.exists(name) for name in names.values()):
            assert time.monotonic() < deadline, "the cache is not in use: this test proves nothing"
            time.sleep(0.02)
        right: dict[str, Any] = {item: client.get(name) for item, name in names.items()}
        wrong = [
            b"",
            b"garbage" * 50,
            right["item-0"],  # another record's value
            right["item-3"][:-1],
            right["item-4"][:32] + right["item-0"][32:],
            right["item-5"] + b"\x00",
            b'{"status": 201, "body": "made up"}',
        ]
        for item, value in zip(items[1:], wrong, strict=True):
            client.set(names[item], value)
        client.delete(names["item-7"])
        client.rpush(names["item-7"], "a list, not a text")
        # A record of another key.
        client.set(cached("never-used"), right["item-0"])

        for item in items:
            again = order(cached_shop, item)
            assert (again.status_code, again.content) == (201, first[item].content), item
            assert again.headers["idempotency-replayed"] == "true"
        fresh = order(cached_shop, "brand new", key="never-used")
        assert fresh.json()["item"] == "brand new"
        assert "idempotency-replayed" not in fresh.headers
    rows = httpx.get(f"{cached_shop.url}/orders").json()
    assert Counter(row["item"] for row in rows) == Counter([*items, "brand new"])


async def test_redis_is_flushed_stopped_and_started_under_load(
    cached_shop: ShopProcess, redis_server: RealRedis
) -> None:
    crowd = Crowd(cached_shop)

    async def fault() -> None:
        for _ in range(3):
            await asyncio.to_thread(redis_server.flush)
            await asyncio.sleep(0.1)
        for end in (redis_server.stop, redis_server.kill):
            await asyncio.to_thread(end)
            before = crowd.statuses[201]
            async with asyncio.timeout(60):  # without the cache the others go on
                while crowd.statuses[201] <= before:
                    await asyncio.sleep(0.02)
            await asyncio.to_thread(redis_server.start)
            await asyncio.sleep(0.3)

    await crowd.run(fault, replay=True)
    assert set(crowd.statuses) == {201}, crowd.statuses
    await crowd.assert_one_effect_each()


async def test_foreign_values_in_redis_under_load_are_ignored(
    cached_shop: ShopProcess, redis_url: str
) -> None:
    crowd = Crowd(cached_shop)

    async def fault() -> None:
        def mix_up() -> None:
            with redis.Redis.from_url(redis_url) as client:
                until = time.monotonic() + 1.5
                while time.monotonic() < until:
                    names = list(client.scan_iter(match="idempo:*", count=500))
                    if not names:
                        continue
                    values = client.mget(names)
                    for name, value in zip(names, [*values[1:], b"\x00garbage"], strict=True):
                        if value is not None:
                            client.set(name, value)

        await asyncio.to_thread(mix_up)

    await crowd.run(fault, replay=True)
    assert set(crowd.statuses) == {201}, crowd.statuses
    await crowd.assert_one_effect_each()
