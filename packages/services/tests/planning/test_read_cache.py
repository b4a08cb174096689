"""The read cache: faster, bounded, and never behind a write that was acknowledged."""

import asyncio
from typing import Any

import pytest

from holdfast.errors import StoreUnavailableError
from holdfast_services.planning.read_cache import ReadCache, ReadKey

from .fixtures import Office, OpenOffice, ok, refused, tag
from .test_effects import Dies

KEY = ReadKey("acme", "mission", "m")


# -- unit -----------------------------------------------------------------------------------------


def test_an_answer_counts_for_its_version_only() -> None:
    cache = ReadCache(10_000)
    cache.put(KEY, 2, b"two")
    assert cache.get(KEY, 2) == b"two"
    assert cache.get(KEY, 1) is cache.get(KEY, 3) is None
    assert (cache.hits, cache.misses) == (1, 2)


def test_an_older_answer_never_replaces_a_newer_one() -> None:
    cache = ReadCache(10_000)
    cache.put(KEY, 2, b"two")
    cache.put(KEY, 1, b"one")
    assert cache.get(KEY, 2) == b"two"
    cache.put(KEY, 3, b"three")
    assert (cache.get(KEY, 3), len(cache)) == (b"three", 1)


def test_tenants_with_the_same_id_have_answers_of_their_own() -> None:
    cache = ReadCache(10_000)
    cache.put(KEY, 1, b"ours")
    assert cache.get(KEY._replace(tenant="globex"), 1) is None
    assert KEY._replace(tenant="globex") not in cache


def test_it_is_bounded_in_bytes_and_lets_go_of_the_least_recently_used() -> None:
    cache = ReadCache(5_000)
    keys = [KEY._replace(id=str(number)) for number in range(6)]
    for key in keys[:3]:
        cache.put(key, 1, b"x" * 1_000)
    assert cache.get(keys[0], 1) is not None
    cache.put(keys[3], 1, b"x" * 1_000)
    assert [key in cache for key in keys[:4]] == [True, False, True, True]
    assert cache.size_bytes <= 5_000
    cache.put(keys[4], 1, b"x" * 6_000)
    assert keys[4] not in cache
    for key in keys:
        cache.remove(key)
    assert (len(cache), cache.size_bytes) == (0, 0)


def test_zero_bytes_switch_it_off() -> None:
    cache = ReadCache(0)
    cache.put(KEY, 1, b"")
    assert (len(cache), cache.get(KEY, 1)) == (0, None)


# -- over HTTP ------------------------------------------------------------------------------------


class Counted:
    """How many reads were answered from memory, and what is kept of a path."""

    def __init__(self, office: Office, path: str) -> None:
        self.office = office
        self.path = path
        kind, item_id = path.split("/")[2:4]
        self.key = ReadKey("acme", kind.removesuffix("s"), item_id)  # type: ignore[arg-type]

    @property
    def is_kept(self) -> bool:
        return self.key in self.office.cache

    async def is_hit(self) -> bool:
        before = self.office.cache.hits
        await self.office.read(self.path)
        return self.office.cache.hits == before + 1


async def test_the_second_read_is_answered_from_memory_byte_for_byte(office: Office) -> None:
    mission = await office.mission()
    assignment = await office.assignment(mission)
    project = f"/v1/projects/{(await office.read(mission))['project_id']}"
    for path in (project, f"{project}/dashboard", mission, assignment):
        first = await office.get(path)
        before = office.cache.hits
        second = await office.get(path)
        assert office.cache.hits == before + 1
        assert (second.content, second.headers["etag"]) == (first.content, first.headers["etag"])
        assert second.headers["content-type"] == first.headers["content-type"]


async def test_a_committed_write_forgets_the_answer_and_the_next_read_is_new(
    office: Office,
) -> None:
    counted = Counted(office, await office.mission())
    for version, write in enumerate((office.patch, office.put), 1):
        await office.read(counted.path)
        assert counted.is_kept
        ok(await write(counted.path, {"title": f"v{version}"}, **tag(version)))
        assert not counted.is_kept
        assert (await office.read(counted.path))["title"] == f"v{version}"
    await office.delete(counted.path, **tag(3))
    assert not counted.is_kept
    refused(await office.get(counted.path), 404, "resource.not_found")


