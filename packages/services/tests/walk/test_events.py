"""Events of a walker: pages after a cursor, and a stream."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

from onceward.errors import StoreUnavailableError
from onceward_services import event_stream
from onceward_services.walk import api
from onceward_services.walk.events import add_event
from onceward_services.walk.walkers import lock_walker

from .fixtures import Game, OpenGame, ok, refused, text


async def happen(game: Game, *types: str, walker: str = "ada") -> list[int]:
    """Add events as a job in another process does, without a notification here."""
    async with game.transaction() as tx:
        await lock_walker(tx, walker, game.clock.at)
        return [await add_event(tx, walker, t, {"n": t}, game.clock.at) for t in types]


# -- pages ----------------------------------------------------------------------------------------


async def test_nothing_has_happened_to_a_new_walker(game: Game) -> None:
    assert ok(await game.ada.get("/walker/events")) == {"items": [], "next": None}
    assert await game.ada.me() == {
        "walkerId": "ada",
        "pointsBanked": 0,
        "pointsProvisional": 0,
        "energyBalance": 0,
        "provisionalEnergy": 0,
        "spendableEnergy": 0,
        "lastEventId": 0,
        "streakState": {
            "currentLengthDays": 0,
            "lastAttestedDate": None,
            "bonusTier": 0,
            "decayAt": None,
            "totalLifetimeSteps": 0,
        },
    }


async def test_events_have_the_order_of_the_actions(game: Game) -> None:
    await game.ada.finish("quest.001")
    ok(await game.ada.allocate("node.even-stride"))
    events = await game.ada.events()
    assert [event["id"] for event in events] == [1, 2, 3, 4, 5]
    assert [event["type"] for event in events] == [
        "quest.started",
        "quest.advanced",
        "quest.advanced",
        "quest.completed",
        "tree.allocated",
    ]
    assert events[3] == {
        "id": 4,
        "type": "quest.completed",
        "data": {"questId": "quest.001", "pointsAwarded": 2, "pointsBanked": 2},
        "createdAt": text(game.clock.at),
    }
    assert (await game.ada.me())["lastEventId"] == 5


async def test_failed_or_replayed_action_adds_no_event(game: Game) -> None:
    await game.ada.start("quest.001")
    await game.ada.start("quest.001")
    key = "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10"
    await game.ada.advance("quest.001", 1, key=key)
    await game.ada.advance("quest.001", 1, key=key)
    await game.ada.advance("quest.001", 9)
    assert [event["type"] for event in await game.ada.events()] == [
        "quest.started",
        "quest.advanced",
    ]


async def test_pages_follow_one_another_without_a_gap_or_an_overlap(game: Game) -> None:
    assert await happen(game, *(f"e{n}" for n in range(7))) == [1, 2, 3, 4, 5, 6, 7]
    seen: list[int] = []
    after: int | None = 0
    for size in (3, 3, 1):
        page = ok(await game.ada.get(f"/walker/events?limit=3&after={after}"))
        assert len(page["items"]) == size
        seen += [event["id"] for event in page["items"]]
        after = page["next"]
    assert (seen, after) == ([1, 2, 3, 4, 5, 6, 7], None)
    exact = ok(await game.ada.get("/walker/events?limit=7"))
    assert (len(exact["items"]), exact["next"]) == (7, None)
    assert ok(await game.ada.get("/walker/events?after=7")) == {"items": [], "next": None}
    assert ok(await game.ada.get(f"/walker/events?after={2**63 - 1}"))["items"] == []


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("after=-1", 422),
        (f"after={2**63}", 422),
        ("limit=0", 422),
        ("limit=501", 422),
        ("after=x", 400),
        ("limit=1.5", 400),
    ],
)
async def test_invalid_cursor_or_limit_is_rejected(
    sqlite_game: Game, query: str, status: int
) -> None:
    response = await sqlite_game.ada.get(f"/walker/events?{query}")
    assert refused(response, status, "BAD_REQUEST")["fields"][0]["field"] == query.partition("=")[0]


async def test_events_are_numbered_per_walker(game: Game) -> None:
    await happen(game, "a")
    await happen(game, "b", "c", walker="eve")
    assert [(e["id"], e["type"]) for e in await game.ada.events()] == [(1, "a")]
    eves = await game.device("eve").events()
    assert [(e["id"], e["type"]) for e in eves] == [(1, "b"), (2, "c")]


async def test_any_text_comes_back_as_it_was(game: Game) -> None:
    data = {"text": 'line\nbreak \u2028 ☕ \x00 "quotes"', "deep": {"list": [1, None, True]}}
    async with game.transaction() as tx:
        await lock_walker(tx, "ada", game.clock.at)
        await add_event(tx, "ada", "odd", data, game.clock.at)
    assert (await game.ada.events())[0]["data"] == data


# -- the stream -----------------------------------------------------------------------------------


class Reader:
    """Reads a stream incrementally. httpx's ASGI transport would wait for its end."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        elif message.get("more_body"):
            await self._chunks.put(message["body"])
        else:
            await self._chunks.put(None)

    async def block(self, within: float = 10) -> str | None:
        """Return the next block, or None at the end."""
        chunk = await asyncio.wait_for(self._chunks.get(), within)
        return None if chunk is None else chunk.decode()

    async def event(self, within: float = 10) -> Any:
        """Return the next event's data; its fields must agree with one another."""
        block = await self.block(within)
        assert block is not None
        fields = dict(line.split(": ", 1) for line in block.removesuffix("\n\n").split("\n"))
        data = json.loads(fields["data"])
        assert (fields["id"], fields["event"]) == (str(data["id"]), data["type"])
        return data

    async def is_silent(self, seconds: float) -> bool:
        try:
            await self.block(seconds)
        except TimeoutError:
            return True
        return False


