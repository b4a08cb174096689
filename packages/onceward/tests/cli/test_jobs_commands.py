"""``onceward jobs`` on SQLite and PostgreSQL."""

import asyncio
import json
import re
import time
from pathlib import Path

import pytest

from onceward import open_store
from onceward.jobs.admin import JobAdmin
from onceward.jobs.enqueue import Cause, new_job
from onceward.jobs.job_store import JobStore
from onceward.stores.parts import JOBS
from packages.onceward.tests.support.citus import ON_CITUS
from packages.protocol.tests.cli.harness import Here, one_line


@pytest.fixture(params=["sqlite", "postgres", *ON_CITUS])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/commands.db"
    return str(request.getfixturevalue(f"{request.param}_url"))


def prepare(url: str) -> dict[str, str]:
    """Create one waiting, one done and two dead jobs of two tenants; return their ids by name."""

    async def make() -> dict[str, str]:
        store = open_store(url)
        store.schema.want(JOBS)
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
                await table.dead_letter(
                    job, worker="w", reason="error", error="ValueError: no\x1b[31m"
                )
        await enqueue("waiting", "ada")
        await store.close()
        return ids

    return asyncio.run(make())


def test_jobs_ls_prints_newest_first_as_columns_and_json(here: Here, database: str) -> None:
    ids = prepare(database)
    table = here("jobs", "ls", "--database", database)
    lines = table.stdout.decode().splitlines()
    assert lines[0].split("\t")[:5] == ["id", "tenant", "queue", "type", "state"]
    assert lines[1].startswith(f"{ids['waiting']}\tada\tmail\tmail.send\twaiting\t0/5")
    assert len(lines) == 5
    result = json.loads(here("jobs", "ls", "--database", database, "--json").stdout)
    assert {job["id"]: job["state"] for job in result} == {
        ids["waiting"]: "waiting",
        ids["done"]: "done",
        ids["dead"]: "dead",
        ids["dead-too"]: "dead",
    }
    assert result[0]["key"] == "job:ada:mail:mail.send:waiting"


def test_jobs_ls_filters(here: Here, database: str) -> None:
    ids = prepare(database)

    def listed(*options: str) -> list[str]:
        result = here("jobs", "ls", "--database", database, "--json", *options)
        return [job["id"] for job in json.loads(result.stdout)]

    assert listed("--tenant", "bob") == [ids["dead-too"]]
    assert listed("--state", "done") == [ids["done"]]
    assert listed("--state", "running", "--queue", "mail") == []
    assert len(listed("--type", "mail.send", "--limit", "2")) == 2
    bad = here("jobs", "ls", "--database", database, "--state", "lost")
    assert bad.returncode == 2
    assert "waiting, running, done, dead" in one_line(bad.stderr)


def test_jobs_show_prints_payload_failures_and_result(here: Here, database: str) -> None:
    ids = prepare(database)
    dead = json.loads(here("jobs", "show", ids["dead"], "--database", database, "--json").stdout)
    assert dead["state"] == "dead"
    assert dead["reason"] == "error"
    assert dead["payload"] == {"to": "dead"}
    assert dead["failures"][0]["attempt"] == 1
    assert dead["correlation_id"] == "chain-dead"
    done = json.loads(here("jobs", "show", ids["done"], "--database", database, "--json").stdout)
    assert done["result"] == {"sent": True}
    result = here("jobs", "show", ids["dead"], "--database", database).stdout.decode()
    assert re.search(r'^payload +\{"to": "dead"\}$', result, re.MULTILINE)
    assert "ValueError: no\\x1b[31m" in result
    assert "\x1b" not in result


def test_running_job_whose_lease_has_expired_is_marked(here: Here, database: str) -> None:
    ids = prepare(database)

    async def claim(lease_seconds: float) -> None:
        store = open_store(database)
        await store.open()
        table = JobStore(store)
        (job,) = await table.claim(["mail"], worker="w", limit=9, lease_seconds=lease_seconds)
        assert job.lease.job_id == ids["waiting"]
        if lease_seconds > 1:
            await table.save_step(job.lease, "send", '{"ok":true}', worker="w")
        await store.close()

    def shown() -> tuple[str, str, bool]:
        listed = here("jobs", "ls", "--state", "running", "--database", database)
        show = here("jobs", "show", ids["waiting"], "--database", database).stdout.decode()
        found = json.loads(here("jobs", "ls", "--database", database, "--json").stdout)
        (expired,) = [job["lease_expired"] for job in found if job["id"] == ids["waiting"]]
        (state,) = re.findall(r"^state +(.+)$", show, re.MULTILINE)
        return listed.stdout.decode().splitlines()[1].split("\t")[4], state, expired

    asyncio.run(claim(0.05))
    time.sleep(0.06)
    assert shown() == ("running, lease expired", "running, lease expired", True)
    asyncio.run(claim(30))
    assert shown() == ("running", "running", False)
    show = here("jobs", "show", ids["waiting"], "--database", database).stdout.decode()
    assert show.endswith('step\tresult\nsend\t{"ok": true}\n')


