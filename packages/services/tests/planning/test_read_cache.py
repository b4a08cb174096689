"""The read cache: limited in size, and never behind an acknowledged write."""

import asyncio
from typing import Any

import pytest

from onceward.errors import StoreUnavailableError
from onceward_services.planning.read_cache import ReadCache, ReadKey

from .fixtures import OpenPlanning, PlanningServer, ok, refused, tag
from .test_effects import Dies

KEY = ReadKey("org:acme", "mission", "m")


# -- unit -----------------------------------------------------------------------------------------


def test_cached_body_is_used_for_its_version_only() -> None:
    cache = ReadCache(10_000)
    cache.put(KEY, 2, b"two")
    assert cache.get(KEY, 2) == b"two"
    assert cache.get(KEY, 1) is cache.get(KEY, 3) is None
    assert (cache.hits, cache.misses) == (1, 2)


def test_older_body_never_replaces_a_newer_one() -> None:
    cache = ReadCache(10_000)
    cache.put(KEY, 2, b"two")
    cache.put(KEY, 1, b"one")
    assert cache.get(KEY, 2) == b"two"
    cache.put(KEY, 3, b"three")
    assert (cache.get(KEY, 3), len(cache)) == (b"three", 1)


def test_cache_entries_of_tenants_with_the_same_id_are_separate() -> None:
    cache = ReadCache(10_000)
    cache.put(KEY, 1, b"ours")
    assert cache.get(KEY._replace(tenant="org:globex"), 1) is None
    assert KEY._replace(tenant="org:globex") not in cache


def test_cache_is_limited_in_bytes_and_evicts_the_least_recently_used() -> None:
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
    """The hits of the cache, and its entry of a path."""

    def __init__(self, planning: PlanningServer, path: str) -> None:
        self.planning = planning
        self.path = path
        kind, item_id = path.split("/")[2:4]
        self.key = ReadKey("org:acme", kind.removesuffix("s"), item_id)  # type: ignore[arg-type]

    @property
    def is_kept(self) -> bool:
        return self.key in self.planning.cache

    async def is_hit(self) -> bool:
        before = self.planning.cache.hits
        await self.planning.read(self.path)
        return self.planning.cache.hits == before + 1


async def test_second_read_comes_from_the_cache_byte_for_byte(planning: PlanningServer) -> None:
    mission = await planning.mission()
    assignment = await planning.assignment(mission)
    project = f"/v1/projects/{(await planning.read(mission))['project_id']}"
    for path in (project, f"{project}/dashboard", mission, assignment):
        first = await planning.get(path)
        before = planning.cache.hits
        second = await planning.get(path)
        assert planning.cache.hits == before + 1
        assert (second.content, second.headers["etag"]) == (first.content, first.headers["etag"])
        assert second.headers["content-type"] == first.headers["content-type"]


async def test_committed_write_invalidates_the_cached_body(
    planning: PlanningServer,
) -> None:
    counted = Counted(planning, await planning.mission())
    for version, write in enumerate((planning.patch, planning.put), 1):
        await planning.read(counted.path)
        assert counted.is_kept
        ok(await write(counted.path, {"title": f"v{version}"}, **tag(version)))
        assert not counted.is_kept
        assert (await planning.read(counted.path))["title"] == f"v{version}"
    await planning.delete(counted.path, **tag(3))
    assert not counted.is_kept
    refused(await planning.get(counted.path), 404, "resource.not_found")


async def test_failed_and_replayed_writes_leave_it_alone(planning: PlanningServer) -> None:
    counted = Counted(planning, await planning.mission())
    won = await planning.patch(counted.path, {"title": "won"}, key="first", **tag(1))
    await planning.read(counted.path)
    assert await counted.is_hit()

    replay = await planning.patch(counted.path, {"title": "won"}, key="first", **tag(1))
    assert replay.content == won.content
    assert replay.headers["idempotency-replayed"] == "true"
    for status, response in (
        (409, await planning.patch(counted.path, {"title": "x"}, key="first", **tag(2))),
        (409, await planning.patch(counted.path, {"title": "x"}, **tag(1))),
        (428, await planning.put(counted.path, {"title": "x"})),
        (400, await planning.patch(counted.path, {"colour": "x"}, **tag(2))),
        (422, await planning.patch(counted.path, {"title": ""}, **tag(2))),
        (409, await planning.delete(counted.path, **tag(1))),
        (404, await planning.member().patch(counted.path, {"title": "x"}, **tag(2))),
    ):
        assert response.status_code == status, response.text
        assert counted.is_kept
        assert await counted.is_hit()