Listen = Callable[..., Any]


@asynccontextmanager
async def listening(
    game: Game, query: str = "", walker: str = "ada", **headers: str
) -> AsyncIterator[Reader]:
    """Open a stream on the app, and disconnect at the end."""
    reader, gone = Reader(), asyncio.Event()
    sent = {"accept": "text/event-stream"} | game.device(walker).headers() | headers
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "GET",
        "path": "/walker/events",
        "raw_path": b"/walker/events",
        "query_string": query.encode(),
        "root_path": "",
        "scheme": "http",
        "headers": [(k.lower().encode(), v.encode()) for k, v in sent.items()],
        "server": ("onceward", 80),
        "client": ("device", 1),
    }

    async def receive() -> Any:
        await gone.wait()
        return {"type": "http.disconnect"}

    transport: Any = game.client._transport
    task = asyncio.create_task(transport.app(scope, receive, reader.send))
    try:
        assert await reader.block() == "retry: 2000\n\n"
        yield reader
    finally:
        gone.set()
        await asyncio.wait_for(task, 10)


async def test_stream_has_past_events_and_then_new_ones(game: Game) -> None:
    await happen(game, "a", "b")
    async with listening(game) as reader:
        assert reader.status == 200
        assert reader.headers["content-type"].startswith("text/event-stream")
        assert reader.headers["cache-control"] == "no-store"
        assert "x-request-id" in reader.headers
        first = await reader.event()
        assert first == (await game.ada.events())[0]
        assert (await reader.event())["id"] == 2
        ok(await game.ada.start("quest.001"))
        assert (await reader.event())["type"] == "quest.started"


async def test_event_of_this_process_is_streamed_at_once(
    open_game: OpenGame, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "POLL_SECONDS", 3600.0)
    async with open_game() as game, listening(game) as reader:
        await asyncio.sleep(0.1)
        ok(await game.ada.start("quest.001"))
        assert (await reader.event(within=1))["type"] == "quest.started"
        ok(await game.ada.advance("quest.001", 1))
        assert (await reader.event(within=1))["type"] == "quest.advanced"


async def test_events_of_another_process_are_found_by_polling(game: Game) -> None:
    async with listening(game) as reader:
        await asyncio.sleep(0.1)
        await happen(game, "from elsewhere")
        assert (await reader.event(within=5))["type"] == "from elsewhere"


@pytest.mark.parametrize(
    ("query", "headers", "first"),
    [
        ("after=2", {}, 3),
        ("", {"Last-Event-ID": "2"}, 3),
        ("after=1", {"Last-Event-ID": "3"}, 4),
        ("after=1", {"Last-Event-ID": ""}, 2),
        ("limit=1", {}, 1),
    ],
)
async def test_reader_resumes_after_the_last_event_id(
    sqlite_game: Game, query: str, headers: dict[str, str], first: int
) -> None:
    await happen(sqlite_game, "a", "b", "c", "d")
    async with listening(sqlite_game, query, **headers) as reader:
        got = [(await reader.event())["id"] for _ in range(first, 5)]
        assert got == list(range(first, 5))