def test_jobs_show_does_not_find_jobs_of_another_tenant(here: Here, database: str) -> None:
    ids = prepare(database)
    for job_id in (ids["dead-too"], "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10", "'; --", ""):
        result = here("jobs", "show", job_id, "--tenant", "ada", "--database", database)
        assert result.returncode == 1
        assert "there is no such job" in one_line(result.stderr)


def test_jobs_dead_prints_reason_and_error(here: Here, database: str) -> None:
    ids = prepare(database)
    table = here("jobs", "dead", "--database", database, "--tenant", "ada").stdout.decode()
    assert ids["dead"] in table
    assert ids["dead-too"] not in table
    assert "ValueError: no" in table
    result = json.loads(here("jobs", "dead", "--database", database, "--json").stdout)
    assert {job["id"] for job in result} == {ids["dead"], ids["dead-too"]}


def test_dead_letter_is_requeued_once_and_keeps_its_failures(here: Here, database: str) -> None:
    ids = prepare(database)
    first = here("jobs", "requeue", ids["dead"], "--database", database)
    assert first.stdout.decode() == "1 job requeued: 1 mail.send in mail\n"
    assert first.returncode == 0
    job = json.loads(here("jobs", "show", ids["dead"], "--database", database, "--json").stdout)
    assert (job["state"], job["attempts"]) == ("waiting", 0)
    assert len(job["failures"]) == 1
    again = here("jobs", "requeue", ids["dead"], "--database", database, "--json")
    assert json.loads(again.stdout) == {"requeued": [], "not_found": [ids["dead"]]}
    assert again.returncode == 1


def test_requeue_with_tenant_ignores_other_tenants(here: Here, database: str) -> None:
    ids = prepare(database)
    result = here("jobs", "requeue", ids["dead-too"], "--tenant", "ada", "--database", database)
    assert result.returncode == 1
    assert ids["dead-too"] in one_line(result.stderr)
    whole = here(
        "jobs", "requeue", "--queue", "mail", "--tenant", "ada", "--database", database, "--json"
    )
    assert json.loads(whole.stdout)["requeued"] == [ids["dead"]]


def test_empty_tenant_is_refused_and_means_neither_all_nor_none(here: Here, database: str) -> None:
    ids = prepare(database)
    for command in (
        ("jobs", "requeue", ids["dead-too"]),
        ("keys", "ls"),
        ("keys", "rm", "a", "--endpoint", "b", "--reason", "c"),
    ):
        result = here(*command, "--tenant", "", "--database", database)
        assert result.returncode == 2
        assert "--tenant is empty" in one_line(result.stderr)
    job = json.loads(here("jobs", "show", ids["dead-too"], "--database", database, "--json").stdout)
    assert job["state"] == "dead"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--queue", "mial"), "there is no queue mial (queues: mail)"),
        (("--type", "mail.sent"), "there is no job of the type mail.sent"),
        (("--tenant", "eve"), "nothing is stored of a tenant eve"),
    ],
)
def test_unknown_queue_type_or_tenant_is_an_error(
    here: Here, database: str, options: tuple[str, ...], line: str
) -> None:
    prepare(database)
    requeue = () if "--tenant" in options else (("requeue",),)
    for command in (("ls",), ("dead",), *requeue):
        result = here("jobs", *command, *options, "--database", database)
        assert (result.returncode, result.stdout) == (1, b"")
        assert line in one_line(result.stderr)


def test_unknown_tenant_is_an_error_of_keys_and_sweep(here: Here, database: str) -> None:
    prepare(database)
    for command in (("keys", "ls"), ("keys", "show", "x"), ("sweep",)):
        result = here(*command, "--tenant", "eve", "--database", database)
        assert result.returncode == 1
        assert "nothing is stored of a tenant eve" in one_line(result.stderr)
        assert here(*command[:2], "--tenant", "ada", "--database", database).returncode in (0, 2)


def test_dead_letters_are_requeued_by_type_and_error(here: Here, database: str) -> None:
    ids = prepare(database)
    rest = ("--database", database)
    dry = here("jobs", "requeue", "--error", "valueerror", "--dry-run", *rest)
    assert dry.stdout.decode().splitlines()[-1] == "2 jobs would be requeued: 2 mail.send in mail"
    assert ids["dead"] in dry.stdout.decode()
    none = here("jobs", "requeue", "--type", "mail.send", "--error", "timeout", *rest)
    assert (none.returncode, none.stdout) == (0, b"0 jobs requeued\n")
    dry_ids = here("jobs", "requeue", ids["dead"], "--dry-run", "--json", *rest)
    assert json.loads(dry_ids.stdout) == {"would_requeue": [ids["dead"]], "not_found": []}
    done = here("jobs", "requeue", "--type", "mail.send", "--error", "ValueError", *rest)
    assert done.stdout.decode() == "2 jobs requeued: 2 mail.send in mail\n"
    found = json.loads(here("jobs", "ls", "--state", "waiting", "--json", *rest).stdout)
    assert len(found) == 3


