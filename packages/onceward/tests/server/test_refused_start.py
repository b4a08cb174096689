"""A refused start raises in a test client and ends every ASGI server with one clear line."""

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.applications import Starlette

from onceward import SINGLE_TENANT, GuardConfig, Onceward
from onceward.errors import ConfigurationError, OncewardError, StoreUnavailableError
from packages.onceward.tests.support.serving import ROOT, free_port

UNREACHABLE = "postgresql://ada@127.0.0.1:1/none"


@pytest.mark.parametrize(
    ("url", "method", "error", "message"),
    [
        (UNREACHABLE, "POST", StoreUnavailableError, "unavailable"),
        ("sqlite:////no/such/folder/app.db", "POST", OncewardError, "no/such/folder"),
        ("sqlite:///{tmp}/app.db", "GET", ConfigurationError, "must not write"),
        ("sqlite:///{tmp}/app.db", None, ConfigurationError, "no route"),
    ],
    ids=["unreachable", "no folder", "guarded GET", "guard without route"],
)
def test_a_refused_start_raises_under_test_client(
    tmp_path: Path, url: str, method: str | None, error: type[Exception], message: str
) -> None:
    app = FastAPI()
    onceward = Onceward(
        url.format(tmp=tmp_path),
        tenants=SINGLE_TENANT,
        config=GuardConfig(sweep_every_seconds=None),
    )
    onceward.install(app)

    async def create() -> None:
        """Have no effect."""

    guarded = onceward.guard()(create)
    if method is not None:
        app.add_api_route("/things", guarded, methods=[method])
    with pytest.raises(error, match=message), TestClient(app):
        raise AssertionError("the app has started")


def test_an_app_that_fails_to_start_closes_the_store(tmp_path: Path) -> None:
    onceward = Onceward(
        f"sqlite:///{tmp_path}/app.db", config=GuardConfig(sweep_every_seconds=None)
    )

    @asynccontextmanager
    async def lifespan(_app: Any) -> AsyncIterator[None]:
        raise RuntimeError("the app's own error")
        yield

    app = Starlette(lifespan=lifespan)
    onceward.install(app)
    with pytest.raises(RuntimeError, match="own error"), TestClient(app):
        raise AssertionError("the app has started")
    assert not onceward.runtime._is_open


APP = f"""
from onceward import Onceward

async def bare(scope, receive, send):
    assert scope["type"] == "lifespan"
    await receive()
    await send({{"type": "lifespan.startup.complete"}})
    await receive()
    await send({{"type": "lifespan.shutdown.complete"}})

app = Onceward("{UNREACHABLE}").wrap(bare)
"""
SERVERS = {
    "uvicorn": ["uvicorn", "refused:app", "--port={port}"],
    # Without --workers 0, Hypercorn 0.18 exits with 0 after every failed start.
    "hypercorn": ["hypercorn", "refused:app", "--bind=127.0.0.1:{port}", "--workers=0"],
    "granian": ["granian", "--interface=asgi", "refused:app", "--port={port}"],
    "gunicorn": [
        *("gunicorn", "refused:app", "--bind=127.0.0.1:{port}", "--no-control-socket"),
        "--worker-class=uvicorn.workers.UvicornWorker",
    ],
}


def test_a_refused_start_ends_every_server_with_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "refused.py").write_text(APP)
    running = {}
    for name, command in SERVERS.items():
        arguments = [part.format(port=free_port()) for part in command]
        running[name] = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=tmp_path,
            env={"PYTHONPATH": f"{ROOT}/packages/onceward/src:{tmp_path}", "HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    for name, process in running.items():
        try:
            output, _ = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            pytest.fail(f"{name} hangs:\n{output}")
        assert process.returncode != 0, f"{name} exited with 0:\n{output}"
        lines = [line for line in output.splitlines() if "PostgreSQL is unavailable" in line]
        assert lines, output