@pytest.mark.parametrize("point", ["after_business_write", "before_commit"])
async def test_a_write_that_is_undone_leaves_it_alone(
    sqlite_planning: PlanningServer, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(sqlite_planning, await sqlite_planning.mission())
    await sqlite_planning.read(counted.path)
    monkeypatch.setattr(sqlite_planning.onceward.runtime.idempotency, "faults", Dies(point))
    cut = await sqlite_planning.patch(counted.path, {"title": "x"}, **tag(1))
    assert cut.status_code == 503
    assert counted.is_kept
    assert await counted.is_hit()


async def test_a_write_at_another_server_is_seen_at_once(open_planning: OpenPlanning) -> None:
    async with open_planning() as here, open_planning() as there:
        path = await here.mission()
        for version in range(1, 4):
            await there.read(path)
            ok(await here.patch(path, {"title": f"v{version}"}, **tag(version)))
            seen = await there.get(path, If_None_Match=f'"{version}"')
            assert (ok(seen)["title"], seen.headers["etag"]) == (f"v{version}", f'"{version + 1}"')
        await there.read(path)
        await here.delete(path, **tag(4))
        refused(await there.get(path), 404, "resource.not_found")


async def test_a_job_at_another_server_is_seen_at_once(open_planning: OpenPlanning) -> None:
    async with open_planning() as here, open_planning() as there:
        project = await here.project()
        before = await there.get(f"{project}/dashboard")
        await here.mission(project)
        await here.all_jobs_done()
        after = await there.get(f"{project}/dashboard", If_None_Match=before.headers["etag"])
        assert ok(after)["missions"]["planned"] == 1


async def test_reader_sees_every_write_acknowledged_before_its_request(
    open_planning: OpenPlanning,
) -> None:
    async with open_planning() as one, open_planning() as two:
        path = await one.mission()
        acknowledged = 1
        reads = hits = 0

        async def write() -> None:
            nonlocal acknowledged
            for version in range(1, 31):
                member: Any = (one, two)[version % 2]
                ok(await member.patch(path, {"title": f"v{version + 1}"}, **tag(version)))
                acknowledged = version + 1

        async def read(planning: PlanningServer) -> None:
            nonlocal reads
            while acknowledged < 31:
                least = acknowledged
                seen = await planning.get(path)
                assert ok(seen)["version"] >= least
                assert seen.headers["etag"] == f'"{ok(seen)["version"]}"'
                reads += 1
                await asyncio.sleep(0)

        async with asyncio.timeout(60):
            await asyncio.gather(write(), *(read(planning) for planning in (one, two, one, two)))
        hits = one.cache.hits + two.cache.hits
        assert reads > hits > 0


async def test_cache_is_not_used_while_the_database_is_unavailable(
    sqlite_planning: PlanningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await sqlite_planning.mission()
    await sqlite_planning.read(path)

    async def down(*_: Any) -> Any:
        raise StoreUnavailableError("down")

    monkeypatch.setattr(sqlite_planning.onceward.store, "read", down)
    refused(await sqlite_planning.get(path), 503, "idempotency.store_unavailable")


async def test_cache_is_separate_per_organization(planning: PlanningServer) -> None:
    path = await planning.mission()
    await planning.read(path)
    before = (planning.cache.hits, len(planning.cache))
    eve = planning.member()
    for _ in range(2):
        refused(await eve.get(path), 404, "resource.not_found")
        refused(await eve.get(path, If_None_Match='"1"'), 404, "resource.not_found")
    assert (planning.cache.hits, len(planning.cache)) == before


async def test_it_can_be_switched_off(open_planning: OpenPlanning) -> None:
    async with open_planning(planning_cache_bytes=0) as planning:
        path = await planning.mission()
        assert await planning.read(path) == await planning.read(path)
        assert (len(planning.cache), planning.cache.hits) == (0, 0)
