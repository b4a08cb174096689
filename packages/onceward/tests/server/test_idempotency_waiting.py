"""Simultaneous duplicates wait and replay; if the first one fails, another one runs."""

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from onceward import ErrorFormat, Policy
from onceward_testing.servers import RealPostgres
from packages.onceward.tests.support.harness import fresh_database, open_lab
from packages.onceward.tests.support.policies import OPTIONAL_KEY

UUID4 = "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10"
BRIEF = Policy(wait=timedelta(milliseconds=80))


@pytest.fixture(scope="module")
def module_database(postgres: RealPostgres) -> Iterator[str]:
    url = postgres.create_database("lab")
    yield url
    postgres.start()
    postgres.drop_database(url)


@pytest.fixture(params=["sqlite", "postgresql"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return await fresh_database(request, tmp_path, request.param)


async def test_a_duplicate_waits_for_the_first_and_replays_it(database: str) -> None:
    async with open_lab(database) as lab:
        first = lab.send_soon(do="wait")
        await lab.started.wait()
        duplicates = [lab.send_soon() for _ in range(5)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in duplicates)
        lab.gate.set()
        response = await first
        for duplicate in await asyncio.gather(*duplicates):
            assert duplicate.content == response.content
            assert duplicate.headers["idempotency-replayed"] == "true"
        assert await lab.effects() == len(lab.runs) == 1


async def test_a_duplicate_with_another_payload_is_a_conflict_once_the_first_is_done(
    database: str,
) -> None:
    async with open_lab(database) as lab:
        first = lab.send_soon(do="wait")
        await lab.started.wait()
        other = lab.send_soon(json={"item": "hat"})
        await asyncio.sleep(0.05)
        lab.gate.set()
        assert (await first).status_code == 201
        assert (await other).json()["code"] == "idempotency.payload_mismatch"


@pytest.mark.parametrize(
    ("error_format", "code"),
    [
        (ErrorFormat.PROBLEM, "idempotency.in_progress"),
        (ErrorFormat.ENVELOPE, "IDEMPOTENCY_IN_PROGRESS"),
    ],
)
async def test_after_the_wait_a_duplicate_gets_in_progress_and_retry_after(
    database: str, error_format: ErrorFormat, code: str
) -> None:
    async with open_lab(database, BRIEF.replace(error_format=error_format)) as lab:
        first = lab.send_soon(do="wait")
        await lab.started.wait()
        refused = await lab.send()
        assert refused.status_code == 409
        assert refused.json()["code" if error_format is ErrorFormat.PROBLEM else "error"] == code
        assert int(refused.headers["retry-after"]) >= 1
        assert not first.done()
        lab.gate.set()
        assert (await first).status_code == 201
        again = await lab.send()
        assert again.headers["idempotency-replayed"] == "true"
        assert len(lab.runs) == 1


async def test_after_the_wait_another_process_responds_in_progress_too(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    database = await fresh_database(request, tmp_path, "postgresql")
    async with open_lab(database, BRIEF) as one, open_lab(database, BRIEF) as other:
        first = one.send_soon(do="wait")
        await one.started.wait()
        refused = await other.send()
        assert (refused.status_code, refused.json()["code"]) == (409, "idempotency.in_progress")
        assert "retry-after" in refused.headers
        one.gate.set()
        response = await first
        again = await other.send()
        assert again.content == response.content
        assert other.runs == []


@pytest.mark.parametrize("failure", ["wait 500", "wait raise", "wait stream"])
async def test_a_waiter_whose_leader_fails_runs_the_handler_itself(
    database: str, failure: str
) -> None:
    async with open_lab(database) as lab:
        first = lab.send_soon(do=failure)
        await lab.started.wait()
        waiters = [lab.send_soon() for _ in range(4)]
        await asyncio.sleep(0.05)
        lab.gate.set()
        assert (await first).status_code == 500
        responses = await asyncio.gather(*waiters)
        assert {a.status_code for a in responses} == {201}
        assert len({a.content for a in responses}) == 1
        assert sum("idempotency-replayed" not in a.headers for a in responses) == 1
        assert len(lab.runs) == 2
        assert await lab.effects() == len(await lab.audits()) == 1


async def test_a_waiter_whose_leader_stored_no_record_runs_the_handler_itself(
    database: str,
) -> None:
    async with open_lab(database, OPTIONAL_KEY) as lab:
        first = lab.send_soon(UUID4, do="wait 404")
        await lab.started.wait()
        waiter = lab.send_soon(UUID4)
        await asyncio.sleep(0.05)
        lab.gate.set()
        assert (await first).status_code == 404
        assert (await waiter).status_code == 201


async def test_a_waiter_whose_leader_stored_an_error_replays_it(database: str) -> None:
    async with open_lab(database) as lab:
        first = lab.send_soon(do="wait 404")
        await lab.started.wait()
        waiter = lab.send_soon()
        await asyncio.sleep(0.05)
        lab.gate.set()
        responses = await asyncio.gather(first, waiter)
        assert {a.status_code for a in responses} == {404}
        assert len({a.content for a in responses}) == 1
        assert len(lab.runs) == 1


async def test_a_waiter_that_disconnects_does_not_disturb_others(database: str) -> None:
    async with open_lab(database) as lab:
        first = lab.send_soon(do="wait")
        await lab.started.wait()
        leaver, stayer = lab.send_soon(), lab.send_soon()
        await asyncio.sleep(0.05)
        leaver.cancel()
        await asyncio.sleep(0)
        lab.gate.set()
        assert (await first).content == (await stayer).content
        assert len(lab.onceward.idempotency.in_flight) == 0


# -- two processes on one database ------------------------------------------------------------


@pytest.mark.parametrize("do", ["wait", "wait quiet"], ids=["with a write", "without a write"])
async def test_two_processes_with_one_key_have_one_effect_and_one_response(
    database: str, do: str
) -> None:
    async with open_lab(database) as one, open_lab(database) as other:
        racing = [one.send_soon(do=do), other.send_soon(do=do)]
        await asyncio.sleep(0.15)
        one.gate.set()
        other.gate.set()
        responses = await asyncio.gather(*racing)
        assert {a.status_code for a in responses} == {201}
        assert len({a.content for a in responses}) == 1
        assert sum("idempotency-replayed" in a.headers for a in responses) == 1
        assert await one.effects() == (0 if "quiet" in do else 1)
        assert len(await one.audits()) == len(await one.records()) == 1
        assert len(one.background) + len(other.background) == 1, (
            "the superseded request's tasks must not run"
        )


async def test_two_processes_with_one_key_and_two_payloads_execute_one(database: str) -> None:
    async with open_lab(database) as one, open_lab(database) as other:
        racing = [
            one.send_soon(do="wait quiet"),
            other.send_soon(do="wait quiet", json={"item": "hat"}),
        ]
        await asyncio.sleep(0.15)
        one.gate.set()
        other.gate.set()
        responses = await asyncio.gather(*racing)
        assert sorted(a.status_code for a in responses) == [201, 409]
        assert len(await one.records()) == 1
        assert len(one.background) + len(other.background) == 1


async def test_an_error_response_superseded_by_another_process_replays_its_record(
    tmp_path: Path,
) -> None:
    """Only on SQLite can two processes run one key; PostgreSQL makes the second wait."""
    database = f"sqlite:///{tmp_path}/lab.db"
    async with open_lab(database) as one, open_lab(database) as other:
        slow = one.send_soon(do="quiet wait 404")
        await one.started.wait()
        quick = await other.send()
        one.gate.set()
        response = await slow
        assert (response.status_code, response.content) == (201, quick.content)
        assert response.headers["idempotency-replayed"] == "true"
        assert [r["response_status"] for r in await one.records()] == [201]
