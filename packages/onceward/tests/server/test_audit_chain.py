"""The chain of audit events: nothing is left out, nothing sealed twice, tampering is found."""

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from onceward import SINGLE_TENANT, GuardConfig, Onceward, open_store
from onceward.audit import seals as audit_seals
from onceward.audit.chain import (
    NO_PREVIOUS,
    AuditKeys,
    event_digest,
    event_document,
    make_seal,
)
from onceward.audit.seals import AuditSealer, AuditSeals
from onceward.errors import ConfigurationError
from onceward.maintenance.retention import AUDIT_EVENTS, Retention
from onceward.maintenance.sweeper import Sweeper
from onceward.ports import Store
from onceward.stores.parts import AUDIT_SEALS
from onceward_operator.audit_trail import AuditTrail
from onceward_operator.tenant_data import TenantData
from onceward_protocol.clock import SystemClock
from onceward_protocol.fingerprint import body_hash, canonical_json
from onceward_testing.fork_server import ForkServer
from packages.onceward.tests.support.audit_chain import add_event, chains, seal, verify
from packages.onceward.tests.support.harness import HeldClock
from packages.onceward.tests.support.jobs_harness import eventually

KEY, OTHER_KEY = "k" * 32, "o" * 32
DAY = timedelta(days=1)
EVENTS, SEALS = "onceward_audit_events", "onceward_audit_seals"


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return one database for all tests: creating one takes longer than most of them."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path_factory.mktemp('audit')}/audit.db"
    postgres = request.getfixturevalue("postgres")
    postgres.start()  # a test before this one may have stopped it
    return str(postgres.create_database())


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    opened = open_store(url)
    opened.schema.want(AUDIT_SEALS)
    await opened.open()
    for table in (EVENTS, SEALS):
        await opened.write(opened.table_names.render(f"DELETE FROM {table}"))
    yield opened
    await opened.close()


async def write(store: Store, sql: str) -> None:
    await store.write(store.table_names.render(sql))


async def rows(store: Store, sql: str) -> list[dict[str, Any]]:
    return [dict(row) for row in await store.read(store.table_names.render(sql))]


async def check_is_clean(store: Store, tenant: str, *, events: int) -> None:
    check = await verify(store, tenant)
    assert check.findings == []
    assert (check.events, check.unsealed) == (events, 0)


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer("packages.onceward.tests.support.audit_chain") as server:
        yield server


# -- sealing ----------------------------------------------------------------------------------


async def test_no_event_is_left_out_or_sealed_twice_while_16_writers_commit_and_roll_back(
    store: Store, url: str
) -> None:
    """Ids are made before the commits, whose order is another one."""
    other = open_store(url)
    await other.open()
    written: list[str] = []
    is_writing = True

    async def writer(number: int) -> None:
        chance = random.Random(number)
        for _ in range(6):
            at = SystemClock().now() - timedelta(seconds=chance.uniform(0, 60))
            await asyncio.sleep(chance.uniform(0, 0.01))
            tenant = chance.choice(["ada", "bob"])
            commits = chance.random() < 0.7
            event = await add_event(store, at, tenant, commits=commits)
            if commits:
                written.append(event)

    async def sealer(on: Store) -> None:
        while is_writing:
            await AuditSealer(on, SystemClock()).seal()
            await asyncio.sleep(0.001)

    sealing = [asyncio.create_task(sealer(on)) for on in (store, other)]
    await asyncio.gather(*(writer(number) for number in range(16)))
    is_writing = False
    await asyncio.gather(*sealing)
    await seal(store)
    sealed = [
        event_id
        for tenant in ("ada", "bob")
        async for one in AuditSeals(store).seals(tenant)
        for event_id, _ in one.events
    ]
    assert sorted(sealed) == sorted(written)
    for tenant in ("ada", "bob"):
        check = await verify(store, tenant)
        assert (check.findings, check.unsealed) == ([], 0)
        assert check.seals > 1, "it sealed while others wrote"
    await other.close()


async def test_event_that_commits_after_a_later_one_was_sealed_is_sealed_next(store: Store) -> None:
    now = SystemClock().now()
    early = now - timedelta(minutes=2)
    await add_event(store, now)
    assert await seal(store) == 1
    late = await add_event(store, early)
    assert (await verify(store)).unsealed == 1
    assert await seal(store) == 1
    head = await AuditSeals(store).head("ada")
    assert head is not None
    assert [event_id for event_id, _ in head.events] == [late]
    await check_is_clean(store, "ada", events=2)


