"""``onceward audit``: verified in the database and in exports; sealed without a server."""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from onceward import open_store
from onceward.ports import Store
from onceward.stores.parts import AUDIT_SEALS
from onceward_protocol.clock import SystemClock
from packages.onceward.tests.support.audit_chain import add_event, chains
from packages.onceward.tests.support.citus import ON_CITUS
from packages.protocol.tests.cli.harness import Done, Here, one_line

KEY = "k" * 32
EVENTS, SEALS = "onceward_audit_events", "onceward_audit_seals"


@pytest.fixture(params=["sqlite", "postgres", *ON_CITUS])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/audit.db"
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def file(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/onceward.db"


def on(url: str, work: Callable[[Store], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        store = open_store(url)
        store.schema.want(AUDIT_SEALS)
        await store.open()
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def writing(sql: str) -> Callable[[Store], Awaitable[Any]]:
    return lambda store: store.write(store.table_names.render(sql))


def found(done: Done) -> Any:
    return json.loads(done.stdout)


def test_chains_are_verified_and_what_was_changed_is_named(
    here: Here, database: str, tmp_path: Path
) -> None:
    where = ("--database", database)
    ids = on(database, lambda store: chains(store, ["ada", "bob"]))["ada"]
    on(database, lambda store: add_event(store, SystemClock().now(), "bob"))
    heads = ("--save-heads", "heads.jsonl")
    good = here("audit", "verify", *where, *heads)
    assert (good.returncode, good.stderr) == (0, b"")
    assert good.stdout.decode() == (
        "12 events in 6 seals of 2 tenants verified, 1 not sealed yet, 0 deleted by retention: "
        "0 findings\n"
    )
    saved = (tmp_path / "heads.jsonl").read_bytes()
    assert [json.loads(line)["number"] for line in saved.splitlines()] == [3, 3]
    ada = found(here("audit", "verify", *where, "--tenant", "ada", "--json"))
    assert (ada["ok"], ada["tenants"], ada["seals"], ada["events"]) == (True, 1, 3, 6)
    head = f"{ada['head']['number']}:{ada['head']['hash']}"
    assert here("audit", "verify", *where, "--tenant", "ada", "--head", head).returncode == 0

    on(
        database,
        writing(f"UPDATE {EVENTS} SET actor = '' WHERE id = '{ids[2]}'"),
    )
    bad = here("audit", "verify", *where, "--heads", "heads.jsonl", *heads)
    assert bad.returncode == 1
    assert one_line(bad.stderr) == ("onceward: the audit trail is not as it was sealed: 1 finding")
    assert bad.stdout.decode().startswith(f"event_changed: tenant ada, seal 2, event {ids[2]}: ")
    assert (tmp_path / "heads.jsonl").read_bytes() == saved, "the heads of a good run stay"
    [finding] = found(here("audit", "verify", *where, "--json"))["findings"]
    assert (finding["code"], finding["tenant"], finding["event"]) == (
        "event_changed",
        "ada",
        ids[2],
    )
    assert here("audit", "verify", *where, "--accept", ids[2]).returncode == 0

    on(
        database,
        writing(f"DELETE FROM {SEALS} WHERE tenant = 'bob'"),
    )
    on(
        database,
        writing(f"DELETE FROM {EVENTS} WHERE tenant = 'bob'"),
    )
    codes = found(here("audit", "verify", *where, "--heads", "heads.jsonl", "--json"))["findings"]
    assert {(one["tenant"], one["code"]) for one in codes} == {
        ("ada", "event_changed"), ("bob", "head_missing"),
    }  # fmt: skip


def test_export_is_verified_without_the_database(here: Here, database: str, tmp_path: Path) -> None:
    where = ("--database", database)
    on(database, lambda store: chains(store, ["ada", "bob"]))
    on(database, lambda store: add_event(store, SystemClock().now(), "ada"))
    wrote = here("audit", "export", *where, "--output", "audit.jsonl", "--json")
    assert found(wrote) == {"file": "audit.jsonl", "events": 13, "seals": 6, "unsealed": 1}
    path = tmp_path / "audit.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert here("audit", "export", *where).stdout.decode().splitlines()[1:] == [
        line.rstrip("\n") for line in lines[1:]
    ]
    verify = ("audit", "verify", "--file", "audit.jsonl", "--json")
    good = found(here(*verify))
    assert (good["ok"], good["tenants"], good["events"], good["unsealed"]) == (True, 2, 12, 1)
    check_with_standard_library(lines)

    def codes(*changed: str) -> set[str]:
        path.write_text("".join(changed))
        done = here(*verify)
        return {one["code"] for one in found(done)["findings"]} if done.stdout else set()

    seal = next(number for number, line in enumerate(lines) if '"kind": "seal"' in line)
    assert codes(*lines[:1], *lines[2:]) == {"event_removed"}
    assert codes(*lines[:seal], *lines[seal + 1 :]) == {"event_inserted", "seal_removed"}
    changed = lines[1].replace('"actor": "', '"actor": "x')
    assert codes(*lines[:1], changed, *lines[2:]) == {"event_changed"}
    path.write_text("".join(lines[:-1]))
    assert "not complete" in one_line(here(*verify[:-1]).stderr)

    some = here("audit", "export", *where, "--tenant", "ada", "--after", "2", "-o", "some.jsonl")
    assert some.stdout.decode() == "some.jsonl written (3 events, 1 seal, 1 not sealed yet)\n"
    assert here("audit", "verify", "--file", "some.jsonl").returncode == 0
    late = here("audit", "export", *where, "--after", "2999-01-01T00:00:00Z").stdout.splitlines()
    assert len(late) == 3, "only the event that is not sealed yet, and the lines around it"


def check_with_standard_library(lines: list[str]) -> None:
    """Check hashes and links as somebody does who has nothing but the documentation."""

    def digest(value: dict[str, Any]) -> str:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    digests: dict[tuple[str, str], str] = {}
    previous: dict[str, str] = {}
    seals = 0
    for line in map(json.loads, lines):
        if line["kind"] == "event":
            fields = {name: line[name] for name in line if name not in ("kind", "seal")}
            digests[line["tenant"], line["id"]] = digest(fields)
        elif line["kind"] == "seal":
            tenant = line["tenant"]
            for event_id, expected in line["events"]:
                assert digests[tenant, event_id] == expected
            assert line["previous"] == previous.get(tenant, "0" * 64)
            left_out = ("kind", "hash", "key_id", "mac")
            sealed = {name: line[name] for name in line if name not in left_out}
            assert digest(sealed) == line["hash"]
            previous[tenant] = line["hash"]
            seals += 1
    assert seals == 6


def test_events_are_sealed_and_signed_without_a_server(here: Here, file: str) -> None:
    on(file, lambda store: add_event(store, SystemClock().now()))
    first = here("audit", "seal", "--json", ONCEWARD_AUDIT_KEY=KEY)
    assert found(first) == {"events": 1, "seals": 1}
    assert here("audit", "seal").stdout == b"0 events sealed by 0 seals\n"
    assert here("audit", "verify", ONCEWARD_AUDIT_KEY=f"{'n' * 32},{KEY}").returncode == 0
    wrong = found(here("audit", "verify", "--json", ONCEWARD_AUDIT_KEY="n" * 32))
    assert "signature_wrong" in {one["code"] for one in wrong["findings"]}


def test_erased_tenant_is_no_finding_but_its_next_chain_is_checked(here: Here, file: str) -> None:
    on(file, lambda store: chains(store, ["ada"]))
    assert here("audit", "verify", "--save-heads", "old.jsonl").returncode == 0
    assert here("tenant", "erase", "ada", "--reason", "gone", "--yes").returncode == 0
    erased = found(here("audit", "verify", "--heads", "old.jsonl", "--json"))
    assert (erased["ok"], erased["erased"]) == (True, 1)
    on(file, lambda store: add_event(store, SystemClock().now()))
    here("audit", "seal")
    assert here("audit", "verify", "--save-heads", "new.jsonl").returncode == 0
    for table in (SEALS, EVENTS):
        on(file, lambda store, of=table: store.write(f"DELETE FROM {of} WHERE tenant = 'ada'"))  # type: ignore[misc]
    lost = found(here("audit", "verify", "--heads", "new.jsonl", "--json"))
    assert [(one["tenant"], one["code"]) for one in lost["findings"]] == [("ada", "head_missing")]


def test_sweep_signs_what_it_records(here: Here, file: str, monkeypatch: Any) -> None:
    at = SystemClock().now() - timedelta(days=40)
    on(file, lambda store: add_event(store, at))
    here("audit", "seal", ONCEWARD_AUDIT_KEY=KEY)

    from onceward.cli import sweep
    from onceward.maintenance.retention import AUDIT_EVENTS, Retention

    async def rules(_target: Any, _store: Any) -> list[Retention]:
        return [Retention(AUDIT_EVENTS, timedelta(days=30))]

    monkeypatch.setattr(sweep, "_retention", rules)
    swept = found(here("sweep", "--json", ONCEWARD_AUDIT_KEY=KEY))
    assert swept["old_rows"] == {"audit_events": 1}
    check = found(here("audit", "verify", "--json", ONCEWARD_AUDIT_KEY=KEY))
    assert (check["ok"], check["swept"], check["events"]) == (True, 1, 0)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["verify", "--head", "1:" + "a" * 64], "--head is a seal of one tenant"),
        (["verify", "--tenant", "ada", "--head", "1:zz"], "--head is a number and 64 hexadecimal"),
        (["verify", "--heads", "none.jsonl"], "--heads none.jsonl is not a file of --save-heads"),
        (["verify", "--heads", "bad.jsonl"], "--heads bad.jsonl is not a file of --save-heads"),
        (["verify", "--file", "none.jsonl"], "cannot read none.jsonl"),
        (["verify", "--file", "bad.jsonl"], "line 1 is not a line of onceward audit export"),
        (["export", "--after", "3"], "--after with the number of a seal needs --tenant"),
        (["export", "--after", "noon"], "--after noon is neither the number of a seal nor a time"),
        (
            ["export", "--after", "2026-01-31"],
            "neither the number of a seal nor a time with a zone",
        ),
    ],
)
def test_bad_arguments_are_one_line(
    here: Here, file: str, tmp_path: Path, arguments: list[str], reason: str
) -> None:
    on(file, lambda store: store.ping())
    (tmp_path / "bad.jsonl").write_text('{"tenant": "ada"}\n')
    done = here("audit", *arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    assert reason in one_line(done.stderr)


def test_short_key_is_one_line(here: Here, file: str) -> None:
    on(file, lambda store: store.ping())
    done = here("audit", "seal", ONCEWARD_AUDIT_KEY="short")
    assert done.returncode == 2
    assert "ONCEWARD_AUDIT_KEY: a key for audit seals is shorter" in one_line(done.stderr)
