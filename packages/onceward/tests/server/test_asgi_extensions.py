"""Extensions of ASGI servers: a guarded app does not use those that a stored response cannot."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.templating import Jinja2Templates
from starlette.testclient import TestClient

from onceward import SINGLE_TENANT, GuardConfig, Onceward
from packages.onceward.tests.support.serving import ROOT, free_port

FILE = Path(__file__)


async def list_unguarded(request: Request) -> Response:
    return JSONResponse(sorted(request.scope.get("extensions", {})))


def create_app(folder: Path) -> Starlette:
    """Return an app that uses what the server offers. Templates are in the folder."""
    onceward = Onceward(
        f"sqlite:///{folder}/app.db",
        tenants=SINGLE_TENANT,
        config=GuardConfig(sweep_every_seconds=None),
    )
    templates = Jinja2Templates(folder)

    @onceward.guard("file")
    async def send_file(request: Request) -> Response:
        return FileResponse(FILE)

    @onceward.guard("page")
    async def send_page(request: Request) -> Response:
        return templates.TemplateResponse(request, "page.html", {"n": 3})

    @onceward.guard("offered")
    async def list_extensions(request: Request) -> Response:
        await request.send_push_promise("/style.css")
        if hasattr(request, "send_early_hints"):  # not in the oldest Starlette
            await request.send_early_hints("</style.css>; rel=preload")
        return JSONResponse(sorted(request.scope.get("extensions", {})))

    app = Starlette(
        routes=[
            Route("/file", send_file, methods=["POST"]),
            Route("/page", send_page, methods=["POST"]),
            Route("/offered", list_extensions, methods=["POST"]),
            Route("/unguarded", list_unguarded, methods=["POST"]),
        ]
    )
    onceward.install(app)
    return app


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "page.html").write_text("<p>{{ n }}</p>")
    return tmp_path


def check(client: httpx.Client, path: str, body: bytes) -> Any:
    """Send twice; return the first response."""
    key = {"Idempotency-Key": f"key-of{path}"}
    first, replay = (client.post(path, headers=key) for _ in range(2))
    assert (first.status_code, first.content) == (200, body), first.text
    assert (replay.content, replay.headers["Idempotency-Replayed"]) == (body, "true")
    return first


def test_template_response_keeps_its_debug_info_under_test_client(folder: Path) -> None:
    with TestClient(create_app(folder)) as client:
        first = check(client, "/page", b"<p>3</p>")
        assert (first.template.name, first.context["n"]) == ("page.html", 3)
        check(client, "/offered", b'["http.response.debug"]')
        # Which extensions the test client offers depends on the version of Starlette.
        bare = Starlette(routes=[Route("/", list_unguarded, methods=["POST"])])
        assert client.post("/unguarded").json() == TestClient(bare).post("/").json()


async def test_extensions_of_responses_are_removed_and_others_kept(folder: Path) -> None:
    app = create_app(folder)
    kept = {"tls": {"tls_version": 0x0304}, "http.response.debug": {}}
    removed = ("pathsend", "trailers", "push", "early_hint", "zerocopysend")
    extensions = kept | {f"http.response.{name}": {} for name in removed}

    async def offering(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "extensions": extensions}, receive, send)

    transport = httpx.ASGITransport(offering)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        offered = await client.post("/offered", headers={"Idempotency-Key": "a"})
        assert offered.json() == sorted(kept)
        sent = await client.post("/file", headers={"Idempotency-Key": "a"})
        assert sent.content == FILE.read_bytes()
        assert (await client.post("/unguarded")).json() == sorted(extensions)


SERVED = f"""
from pathlib import Path
from {__name__} import create_app

app = create_app(Path(__file__).parent)
"""


def test_file_response_is_stored_on_granian(folder: Path) -> None:
    (folder / "served.py").write_text(SERVED)
    port = free_port()
    command = ["granian", "--interface=asgi", "served:app", f"--port={port}"]
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=folder,
            env={"PYTHONPATH": f"{ROOT}/packages/onceward/src:{ROOT}:{folder}"},
            stdout=log,
            stderr=log,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            deadline = time.monotonic() + 60
            while True:
                try:
                    assert "http.response.pathsend" in client.post("/unguarded").json()
                    break
                except httpx.TransportError:
                    assert process.poll() is None, (folder / "log.txt").read_text()
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            check(client, "/file", FILE.read_bytes())
            check(client, "/page", b"<p>3</p>")
    finally:
        process.terminate()
        process.wait(20)