async def test_second_of_two_sealers_that_read_the_same_events_changes_nothing(
    store: Store, url: str
) -> None:
    await add_event(store, SystemClock().now())
    other = open_store(url)
    await other.open()

    class SealsFirst:
        """Lets another process seal between the reading and the writing of this one."""

        async def reach(self, point: str) -> None:
            if point == "audit_seal.before_writes":
                assert await seal(other) == 1

    outcome = await AuditSealer(store, SystemClock(), faults=SealsFirst()).seal()
    assert (outcome.events, outcome.seals) == (0, 0)
    await check_is_clean(store, "ada", events=1)
    await other.close()


async def test_event_that_was_sealed_since_it_was_read_is_not_sealed_by_a_later_number(
    store: Store,
) -> None:
    """Another process may have added a whole seal between both reads."""
    await add_event(store, SystemClock().now())
    seals = AuditSeals(store)
    [row] = await seals.unsealed(("", ""), limit=10)
    await seal(store)
    again = make_seal("ada", [row], after=await seals.head("ada"), now=SystemClock().now())
    assert not await seals.add([again])
    await check_is_clean(store, "ada", events=1)


@pytest.mark.parametrize(
    ("point", "sealed_before_death"),
    [
        ("audit_seal.before_writes", 0),
        ("audit_seal.before_commit", 0),
        ("audit_seal.after_commit", 2),
    ],
)
async def test_sealer_killed_between_its_steps_leaves_all_or_nothing(
    fork_server: ForkServer, store: Store, url: str, point: str, sealed_before_death: int
) -> None:
    now = SystemClock().now()
    for second in range(2):
        await add_event(store, now + timedelta(seconds=second))
    call = ("seal_and_die", {"url": url, "point": point})
    assert await asyncio.to_thread(fork_server.run, call) == [-signal.SIGKILL]
    found = await verify(store)
    assert (found.findings, found.events) == ([], sealed_before_death)
    assert await seal(store) == 2 - sealed_before_death
    await check_is_clean(store, "ada", events=2)


async def test_many_events_are_sealed_in_batches_and_one_day_at_a_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_seals, "_BATCH", 4)
    monkeypatch.setattr(audit_seals, "_SEALS_PER_TRANSACTION", 1)
    monkeypatch.setattr(audit_seals, "_SEALS_PER_PAGE", 1)
    monkeypatch.setattr(audit_seals, "_EVENTS_PER_PAGE", 2)
    midnight = datetime(2026, 3, 2, tzinfo=UTC)
    for tenant in ("ada", "bob", "eve"):
        for minutes in (-3, -2, -1, 1, 2):
            await add_event(store, midnight + timedelta(minutes=minutes), tenant)
    assert await seal(store) == 15
    for tenant in ("ada", "bob", "eve"):
        await check_is_clean(store, tenant, events=5)
        async for one in AuditSeals(store).seals(tenant):
            dates = await AuditSeals(store).events_of(one)
            assert len({event_document(row)["created_at"][:10] for row in dates.values()}) == 1
    assert [name async for name in AuditTrail(store).tenants()] == ["ada", "bob", "eve"]
    assert await seal(store) == 0


async def test_app_seals_in_the_background_and_goes_on_after_an_error(
    store: Store, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "onceward.audit")
    onceward = Onceward(
        url,
        tenants=SINGLE_TENANT,
        config=GuardConfig(audit_seal_seconds=0.01, audit_keys=[KEY], sweep_every_seconds=None),
    )

    async def is_logged(text: str) -> bool:
        return text in caplog.text

    await onceward.open()
    prefix = store.table_names.prefix
    await write(store, f"ALTER TABLE {SEALS} RENAME TO {prefix}away")
    try:
        await add_event(store, SystemClock().now())
        await eventually(lambda: is_logged("were not sealed"), seconds=30)
    finally:
        away = store.table_names.render(SEALS).replace("audit_seals", "away")
        seals = store.table_names.render(SEALS).rpartition(".")[2]
        await write(store, f"ALTER TABLE {away} RENAME TO {seals}")
    await eventually(lambda: is_logged("audit.sealed"), seconds=30)
    await onceward.close()
    check = await verify(store, "ada", KEY)
    assert (check.findings, check.events) == ([], 1)
    [logged] = [record.__dict__ for record in caplog.records if record.message == "audit.sealed"]
    assert check.head is not None
    assert (logged["tenant"], logged["seal"], logged["seal_hash"]) == ("ada", 1, check.head.hash)


