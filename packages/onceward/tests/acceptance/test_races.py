"""Many requests at once, over real connections, repeatedly: one effect, equal responses."""

import asyncio
import os
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from packages.onceward.tests.support.citus import ON_CITUS, empty_citus
from packages.onceward.tests.support.raw_http import RawConnections
from packages.onceward.tests.support.serving import ShopProcess

ROUNDS = int(os.environ.get("ONCEWARD_TEST_ROUNDS", "200"))
AT_ONCE = 50


DATABASES = [
    pytest.param(name, marks=pytest.mark.xdist_group(f"races-{name}"))
    for name in ("sqlite", "postgresql", *ON_CITUS)
]


@pytest.fixture(scope="module", params=DATABASES)
def shops(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[ShopProcess]]:
    """Start one process on SQLite, two on others; each test has its own items."""
    if request.param == "sqlite":
        with ShopProcess(f"sqlite:///{tmp_path_factory.mktemp('races')}/shop.db") as shop:
            yield [shop]
        return
    if request.param == "citus":
        url = asyncio.run(empty_citus())
        with ShopProcess(url) as first, ShopProcess(url) as second:
            yield [first, second]
        return
    postgres: Any = request.getfixturevalue("postgres")
    postgres.start()  # a test before this one may have stopped it
    url = postgres.create_database("races")
    with ShopProcess(url) as first, ShopProcess(url) as second:
        yield [first, second]
    postgres.drop_database(url)


async def ordered(client: httpx.AsyncClient, what: str) -> Counter[str]:
    """Count the orders of each item whose name begins with this."""
    orders = (await client.get("/orders")).json()
    return Counter(order["item"] for order in orders if order["item"].startswith(what))


@pytest.fixture
async def clients(shops: list[ShopProcess]) -> AsyncIterator[list[httpx.AsyncClient]]:
    limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=AT_ONCE)
    made = [httpx.AsyncClient(base_url=s.url, timeout=30, limits=limits) for s in shops]
    yield made
    for client in made:
        await client.aclose()


@pytest.fixture
async def connections(shops: list[ShopProcess]) -> AsyncIterator[RawConnections]:
    async with RawConnections(shops, AT_ONCE) as opened:
        yield opened


async def test_fifty_identical_requests_have_one_effect_and_equal_responses(
    clients: list[httpx.AsyncClient], connections: RawConnections
) -> None:
    for number in range(ROUNDS):
        bodies = [{"item": f"same {number}"}] * AT_ONCE
        responses = await connections.post("/orders", bodies, str(uuid.uuid4()))
        assert {a.status_code for a in responses} == {201}
        assert len({a.content for a in responses}) == 1
        assert sum(not a.is_replayed for a in responses) == 1
    assert await ordered(clients[0], "same ") == {f"same {n}": 1 for n in range(ROUNDS)}


async def test_one_key_with_two_bodies_executes_one_and_rejects_the_other(
    clients: list[httpx.AsyncClient], connections: RawConnections
) -> None:
    rounds = max(1, ROUNDS // 5)
    for number in range(rounds):
        # By twos: each of two servers gets both bodies.
        bodies = [{"item": f"either {number}", "note": "ab"[i // 2 % 2]} for i in range(AT_ONCE)]
        responses = await connections.post("/orders", bodies, str(uuid.uuid4()))
        by_note = {
            note: [a for a, b in zip(responses, bodies, strict=True) if b["note"] == note]
            for note in "ab"
        }
        winner = "a" if by_note["a"][0].status_code == 201 else "b"
        loser = "b" if winner == "a" else "a"
        assert {a.status_code for a in by_note[winner]} == {201}
        assert len({a.content for a in by_note[winner]}) == 1
        assert {a.status_code for a in by_note[loser]} == {409}
        for response in by_note[loser]:
            problem = response.json()
            assert problem["code"] == "idempotency.payload_mismatch"
            assert problem["details"]["expectedHash"] != problem["details"]["receivedHash"]
    assert await ordered(clients[0], "either ") == {f"either {n}": 1 for n in range(rounds)}


async def test_many_retries_of_a_slow_request_do_not_block_other_keys(
    clients: list[httpx.AsyncClient],
) -> None:
    slow = {"item": "slow", "think_seconds": 6.0}
    headers = {"Idempotency-Key": str(uuid.uuid4())}
    flood = [
        asyncio.create_task(c.post("/orders", json=slow, headers=headers))
        for c in clients
        for _ in range(AT_ONCE - 10)
    ]
    await asyncio.sleep(0.3)
    others = await asyncio.gather(
        *(
            clients[i % len(clients)].post(
                "/orders", json={"item": f"quick {i}"}, headers={"Idempotency-Key": f"quick-{i}"}
            )
            for i in range(40)
        )
    )
    assert not any(task.done() for task in flood), "other keys had to wait for the slow one"
    responses = await asyncio.gather(*flood)
    assert {a.status_code for a in others} == {201}
    assert {a.status_code for a in responses} == {201}
    assert len({a.content for a in responses}) == 1


async def test_a_handler_that_is_slow_after_its_write_delays_the_rest_without_errors(
    clients: list[httpx.AsyncClient],
) -> None:
    slow = clients[0].post(
        "/orders",
        json={"item": "rest, but slow", "linger_seconds": 2.0},
        headers={"Idempotency-Key": "rest-slow"},
    )
    rest = [
        clients[i % len(clients)].post(
            "/orders", json={"item": f"rest {i}"}, headers={"Idempotency-Key": f"rest-{i}"}
        )
        for i in range(30)
    ]
    responses = await asyncio.gather(slow, *rest)
    assert {a.status_code for a in responses} == {201}
    assert (await ordered(clients[0], "rest")).total() == 31
