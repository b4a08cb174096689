"""Nothing is sent before the commit; a disconnected client leaves no claimed key."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import Response

from onceward import Policy
from onceward.errors import NoTransactionError, StoreUnavailableError
from onceward_testing.servers import RealPostgres
from packages.onceward.tests.support.harness import Connection, Lab, fresh_database, open_lab

BODY = json.dumps({"item": "boots"}).encode()


@pytest.fixture(scope="module")
def module_database(postgres: RealPostgres) -> Iterator[str]:
    url = postgres.create_database("lab")
    yield url
    postgres.start()
    postgres.drop_database(url)


@pytest.fixture(params=["sqlite", "postgresql"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return await fresh_database(request, tmp_path, request.param)


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    async with open_lab(f"sqlite:///{tmp_path}/lab.db") as lab:
        yield lab


async def test_nothing_is_sent_and_no_task_runs_before_the_commit(database: str) -> None:
    async with open_lab(database) as lab:
        connection = Connection()
        seen: list[Any] = []

        async def look_and_commit(unit: Any, record: Any, audit: Any) -> None:
            await asyncio.sleep(0.02)
            seen.append((list(connection.sent), list(lab.background)))
            await unit.commit(record, audit)
            seen.append((list(connection.sent), list(lab.background)))

        lab.store.commits.append(look_and_commit)
        connection.feed(BODY)
        await connection.run(lab.app)
        assert seen == [([], []), ([], [])]
        assert connection.status == 201
        assert len(lab.background) == 1


async def test_an_error_response_is_sent_only_after_its_record_is_committed(lab: Lab) -> None:
    connection = Connection(headers={"X-Do": "404"})
    seen: list[Any] = []

    async def look_and_commit(unit: Any, record: Any, audit: Any) -> None:
        seen.extend(connection.sent)
        await unit.commit(record, audit)

    lab.store.commits.append(look_and_commit)
    connection.feed(BODY)
    await connection.run(lab.app)
    assert (seen, connection.status) == ([], 404)


# -- disconnects ---------------------------------------------------------------------------


async def test_a_body_in_pieces_is_one_body(lab: Lab) -> None:
    connection = Connection()
    for piece in (BODY[:3], b"", BODY[3:9]):
        connection.feed(piece, more=True)
    connection.feed(BODY[9:])
    await connection.run(lab.app)
    assert connection.status == 201
    again = await lab.send()
    assert again.content == connection.body


async def test_a_client_that_disconnects_in_the_body_leaves_nothing(lab: Lab) -> None:
    connection = Connection()
    connection.feed(BODY[:5], more=True)
    connection.hang_up()
    await connection.run(lab.app)
    assert connection.sent == []
    assert lab.runs == await lab.records() == []
    assert lab.store.calls["claim"] == 0
    assert (await lab.send()).status_code == 201


async def test_a_client_that_disconnects_while_the_handler_runs_gets_a_replay_later(
    database: str,
) -> None:
    async with open_lab(database) as lab:
        connection = Connection(headers={"X-Do": "wait"})
        connection.feed(BODY)
        running = connection.run(lab.app)
        await lab.started.wait()
        connection.hang_up()
        await asyncio.sleep(0.02)
        lab.gate.set()
        await running
        again = await lab.send()
        assert again.headers["idempotency-replayed"] == "true"
        assert await lab.effects() == 1


async def test_a_response_that_cannot_be_sent_is_stored(database: str) -> None:
    async with open_lab(database) as lab:
        connection = Connection()
        connection.feed(BODY)

        async def gone(_message: Any) -> None:
            raise OSError("broken pipe")

        connection.send = gone  # type: ignore[method-assign,assignment]
        with pytest.raises(OSError, match="broken pipe"):
            await connection.run(lab.app)
        assert len(lab.onceward.idempotency.in_flight) == 0
        again = await lab.send()
        assert (again.status_code, again.headers["idempotency-replayed"]) == (201, "true")
        assert await lab.effects() == 1


@pytest.mark.parametrize("times", [1, 3], ids=["cancelled", "cancelled again and again"])
async def test_a_request_cancelled_in_the_handler_is_rolled_back_and_its_key_is_free(
    database: str, times: int
) -> None:
    async with open_lab(database) as lab:
        connection = Connection(headers={"X-Do": "wait"})
        connection.feed(BODY)
        running = connection.run(lab.app)
        await lab.started.wait()
        waiter = lab.send_soon()
        await asyncio.sleep(0.02)
        for _ in range(times):
            running.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await running
        assert connection.sent == []
        assert (await asyncio.wait_for(waiter, 5)).status_code == 201
        assert await lab.effects() == len(await lab.audits()) == 1
        assert len(lab.background) == 1


async def test_a_request_cancelled_in_the_commit_is_committed_or_not_and_its_key_is_free(
    database: str,
) -> None:
    async with open_lab(database) as lab:
        committing = asyncio.Event()

        async def commit_slowly(unit: Any, record: Any, audit: Any) -> None:
            committing.set()
            commit = asyncio.ensure_future(unit.commit(record, audit))
            try:
                await asyncio.sleep(0)
                await asyncio.shield(commit)
            except asyncio.CancelledError:
                commit.cancel()
                with suppress(asyncio.CancelledError):
                    await commit
                raise

        lab.store.commits.append(commit_slowly)
        connection = Connection()
        connection.feed(BODY)
        running = connection.run(lab.app)
        await committing.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert lab.background == []
        again = await asyncio.wait_for(lab.send(), 5)
        assert again.status_code == 201
        assert await lab.effects() == len(await lab.records()) == len(await lab.audits()) == 1


async def test_a_cancelled_waiter_leaves_the_leader_alone(lab: Lab) -> None:
    first = lab.send_soon(do="wait")
    await lab.started.wait()
    connection = Connection()
    connection.feed(BODY)
    waiter = connection.run(lab.app)
    await asyncio.sleep(0.02)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    lab.gate.set()
    assert (await first).status_code == 201


# -- responses that cannot be stored --------------------------------------------------------------


async def test_a_streamed_response_is_refused_and_logged(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    response = await lab.send(do="stream")
    assert (response.status_code, response.json()["code"]) == (500, "server.internal")
    assert response.headers["x-request-id"] == response.json()["requestId"]
    assert "one" not in response.text
    [message] = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert "POST /things streams its response" in message
    assert await lab.effects() == 0
    assert await lab.records() == []


async def test_a_response_over_the_limit_is_refused_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = Policy(max_response_bytes=1000)
    async with open_lab(f"sqlite:///{tmp_path}/lab.db", policy) as lab:
        assert (await lab.send("small", do="size=900")).status_code == 201
        response = await lab.send(do="size=1000")
        assert response.status_code == 500
        assert len(response.content) < 1000
        [message] = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
        assert "more than 1000 bytes" in message
        assert await lab.effects() == len(lab.background) == 1
        assert (await lab.send()).status_code == 201


async def test_an_app_without_a_response_is_a_500_and_nothing_is_stored(tmp_path: Path) -> None:
    async with open_lab(f"sqlite:///{tmp_path}/lab.db") as lab:

        async def silent(scope: Any, receive: Any, send: Any) -> None:
            await scope["onceward"].transaction.execute("INSERT INTO effects VALUES ('1', 'x')")

        async def half(scope: Any, receive: Any, send: Any) -> None:
            await silent(scope, receive, send)
            await send({"type": "http.response.start", "status": 200})

        for app in (silent, half):
            connection = Connection()
            connection.feed(BODY)
            await connection.run(lab.onceward.middleware(app))
            assert connection.status == 500
        assert await lab.effects() == 0
        assert await lab.records() == []


async def test_headers_may_be_left_out_and_bodies_sent_in_pieces(tmp_path: Path) -> None:
    async with open_lab(f"sqlite:///{tmp_path}/lab.db") as lab:

        async def bare(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200})
            await send({"type": "http.response.body"})

        async def streaming(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200})
            await send({"type": "http.response.body", "body": b"1", "more_body": True})

        async def in_pieces(scope: Any, receive: Any, send: Any) -> None:
            headers = [(b"Content-Length", b"3"), (b"ETag", b'"1"')]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"on", "more_body": True})
            await send({"type": "http.response.body", "body": b"e"})

        for number, (app, status, body) in enumerate(
            [(bare, 200, b""), (streaming, 500, None), (in_pieces, 200, b"one")]
        ):
            for _ in range(2):
                connection = Connection(headers={"idempotency-key": f"key-{number}"})
                connection.feed(BODY)
                await connection.run(lab.onceward.middleware(app))
                assert connection.status == status
                assert body in (None, connection.body)
        assert dict(connection.sent[0]["headers"])[b"etag"] == b'"1"'


async def test_a_base_http_middleware_inside_the_guard_is_not_taken_for_streaming(
    tmp_path: Path,
) -> None:
    async def nod(request: Request, call_next: Any) -> Response:
        response: Response = await call_next(request)
        return response

    lab = Lab(f"sqlite:///{tmp_path}/lab.db")
    lab.app.user_middleware.append(Middleware(BaseHTTPMiddleware, dispatch=nod))
    await lab.onceward.open()
    try:
        unit = await lab.store.inner.begin()
        await unit.transaction.execute("CREATE TABLE effects (id text, name text)")
        await unit.commit(None, None)
        first, again = await lab.send(), await lab.send()
        assert first.status_code == 201
        assert again.content == first.content
        assert (await lab.send("key-2", do="stream")).status_code == 500
    finally:
        await lab.client.aclose()
        await lab.onceward.close()


# -- apps that catch what ``send`` raises --------------------------------------------------------


def recovering(app: Any, sent_after: list[str]) -> Any:
    """Wrap an app in a middleware that turns every exception into a response."""

    async def recover(scope: Any, receive: Any, send: Any) -> None:
        try:
            await app(scope, receive, send)
        except Exception as error:  # noqa: BLE001
            for message in (
                {"type": "http.response.start", "status": 418, "headers": []},
                {"type": "http.response.body", "body": b"recovered"},
            ):
                await send(message)
            sent_after.append(type(error).__name__)

    return recover


async def bare_201(scope: Any, receive: Any, send: Any) -> None:
    await scope["onceward"].transaction.execute("INSERT INTO effects VALUES ('1', 'x')")
    await send({"type": "http.response.start", "status": 201, "headers": []})
    await send({"type": "http.response.body", "body": b"made"})


async def test_an_app_that_catches_everything_cannot_replace_a_discarded_response(
    tmp_path: Path,
) -> None:
    async with open_lab(f"sqlite:///{tmp_path}/lab.db") as lab:

        async def fail(_unit: Any, _record: Any, _audit: Any) -> None:
            raise StoreUnavailableError("down")

        async def streaming(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200})
            await send({"type": "http.response.body", "body": b"1", "more_body": True})

        for app, status in ((bare_201, 503), (streaming, 500)):
            if app is bare_201:
                lab.store.commits.append(fail)
            sent_after: list[str] = []
            connection = Connection()
            connection.feed(BODY)
            await connection.run(lab.onceward.middleware(recovering(app, sent_after)))
            assert (connection.status, len(connection.sent), sent_after) == (status, 2, [])
            assert b"recovered" not in connection.body
        assert await lab.effects() == 0
        assert await lab.records() == []
        assert len(lab.onceward.idempotency.in_flight) == 0


async def test_an_app_may_respond_to_a_commit_that_raised(tmp_path: Path) -> None:
    async with open_lab(f"sqlite:///{tmp_path}/lab.db") as lab:

        async def fail(unit: Any, _record: Any, _audit: Any) -> None:
            await unit.rollback()
            raise RuntimeError("a defect in the store")

        lab.store.commits.append(fail)
        sent_after: list[str] = []
        connection = Connection()
        connection.feed(BODY)
        await connection.run(lab.onceward.middleware(recovering(bare_201, sent_after)))
        assert (connection.status, connection.body) == (418, b"recovered")
        assert sent_after == ["RuntimeError"]
        assert await lab.effects() == 0
        assert await lab.records() == []


async def test_a_response_started_again_replaces_the_one_before(tmp_path: Path) -> None:
    async with open_lab(f"sqlite:///{tmp_path}/lab.db") as lab:

        async def half(scope: Any, receive: Any, send: Any) -> None:
            headers = [(b"content-length", b"9")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
            raise RuntimeError("broken handler")

        connection = Connection()
        connection.feed(BODY)
        await connection.run(lab.onceward.middleware(recovering(half, [])))
        assert (connection.status, connection.body) == (418, b"recovered")


async def test_an_exception_handler_of_a_mounted_app_sends_nothing_for_a_discarded_response(
    tmp_path: Path,
) -> None:
    lab = Lab(f"sqlite:///{tmp_path}/lab.db")
    outer, inner, background = FastAPI(), FastAPI(), list[str]()
    onceward = lab.onceward

    @inner.post("/things")
    @onceward.guard()
    async def create() -> Response:
        return Response("made", 201, background=BackgroundTask(background.append, "ran"))

    @inner.exception_handler(Exception)
    async def handle(_request: Request, _error: Exception) -> Response:
        return Response("recovered", 418, background=BackgroundTask(background.append, "handled"))

    outer.mount("/shop", inner)
    onceward._guarded = [g for g in onceward._guarded if g.__name__ == "create"]
    onceward.install(outer)
    await onceward.open()

    async def fail(_unit: Any, _record: Any, _audit: Any) -> None:
        raise StoreUnavailableError("down")

    try:
        lab.store.commits.append(fail)
        connection = Connection("/shop/things")
        connection.feed(BODY)
        await connection.run(outer)
        assert (connection.status, len(connection.sent), background) == (503, 2, [])
    finally:
        await lab.client.aclose()
        await onceward.close()


async def test_a_base_http_middleware_runs_no_background_task_of_a_discarded_response(
    tmp_path: Path,
) -> None:
    async def nod(request: Request, call_next: Any) -> Response:
        response: Response = await call_next(request)
        return response

    async def fail(unit: Any, _record: Any, _audit: Any) -> None:
        await unit.rollback()
        raise StoreUnavailableError("down")

    lab = Lab(f"sqlite:///{tmp_path}/lab.db")
    lab.app.user_middleware.append(Middleware(BaseHTTPMiddleware, dispatch=nod))
    await lab.onceward.open()
    try:
        lab.store.commits.append(fail)
        refused = await lab.send(do="quiet")
        assert (refused.status_code, lab.background) == (503, [])
        assert (await lab.send(do="quiet")).status_code == 201
        assert len(lab.background) == 1
    finally:
        await lab.client.aclose()
        await lab.onceward.close()


# -- reading ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
async def test_reading_never_touches_the_store_of_records(lab: Lab, method: str) -> None:
    response = await lab.client.request(method, "/things", headers={"Idempotency-Key": "key-1"})
    assert response.status_code == (200 if method == "GET" else 405)
    assert response.headers["x-request-id"]
    assert lab.store.calls == {}
    assert await lab.records() == []


async def test_an_unknown_path_never_touches_the_store_of_records(lab: Lab) -> None:
    response = await lab.send(path="/nowhere")
    assert (response.status_code, lab.store.calls) == (404, {})


# -- after the end ----------------------------------------------------------------------------


@pytest.mark.parametrize("do", ["201", "404", "raise"])
async def test_the_transaction_cannot_be_used_after_the_end(database: str, do: str) -> None:
    async with open_lab(database) as lab:
        kept: list[Any] = []
        act = lab.act

        async def act_and_keep(request: Request) -> Response:
            kept.append(lab.onceward.transaction)
            return await act(request)

        lab.act = act_and_keep  # type: ignore[method-assign]
        await lab.send(do=do)
        for ask in (kept[0].execute, kept[0].fetch_all, kept[0].fetch_one):
            with pytest.raises(NoTransactionError, match="ended"):
                await ask("SELECT 1")


async def test_a_background_task_has_no_transaction(database: str) -> None:
    async with open_lab(database) as lab:
        caught: list[BaseException] = []
        act = lab.act

        async def too_late() -> None:
            try:
                await lab.onceward.transaction.execute("INSERT INTO effects VALUES ('1', 'late')")
            except NoTransactionError as error:
                caught.append(error)

        async def act_and_go_on(request: Request) -> Response:
            response = await act(request)
            response.background = too_late  # type: ignore[assignment]
            return response

        lab.act = act_and_go_on  # type: ignore[method-assign]
        assert (await lab.send()).status_code == 201
        assert len(caught) == await lab.effects() == 1
