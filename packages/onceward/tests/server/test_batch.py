"""A batch gives each of its items what a single request would have got, each exactly once."""

import asyncio
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException, Request, Response

from onceward import SINGLE_TENANT, ErrorFormat, Onceward, Policy, Principal
from onceward.batch.options import BatchOptions
from onceward.errors import CommitUnknownError, ConfigurationError, StoreUnavailableError
from onceward.fastapi import Tx
from onceward.guard.policy import ErrorsStored
from onceward.guard.rate_limits import LimitsRateLimiter
from onceward_testing.servers import RealPostgres
from packages.onceward.tests.support.batch_lab import BatchLab, item, open_batch_lab
from packages.onceward.tests.support.harness import HeldClock, fresh_database


@pytest.fixture(scope="module")
def module_database(postgres: RealPostgres) -> Iterator[str]:
    url = postgres.create_database("batch")
    yield url
    postgres.start()
    postgres.drop_database(url)


@pytest.fixture(params=["sqlite", "postgresql"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return await fresh_database(request, tmp_path, request.param)


@pytest.fixture
async def postgresql(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return await fresh_database(request, tmp_path, "postgresql")


def things(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [item(f"k{at:03}") for at in range(first, first + count)]


# -- replay --------------------------------------------------------------------------------------


async def test_batch_and_single_sends_replay_each_other(database: str) -> None:
    async with open_batch_lab(database) as lab:
        alone = await lab.single(item("k001"))
        first = await lab.results(things(3))
        assert [result["status"] for result in first] == [201] * 3
        assert [result["replayed"] for result in first] == [False, True, False]
        assert first[1]["body"] == alone.json()
        assert first[1]["headers"]["x-original-request-id"] == alone.headers["x-request-id"]
        assert first[0]["headers"]["etag"] == '"1"'
        # The response of the batch was lost: all of it again.
        again = await lab.results(things(3))
        assert [result["replayed"] for result in again] == [True] * 3
        assert [result["body"] for result in again] == [result["body"] for result in first]
        replayed = await lab.single(item("k002"))
        assert replayed.headers["idempotency-replayed"] == "true"
        assert replayed.json() == first[2]["body"]
        assert await lab.names() == ["k000", "k001", "k002"]
        assert await lab.count("onceward_audit_events") == 3


async def test_two_hundred_items_are_committed_in_a_few_transactions(database: str) -> None:
    async with open_batch_lab(database) as lab:
        commits = count_commits(lab)
        results = await lab.results(things(200))
        assert [result["status"] for result in results] == [201] * 200
        assert len(await lab.names()) == 200
        assert len(lab.runs) == len(lab.background) == 200
        assert commits == ([50] * 4 if "postgresql" in database else [16] * 12 + [8])


def count_commits(lab: BatchLab) -> list[int]:
    """Note how many records each commit of a chunk writes."""
    found: list[int] = []
    store: Any = lab.onceward.store
    begin = store.begin_chunk

    async def begin_chunk(**options: Any) -> Any:
        chunk = await begin(**options)
        commit = chunk.commit

        async def counted(records: Any, audits: Any) -> None:
            found.append(len(records))
            await commit(records, audits)

        chunk.commit = counted
        return chunk

    store.begin_chunk = begin_chunk
    return found


async def test_another_payload_is_the_conflict_of_its_item(database: str) -> None:
    async with open_batch_lab(database) as lab:
        await lab.single(item("k001"))
        changed = item("k001", body={"name": "other"})
        results = await lab.results([item("k000"), changed, item("k002")])
        assert [result["status"] for result in results] == [201, 409, 201]
        assert results[1]["body"]["code"] == "idempotency.payload_mismatch"
        assert await lab.names() == ["k000", "k001", "k002"]


async def test_one_key_twice_in_a_batch_is_a_replay(database: str) -> None:
    async with open_batch_lab(database) as lab:
        twice = [item("k000"), item("k001"), item("k000"), item("k001", body={"name": "other"})]
        results = await lab.results(twice)
        assert [result["status"] for result in results] == [201, 201, 201, 409]
        assert [result["replayed"] for result in results] == [False, False, True, False]
        assert results[2]["body"] == results[0]["body"]
        assert await lab.names() == ["k000", "k001"]


async def test_expired_record_is_treated_as_absent(database: str) -> None:
    brief = Policy(success_ttl=timedelta(microseconds=1))
    async with open_batch_lab(database, policy=brief) as lab:
        await lab.results(things(2))
        results = await lab.results(things(2))
        assert [result["replayed"] for result in results] == [False, False]
        assert await lab.names() == ["k000", "k000", "k001", "k001"]


# -- errors of items -------------------------------------------------------------------------------


async def test_4xx_undoes_its_item_and_is_stored_as_the_policy_says(database: str) -> None:
    async with open_batch_lab(database) as lab:
        batch = [item("k000"), item("k001", "422"), item("k002", "422 keep"), item("k003")]
        results = await lab.results(batch)
        assert [result["status"] for result in results] == [201, 422, 422, 201]
        assert await lab.names() == ["k000", "k002", "k003"]
        again = await lab.results(batch)
        assert [result["replayed"] for result in again] == [True] * 4
        ran_before = ["k000", "k001"] if "postgresql" in database else []
        assert lab.runs == [*ran_before, "k000", "k001", "k002", "k003"]
        assert await lab.count("onceward_audit_events") == 2
    unstored = Policy(errors_stored=ErrorsStored.NONE)
    async with open_batch_lab(database, policy=unstored) as lab:
        await lab.set_savepoints()
        batch = [item("n000"), item("n001", "422")]
        assert await lab.statuses(batch) == [201, 422]
        results = await lab.results(batch)
        assert [result["replayed"] for result in results] == [True, False]
        assert lab.runs == ["n000", "n001", "n001"]


async def test_only_the_first_request_that_is_undone_makes_others_run_again(
    database: str,
) -> None:
    """PostgreSQL sets savepoints after it, for ten minutes; SQLite always does."""
    clock = HeldClock()
    is_postgres = "postgresql" in database
    async with open_batch_lab(database, clock=clock) as lab:

        async def runs_of(prefix: str) -> list[str]:
            lab.runs.clear()
            batch = [item(f"{prefix}0"), item(f"{prefix}1", "422"), item(f"{prefix}2")]
            assert await lab.statuses(batch) == [201, 422, 201]
            return [run.removeprefix(prefix) for run in lab.runs]

        first = ["0", "1", "0", "1", "2"] if is_postgres else ["0", "1", "2"]
        assert await runs_of("a") == first
        assert await runs_of("b") == ["0", "1", "2"]
        clock.pass_by(seconds=599)
        assert await runs_of("c") == ["0", "1", "2"]
        clock.pass_by(seconds=601)
        assert await runs_of("d") == first
        assert await lab.names() == [f"{prefix}{at}" for prefix in "abcd" for at in (0, 2)]


async def test_request_refused_before_it_writes_makes_no_other_run_again(database: str) -> None:
    async with open_batch_lab(database) as lab:
        batch = [item("k0"), item("k1", "early"), item("k2")]
        assert await lab.statuses(batch) == [201, 422, 201]
        assert lab.runs == ["k0", "k1", "k2"]


@pytest.mark.parametrize("broken", ["raise", "500"])
async def test_5xx_undoes_its_item_only_and_is_not_stored(database: str, broken: str) -> None:
    async with open_batch_lab(database) as lab:
        batch = [item("k000"), item("k001", broken), item("k002")]
        assert await lab.statuses(batch) == [201, 500, 201]
        assert await lab.names() == ["k000", "k002"]
        assert lab.background.count("k000") == lab.background.count("k002") == 1
        healed = [item("k000"), item("k001", body={"name": "k001"}), item("k002")]
        results = await lab.results(healed)
        assert [result["replayed"] for result in results] == [True, False, True]
        assert await lab.names() == ["k000", "k001", "k002"]


async def test_after_a_failure_the_rest_of_its_lane_is_skipped(database: str) -> None:
    async with open_batch_lab(database) as lab:
        results = await lab.results(
            [
                item("k000", lane="a"),
                item("k001", "500", lane="a"),
                item("k002", lane="a"),
                item("k003", lane="b"),
                item("k004"),
                item("k005", "409", client_id="phone", sequence=1),
                item("k006", client_id="phone", sequence=2),
            ]
        )
        assert [result["status"] for result in results] == [201, 500, 424, 201, 201, 409, 424]
        assert results[2]["body"]["code"] == "batch.skipped"
        assert await lab.names() == ["k000", "k003", "k004"]
        # A skipped item was not stored: it runs in the next batch.
        assert await lab.statuses([item("k002", lane="a")]) == [201]


async def test_envelope_policy_has_its_own_codes(tmp_path: Path) -> None:
    policy = Policy(error_format=ErrorFormat.ENVELOPE)
    async with open_batch_lab(f"sqlite:///{tmp_path}/lab.db", policy=policy) as lab:
        results = await lab.results([item("k000", "409", lane="a"), item("k001", lane="a")])
        assert results[1]["body"]["error"] == "BATCH_SKIPPED"


async def test_ignored_failure_of_a_statement_is_an_error_of_its_item(postgresql: str) -> None:
    async with open_batch_lab(postgresql) as lab:
        assert await lab.statuses([item("k000"), item("k001", "swallow"), item("k002")]) == [
            *(201, 500, 201),
        ]
        assert await lab.names() == ["k000", "k002"]


@pytest.mark.parametrize("status", ["409", "201"])
async def test_handler_whose_statement_ends_the_transaction_of_sqlite(
    tmp_path: Path, status: str
) -> None:
    async with open_batch_lab(f"sqlite:///{tmp_path}/lab.db") as lab:
        batch = [item("k000"), item("k001", f"or-rollback {status}"), item("k002")]
        statuses = await lab.statuses(batch)
        statuses += await lab.statuses(batch[len(statuses) :])
        assert statuses[0] == statuses[2] == 201
        assert statuses[1] == 409 if status == "409" else statuses[1] >= 500
        assert await lab.names() == ["k000", "k002"]
        assert len(lab.onceward.runtime.idempotency.in_flight) == 0


async def test_statement_timeout_fails_its_item_only(postgresql: str) -> None:
    async with open_batch_lab(postgresql) as lab:
        batch = [item("k000"), item("k001", "cancel"), item("k002")]
        assert await lab.statuses(batch) == [201, 503]  # and the rest is sent again
        assert await lab.statuses(batch[2:]) == [201]
        assert await lab.names() == ["k000", "k002"]


async def test_more_than_64_savepoints_in_a_chunk(postgresql: str) -> None:
    async with open_batch_lab(postgresql) as lab:
        batch = [item(f"k{at:03}", "savepoints") for at in range(50)]
        assert await lab.statuses(batch) == [201] * 50
        assert await lab.count("logs") == 100


async def test_setting_of_one_item_is_not_seen_by_the_next(postgresql: str) -> None:
    async with open_batch_lab(postgresql) as lab:
        results = await lab.results([item("k000", "set"), item("k001", "leak")])
        assert results[1]["body"] == {"leak": None} or results[1]["body"] == {"leak": ""}


# -- transactions ----------------------------------------------------------------------------------


async def test_violated_deferred_constraint_fails_its_item_only(database: str) -> None:
    async with open_batch_lab(database) as lab:
        batch = [item("k000"), item("k001", "orphan"), item("k002")]
        statuses = await lab.statuses(batch)
        statuses += await lab.statuses(batch[len(statuses) :])  # after a 503 the rest is sent again
        assert statuses[0] == statuses[2] == 201
        assert statuses[1] >= 500
        assert await lab.names() == ["k000", "k002"]
        assert sorted(lab.background) == ["k000", "k002"]


async def test_handler_with_its_own_connection_runs_alone(database: str) -> None:
    batch = BatchOptions(stall_seconds=0.3)
    async with open_batch_lab(database, batch=batch) as lab:
        assert await lab.statuses([item("k000"), item("k001", "own"), item("k002")]) == [201] * 3
        assert await lab.names() == ["k000", "k001", "k002"]
        assert await lab.statuses([item("k003", "own"), item("k004", "own")]) == [201] * 2
        # The endpoint is known by now: none was tried in a shared transaction.
        assert lab.runs.count("k003") == lab.runs.count("k004") == 1


@pytest.mark.parametrize("driver", ["postgresql", "postgresql+psycopg"])
async def test_handler_that_takes_the_drivers_connection_runs_alone(
    postgresql: str, driver: str
) -> None:
    """On it, a COMMIT would commit the other items without their records."""
    async with open_batch_lab(postgresql.replace("postgresql", driver, 1)) as lab:
        commits = count_commits(lab)
        batch = [item("k000"), item("k001"), item("k002", "raw"), item("k003")]
        await lab.post(batch)
        assert commits[0] == 2
        await lab.post(batch)
        names = await lab.names()
        assert [name for name in names if name != "k002"] == ["k000", "k001", "k003"]


async def test_policy_can_keep_an_endpoint_out_of_shared_transactions(database: str) -> None:
    async with open_batch_lab(database, policy=Policy(batch_alone=True)) as lab:
        commits = count_commits(lab)
        batch = [item("k000"), item("k001", "own"), item("k002", "raise"), item("k003")]
        assert await lab.statuses(batch) == [201, 201, 500, 201]
        assert commits == []
        assert lab.runs == ["k000", "k001", "k002", "k003"]


async def test_redirect_that_is_not_stored_runs_alone(database: str) -> None:
    async with open_batch_lab(database) as lab:
        results = await lab.results([item("k000"), item("k001", "307"), item("k002")])
        assert [result["status"] for result in results] == [201, 500, 201]
        assert await lab.names() == ["k000", "k002"]


@pytest.mark.parametrize("was_committed", [True, False])
async def test_unknown_commit_of_a_chunk_is_looked_up(database: str, was_committed: bool) -> None:
    async with open_batch_lab(database) as lab:
        store: Any = lab.onceward.store
        begin = store.begin_chunk
        units: list[Any] = []

        async def begin_chunk(**options: Any) -> Any:
            chunk = await begin(**options)
            commit = chunk.commit

            async def lose_connection(records: Any, audits: Any) -> None:
                await (commit(records, audits) if was_committed else chunk.rollback())
                raise CommitUnknownError("the connection was lost during COMMIT")

            if not units:
                chunk.commit = lose_connection
            units.append(chunk)
            return chunk

        store.begin_chunk = begin_chunk
        results = await lab.results(things(3))
        assert [result["status"] for result in results] == [201] * 3
        assert await lab.names() == ["k000", "k001", "k002"]
        assert sorted(lab.background) == ["k000", "k001", "k002"]
        assert len(lab.runs) == (3 if was_committed else 6)
        assert len(lab.onceward.runtime.idempotency.in_flight) == 0


async def test_background_tasks_and_callbacks_come_after_the_commit(database: str) -> None:
    async with open_batch_lab(database) as lab:
        sending = asyncio.create_task(lab.statuses([*things(2), item("k002", "wait")]))
        await asyncio.wait_for(lab.started.wait(), 30)
        while len(lab.runs) < 3:
            await asyncio.sleep(0.01)
        assert lab.background == []
        # A duplicate waits for the commit, as for any request that runs.
        duplicate = asyncio.create_task(lab.single(item("k000")))
        lab.gate.set()
        assert await sending == [201] * 3
        assert (await duplicate).headers["idempotency-replayed"] == "true"
        assert sorted(lab.background) == ["k000", "k001", "k002"]


async def test_cancelled_batch_rolls_back_and_frees_its_keys(database: str) -> None:
    async with open_batch_lab(database) as lab:
        sending = asyncio.create_task(lab.statuses([*things(2), item("k002", "wait")]))
        while len(lab.runs) < 3:
            await asyncio.sleep(0.01)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        lab.gate.set()
        assert await lab.names() == []
        assert await lab.statuses(things(3)) == [201] * 3
        assert await lab.names() == ["k000", "k001", "k002"]


async def test_5xx_of_a_chunk_is_tried_again_alone(database: str) -> None:
    """It may have been caused by the other items: a lock, or a full pool."""
    async with open_batch_lab(database) as lab:
        assert await lab.statuses([item("k000"), item("k001", "busy"), item("k002")]) == [201] * 3
        assert lab.runs == ["k000", "k001", "k001", "k002"]


async def test_callback_that_raises_after_the_commit_breaks_no_other_item(database: str) -> None:
    async with open_batch_lab(database) as lab:
        batch = [item("k000", "callback"), item("k001"), item("k002")]
        assert await lab.statuses(batch) == [201] * 3
        assert lab.runs == ["k000", "k001", "k002"]
        results = await lab.results(batch)
        assert [result["replayed"] for result in results] == [True] * 3


async def test_unknown_commit_of_unrecorded_writes_is_not_repeated(database: str) -> None:
    """Without a record nothing can be looked up: the client gets 503, as for a single request."""
    unstored = Policy(errors_stored=ErrorsStored.NONE)
    async with open_batch_lab(database, policy=unstored) as lab:
        await lab.set_savepoints()
        store: Any = lab.onceward.store
        begin = store.begin_chunk

        async def begin_chunk(**options: Any) -> Any:
            chunk = await begin(**options)
            commit = chunk.commit

            async def lose_connection(records: Any, audits: Any) -> None:
                await commit(records, audits)
                raise CommitUnknownError("the connection was lost during COMMIT")

            chunk.commit = lose_connection
            return chunk

        store.begin_chunk = begin_chunk
        malformed = {"method": "POST", "path": "/unguarded", "body": {}}
        items = [malformed, item("k000", "422 keep"), item("k001", "422")]
        response = (await lab.post(items)).json()
        assert [result["status"] for result in response["results"]] == [400, 503]
        assert response["results"][1]["body"]["details"]["reason"] == "outcome_unknown"
        assert lab.runs == ["k000", "k001"]
        assert len(lab.onceward.runtime.idempotency.in_flight) == 0


@pytest.mark.parametrize("is_late", [False, True])
async def test_chunk_holds_one_tenant(database: str, is_late: bool) -> None:
    def tenant_of(text: str) -> Principal:
        return Principal("bob", "bob") if "2" in text else Principal("ada", "ada")

    async def caller(request: Request) -> Principal:
        return tenant_of((await request.body()).decode())

    options: dict[str, Any] = {"identify": lambda head: tenant_of(head.header("if-match") or "")}
    if is_late:
        options = {"identify": None, "principal": caller}
    async with open_batch_lab(database, **options) as lab:
        commits: list[set[str]] = []
        store: Any = lab.onceward.store
        begin = store.begin_chunk

        async def begin_chunk(**options: Any) -> Any:
            chunk = await begin(**options)
            commit = chunk.commit

            async def noted(records: Any, audits: Any) -> None:
                commits.append({record.id.tenant for record in records})
                await commit(records, audits)

            chunk.commit = noted
            return chunk

        store.begin_chunk = begin_chunk
        keys = ["k1", "k3", "k2", "k22", "k4", "k5"]
        batch = [item(key, headers={"If-Match": f'"{key}"'}) for key in keys]
        assert await lab.statuses(batch) == [201] * 6
        assert commits
        assert all(len(tenants) == 1 for tenants in commits)
        rows = await lab.onceward.store.read(
            lab.onceward.store.table_names.render(
                "SELECT tenant, idempotency_key FROM onceward_idempotency_records"
            )
        )
        found = {row["idempotency_key"]: row["tenant"] for row in rows}
        assert found == {key: "bob" if "2" in key else "ada" for key in keys}


# -- others at the same time -----------------------------------------------------------------------


async def test_held_key_ends_the_batch_before_it(database: str) -> None:
    async with open_batch_lab(database) as lab:
        first = asyncio.create_task(lab.single(item("k002", "wait")))
        await asyncio.wait_for(lab.started.wait(), 30)
        batch = [*things(2), item("k002", "wait"), item("k003")]
        if "postgresql" in database:  # on SQLite the others wait for the one that writes
            response = (await lab.post(batch)).json()
            assert [result["status"] for result in response["results"]] == [201, 201]
            assert response["retry_after"] == 1
        lab.gate.set()
        await first
        results = await lab.results(batch)
        assert [result["status"] for result in results] == [201] * 4
        assert await lab.names() == ["k000", "k001", "k002", "k003"]


async def test_first_item_waits_for_its_key(database: str) -> None:
    async with open_batch_lab(database) as lab:
        first = asyncio.create_task(lab.single(item("k000", "wait")))
        await asyncio.wait_for(lab.started.wait(), 30)
        sending = asyncio.create_task(lab.results([item("k000", "wait"), item("k001")]))
        await asyncio.sleep(0.05)
        assert not sending.done()
        lab.gate.set()
        await first
        results = await sending
        assert [result["replayed"] for result in results] == [True, False]


async def test_overlapping_batches_of_two_processes_in_opposite_order(database: str) -> None:
    async with open_batch_lab(database) as one, open_batch_lab(database) as other:

        async def drain(lab: BatchLab, left: list[dict[str, Any]]) -> None:
            while left:
                response = (await lab.post(left)).json()
                assert response["results"], "the first item always has a result"
                assert all(result["status"] == 201 for result in response["results"]), response
                left = left[len(response["results"]) :]

        keys = things(60)
        async with asyncio.timeout(60):
            await asyncio.gather(
                drain(one, keys),
                drain(other, keys[::-1]),
                *(one.single(each) for each in keys[20:30]),
            )
        assert await one.names() == [each["key"] for each in keys]


async def test_deadlock_between_two_batches_is_resolved(postgresql: str) -> None:
    async with open_batch_lab(postgresql) as one, open_batch_lab(postgresql) as other:
        for name in ("a", "b"):
            row = {"id": name, "name": name}
            await one.onceward.store.write(
                "INSERT INTO effects (id, name, version) VALUES (:id, :name, 1)", row
            )

        def edits(prefix: str, order: str) -> list[dict[str, Any]]:
            return [
                item(f"{prefix}{thing}", method="PATCH", path=f"/things/{thing}", body={})
                | {"headers": {"If-Match": '"1"'}}
                for thing in order
            ]

        async with asyncio.timeout(60):
            found = await asyncio.gather(
                one.statuses(edits("one-", "ab")), other.statuses(edits("other-", "ba"))
            )
        # Each row is changed by one of them; the other one gets the conflict.
        assert sorted(found[0] + found[1]) == [200, 200, 409, 409]
        rows = await one.onceward.store.read("SELECT DISTINCT version FROM effects")
        assert [row["version"] for row in rows] == [2]


# -- references ------------------------------------------------------------------------------------


async def test_ids_and_versions_of_earlier_items_are_filled_in(database: str) -> None:
    async with open_batch_lab(database) as lab:
        local = str(uuid.uuid4())
        edit = {
            "method": "PATCH",
            "path": f"/things/{{local:{local}}}",
            "headers": {"If-Match": f"{{version:{local}}}"},
            "body": {"note": f"of {{local:{local}}}", "was": f"{{version:{local}}}"},
            "local_id": local,
        }
        batch = [
            item("k000", local_id=local),
            {**edit, "key": "k001"},
            {**edit, "key": "k002"},
            item("k003", body={"name": "child", "parent": f"{{local:{local}}}"}),
        ]
        results = await lab.results(batch)
        assert [result["status"] for result in results] == [201, 200, 200, 201]
        thing = results[0]["body"]["id"]
        assert results[1]["body"] == {
            "id": thing,
            "version": 2,
            "note": f"of {thing}",
            "was": 1,
        }
        assert results[2]["headers"]["etag"] == '"3"'
        assert results[3]["body"]["got"] == thing
        # The same request sent alone, with the values in it, has the same fingerprint.
        alone = await lab.single(
            {
                "method": "PATCH",
                "path": f"/things/{thing}",
                "key": "k002",
                "headers": {"If-Match": '"2"'},
                "body": {"note": f"of {thing}", "was": 2},
            }
        )
        assert alone.headers["idempotency-replayed"] == "true"
        again = await lab.results(batch)
        assert [result["replayed"] for result in again] == [True] * 4


async def test_items_that_use_a_failed_item_are_skipped(database: str) -> None:
    async with open_batch_lab(database) as lab:
        local, other = str(uuid.uuid4()), str(uuid.uuid4())
        child = item("k002", body={"name": "child", "parent": f"{{local:{local}}}"})
        results = await lab.results(
            [
                item("k000", "422", local_id=local),
                item("k001", local_id=other),
                {**child, "local_id": str(uuid.uuid4())},
                item("k003", body={"name": "k003", "parent": f"{{local:{other}}}"}),
                item("k004", body={"name": "k004", "parent": f"{{local:{uuid.uuid4()}}}"}),
                item("k005", body={"name": "k005", "parent": "{local:nothing}"}),
            ]
        )
        assert [result["status"] for result in results] == [422, 201, 424, 201, 400, 400]
        assert await lab.names() == ["k001", "k003"]


# -- apps ------------------------------------------------------------------------------------------


async def test_keys_claimed_after_the_apps_dependencies(database: str) -> None:
    async def caller(request: Request, tx: Tx) -> Principal:
        await tx.fetch_all("SELECT name FROM effects")
        name = request.headers.get("x-tenant", "ada")
        if name == "not-signed-in":
            raise HTTPException(401, "sign in")
        if (await request.json()).get("name") == "refused":
            raise HTTPException(403, "not this one")
        return Principal(name, name)

    async with open_batch_lab(database, identify=None, principal=caller) as lab:
        commits = count_commits(lab)
        batch = [item("k000"), item("k001", body={"name": "refused"}), item("k002"), item("k000")]
        results = await lab.results(batch)
        assert [result["status"] for result in results] == [201, 403, 201, 201]
        assert [result["replayed"] for result in results] == [False, False, False, True]
        assert await lab.names() == ["k000", "k002"]
        assert commits == [2]
        assert await lab.statuses(batch, X_Tenant="not-signed-in") == [401] * 4
        alone = await lab.single(item("k002"))
        assert alone.headers["idempotency-replayed"] == "true"


async def test_batch_of_an_app_without_a_framework(tmp_path: Path) -> None:
    onceward = Onceward(f"sqlite:///{tmp_path}/lab.db", tenants=SINGLE_TENANT)
    onceward.guard_path("POST", "/notes/{shelf}", endpoint="notes")

    async def notes(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        if body == b'"raise"':
            raise RuntimeError("broken app")
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        path = scope["path"].encode()
        await send({"type": "http.response.body", "body": b'{"at": "%s"}' % path})

    app = onceward.wrap(notes, batch="/batch")
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://notes"
    ) as client:
        batch = [
            item("k000", path="/notes/a%20b"),
            item("k001", path="/notes/c", body="raise"),
            item("k002", path="/notes/d?x=1"),
        ]
        results = (await client.post("/batch", json={"items": batch})).json()["results"]
        assert [result["status"] for result in results] == [201, 500, 201]
        assert results[0]["body"] == {"at": "/notes/a b"}
        assert results[1]["body"]["code"] == "server.internal"
    await onceward.close()


async def test_batch_of_a_mounted_app_and_middleware_around_the_guard(tmp_path: Path) -> None:
    async with open_batch_lab(f"sqlite:///{tmp_path}/lab.db") as lab:
        seen = []

        @lab.app.middleware("http")
        async def refuse_secrets(request: Request, call_next: Any) -> Any:
            seen.append(request.url.path)
            if "secret" in request.url.path:
                return Response(status_code=403)
            return await call_next(request)

        outer = FastAPI()
        outer.mount("/v1", lab.app)
        transport = httpx.ASGITransport(app=outer)
        async with httpx.AsyncClient(transport=transport, base_url="http://lab") as client:
            batch = [
                item("k000", path="/v1/things"),
                item("k001", method="PATCH", path="/v1/things/secret"),
                item("k002", path="/elsewhere"),
            ]
            response = await client.post("/v1/batch", json={"items": batch})
            found = [result["status"] for result in response.json()["results"]]
            assert found == [201, 403, 400]
            alone = await client.post(
                "/v1/things", json=batch[0]["body"], headers={"Idempotency-Key": "k000"}
            )
            assert alone.headers["idempotency-replayed"] == "true"
            assert alone.headers["onceward-batch"] == "/v1/batch; items=200"
        assert "/v1/things/secret" in seen


async def test_full_lock_table_is_an_outage_and_nothing_is_lost(postgresql: str) -> None:
    async with open_batch_lab(postgresql) as lab:
        store: Any = lab.onceward.store
        # As PostgreSQL says it when its lock table is full.
        await store.write(
            "CREATE FUNCTION no_lock(bigint) RETURNS boolean LANGUAGE plpgsql AS $f$ BEGIN"
            " RAISE EXCEPTION 'out of shared memory' USING ERRCODE = '53200'; END $f$"
        )
        queries, claim = store.sql, store.claim
        refused = queries["try_locks"].replace("pg_try_advisory_xact_lock", "no_lock")

        async def claim_refused(*_: Any) -> Any:
            raise StoreUnavailableError("out of shared memory", is_outage=False)

        store.sql, store.claim = {**queries, "try_locks": refused}, claim_refused
        response = (await lab.post(things(5))).json()
        assert [result["status"] for result in response["results"]] == [503]
        assert response["retry_after"] >= 1
        assert lab.runs == []
        store.sql, store.claim = queries, claim
        assert await lab.statuses(things(5)) == [201] * 5


# -- limits and hostile input ----------------------------------------------------------------------


HOSTILE: list[dict[str, Any]] = [
    {"path": "http://evil.example/things"},
    {"path": "//evil.example/things"},
    {"path": "/things/../open"},
    {"path": "/things/%2e%2e/open"},
    {"path": "/things/%252e%252e/open"},
    {"path": "/./things"},
    {"path": "/things//x"},
    {"path": "/things\\..\\open"},
    {"path": "/things#/open"},
    {"path": "/things%00"},
    {"path": "/things\x00"},
    {"path": "/things%0a"},
    {"path": "/Things"},
    {"path": "/things/"},
    {"path": "http:/things"},
    {"path": "/http://evil.example/things"},
    {"path": "@evil.example/things"},
    {"path": ""},
    {"path": "/" + "x" * 3000},
    {"path": "/batch"},
    {"path": "/%62atch"},
    {"path": "/Batch"},
    {"path": "/batch/"},
    {"path": "/batch?x=1"},
    {"path": "/open"},
    {"path": "/nowhere"},
    {"path": "things"},
    {"path": 7},
    {"method": "GET"},
    {"method": "PO ST"},
    {"headers": {"Authorization": "Bearer of another"}},
    {"headers": {"X-Tenant": "bob"}},
    {"headers": {"Cookie": "session=another"}},
    {"headers": {"Host": "evil.example"}},
    {"headers": {"Connection": "close"}},
    {"headers": {"Transfer-Encoding": "chunked"}},
    {"headers": {"Content-Length": "5"}},
    {"headers": {"Content-Encoding": "gzip"}},
    {"headers": {"X-HTTP-Method-Override": "DELETE"}},
    {"headers": {"X-Forwarded-For": "10.0.0.1"}},
    {"headers": {"If-Match: x\r\nX-Tenant": "bob"}},
    {"headers": {"If-Match": "\x00"}},
    {"headers": {"": "x"}},
    {"headers": {"If-Match": 5}},
    {"headers": {"Idempotency-Key": "other"}},
    {"headers": {"If-Match": '"1"\r\nX-Tenant: bob'}},
    {"headers": {"If-Match": "1", "if-match": "2"}},
    {"headers": []},
    {"lane": 5},
    {"local_id": "not-a-uuid"},
    {"sequence": 0},
    {"sequence": True},
    {"unknown": 1},
    {"key": "two words"},
    {"key": "a\r\nX-Tenant: bob"},
    {"key": None},
    {"key": ""},
    {"key": "x" * 129},
    {"key": "nul\x00"},
    {"client_id": "a\r\nX-Tenant: bob"},
    {"body": {"base64": "not base64!"}, "headers": {"Content-Type": "text/plain"}},
    {"headers": {"Content-Type": "text/plain"}},
]


async def test_malformed_item_is_its_own_400(tmp_path: Path) -> None:
    async with open_batch_lab(f"sqlite:///{tmp_path}/lab.db") as lab:
        batch = [{**item(f"h{at:03}"), **hostile} for at, hostile in enumerate(HOSTILE)]
        found = await lab.statuses([item("k000"), *batch, item("k001")])
        wrong = [one for one, status in zip(HOSTILE, found[1:-1], strict=True) if status != 400]
        assert not wrong
        assert found[0] == found[-1] == 201
        assert await lab.names() == ["k000", "k001"]
        assert "open" not in lab.runs
        rows = await lab.onceward.store.read(
            lab.onceward.store.table_names.render("SELECT tenant FROM onceward_idempotency_records")
        )
        assert {row["tenant"] for row in rows} == {"ada"}


async def test_item_that_is_no_object_and_body_with_a_name_twice(tmp_path: Path) -> None:
    async with open_batch_lab(f"sqlite:///{tmp_path}/lab.db") as lab:
        one = '{"method": "POST", "path": "/things", "key": "%s", "body": {"name": "%s"}}'
        items = [
            one % ("k000", "k000"),
            "7",
            '{"method": "POST", "method": "PATCH", "path": "/things", "key": "k1"}',
            '{"method": "POST", "path": "/things", "key": "k2", "body": {"n": 1, "n": 2}}',
            one % ("k003", "k003"),
        ]
        content = f'{{"items": [{",".join(items)}]}}'
        response = await lab.client.post("/batch", content=content, headers=JSON)
        found = [result["status"] for result in response.json()["results"]]
        assert found == [201, 400, 400, 400, 201]


JSON = {"Content-Type": "application/json"}

MALFORMED = [
    (b"", 400, "request.invalid"),
    (b"[]", 400, "request.invalid"),
    (b'{"items": 5}', 400, "request.invalid"),
    (b'{"items": [], "items": []}', 400, "request.invalid"),
    (b'{"items": [], "more": 1}', 400, "request.invalid"),
    (b'{"items": [1, 2, 3, 4]}', 413, "batch.too_large"),
    (b'{"items": ["' + b"x" * 2000 + b'"]}', 413, "batch.too_large"),
]


async def test_malformed_envelope_fails_the_batch(tmp_path: Path) -> None:
    limits = BatchOptions(max_items=3, max_bytes=1000)
    async with open_batch_lab(f"sqlite:///{tmp_path}/lab.db", batch=limits) as lab:
        for content, status, code in MALFORMED:
            response = await lab.client.post("/batch", content=content, headers=JSON)
            assert (response.status_code, response.json()["code"]) == (status, code), content


async def test_batch_at_its_limits_is_served(tmp_path: Path) -> None:
    batch = [item(f"k{at}") for at in range(3)]
    size = len(b'{"items":' + str(batch).replace("'", '"').replace(", ", ",").encode() + b"}")
    limits = BatchOptions(max_items=3, max_bytes=size)
    async with open_batch_lab(f"sqlite:///{tmp_path}/lab.db", batch=limits) as lab:
        assert await lab.statuses(batch) == [201] * 3
        assert await lab.statuses([]) == []


async def test_caller_is_signed_in_before_the_batch_is_read(tmp_path: Path) -> None:
    async with open_batch_lab(f"sqlite:///{tmp_path}/lab.db") as lab:
        response = await lab.post(things(2), X_Tenant="not-signed-in")
        assert response.status_code == 401
        assert await lab.statuses(things(2), X_Tenant="bob") == [201, 201]
        results = await lab.results(things(2), X_Tenant="ada")
        assert [result["replayed"] for result in results] == [False, False]


async def test_rate_limit_counts_each_item_once(database: str) -> None:
    policy = Policy(rate_limit="3/hour")
    async with open_batch_lab(database, policy=policy, limiter=LimitsRateLimiter()) as lab:
        # The second one fails in the chunk and runs again: it is counted once.
        batch = [item("k000"), item("k001", "raise"), item("k002"), item("k003"), item("k004")]
        results = await lab.results(batch)
        assert [result["status"] for result in results] == [201, 500, 201, 429, 429]
        assert results[3]["body"]["code"] == "rate.limited"
        assert results[0]["headers"]["ratelimit"]


async def test_results_may_be_a_prefix_of_the_items(database: str) -> None:
    limits = BatchOptions(max_response_bytes=500)
    async with open_batch_lab(database, batch=limits) as lab:
        response = (await lab.post(things(5))).json()
        assert 1 <= len(response["results"]) < 5
        assert response["retry_after"] == 0
        assert len(await lab.names()) == len(response["results"])
    async with open_batch_lab(database, batch=BatchOptions(max_seconds=1e-9)) as lab:
        response = (await lab.post(things(3, first=10))).json()
        assert [result["status"] for result in response["results"]] == [201]


async def test_guarded_responses_name_the_batch_endpoint(tmp_path: Path) -> None:
    async with open_batch_lab(f"sqlite:///{tmp_path}/lab.db", batch="/v1/batch") as lab:
        for _ in range(2):
            response = await lab.single(item("k000"))
            assert response.headers["onceward-batch"] == "/v1/batch; items=200"
        assert "onceward-batch" not in (await lab.client.post("/open")).headers
        sent = {"items": things(1)}
        result = (await lab.client.post("/v1/batch", json=sent)).json()["results"][0]
        assert "onceward-batch" not in result["headers"]


async def test_other_bodies_than_json_are_base64(tmp_path: Path) -> None:
    async with open_batch_lab(f"sqlite:///{tmp_path}/lab.db") as lab:
        headers = {"Content-Type": "text/plain"}
        file = item("k000", path="/files", headers=headers, body={"base64": "aGVsbG8="})
        results = await lab.results([file, item("k001", path="/files", body={"a": 1})])
        assert [result["status"] for result in results] == [200, 200]
        assert results[0]["body"] == {"base64": "b2xsZWg="}
        alone = await lab.client.post(
            "/files", content=b"hello", headers={**headers, "Idempotency-Key": "k000"}
        )
        assert alone.headers["idempotency-replayed"] == "true"


async def test_route_at_the_path_of_the_batch_endpoint_is_refused(tmp_path: Path) -> None:
    lab = BatchLab(f"sqlite:///{tmp_path}/lab.db", batch="/open")
    with pytest.raises(ConfigurationError, match="/open"):
        await lab.onceward.open()


@pytest.mark.parametrize(
    "wrong",
    [
        {"path": "batch"},
        {"path": "/batch/{id}"},
        {"max_items": 0},
        {"max_seconds": 0},
        {"chunk_items": 65},
    ],
)
def test_invalid_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        BatchOptions(**wrong)