def test_job_that_died_last_is_listed_first(here: Here, database: str) -> None:
    ids = prepare(database)

    async def let_die() -> None:
        store = open_store(database)
        await store.open()
        table = JobStore(store)
        await asyncio.sleep(0.01)
        # Enqueued before the other dead letters are requeued, dead after them.
        await JobAdmin(store).requeue(ids["dead"], tenant="ada", actor="me")
        for job in await table.claim(["mail"], worker="w", limit=9, lease_seconds=30):
            if job.lease.job_id == ids["dead"]:
                await table.dead_letter(job, worker="w", reason="error", error="again")
        await store.close()

    asyncio.run(let_die())
    for command in (("dead",), ("ls", "--state", "dead")):
        found = json.loads(here("jobs", *command, "--database", database, "--json").stdout)
        assert [job["id"] for job in found] == [ids["dead"], ids["dead-too"]]


def test_queue_without_jobs_is_paused_with_a_warning(here: Here, database: str) -> None:
    prepare(database)
    done = here("jobs", "pause", "mial", "--reason", "no server", "--database", database)
    assert done.returncode == 0
    assert "warning: there is no queue mial (queues: mail)" in one_line(done.stderr)


def test_requeue_takes_either_ids_or_a_queue(here: Here, database: str) -> None:
    prepare(database)
    for options in ((), ("7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10", "--queue", "mail")):
        result = here("jobs", "requeue", *options, "--database", database)
        assert result.returncode == 2
        assert "give either ids" in one_line(result.stderr)


def test_jobs_without_a_command_lists_the_commands(here: Here) -> None:
    result = here("jobs")
    assert result.returncode == 2
    assert "ls, show, dead, requeue, cancel, pause" in one_line(result.stderr)


def test_jobs_ls_does_not_create_a_database(here: Here, tmp_path: Path) -> None:
    result = here("jobs", "ls", "--database", "sqlite:///absent.db")
    assert result.returncode == 1
    assert "does not exist" in one_line(result.stderr)
    assert not (tmp_path / "absent.db").exists()


def test_waiting_job_is_cancelled_once(here: Here, database: str) -> None:
    ids = prepare(database)
    cancel = ("jobs", "cancel", ids["waiting"], "--database", database, "--reason", "sent by post")
    assert here(*cancel, "--tenant", "bob").returncode == 1
    first = here(*cancel)
    assert (first.returncode, first.stdout.decode()) == (0, "1 job cancelled\n")
    show = ("jobs", "show", ids["waiting"], "--database", database, "--json")
    job = json.loads(here(*show).stdout)
    assert (job["state"], job["reason"], job["error"]) == ("dead", "cancelled", "sent by post")
    again = here(*cancel, "--json")
    assert json.loads(again.stdout) == {"cancelled": [], "not_waiting": [ids["waiting"]]}
    assert again.returncode == 1
    assert ids["waiting"] in one_line(again.stderr)
    assert here("jobs", "requeue", ids["waiting"], "--database", database).returncode == 0


def test_queue_is_paused_listed_and_resumed(here: Here, database: str) -> None:
    prepare(database)
    rest = ("--database", database)
    assert here("jobs", "pause", "mail", "--reason", "no server", *rest).returncode == 0
    again = here("jobs", "pause", "mail", "--reason", "no server", *rest)
    assert again.returncode == 1
    assert "paused already" in one_line(again.stderr)
    (found,) = json.loads(here("jobs", "paused", "--json", *rest).stdout)
    assert (found["queue"], found["reason"]) == ("mail", "no server")
    assert found["actor"].endswith(" via onceward jobs pause")
    assert "no server" in here("jobs", "paused", *rest).stdout.decode()
    resumed = here("jobs", "resume", "mail", "--json", *rest)
    assert json.loads(resumed.stdout) == {"resumed": "mail"}
    again = here("jobs", "resume", "mail", *rest)
    assert again.returncode == 1
    assert "is not paused" in one_line(again.stderr)
    assert json.loads(here("jobs", "paused", "--json", *rest).stdout) == []


def test_cancel_and_pause_need_a_reason_and_pause_a_valid_name(here: Here, database: str) -> None:
    ids = prepare(database)
    for command in (
        ("cancel", ids["waiting"]),
        ("cancel", ids["waiting"], "--reason", " "),
        ("pause", "mail"),
        ("pause", "mail", "--reason", ""),
        ("pause", "two words", "--reason", "x"),
    ):
        result = here("jobs", *command, "--database", database)
        assert result.returncode == 2, command
        one_line(result.stderr)
    assert json.loads(here("jobs", "paused", "--json", "--database", database).stdout) == []
