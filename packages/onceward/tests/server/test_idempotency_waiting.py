"""Simultaneous duplicates wait and replay; if the first one fails, another one runs."""

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest

from onceward import Policy
from packages.onceward.tests.support.harness import fresh_database, open_lab

BRIEF = Policy(wait=timedelta(milliseconds=80))


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
        assert len(lab.onceward.runtime.idempotency.in_flight) == 0


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