def test_digest_is_the_hash_of_canonical_json() -> None:
    row = {
        "tenant": 'ä “\u2028\x7f\x01\\/"', "id": "1", "actor": "\U0001f600", "endpoint": "e",
        "payload_hash": "", "status": 200, "resource": None, "version": 2**63 - 1,
        "request_id": "r", "correlation_id": "c", "created_at": "2026-01-02T03:04:05.000006Z",
        "reason": None,
    }  # fmt: skip
    text = json.dumps(event_document(row)).encode()
    assert event_digest(row) == body_hash(text, "application/json")
    assert canonical_json(text)
    at = datetime(2026, 1, 2, 4, 4, 5, 6, tzinfo=UTC).astimezone()
    same = row | {"created_at": at - timedelta(hours=1)}
    assert event_digest(same) == event_digest(row), "PostgreSQL has times, SQLite text"


# -- tampering --------------------------------------------------------------------------------

Tamper = Callable[[Store, str, list[str]], Awaitable[Any]]


async def swap_events(store: Store, tenant: str, ids: list[str]) -> None:
    """Exchange the ids of two events, and so their places."""
    for old, new in ((ids[2], "x"), (ids[3], ids[2]), ("x", ids[3])):
        await write(
            store, f"UPDATE {EVENTS} SET id = '{new}' WHERE id = '{old}' AND tenant = '{tenant}'"
        )


async def swap_seals(store: Store, tenant: str, _ids: list[str]) -> None:
    for old, new in ((1, 99), (2, 1), (99, 2)):
        await write(
            store, f"UPDATE {SEALS} SET number = {new} WHERE number = {old} AND tenant = '{tenant}'"
        )


async def insert_old(store: Store, tenant: str, _ids: list[str]) -> None:
    await add_event(store, SystemClock().now() - timedelta(days=9), tenant)


async def insert_old_and_seal(store: Store, tenant: str, ids: list[str]) -> None:
    await insert_old(store, tenant, ids)
    await seal(store)


async def insert_into_a_seal(store: Store, tenant: str, _ids: list[str]) -> None:
    event = await add_event(store, SystemClock().now(), tenant)
    await write(store, f"UPDATE {EVENTS} SET seal = 2 WHERE id = '{event}'")


async def truncate(store: Store, tenant: str, _ids: list[str]) -> None:
    await write(store, f"DELETE FROM {SEALS} WHERE number = 3 AND tenant = '{tenant}'")


async def truncate_with_events(store: Store, tenant: str, ids: list[str]) -> None:
    await truncate(store, tenant, ids)
    await write(store, f"DELETE FROM {EVENTS} WHERE seal = 3 AND tenant = '{tenant}'")


async def rewrite(store: Store, tenant: str, ids: list[str]) -> None:
    """Change an event and make the whole chain again, as one can who has no key."""
    await write(store, f"UPDATE {EVENTS} SET actor = 'eve' WHERE id = '{ids[0]}'")
    await write(store, f"DELETE FROM {SEALS} WHERE tenant = '{tenant}'")
    await write(store, f"UPDATE {EVENTS} SET seal = NULL WHERE tenant = '{tenant}'")
    await seal(store)


def statement(sql: str) -> Tamper:
    return lambda store, tenant, ids: write(store, f"{sql.format(*ids)} AND tenant = '{tenant}'")


TAMPERING: list[tuple[str, Tamper]] = [
    ("event_changed", statement(f"UPDATE {EVENTS} SET actor = 'eve' WHERE id = '{{2}}'")),
    ("event_changed", statement(f"UPDATE {EVENTS} SET reason = '' WHERE id = '{{2}}'")),
    ("event_changed", statement(f"UPDATE {EVENTS} SET version = 7 WHERE id = '{{2}}'")),
    ("event_changed", swap_events),
    ("event_removed", statement(f"DELETE FROM {EVENTS} WHERE id = '{{5}}'")),
    ("event_removed", statement(f"UPDATE {EVENTS} SET tenant = 'else' WHERE id = '{{0}}'")),
    ("event_moved", statement(f"UPDATE {EVENTS} SET seal = NULL WHERE id = '{{2}}'")),
    ("event_moved", statement(f"UPDATE {EVENTS} SET seal = 3 WHERE id = '{{2}}'")),
    ("event_inserted", insert_old),
    ("event_inserted", insert_old_and_seal),
    ("event_inserted", insert_into_a_seal),
    ("seal_changed", statement(f"UPDATE {SEALS} SET swept = 5 WHERE number = 2")),
    ("seal_changed", statement(f"UPDATE {SEALS} SET events = '[[1]]' WHERE number = 2")),
    ("seal_changed", statement(f"UPDATE {SEALS} SET events = 'no' WHERE number = 2")),
    ("chain_broken", statement(f"UPDATE {SEALS} SET previous = '' WHERE number = 1")),
    ("chain_broken", statement(f"UPDATE {SEALS} SET hash = '{NO_PREVIOUS}' WHERE number = 2")),
    ("chain_broken", swap_seals),
    ("seal_removed", statement(f"DELETE FROM {SEALS} WHERE number = 1")),
    ("seal_removed", statement(f"DELETE FROM {SEALS} WHERE number = 2")),
    ("seal_removed", truncate),
    ("head_missing", truncate_with_events),
    ("head_changed", rewrite),
    ("head_missing", statement(f"UPDATE {SEALS} SET tenant = 'else' WHERE 1 = 1")),
]


