"""kill -9 at each named fault point: all of it or none of it, and never a key that is stuck."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from onceward.guard.idempotency import FAULT_POINTS
from packages.onceward.tests.support.serving import ShopProcess

KEY = {"Idempotency-Key": "the-key"}
ORDER = {"item": "boots"}


@pytest.fixture(params=["sqlite", "postgresql"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ShopProcess]:
    if request.param == "sqlite":
        database = f"sqlite:///{tmp_path}/shop.db"
    else:
        database = request.getfixturevalue("postgres_url")
    process = ShopProcess(database)
    yield process
    process.stop()


@pytest.mark.parametrize("point", FAULT_POINTS)
def test_a_process_killed_at_a_fault_point_leaves_one_effect_after_the_retry(
    shop: ShopProcess, point: str
) -> None:
    shop.start(SHOP_KILL_AT=point)
    with pytest.raises(httpx.TransportError):
        httpx.post(f"{shop.url}/orders", json=ORDER, headers=KEY, timeout=10)
    assert shop.wait_until_killed() == -signal.SIGKILL

    shop.start()
    after_crash = httpx.get(f"{shop.url}/orders").json()
    assert len(after_crash) == (1 if point == "after_commit" else 0)

    started = time.monotonic()
    response = httpx.post(f"{shop.url}/orders", json=ORDER, headers=KEY, timeout=20)
    assert response.status_code == 201
    assert time.monotonic() - started < 9, "the key was stuck"
    was_replayed = response.headers.get("Idempotency-Replayed") == "true"
    assert was_replayed == (point == "after_commit")

    again = httpx.post(f"{shop.url}/orders", json=ORDER, headers=KEY, timeout=10)
    assert again.content == response.content
    orders = httpx.get(f"{shop.url}/orders").json()
    assert [o["id"] for o in orders] == [response.json()["id"]]
