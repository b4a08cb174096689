"""Nothing is sent before the commit; a disconnected client leaves no claimed key."""

import asyncio
import json
import logging
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
from packages.onceward.tests.support.harness import Connection, Lab, open_lab

BODY = json.dumps({"item": "boots"}).encode()


# -- disconnects ---------------------------------------------------------------------------


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


# -- responses that cannot be stored --------------------------------------------------------------


@pytest.mark.parametrize(
    ("do", "line"),
    [
        ("stream", "POST /things streams its response"),
        ("size=1000", "a response of more than 1000 bytes"),
    ],
)
async def test_response_that_cannot_be_stored_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, do: str, line: str
) -> None:
    policy = Policy(max_response_bytes=1000)
    async with open_lab(f"sqlite:///{tmp_path}/lab.db", policy) as lab:
        response = await lab.send(do=do)
        assert (response.status_code, response.json()["code"]) == (500, "server.internal")
        assert response.headers["x-request-id"] == response.json()["requestId"]
        [message] = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
        assert line in message
        assert lab.background == []


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
            await connection.run(lab.onceward.wrap(app, lifespan=False))
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
                await connection.run(lab.onceward.wrap(app, lifespan=False))
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
            await connection.run(lab.onceward.wrap(recovering(app, sent_after), lifespan=False))
            assert (connection.status, len(connection.sent), sent_after) == (status, 2, [])
            assert b"recovered" not in connection.body
        assert await lab.effects() == 0
        assert await lab.records() == []
        assert len(lab.onceward.runtime.idempotency.in_flight) == 0


async def test_an_app_may_respond_to_a_commit_that_raised(tmp_path: Path) -> None:
    async with open_lab(f"sqlite:///{tmp_path}/lab.db") as lab:

        async def fail(unit: Any, _record: Any, _audit: Any) -> None:
            await unit.rollback()
            raise RuntimeError("a defect in the store")

        lab.store.commits.append(fail)
        sent_after: list[str] = []
        connection = Connection()
        connection.feed(BODY)
        await connection.run(lab.onceward.wrap(recovering(bare_201, sent_after), lifespan=False))
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
        await connection.run(lab.onceward.wrap(recovering(half, []), lifespan=False))
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
    routes = onceward.runtime.routes
    routes._handlers = [one for one in routes._handlers if one.__name__ == "create"]
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
