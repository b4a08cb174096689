"""Shutdown of ``onceward serve``: with several processes, and with an open stream."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import httpx

from onceward.sign_in.jwt_auth import mint_token
from packages.protocol.tests.cli.harness import TIMEOUT_SECONDS
from packages.services.tests.cli.conftest import Server

Serve = Callable[..., Server]


def test_workers_stop_without_a_fatal_error(serve: Serve) -> None:
    server = serve("--workers", "2")
    assert server.stop() == 0
    assert "Fatal" not in server.stderr()


def test_open_live_page_of_the_console_does_not_delay_the_shutdown(serve: Serve) -> None:
    secret = "a secret of tests, long enough for HS256"
    # A stream that had to be cut off would take longer than the test waits.
    server = serve(
        ONCEWARD_JWT_SECRET=secret,
        ONCEWARD_CONSOLE_OPERATORS="ada",
        ONCEWARD_SHUTDOWN_SECONDS=str(10 * TIMEOUT_SECONDS),
    )
    token = mint_token(
        secret, sub="ada", roles=["viewer"], lifetime=timedelta(hours=1), now=datetime.now(UTC)
    )
    with httpx.Client(base_url=server.url, timeout=TIMEOUT_SECONDS) as client:
        assert client.post("/console/sign-in", data={"token": token}).status_code == 303
        with client.stream("GET", "/console/events") as stream:
            parts = stream.iter_bytes()
            assert next(parts).startswith(b"retry:")
            assert server.stop() == 0
            assert b"".join(parts).strip() in {b"", b"event: changed\ndata:"}