async def test_tampering_is_found(store: Store) -> None:
    """Each kind is tried on the chain of a tenant of its own; the other chains stay valid."""
    tenants = [f"t{number:02}" for number in range(len(TAMPERING))]
    ids = await chains(store, tenants)
    heads: dict[str, dict[int, str]] = {}
    for tenant in tenants:
        check = await verify(store, tenant)
        assert (check.findings, check.events, check.seals) == ([], 6, 3)
        assert check.first is not None
        assert check.head is not None
        heads[tenant] = {1: check.first.hash, 3: check.head.hash}
    for tenant, (code, tamper) in zip(tenants, TAMPERING, strict=True):
        await tamper(store, tenant, ids[tenant])
        check = await verify(store, tenant, known_heads=heads[tenant])
        found = {finding.code for finding in check.findings}
        assert code in found, (tenant, code, check.findings)
        if code.startswith("event_"):
            assert all(finding.event for finding in check.findings if finding.code == code)
        if code not in {"head_missing", "head_changed"}:
            assert code in {finding.code for finding in (await verify(store, tenant)).findings}


async def test_events_of_the_last_hour_are_not_suspicious_and_older_ones_are(store: Store) -> None:
    now = SystemClock().now()
    await add_event(store, now)
    await seal(store)
    await add_event(store, now - timedelta(minutes=59))
    await add_event(store, now + timedelta(hours=5))  # a clock that is ahead
    await seal(store)
    await add_event(store, now + timedelta(seconds=1))
    await seal(store)
    assert (await verify(store)).findings == []
    late = await add_event(store, now - timedelta(minutes=61))
    for _ in range(2):  # not sealed yet, and sealed
        [finding] = (await verify(store)).findings
        assert (finding.code, finding.event) == ("event_inserted", late)
        await seal(store)


# -- keys -------------------------------------------------------------------------------------


async def test_chain_that_was_made_again_without_the_key_is_found_without_a_known_head(
    store: Store,
) -> None:
    now = SystemClock().now()
    ids = []
    for second in range(2):
        ids.append(await add_event(store, now + timedelta(seconds=second)))
        await seal(store, None, KEY)
    for keys in ([KEY], [OTHER_KEY, KEY]):
        assert (await verify(store, "ada", *keys)).findings == []
    assert {f.code for f in (await verify(store, "ada", OTHER_KEY)).findings} == {
        "signature_wrong", "signature_missing",
    }  # fmt: skip
    assert (await verify(store)).findings == [], "hashes can be checked without the key"
    await rewrite(store, "ada", ids)
    [finding] = (await verify(store, "ada", KEY)).findings
    assert finding.code == "signature_missing"


async def test_unsigned_seals_from_before_the_key_are_covered_by_the_first_signed_one(
    store: Store,
) -> None:
    now = SystemClock().now()
    await add_event(store, now)
    await seal(store)
    assert [f.code for f in (await verify(store, "ada", KEY)).findings] == ["signature_missing"]
    assert (await verify(store, "ada", KEY, allow_unsigned=True)).findings == []
    await add_event(store, now + timedelta(seconds=1))
    await seal(store, None, KEY)
    assert (await verify(store, "ada", KEY)).findings == []


def test_short_key_is_refused_and_several_are_separated_by_commas() -> None:
    with pytest.raises(ConfigurationError, match="shorter than 32 bytes"):
        AuditKeys.parse(f"{KEY},short")
    assert AuditKeys.parse(f" {KEY} , {OTHER_KEY},")
    assert not AuditKeys.parse("")


