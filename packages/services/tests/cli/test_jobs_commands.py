"""``jobs ls|show|dead|requeue`` on both databases."""

import asyncio
import json
from pathlib import Path

import pytest

from holdfast import open_store
from holdfast.jobs.enqueue import Cause, new_job
from holdfast.jobs.job_store import JobStore

from .conftest import Here, one_line


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/commands.db"
    return str(request.getfixturevalue("postgres_url"))


def prepare(url: str) -> dict[str, str]:
    """Make one waiting, one done and two dead jobs, of two tenants; returns their ids."""

    async def make() -> dict[str, str]:
        store = open_store(url)
        await store.open()
        table = JobStore(store)
        ids: dict[str, str] = {}

        async def enqueue(name: str, tenant: str) -> None:
            cause = Cause(tenant, f"{tenant}'s phone", f"request-{name}", f"chain-{name}")
            job = new_job("mail.send", {"to": name}, queue="mail", resource_id=name, cause=cause)
            unit = await store.begin()
            await table.enqueue(unit.statements, job)
            await unit.commit(None, None)
            ids[name] = job.id

        for name, tenant in (("done", "ada"), ("dead", "ada"), ("dead-too", "bob")):
            await enqueue(name, tenant)
        for job in await table.claim(["mail"], worker="w", limit=9, lease_seconds=30):
            if job.resource_id == "done":
                await table.complete_alone([(job.lease, '{"sent":true}')], worker="w")
            else:
                await table.bury(job, worker="w", reason="error", error="ValueError: no\x1b[31m")
        await enqueue("waiting", "ada")
        await store.close()
        return ids

    return asyncio.run(make())


def test_jobs_are_listed_newest_first_for_people_and_scripts(here: Here, database: str) -> None:
    ids = prepare(database)
    table = here("jobs", "ls", "--database", database)
    lines = table.stdout.decode().splitlines()
    assert lines[0].split("\t")[:5] == ["id", "tenant", "queue", "type", "state"]
    assert lines[1].startswith(f"{ids['waiting']}\tada\tmail\tmail.send\twaiting\t0/5")
    assert len(lines) == 5
    expected = json.loads(here("jobs", "ls", "--database", database, "--json").stdout)
    assert {job["id"]: job["state"] for job in expected} == {
        ids["waiting"]: "waiting",
        ids["done"]: "done",
        ids["dead"]: "dead",
        ids["dead-too"]: "dead",
    }
    assert expected[0]["key"] == "job:ada:mail:mail.send:waiting"


def test_a_listing_can_be_narrowed_down(here: Here, database: str) -> None:
    ids = prepare(database)

    def listed(*options: str) -> list[str]:
        expected = here("jobs", "ls", "--database", database, "--json", *options)
        return [job["id"] for job in json.loads(expected.stdout)]

    assert listed("--tenant", "bob") == [ids["dead-too"]]
    assert listed("--state", "done") == [ids["done"]]
    assert listed("--queue", "other") == []
    assert len(listed("--type", "mail.send", "--limit", "2")) == 2
    bad = here("jobs", "ls", "--database", database, "--state", "lost")
    assert bad.returncode == 2
    assert "waiting, running, done, dead" in one_line(bad.stderr)


def test_a_job_is_shown_with_all_that_is_known(here: Here, database: str) -> None:
    ids = prepare(database)
    dead = json.loads(here("jobs", "show", ids["dead"], "--database", database, "--json").stdout)
    assert dead["state"] == "dead"
    assert dead["reason"] == "error"
    assert dead["payload"] == {"to": "dead"}
    assert dead["failures"][0]["attempt"] == 1
    assert dead["correlation_id"] == "chain-dead"
    done = json.loads(here("jobs", "show", ids["done"], "--database", database, "--json").stdout)
    assert done["result"] == {"sent": True}
    expected = here("jobs", "show", ids["dead"], "--database", database).stdout.decode()
    assert "ValueError: no\\x1b[31m" in expected
    assert "\x1b" not in expected


def test_a_job_of_another_tenant_is_not_shown(here: Here, database: str) -> None:
    ids = prepare(database)
    for job_id in (ids["dead-too"], "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10", "'; --", ""):
        expected = here("jobs", "show", job_id, "--tenant", "ada", "--database", database)
        assert expected.returncode == 1
        assert "there is no such job" in one_line(expected.stderr)


def test_dead_letters_are_listed_with_their_reason(here: Here, database: str) -> None:
    ids = prepare(database)
    table = here("jobs", "dead", "--database", database, "--tenant", "ada").stdout.decode()
    assert ids["dead"] in table
    assert ids["dead-too"] not in table
    assert "ValueError: no" in table
    expected = json.loads(here("jobs", "dead", "--database", database, "--json").stdout)
    assert {job["id"] for job in expected} == {ids["dead"], ids["dead-too"]}


def test_a_dead_letter_is_requeued_once_and_keeps_its_history(here: Here, database: str) -> None:
    ids = prepare(database)
    first = here("jobs", "requeue", ids["dead"], "--database", database)
    assert first.stdout.decode() == "1 job requeued\n"
    assert first.returncode == 0
    job = json.loads(here("jobs", "show", ids["dead"], "--database", database, "--json").stdout)
    assert (job["state"], job["attempts"]) == ("waiting", 0)
    assert len(job["failures"]) == 1
    again = here("jobs", "requeue", ids["dead"], "--database", database, "--json")
    assert json.loads(again.stdout) == {"requeued": [], "not_found": [ids["dead"]]}
    assert again.returncode == 1


def test_requeue_does_not_cross_a_tenant_that_was_named(here: Here, database: str) -> None:
    ids = prepare(database)
    expected = here("jobs", "requeue", ids["dead-too"], "--tenant", "ada", "--database", database)
    assert expected.returncode == 1
    assert ids["dead-too"] in one_line(expected.stderr)
    whole = here(
        "jobs", "requeue", "--queue", "mail", "--tenant", "ada", "--database", database, "--json"
    )
    assert json.loads(whole.stdout)["requeued"] == [ids["dead"]]


def test_requeue_needs_exactly_one_selection(here: Here, database: str) -> None:
    prepare(database)
    for options in ((), ("7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10", "--queue", "mail")):
        expected = here("jobs", "requeue", *options, "--database", database)
        assert expected.returncode == 2
        assert "say which" in one_line(expected.stderr)


def test_jobs_without_a_command_prints_help(here: Here) -> None:
    expected = here("jobs")
    assert expected.returncode == 2
    assert "ls, show, dead or requeue" in one_line(expected.stderr)


def test_a_database_without_the_tables_is_refused_and_left_alone(
    here: Here, tmp_path: Path
) -> None:
    expected = here("jobs", "ls", "--database", "sqlite:///absent.db")
    assert expected.returncode == 1
    assert "does not exist" in one_line(expected.stderr)
    assert not (tmp_path / "absent.db").exists()
