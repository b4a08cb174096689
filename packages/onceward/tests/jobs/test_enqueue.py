"""Enqueue: in the transaction of the write that causes it, under its key, with its ids."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta, timezone
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from fastapi import FastAPI, HTTPException, Request
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from onceward import GuardConfig, Onceward, Policy, open_store
from onceward.errors import JobPayloadTooLargeError, NoTransactionError, UsageError
from onceward.jobs.context import JobContext
from onceward.jobs.enqueue import Cause, new_job
from onceward.jobs.job import AlreadyDone, Enqueued, Merged, job_id
from onceward.ports import Store
from onceward.stores.sessions.sqlalchemy import SqlAlchemyStore
from packages.onceward.tests.support.harness import by_header
from packages.onceward.tests.support.jobs_harness import (
    JobsLab,
    eventually,
    make_effects,
    write_effect,
)

CAUSE = Cause("ada", "ada's phone", "request-1", "correlation-1")


class Shop:
    """A guarded app that writes, enqueues, and then succeeds or fails as the request says."""

    def __init__(self, store: Store) -> None:
        self.onceward = Onceward(
            store,
            policy=Policy(),
            identify=by_header,
            config=GuardConfig(sweep_every_seconds=None, max_payload_bytes=1000),
        )
        self.lab = JobsLab(store)
        self.lab.jobs = self.onceward.jobs
        self.notifications = 0
        self.events_before = 0
        self.outcomes: list[Any] = []
        app = FastAPI()
        self.onceward.install(app)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://shop")

        @self.onceward.jobs.handler("receipt", queue="mail", max_attempts=3)
        async def receipt(job: JobContext) -> None:
            await write_effect(job, f"receipt {job.request_id} {job.correlation_id}")

        @app.post("/orders", status_code=201)
        @self.onceward.guard("orders.create")
        async def create(request: Request) -> dict[str, str]:
            options = (await request.json()).get("options", {})
            payload = options.pop("payload", {"total": 7})
            await self.onceward.execution.statements.execute(
                "INSERT INTO effects (name) VALUES ('order')"
            )
            self.outcomes.append(await self.onceward.enqueue("receipt", payload, **options))
            assert await self.lab.count("onceward_audit_events") == self.events_before, (
                "nothing is seen before the commit"
            )
            match request.headers.get("x-do"):
                case "raise":
                    raise RuntimeError("broken handler")
                case str(status):
                    raise HTTPException(int(status))
            return {"id": "1"}

        notify = self.onceward.runtime.notifier.notify

        def counted() -> None:
            self.notifications += 1
            notify()

        self.onceward.runtime.notifier.notify = counted  # type: ignore[method-assign]

    async def order(self, key: str = "key-1", do: str | None = None, **options: Any) -> Any:
        headers = {"Idempotency-Key": key, "X-Request-ID": "r-7", "X-Correlation-ID": "c-7"}
        if do is not None:
            headers["X-Do"] = do
        return await self.client.post("/orders", json={"options": options}, headers=headers)


@pytest.fixture(params=["sqlite", "postgresql", "sqlalchemy sqlite", "sqlalchemy postgresql"])
def kind_and_url(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    if request.param.endswith("sqlite"):
        return request.param, f"sqlite:///{tmp_path}/jobs.db"
    return request.param, str(request.getfixturevalue("clean_jobs_url"))


@pytest.fixture
async def shop(kind_and_url: tuple[str, str]) -> AsyncIterator[Shop]:
    kind, url = kind_and_url
    engine = None
    store: Store = open_store(url)
    if kind.startswith("sqlalchemy"):
        driver = "+aiosqlite://" if "sqlite" in url else "+asyncpg://"
        engine = create_async_engine(url.replace("://", driver, 1))
        store = SqlAlchemyStore(async_sessionmaker(engine))
    shop = Shop(store)
    await shop.onceward.open()
    await make_effects(store)
    yield shop
    await shop.lab.stop_workers()
    await shop.client.aclose()
    await shop.onceward.close()
    if engine is not None:
        await engine.dispose()


# -- one transaction ------------------------------------------------------------------------------


async def test_job_audit_event_and_rows_commit_with_the_response(shop: Shop) -> None:
    assert (await shop.order(resource_id="order/1")).status_code == 201
    key = "job:ada:mail:receipt:order/1"
    assert shop.outcomes == [Enqueued(job_id(key))]
    job = await shop.lab.job(job_id(key))
    assert (job.view.key, job.view.queue, job.view.state) == (key, "mail", "waiting")
    assert (job.payload, job.view.max_attempts) == ({"total": 7}, 3), "the handler's default"
    assert (job.view.request_id, job.view.correlation_id) == ("r-7", "c-7")
    assert await shop.lab.effects() == ["order"]
    audits = await shop.lab.rows(
        "SELECT tenant, endpoint, actor, status, resource, request_id, correlation_id,"
        " payload_hash FROM onceward_audit_events ORDER BY endpoint"
    )
    ids = {"request_id": "r-7", "correlation_id": "c-7"}
    about_job = {"status": 202, "resource": key, "payload_hash": job.payload_hash}
    who = {"tenant": "ada", "actor": "ada's phone"}
    assert [row["endpoint"] for row in audits] == ["job.enqueued mail receipt", "orders.create"]
    assert dict(audits[0]) == {"endpoint": "job.enqueued mail receipt", **who, **about_job, **ids}
    assert shop.notifications == 1


@pytest.mark.parametrize("attempts", [0, 10**12])
async def test_invalid_max_attempts_is_refused_although_the_handler_has_a_default(
    attempts: int, shop: Shop
) -> None:
    assert (await shop.order(max_attempts=attempts)).status_code == 500
    assert await shop.lab.count("onceward_jobs") == 0
    assert await shop.lab.effects() == []


async def test_a_replay_enqueues_nothing(shop: Shop) -> None:
    first = await shop.order()
    await shop.lab.claim("one")
    again = await shop.order()
    assert again.headers["Idempotency-Replayed"] == "true"
    assert (first.content, len(shop.outcomes), shop.notifications) == (again.content, 1, 1)
    assert await shop.lab.count("onceward_jobs") == 1
    assert await shop.lab.count("onceward_audit_events") == 2


@pytest.mark.parametrize("failure", ["raise", "500", "503", "404", "422"])
async def test_rolled_back_request_enqueues_nothing(shop: Shop, failure: str) -> None:
    assert (await shop.order(do=failure)).status_code >= 400
    for table in ("onceward_jobs", "effects", "onceward_audit_events"):
        assert await shop.lab.count(table) == 0
    assert (len(shop.outcomes), shop.notifications) == (1, 0)
    if failure.startswith("5"):
        assert (await shop.order()).status_code == 201
        assert await shop.lab.count("onceward_jobs") == 1
        assert shop.notifications == 1


async def test_too_large_payload_is_413_and_writes_nothing(shop: Shop) -> None:
    response = await shop.order(payload="x" * 1000)
    assert response.status_code == 413
    assert "the payload of receipt has 1002 bytes, at most 1000" in response.json()["detail"]
    for table in ("onceward_jobs", "effects", "onceward_audit_events"):
        assert await shop.lab.count(table) == 0
    assert (await shop.order("key-2", payload="x" * 998)).status_code == 201


async def test_same_key_is_one_job_and_stays_done(shop: Shop) -> None:
    """The writes that cause it are two all the same."""
    lab, same = shop.lab, job_id("job:ada:mail:receipt:order/1")

    async def again() -> Any:
        async with lab.transaction() as tx:
            return await lab.enqueue_in(tx, "receipt", {"n": 2}, resource_id="order/1")

    assert await again() == Enqueued(same)
    assert await again() == Merged(same)
    assert await lab.count("onceward_audit_events") == 2, "enqueued, merged"
    job = await lab.claim_one("one")
    assert await again() == Merged(same), "while it runs"
    assert await lab.job_store.complete_alone([(job.lease, "1")], worker="one")
    assert await again() == AlreadyDone(same)
    assert await lab.count("onceward_jobs") == 0
    assert await lab.count("onceward_audit_events") == 3, "enqueued once, merged twice"


async def test_duplicate_is_logged_with_the_id_of_the_job_that_exists(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "onceward.jobs")

    async def order(key: str, **options: Any) -> None:
        shop.events_before = await shop.lab.count("onceward_audit_events")
        assert (await shop.order(key, **options)).status_code == 201

    await order("key-0")
    await order("key-1")  # another request, the same payload
    first, second = shop.outcomes
    assert second == Merged(first.job_id)
    job = await shop.lab.claim_one("one")
    assert await shop.lab.job_store.complete_alone([(job.lease, "1")], worker="one")
    await order("key-2")
    await order("key-3", coalesce="all")
    await order("key-4", coalesce="all")
    found = [record for record in caplog.records if "not enqueued" in record.message]
    assert [record.message for record in found] == [
        f"job not enqueued, receipt {first.job_id} {reason}: tenant ada; "
        "without resource_id the payload is the key"
        for reason in ("waits or runs", "is done")
    ]
    assert {(r.levelname, r.job_id, r.tenant) for r in found} == {("INFO", first.job_id, "ada")}  # type: ignore[attr-defined]


async def test_two_concurrent_transactions_with_one_key_enqueue_one_job(shop: Shop) -> None:
    async def one(n: int) -> Any:
        unit = await shop.lab.store.begin()
        outcome = await shop.lab.enqueue_in(unit.statements, "receipt", 1, resource_id="r")
        await asyncio.sleep(0.01)
        if n == 0:
            await unit.rollback()
        else:
            await unit.commit(None, None)
        return outcome

    outcomes = await asyncio.gather(*(one(n) for n in range(8)))
    assert [type(outcome) for outcome in outcomes[1:]].count(Enqueued) == 1
    assert await shop.lab.count("onceward_jobs") == 1
    enqueued = "SELECT 1 AS n FROM onceward_audit_events WHERE endpoint LIKE 'job.enqueued%'"
    assert len(await shop.lab.rows(enqueued)) == 1
    assert await shop.lab.count("onceward_audit_events") == 7, "one for each that was committed"


async def test_request_and_correlation_ids_reach_the_handler(shop: Shop) -> None:
    worker = shop.onceward.worker(lease_seconds=5)
    await worker.start()
    try:
        await shop.order(resource_id="order/1")

        async def has_run() -> bool:
            return await shop.lab.effects() == ["order", "receipt r-7 c-7"]

        await eventually(has_run)
    finally:
        await worker.stop()


async def test_enqueue_outside_a_guarded_request_is_an_error(shop: Shop) -> None:
    with pytest.raises(NoTransactionError):
        await shop.onceward.enqueue("receipt")


# -- times ------------------------------------------------------------------------------------


async def test_job_is_not_claimed_before_its_due_time(shop: Shop) -> None:
    lab = shop.lab
    now = await lab.job_store.now()
    options: dict[str, dict[str, Any]] = {
        "delay": {"delay_seconds": 100.5},
        "instant": {"run_at": now + timedelta(seconds=50)},
        "other zone": {"run_at": (now + timedelta(seconds=50)).astimezone()},
        "both": {"run_at": now + timedelta(seconds=50), "delay_seconds": 50},
        "past": {"run_at": now - timedelta(days=1)},
        "far": {"run_at": datetime(9999, 12, 30, tzinfo=UTC), "delay_seconds": 60},
    }
    due: dict[str, float] = {}
    for name, arguments in options.items():
        async with lab.transaction() as tx:
            outcome = await lab.enqueue_in(tx, "receipt", name, **arguments)
        due_at = (await lab.job(outcome.job_id)).view.due_at
        assert due_at is not None
        due[name] = (due_at - now).total_seconds()
    assert due.pop("far") > 1e11
    expected = {"delay": 100.5, "instant": 50, "other zone": 50, "both": 100, "past": -86400}
    assert due == pytest.approx(expected, abs=2)
    assert [job.decoded() for job in await lab.claim()] == ["past"]


async def test_delayed_job_runs_when_it_is_due(shop: Shop) -> None:
    lab = shop.lab
    async with lab.transaction() as tx:
        outcome = await lab.enqueue_in(tx, "receipt", 1, delay_seconds=0.4)
    enqueued_at = (await lab.job(outcome.job_id)).view.enqueued_at
    assert await lab.claim() == []

    async def taken() -> list[Any]:
        return list(await lab.claim())

    await eventually(taken, seconds=5)
    assert (await lab.job_store.now() - enqueued_at).total_seconds() >= 0.399


# -- keys and checks --------------------------------------------------------------------------


def test_key_without_resource_contains_the_payload_hash() -> None:
    job = new_job("receipt", {"b": 1, "a": [1.0, "ü"]}, cause=CAUSE, queue="mail")
    digest = sha256('{"a":[1,"ü"],"b":1}'.encode()).hexdigest()
    assert job.payload_hash == digest
    assert job.key == f"job:ada:mail:receipt:{digest}"
    same = new_job("receipt", {"a": [1, "ü"], "b": 1}, cause=CAUSE, queue="mail")
    assert same.id == job.id, "the order of its fields is no difference"
    assert new_job("receipt", {"a": [1]}, cause=CAUSE, queue="mail").id != job.id


def test_key_with_resource_ignores_the_payload() -> None:
    one = new_job("receipt", 1, cause=CAUSE, resource_id="order/1")
    other = new_job("receipt", 2, cause=CAUSE, resource_id="order/1")
    assert one.key == "job:ada:default:receipt:order/1"
    assert one.id == other.id == job_id(one.key)
    assert one.payload_hash != other.payload_hash


def test_every_enqueue_of_a_coalescing_job_has_a_new_key() -> None:
    jobs = [new_job("receipt", 1, cause=CAUSE, coalesce="day") for _ in range(100)]
    assert len({job.id for job in jobs}) == 100
    assert all(job.key.startswith("job:ada:default:receipt:day#") for job in jobs)
    assert {job.coalesce_key for job in jobs} == {"day"}


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


endless: list[Any] = []
endless.append(endless)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (object(), "not JSON"),
        ({"a": {1: object()}}, "not JSON"),
        (float("nan"), "NaN"),
        ({"a": [None, float("inf")]}, "NaN and Infinity"),
        ({"a": (1, -float("inf"))}, "NaN and Infinity"),
        ("\ud800", "not JSON"),
        ({1: "a", "1": "b"}, "same key twice"),
        (deep(129), "nested deeper"),
        (endless, "nested too deep"),
    ],
    ids=["object", "inner object", "nan", "inf", "-inf", "surrogate", "twice", "deep", "endless"],
)
def test_a_payload_that_is_not_json_is_refused_with_the_reason(payload: Any, reason: str) -> None:
    with pytest.raises(UsageError, match="the payload of receipt is not JSON") as raised:
        new_job("receipt", payload, cause=CAUSE)
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    "payload", [None, {"a": None}, [None, 1.5], "null", deep(128), 2**70, "\x00", {"": ""}]
)
def test_any_json_payload_is_stored_unchanged(payload: Any) -> None:
    import json

    assert json.loads(new_job("receipt", payload, cause=CAUSE).payload) == payload


@pytest.mark.parametrize(
    "arguments",
    [
        {"job_type": ""},
        {"job_type": "a:b"},
        {"job_type": "a b"},
        {"job_type": "x" * 101},
        {"job_type": "-a"},
        {"queue": "ü"},
        {"queue": ""},
        {"queue": "a\n"},
        {"resource_id": ""},
        {"resource_id": "x" * 501},
        {"resource_id": "a\x00b"},
        {"coalesce": ""},
        {"coalesce": "\ud800"},
        {"order": "x" * 501},
        {"run_at": datetime(2026, 3, 1)},  # noqa: DTZ001
        {"run_at": datetime(9999, 12, 31, tzinfo=UTC), "delay_seconds": 2**31 - 1},
        {"run_at": datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-12)))},
        {"delay_seconds": -1},
        {"delay_seconds": float("nan")},
        {"delay_seconds": float("inf")},
        {"delay_seconds": 1e12},
        {"max_attempts": 0},
        {"max_attempts": -1},
        {"max_attempts": 1001},
        {"max_attempts": 10**12},
    ],
    ids=str,
)
def test_invalid_enqueue_arguments_are_refused(arguments: dict[str, Any]) -> None:
    job_type = arguments.pop("job_type", "receipt")
    with pytest.raises(UsageError, match=r"must |refuse|no time zone|out of range"):
        new_job(job_type, 1, cause=CAUSE, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"job_type": 5}, "type must be text, not int"),
        ({"queue": 5}, "queue must be text, not int"),
        ({"queue": ["mail"]}, "queue must be text, not list"),
        ({"resource_id": 1.5}, "resource_id must be text, an integer or a UUID, not float"),
        ({"resource_id": True}, "resource_id must be text, an integer or a UUID, not bool"),
        ({"coalesce": b"a"}, "coalesce must be text, an integer or a UUID, not bytes"),
        ({"order": ["a"]}, "order must be text, an integer or a UUID, not list"),
        ({"run_at": "2026-03-01"}, "run_at must be a datetime, not str"),
        ({"delay_seconds": "5"}, "delay_seconds must be a number, not str"),
        ({"delay_seconds": timedelta(1)}, "delay_seconds must be a number, not timedelta"),
        ({"max_attempts": "5"}, "max_attempts must be an integer, not str"),
        ({"max_attempts": 2.5}, "max_attempts must be an integer, not float"),
        ({"cause": Cause(7, "", "", "")}, "tenant must be text, not int"),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_enqueue_argument_of_another_type_is_refused_by_name(
    arguments: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"job_type": "receipt", "cause": CAUSE} | arguments
    with pytest.raises(UsageError, match=message):
        new_job(payload=1, **given)


def test_integers_and_uuids_name_the_same_job_as_their_text() -> None:
    id_ = UUID("7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10")
    for given, text in ((42, "42"), (0, "0"), (id_, str(id_))):
        job = new_job("receipt", 1, cause=CAUSE, resource_id=given, order=given)
        assert job == new_job("receipt", 1, cause=CAUSE, resource_id=text, order=text)
        assert (job.resource_id, job.order_key) == (text, text)
        assert new_job("receipt", 1, cause=CAUSE, coalesce=given).coalesce_key == text


async def test_empty_queue_is_refused_and_not_taken_for_the_default(shop: Shop) -> None:
    assert (await shop.order(queue="")).status_code == 500
    assert await shop.lab.count("effects") == 0


async def test_empty_tenant_is_refused_and_not_taken_for_the_callers(shop: Shop) -> None:
    assert (await shop.order(tenant="")).status_code == 500
    assert await shop.lab.count("effects") == 0
    assert (await shop.order(tenant=None)).status_code == 201


def test_job_without_a_tenant_is_refused() -> None:
    with pytest.raises(UsageError, match="tenant"):
        new_job("receipt", 1, cause=Cause("", "", "", ""))


def test_payload_limit_counts_bytes() -> None:
    assert new_job("receipt", "ü" * 4, cause=CAUSE, max_payload_bytes=10).payload == '"üüüü"'
    with pytest.raises(JobPayloadTooLargeError, match="has 12 bytes, at most 11"):
        new_job("receipt", "ü" * 5, cause=CAUSE, max_payload_bytes=11)
