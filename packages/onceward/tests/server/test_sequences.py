"""Strict sequences: a client's requests run in the order of their numbers, without gaps."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from onceward import ErrorFormat, GuardConfig, Onceward, Policy, Principal
from onceward.errors import CommitUnknownError, ConfigurationError
from onceward.fastapi import Tx
from onceward.guard.idempotency import FAULT_POINTS
from onceward.guard.policy import ErrorsStored
from onceward.stores.redis import RedisRecords
from onceward_operator.tenant_data import TenantData
from onceward_testing.servers import RealPostgres
from packages.onceward.tests.support.batch_lab import item, open_batch_lab
from packages.onceward.tests.support.harness import HeldClock, Lab, fresh_database, open_lab

STRICT = Policy(ordering="strict")
KEY_TABLES = ("onceward_sequences", "onceward_sequence_numbers")


@pytest.fixture(scope="module")
def module_database(postgres: RealPostgres) -> Iterator[str]:
    url = postgres.create_database("sequences")
    yield url
    postgres.start()
    postgres.drop_database(url)


@pytest.fixture(params=["sqlite", "postgresql"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return await fresh_database(request, tmp_path, request.param)


@pytest.fixture
async def postgresql(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return await fresh_database(request, tmp_path, "postgresql")


def numbered(number: object, client: str = "phone") -> dict[str, str]:
    return {"X-Client-ID": client, "X-Sequence": str(number)}


async def send(lab: Lab, key: str, number: object, **more: Any) -> httpx.Response:
    headers = {**numbered(number, more.pop("client", "phone")), **more.pop("headers", {})}
    return await lab.send(key, headers=headers, **more)


def refusal(response: httpx.Response) -> dict[str, Any]:
    assert (response.status_code, response.json()["code"]) == (422, "sequence.violation")
    assert response.headers["onceward-error"] == "sequence.violation"
    details: dict[str, Any] = response.json()["details"]
    return details


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


# -- what a number gets ----------------------------------------------------------------------------


async def test_next_number_runs_and_a_known_one_is_replayed_with_its_key_only(
    database: str,
) -> None:
    async with open_lab(database, STRICT) as lab:
        first = await send(lab, "a", 1)
        assert first.status_code == 201
        assert refusal(await send(lab, "b", 3)) == {"expected": 2}
        assert refusal(await send(lab, "b", 1)) == {"expected": 2, "used_by": "other_key"}
        # The numbers count for all strict endpoints of a client, and for each client alone.
        assert (await send(lab, "b", 2, path="/others")).status_code == 201
        assert (await send(lab, "c", 1, client="laptop")).status_code == 201
        assert (await send(lab, "c", 1, headers={"x-tenant": "bob"})).status_code == 201
        again = await send(lab, "a", 1)
        assert again.content == first.content
        assert again.headers["idempotency-replayed"] == "true"
        # A stored key with another number is neither replayed nor run.
        known = {"expected": 3, "used_by": "other_key", "key_sequence": 1}
        assert refusal(await send(lab, "a", 2)) == known
        assert refusal(await send(lab, "a", 3)) == {"expected": 3, "key_sequence": 1}
        assert refusal(await send(lab, "a", 4)) == {"expected": 3, "key_sequence": 1}
        assert refusal(await send(lab, "a", 1, client="laptop")) == {
            "expected": 2,
            "used_by": "other_key",
        }
        mismatch = await send(lab, "a", 1, json={"item": "hat"})
        assert mismatch.json()["code"] == "idempotency.payload_mismatch"
        assert await lab.effects() == len(await lab.records()) == len(lab.runs) == 4


async def test_replay_of_another_process_checks_the_number(database: str) -> None:
    async with open_lab(database, STRICT) as one, open_lab(database, STRICT) as other:
        first = await send(one, "a", 1)
        assert (await send(other, "a", 1)).content == first.content
        assert refusal(await send(other, "a", 2)) == {"expected": 2, "key_sequence": 1}
        assert (await send(other, "b", 2)).status_code == 201
        assert refusal(await send(one, "c", 2)) == {"expected": 3, "used_by": "other_key"}
        assert (await send(one, "c", 3)).status_code == 201


async def test_replay_from_redis_checks_the_number(postgresql: str, redis_url: str) -> None:
    caches = [
        RedisRecords(redis_url, environment="test", secret=secret, timeout_seconds=5)
        for _ in range(2)
    ]
    options: dict[str, Any] = {"memory_bytes": 0}
    async with (
        open_lab(postgresql, STRICT, cache=caches[0], **options) as one,
        open_lab(postgresql, STRICT, cache=caches[1], **options) as other,
    ):
        first = await send(one, "a", 1)
        await asyncio.gather(*one.onceward.runtime.idempotency._cache_writes)
        assert (await send(other, "a", 1)).content == first.content
        assert refusal(await send(other, "a", 2)) == {"expected": 2, "key_sequence": 1}
        assert other.store.calls["claim"] == 0


async def secret() -> bytes:
    return b"s" * 32


async def test_expired_record_is_reported_as_used_by_this_key(database: str) -> None:
    clock = HeldClock()
    async with open_lab(database, STRICT, clock=clock) as lab:
        await send(lab, "a", 1)
        await send(lab, "b", 2)
        clock.pass_by(days=3)
        assert refusal(await send(lab, "a", 1)) == {"expected": 3, "used_by": "this_key"}
        assert len(lab.runs) == 2


MALFORMED: list[dict[str, str]] = [
    {},
    {"X-Client-ID": "phone"},
    {"X-Sequence": "1"},
    *(numbered(number) for number in ("", "0", "01", "-1", "+1", "1.0", "one", "1,1", 2**63)),
    *(numbered(1, client) for client in ("", "a b", "a,b", "é", "x" * 129)),
]


async def test_missing_and_malformed_headers_are_400(tmp_path: Path) -> None:
    async with open_lab(f"sqlite:///{tmp_path}/lab.db", STRICT) as lab:
        for headers in MALFORMED:
            encoded = {name: value.encode("latin-1") for name, value in headers.items()}
            refused = await lab.send("a", headers=encoded)
            assert (refused.status_code, refused.json()["code"]) == (400, "request.invalid")
            assert "X-Client-ID" in refused.text or "X-Sequence" in refused.text
            # For a client that does not know that requests are numbered here.
            is_missing = not {"X-Client-ID", "X-Sequence"} <= set(headers)
            required = ["X-Client-ID", "X-Sequence"] if is_missing else None
            assert refused.json()["details"].get("required_headers") == required
        assert lab.runs == await lab.records() == []


async def test_two_different_numbers_in_one_request_are_400(tmp_path: Path) -> None:
    async with open_lab(f"sqlite:///{tmp_path}/lab.db", STRICT) as lab:
        headers = [("Idempotency-Key", "a"), ("X-Client-ID", "phone"), ("X-Sequence", "1")]
        twice = await lab.client.post("/things", json={}, headers=[*headers, ("X-Sequence", "2")])
        assert twice.status_code == 400
        same = await lab.client.post("/things", json={}, headers=[*headers, ("X-Sequence", "1")])
        assert same.status_code == 201


def test_ordering_is_checked() -> None:
    assert Policy().ordering == "none"
    with pytest.raises(ConfigurationError, match='ordering is "none" or "strict", not \'yes\''):
        Policy(ordering="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="key_required=True"):
        Policy(ordering="strict", key_required=False)


# -- which responses use a number up ---------------------------------------------------------------


async def test_stored_refusal_uses_its_number_and_an_unstored_response_does_not(
    database: str,
) -> None:
    async with open_lab(database, STRICT) as lab:
        assert (await send(lab, "a", 1, do="500")).status_code == 500
        assert (await send(lab, "a", 1, do="raise")).status_code == 500
        assert (await send(lab, "a", 1, do="403")).status_code == 403
        assert (await send(lab, "a", 1, do="404")).status_code == 404
        assert refusal(await send(lab, "b", 1)) == {"expected": 2, "used_by": "other_key"}
        assert (await send(lab, "b", 2, do="422 keep")).status_code == 422
        assert (await send(lab, "c", 3)).status_code == 201
        assert (await send(lab, "a", 1)).status_code == 404
        assert await lab.effects() == 2
    unstored = STRICT.replace(errors_stored=ErrorsStored.NONE, error_format=ErrorFormat.ENVELOPE)
    async with open_lab(database, unstored) as lab:
        assert (await send(lab, "d", 4, do="404")).status_code == 404
        assert (await send(lab, "e", 4)).status_code == 201
        refused = await send(lab, "d", 4)
        assert refused.json()["error"] == "ORDERING_VIOLATION"
        assert refused.json()["details"] == {"expected": 5, "used_by": "other_key"}


async def test_unknown_commit_is_resolved_with_its_number(database: str) -> None:
    async def cut_after(unit: Any, record: Any, audit: Any) -> None:
        await unit.commit(record, audit)
        raise CommitUnknownError("cut")

    async def cut_before(unit: Any, record: Any, audit: Any) -> None:
        await unit.rollback()
        raise CommitUnknownError("cut")

    async with open_lab(database, STRICT) as lab:
        lab.store.commits = [cut_before, cut_after]
        assert (await send(lab, "a", 1)).status_code == 503
        assert (await send(lab, "a", 1)).status_code == 201
        assert (await send(lab, "b", 2)).status_code == 201
        assert await lab.effects() == 2


class FailAt:
    """Fails at one point, as a process that is killed there: nothing after it happens."""

    def __init__(self, point: str) -> None:
        self._point = point

    async def reach(self, point: str) -> None:
        if point == self._point:
            raise RuntimeError("killed")


@pytest.mark.parametrize("point", FAULT_POINTS)
async def test_number_and_record_are_committed_together_or_not_at_all(
    database: str, point: str
) -> None:
    async with open_lab(database, STRICT, faults=FailAt(point)) as lab:
        assert (await send(lab, "a", 1)).status_code == 500
        assert len(lab.onceward.runtime.idempotency.sequences.turns) == 0
    async with open_lab(database, STRICT) as lab:
        is_committed = point == "after_commit"
        assert await lab.effects() == len(await lab.records()) == int(is_committed)
        again = await send(lab, "a", 1)
        assert again.status_code == 201
        assert ("idempotency-replayed" in again.headers) is is_committed
        assert (await send(lab, "b", 2)).status_code == 201
        assert await lab.effects() == 2


# -- requests at the same time ---------------------------------------------------------------------


async def test_one_of_two_keys_with_the_same_number_runs(database: str) -> None:
    async with open_lab(database, STRICT) as lab:
        first = asyncio.create_task(send(lab, "a", 1, do="wait"))
        await lab.started.wait()
        second = asyncio.create_task(send(lab, "b", 1))
        await until(lambda: lab.onceward.runtime.idempotency.in_flight.waiting_count == 1)
        lab.gate.set()
        assert (await first).status_code == 201
        assert refusal(await second) == {"expected": 2, "used_by": "other_key"}
        assert len(lab.runs) == 1
        # The first one fails: the second one may have the number.
        lab.gate.clear()
        first = asyncio.create_task(send(lab, "c", 2, do="wait 500"))
        await until(lambda: len(lab.runs) == 2)
        second = asyncio.create_task(send(lab, "d", 2))
        await until(lambda: lab.onceward.runtime.idempotency.in_flight.waiting_count == 1)
        lab.gate.set()
        assert [(await first).status_code, (await second).status_code] == [500, 201]


async def test_successors_wait_in_the_order_of_their_numbers(database: str) -> None:
    async with open_lab(database, STRICT) as lab:
        first = asyncio.create_task(send(lab, "1", 1, do="quiet wait"))
        await lab.started.wait()
        later = [asyncio.create_task(send(lab, str(n), n, do=f"n{n}")) for n in (4, 6, 3, 2)]
        await until(lambda: lab.onceward.runtime.idempotency.in_flight.waiting_count == 4)
        # Other clients do not wait, and those that wait hold no connection.
        assert (await send(lab, "x", 1, client="laptop")).status_code == 201
        lab.gate.set()
        assert (await first).status_code == 201
        found = [(await each).status_code for each in later]
        assert found == [201, 422, 201, 201]
        assert lab.runs[2:] == ["n2", "n3", "n4"]
        assert len(lab.onceward.runtime.idempotency.sequences.turns) == 0


async def test_successor_that_has_waited_too_long_is_in_progress(database: str) -> None:
    policy = STRICT.replace(wait=timedelta(milliseconds=50))
    async with open_lab(database, policy) as lab:
        first = asyncio.create_task(send(lab, "a", 1, do="wait"))
        await lab.started.wait()
        late = await send(lab, "b", 2)
        assert (late.status_code, late.json()["code"]) == (409, "idempotency.in_progress")
        assert "retry-after" in late.headers
        lab.gate.set()
        assert (await first).status_code == 201
        assert (await send(lab, "b", 2)).status_code == 201


async def test_cancelled_requests_pass_their_turn_on(database: str) -> None:
    async with open_lab(database, STRICT) as lab:
        first = asyncio.create_task(send(lab, "a", 1, do="wait"))
        await lab.started.wait()
        waiting = [asyncio.create_task(send(lab, key, 1)) for key in "bcd"]
        await until(lambda: lab.onceward.runtime.idempotency.in_flight.waiting_count == 3)
        waiting[0].cancel()
        first.cancel()
        await asyncio.gather(first, waiting[0], return_exceptions=True)
        found = sorted([(await each).status_code for each in waiting[1:]])
        assert found == [201, 422]
        assert len(lab.onceward.runtime.idempotency.sequences.turns) == 0


async def test_successor_waits_for_a_request_of_another_process(postgresql: str) -> None:
    async with open_lab(postgresql, STRICT) as one, open_lab(postgresql, STRICT) as other:
        first = asyncio.create_task(send(one, "a", 1, do="wait"))
        await one.started.wait()
        same = asyncio.create_task(send(other, "b", 1))
        await until(lambda: other.store.calls["claim"] >= 2)
        later = asyncio.create_task(send(other, "c", 2))
        await until(lambda: other.onceward.runtime.idempotency.in_flight.waiting_count >= 1)
        one.gate.set()
        assert (await first).status_code == 201
        assert refusal(await same) == {"expected": 2, "used_by": "other_key"}
        assert (await later).status_code == 201
        assert other.runs == [""]


async def test_of_two_processes_with_the_same_number_one_commits(database: str) -> None:
    async with open_lab(database, STRICT) as one, open_lab(database, STRICT) as other:
        for number in range(1, 11):
            sent = [
                send(lab, f"{number} {lane}".replace(" ", "-"), number)
                for lane, lab in enumerate((one, other, one, other))
            ]
            responses = await asyncio.gather(*sent)
            assert sorted(each.status_code for each in responses) == [201, 422, 422, 422]
            for each in responses:
                if each.status_code == 422:
                    assert refusal(each) == {"expected": number + 1, "used_by": "other_key"}
        assert await one.effects() == 10


# -- batches ---------------------------------------------------------------------------------------


def strict_item(key: str, number: int, do: str = "", **fields: Any) -> dict[str, Any]:
    return item(key, do, **{"client_id": "phone", "sequence": number, **fields})


def single(lab: Any, key: str, number: int) -> Any:
    return lab.single(item(key), **numbered(number))


async def test_numbers_of_a_batch_and_of_single_sends_are_one_stream(database: str) -> None:
    async with open_batch_lab(database, policy=STRICT) as lab:
        assert (await single(lab, "k1", 1)).status_code == 201
        batch = [strict_item(f"k{n}", n) for n in range(1, 61)]
        results = await lab.results(batch)
        assert [result["status"] for result in results] == [201] * 60
        assert [result["replayed"] for result in results] == [True] + [False] * 59
        again = await lab.results(batch)
        assert [result["replayed"] for result in again] == [True] * 60
        assert (await single(lab, "k60", 60)).headers["idempotency-replayed"] == "true"
        assert (await single(lab, "other", 60)).json()["details"] == {
            "expected": 61,
            "used_by": "other_key",
        }
        assert (await single(lab, "k61", 61)).status_code == 201
        rows = await lab.onceward.store.read(
            lab.onceward.store.table_names.render("SELECT last_number FROM onceward_sequences")
        )
        assert [row["last_number"] for row in rows] == [61]
        assert await lab.count("onceward_sequence_numbers") == 61


async def test_items_of_a_client_form_one_lane(database: str) -> None:
    async with open_batch_lab(database, policy=STRICT) as lab:
        batch = [
            strict_item("a", 1),
            strict_item("b", 2, "422"),
            strict_item("c", 3),
            strict_item("x", 1, client_id="laptop"),
        ]
        assert await lab.statuses(batch) == [201, 422, 424, 201]
        # The refusal is stored and has used its number; what was skipped has not.
        assert await lab.statuses([strict_item("c", 3), strict_item("d", 4)]) == [201, 201]
        wrong = [strict_item("e", 6), strict_item("f", 7), strict_item("y", 2, client_id="laptop")]
        results = await lab.results(wrong)
        assert [result["status"] for result in results] == [422, 424, 201]
        assert results[0]["body"]["details"] == {"expected": 5}
        broken = [strict_item("e", 5, "500"), strict_item("f", 6)]
        assert await lab.statuses(broken) == [500, 424]
        twice = [strict_item("e", 5), strict_item("e", 5), strict_item("g", 5)]
        results = await lab.results(twice)
        assert [result["status"] for result in results] == [201, 201, 422]
        assert results[1]["replayed"]
        assert results[2]["body"]["details"] == {"expected": 6, "used_by": "other_key"}
        assert await lab.names() == ["a", "c", "d", "e", "x", "y"]


async def test_batch_waits_for_a_running_single_request_of_its_client(database: str) -> None:
    async with open_batch_lab(database, policy=STRICT) as lab:
        first = asyncio.create_task(lab.single(item("a", "wait"), **numbered(1)))
        await lab.started.wait()
        batch = asyncio.create_task(lab.results([strict_item("b", 2), strict_item("c", 3)]))
        await asyncio.sleep(0.05)
        lab.gate.set()
        assert (await first).status_code == 201
        assert [result["status"] for result in await batch] == [201, 201]
        assert len(lab.onceward.runtime.idempotency.sequences.turns) == 0


# -- other parts -----------------------------------------------------------------------------------


@asynccontextmanager
async def late_app(database: str) -> AsyncIterator[httpx.AsyncClient]:
    async def caller() -> Principal:
        return Principal("ada", "ada")

    onceward = Onceward(
        database, policy=STRICT, principal=caller, config=GuardConfig(sweep_every_seconds=None)
    )
    app = FastAPI()
    onceward.install(app)

    @app.post("/things", status_code=201)
    @onceward.guard("things.create")
    async def create(name: str, tx: Tx) -> dict[str, str]:
        await tx.execute("CREATE TABLE IF NOT EXISTS things (name text)")
        return {"name": name}

    await onceward.open()
    try:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://lab") as client:
            yield client
    finally:
        await onceward.close()


async def test_endpoint_with_dependencies_checks_the_number_and_documents_it(
    database: str,
) -> None:
    async with late_app(database) as client:

        async def post(key: str, number: int) -> httpx.Response:
            headers = {"Idempotency-Key": key, **numbered(number)}
            return await client.post("/things", params={"name": key}, headers=headers)

        found = [(await post("a", 1)).status_code, (await post("c", 3)).status_code]
        found += [(await post("b", 2)).status_code, (await post("a", 1)).status_code]
        assert found == [201, 422, 201, 201]
        document = (await client.get("/openapi.json")).json()
        operation = document["paths"]["/things"]["post"]
        headers = {each["name"]: each for each in operation["parameters"] if each["in"] == "header"}
        assert set(headers) == {"Idempotency-Key", "X-Client-ID", "X-Sequence"}
        assert headers["X-Sequence"]["required"]
        assert "`sequence.violation`" in operation["responses"]["422"]["description"]


async def test_sequences_are_exported_and_erased_with_their_tenant(database: str) -> None:
    async with open_lab(database, STRICT) as lab:
        await send(lab, "a", 1)
        await send(lab, "a", 1, headers={"x-tenant": "bob"})
        data = await TenantData.open(lab.onceward.store, HeldClock())
        exported = [table async for table, _ in data.rows("ada")]
        assert {name.removeprefix("onceward_") for name in exported} >= {
            "sequences",
            "sequence_numbers",
        }
        await data.erase("ada", actor="an operator", reason="asked")
        for table in KEY_TABLES:
            rows = await lab.onceward.store.read(
                lab.onceward.store.table_names.render(f"SELECT tenant FROM {table}")
            )
            assert [row["tenant"] for row in rows] == ["bob"]
