"""``onceward serve`` as a process that is stopped after the test."""

import select
import signal
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from onceward.sign_in.jwt_auth import mint_token
from onceward_services.dev_secrets import development_secret
from packages.onceward.tests.support.databases import SpareDatabases
from packages.protocol.tests.cli.conftest import cli, here
from packages.protocol.tests.cli.harness import (
    ONCEWARD,
    TIMEOUT_SECONDS,
    Cli,
    Done,
    Here,
    environment,
    one_line,
)

__all__ = ["ONCEWARD", "Cli", "Done", "Here", "cli", "environment", "here", "one_line"]

WALK = {"start": {"lat": 55.95, "lon": -3.19}, "minutes": 90, "interests": ["history"]}
ROUTES = "/api/v1/routes"


class Server:
    """``onceward serve`` on a free port, after it printed that it is ready."""

    def __init__(self, directory: Path, *arguments: str, **variables: str) -> None:
        self.directory = directory
        self.errors = (directory / "stderr.txt").open("ab+")
        self.process = subprocess.Popen(
            [ONCEWARD, "serve", "--port", "0", *arguments],
            cwd=directory,
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=self.errors,
        )
        self.line = self._first_line()
        self.url = self.line.split()[4] if self.line.startswith("Onceward is ready on ") else ""

    def client(self, token: str) -> httpx.Client:
        return httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {token}"}, timeout=20
        )

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(TIMEOUT_SECONDS)

    def rest_of_output(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.read().decode()

    def stderr(self) -> str:
        self.errors.seek(0)
        return self.errors.read().decode()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.errors.close()

    def _first_line(self) -> str:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], TIMEOUT_SECONDS)[0]:
            self.process.kill()
            pytest.fail(f"not ready in time: {self.stderr()}")
        return self.process.stdout.readline().decode().rstrip("\n")


@pytest.fixture
def postgres_url(spare_databases: SpareDatabases) -> Iterator[str]:
    """Return the URL of an empty database, without the services' tables."""
    with spare_databases.lend() as url:
        yield url


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*arguments: str, **variables: Any) -> Server:
        servers.append(Server(tmp_path, *arguments, **variables))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def token(cli: Cli) -> str:
    """Return a token signed with the development secret of the server in this directory."""
    secret = development_secret(cli.directory / ".onceward")
    return mint_token(secret, sub="ada", lifetime=timedelta(hours=1), now=datetime.now(UTC))