async def test_nothing_is_lost_in_a_backlog_longer_than_a_page(sqlite_game: Game) -> None:
    await happen(sqlite_game, *(f"e{n}" for n in range(250)))
    async with listening(sqlite_game) as reader:
        assert [(await reader.event())["id"] for _ in range(250)] == list(range(1, 251))


@pytest.mark.parametrize("last", ["x", "-1", "1.0", "9" * 20, "²"])
async def test_an_id_that_is_none_is_refused(sqlite_game: Game, last: str) -> None:
    headers = {"Accept": "text/event-stream", "Last-Event-ID": last}
    client, device = sqlite_game.client, sqlite_game.ada
    response = await client.get(
        "/walker/events",
        headers={k.encode(): v.encode() for k, v in (device.headers() | headers).items()},
    )
    refused(response, 400, "BAD_REQUEST")
    assert "Last-Event-ID" in response.json()["message"]


async def test_stream_has_no_events_of_other_walkers(sqlite_game: Game) -> None:
    async with listening(sqlite_game, walker="eve") as reader:
        ok(await sqlite_game.ada.start("quest.001"))
        assert await reader.is_silent(1.5)


async def test_stream_needs_authentication(sqlite_game: Game) -> None:
    headers = {"Accept": "text/event-stream", "Authorization": "Bearer nonsense"}
    refused(await sqlite_game.client.get("/walker/events", headers=headers), 401, "UNAUTHENTICATED")
    assert await sqlite_game.count("walkers") == 0


@pytest.mark.parametrize("accept", ["*/*", "application/json", "", "text/html, */*;q=0.1"])
async def test_without_the_stream_media_type_events_are_a_page(
    sqlite_game: Game, accept: str
) -> None:
    response = await sqlite_game.ada.get("/walker/events", Accept=accept)
    assert response.headers["content-type"] == "application/json"
    assert ok(response) == {"items": [], "next": None}


async def test_idle_stream_sends_keep_alives(
    open_game: OpenGame, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_SECONDS", 1.0)
    async with open_game() as game, listening(game) as reader:
        assert await reader.block() == ": still here\n\n"
        assert await reader.block() == ": still here\n\n"


async def test_a_stream_ends_with_the_token(sqlite_game: Game) -> None:
    async with listening(sqlite_game) as reader:
        sqlite_game.clock.move(timedelta(hours=1))
        assert await reader.block() is None


async def test_stream_ends_when_the_server_stops(
    sqlite_game: Game, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping = asyncio.Event()
    monkeypatch.setattr(api, "server_is_stopping", stopping.is_set)
    async with listening(sqlite_game) as reader:
        assert await reader.is_silent(0.2)
        stopping.set()
        assert await reader.block(within=3) is None


async def test_stream_ends_when_the_store_is_unavailable(
    sqlite_game: Game, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_args: Any) -> Any:
        raise StoreUnavailableError("away")

    async with listening(sqlite_game) as reader:
        monkeypatch.setattr(sqlite_game.store, "read", away)
        assert await reader.block(within=5) is None


async def test_disconnected_reader_is_unregistered(sqlite_game: Game) -> None:
    tasks = asyncio.all_tasks()
    async with listening(sqlite_game) as reader, listening(sqlite_game):
        ok(await sqlite_game.ada.start("quest.001"))
        assert (await reader.event())["id"] == 1
    await asyncio.sleep(0.05)
    assert asyncio.all_tasks() <= tasks
    ok(await sqlite_game.ada.advance("quest.001", 1))


async def test_event_streams_of_a_walker_are_limited(open_game: OpenGame) -> None:
    async with open_game(walk_events_streams=1) as game:
        headers = {"Accept": "text/event-stream"} | game.ada.headers()
        async with listening(game), listening(game, walker="bob"):
            refused = await game.client.get("/walker/events", headers=headers)
            assert (refused.status_code, refused.json()["error"]) == (429, "QUOTA_EXCEEDED")
            assert refused.json()["details"] == {"resource": "streams", "limit": 1}
            assert refused.headers["retry-after"] == "2"
            page = await game.client.get("/walker/events", headers=game.ada.headers())
            assert page.status_code == 200, "only streams are counted"
        async with listening(game) as reader:  # the first one has ended
            assert reader.status == 200