# -- retention and erasure --------------------------------------------------------------------


async def test_chain_is_valid_after_retention_has_deleted_its_first_seals(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_seals, "_SWEPT_SEALS", 2)
    clock = HeldClock()
    sweeper = Sweeper(
        store, clock, retention=[Retention(AUDIT_EVENTS, 7 * DAY)], audit_keys=AuditKeys([KEY])
    )
    for _ in range(5):
        await add_event(store, clock.now())
        await add_event(store, clock.now() + timedelta(seconds=1), "bob")
        await seal(store, clock, KEY)
        clock.pass_by(days=1)
    before = await verify(store, "ada", KEY)
    assert before.head is not None
    unsealed_and_old = await add_event(store, clock.now() - timedelta(days=4))
    clock.pass_by(days=5)  # three seals are older than seven days
    assert await sweeper.delete_old_rows() == {AUDIT_EVENTS: 7}
    [left] = await rows(store, f"SELECT count(*) AS n FROM {EVENTS}")
    assert left["n"] == 4
    assert unsealed_and_old not in str(await rows(store, f"SELECT id FROM {EVENTS}"))
    known = {1: "0" * 64, before.head.number: before.head.hash}
    check = await verify(store, "ada", KEY, known_heads=known)
    assert (check.findings, check.events, check.swept) == ([], 2, 3)
    assert check.head is not None
    assert (check.head.first_kept, check.head.number) == (4, 7), "two deletions, a seal each"

    await write(store, f"DELETE FROM {SEALS} WHERE tenant = 'ada' AND number = 4")
    assert "seal_removed" in {f.code for f in (await verify(store, "ada", KEY)).findings}
    clock.pass_by(days=30)
    await sweeper.delete_old_rows()
    check = await verify(store, "bob", KEY)
    assert (check.findings, check.events, check.swept) == ([], 0, 5)
    seals = check.seals
    clock.pass_by(days=30)
    assert await sweeper.delete_old_rows() == {AUDIT_EVENTS: 0}
    assert (await verify(store, "bob", KEY)).seals == seals, "nothing was deleted, nothing sealed"
    await add_event(store, clock.now(), "bob")
    await seal(store, clock, KEY)
    check = await verify(store, "bob", KEY)
    assert (check.findings, check.events) == ([], 1)


async def test_retention_waits_for_a_seal_that_was_added_meanwhile(store: Store) -> None:
    clock = HeldClock()
    await add_event(store, clock.now())
    await seal(store, clock)
    seals = AuditSeals(store)
    stale = await seals.head("ada")
    await add_event(store, clock.now())
    await seal(store, clock)

    class Stale(AuditSeals):
        async def head(self, tenant: str) -> Any:
            assert tenant == "ada"
            return stale

    assert await Stale(store).sweep("ada", clock.now() + DAY, now=clock.now()) == 0
    await check_is_clean(store, "ada", events=2)
    assert await seals.sweep("ada", clock.now() + DAY, now=clock.now()) == 2
    await check_is_clean(store, "ada", events=0)


async def test_erased_tenant_has_no_seals_and_its_next_chain_begins_with_1(store: Store) -> None:
    await chains(store, ["ada", "bob"])
    await (await TenantData.open(store, SystemClock())).erase("ada", actor="op", reason="asked")
    await seal(store)
    left = await rows(store, f"SELECT DISTINCT tenant FROM {SEALS} ORDER BY tenant")
    assert [one["tenant"] for one in left] == ["bob", "onceward:operator"]
    await add_event(store, SystemClock().now())
    await seal(store)
    for tenant, events in (("ada", 1), ("bob", 6), ("onceward:operator", 2)):
        await check_is_clean(store, tenant, events=events)


async def test_retention_during_a_verification_is_no_finding(store: Store) -> None:
    clock = HeldClock()
    for _ in range(2):
        await add_event(store, clock.now())
        await seal(store, clock)
        clock.pass_by(days=1)
    trail = AuditTrail(store)
    deleted: list[int] = []
    right = AuditSeals.events_of

    async def events_of(self: AuditSeals, one: Any) -> Any:
        if not deleted:
            deleted.append(await self.sweep("ada", clock.now() - 1.5 * DAY, now=clock.now()))
        return await right(self, one)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AuditSeals, "events_of", events_of)
        check = await trail.verify("ada")
    assert deleted == [1]
    assert (check.findings, check.events) == ([], 1)