async def test_failed_and_replayed_writes_leave_it_alone(office: Office) -> None:
    counted = Counted(office, await office.mission())
    won = await office.patch(counted.path, {"title": "won"}, key="first", **tag(1))
    await office.read(counted.path)
    assert await counted.is_hit()

    replay = await office.patch(counted.path, {"title": "won"}, key="first", **tag(1))
    assert replay.content == won.content
    assert replay.headers["idempotency-replayed"] == "true"
    for status, answer in (
        (409, await office.patch(counted.path, {"title": "x"}, key="first", **tag(2))),
        (409, await office.patch(counted.path, {"title": "x"}, **tag(1))),
        (428, await office.put(counted.path, {"title": "x"})),
        (400, await office.patch(counted.path, {"colour": "x"}, **tag(2))),
        (422, await office.patch(counted.path, {"title": ""}, **tag(2))),
        (409, await office.delete(counted.path, **tag(1))),
        (404, await office.member().patch(counted.path, {"title": "x"}, **tag(2))),
    ):
        assert answer.status_code == status, answer.text
        assert counted.is_kept
        assert await counted.is_hit()


@pytest.mark.parametrize("point", ["after_business_write", "before_commit"])
async def test_a_write_that_is_undone_leaves_it_alone(
    sqlite_office: Office, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(sqlite_office, await sqlite_office.mission())
    await sqlite_office.read(counted.path)
    monkeypatch.setattr(sqlite_office.holdfast.idempotency, "faults", Dies(point))
    cut = await sqlite_office.patch(counted.path, {"title": "x"}, **tag(1))
    assert cut.status_code == 503
    assert counted.is_kept
    assert await counted.is_hit()


async def test_a_write_at_another_server_is_seen_at_once(open_office: OpenOffice) -> None:
    async with open_office() as here, open_office() as there:
        path = await here.mission()
        for version in range(1, 4):
            await there.read(path)
            ok(await here.patch(path, {"title": f"v{version}"}, **tag(version)))
            seen = await there.get(path, If_None_Match=f'"{version}"')
            assert (ok(seen)["title"], seen.headers["etag"]) == (f"v{version}", f'"{version + 1}"')
        await there.read(path)
        await here.delete(path, **tag(4))
        refused(await there.get(path), 404, "resource.not_found")


async def test_a_job_at_another_server_is_seen_at_once(open_office: OpenOffice) -> None:
    async with open_office() as here, open_office() as there:
        project = await here.project()
        before = await there.get(f"{project}/dashboard")
        await here.mission(project)
        await here.all_jobs_done()
        after = await there.get(f"{project}/dashboard", If_None_Match=before.headers["etag"])
        assert ok(after)["missions"]["planned"] == 1


async def test_no_reader_sees_less_than_what_was_acknowledged_before_it_asked(
    open_office: OpenOffice,
) -> None:
    async with open_office() as one, open_office() as two:
        path = await one.mission()
        acknowledged = 1
        reads = hits = 0

        async def write() -> None:
            nonlocal acknowledged
            for version in range(1, 31):
                member: Any = (one, two)[version % 2]
                ok(await member.patch(path, {"title": f"v{version + 1}"}, **tag(version)))
                acknowledged = version + 1

        async def read(office: Office) -> None:
            nonlocal reads
            while acknowledged < 31:
                least = acknowledged
                seen = await office.get(path)
                assert ok(seen)["version"] >= least
                assert seen.headers["etag"] == f'"{ok(seen)["version"]}"'
                reads += 1
                await asyncio.sleep(0)

        async with asyncio.timeout(60):
            await asyncio.gather(write(), *(read(office) for office in (one, two, one, two)))
        hits = one.cache.hits + two.cache.hits
        assert reads > hits > 0


async def test_a_kept_answer_is_not_told_while_the_database_cannot_be_asked(
    sqlite_office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await sqlite_office.mission()
    await sqlite_office.read(path)

    async def down(*_: Any) -> Any:
        raise StoreUnavailableError("down")

    monkeypatch.setattr(sqlite_office.holdfast.store, "read", down)
    refused(await sqlite_office.get(path), 503, "idempotency.store_unavailable")


async def test_another_organization_has_no_part_in_what_is_kept(office: Office) -> None:
    path = await office.mission()
    await office.read(path)
    before = (office.cache.hits, len(office.cache))
    eve = office.member()
    for _ in range(2):
        refused(await eve.get(path), 404, "resource.not_found")
        refused(await eve.get(path, If_None_Match='"1"'), 404, "resource.not_found")
    assert (office.cache.hits, len(office.cache)) == before


async def test_it_can_be_switched_off(open_office: OpenOffice) -> None:
    async with open_office(planning_cache_bytes=0) as office:
        path = await office.mission()
        assert await office.read(path) == await office.read(path)
        assert (len(office.cache), office.cache.hits) == (0, 0)
