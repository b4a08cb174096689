"""The real command in a temporary directory, and a real server that is always stopped."""

import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.cli.main import main
from holdfast.server.jwt_auth import mint_token
from holdfast.testing.servers import RealPostgres
from holdfast_services.dev_secrets import development_secret

HOLDFAST = str(Path(sys.executable).with_name("holdfast"))
_PATIENCE_SECONDS = 60

WALK = {"start": {"lat": 55.95, "lon": -3.19}, "minutes": 90, "interests": ["history"]}
ROUTES = "/api/v1/routes"


def environment(**variables: str) -> dict[str, str]:
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("HOLDFAST_") and name != "ROUTES_IDEMPOTENCY_TTL_HOURS"
    }
    return clean | variables


@dataclass
class Cli:
    """Runs commands in one directory."""

    directory: Path

    def __call__(
        self, *arguments: str, stdin: bytes = b"", **variables: str
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [HOLDFAST, *arguments],
            cwd=self.directory,
            env=environment(**variables),
            input=stdin,
            capture_output=True,
            timeout=_PATIENCE_SECONDS,
            check=False,
        )


@dataclass
class Done:
    """The result of a command."""

    returncode: int
    stdout: bytes
    stderr: bytes


Here = Callable[..., Done]


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Iterator[Here]:
    """Run commands in this process: a new one takes most of a second to import everything."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    root = logging.getLogger()
    logs, level = list(root.handlers), root.level
    monkeypatch.chdir(tmp_path)
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)

    def run(*arguments: str, **variables: str) -> Done:
        capfdbinary.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["holdfast", *arguments])
            for name, value in variables.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as end:
                main()
        out, err = capfdbinary.readouterr()
        return Done(int(str(end.value.code)), out, err)

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
    # A command logs to the stderr of the test, which is closed afterwards.
    root.handlers[:] = logs
    root.setLevel(level)


class Server:
    """``holdfast serve`` on a free port, ready for requests."""

    def __init__(self, directory: Path, *arguments: str, **variables: str) -> None:
        self.errors = (directory / "stderr.txt").open("ab+")
        self.process = subprocess.Popen(
            [HOLDFAST, "serve", "--port", "0", *arguments],
            cwd=directory,
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=self.errors,
        )
        self.line = self._first_line()
        self.url = self.line.split()[4] if self.line.startswith("Holdfast is ready on ") else ""

    def client(self, token: str) -> httpx.Client:
        return httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {token}"}, timeout=20
        )

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(_PATIENCE_SECONDS)

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
        if not select.select([self.process.stdout], [], [], _PATIENCE_SECONDS)[0]:
            self.process.kill()
            pytest.fail(f"not ready in time: {self.stderr()}")
        return self.process.stdout.readline().decode().rstrip("\n")


@pytest.fixture
def postgres_url(postgres: RealPostgres) -> Iterator[str]:
    """Return the URL of an empty database, without the services' tables."""
    postgres.start()  # a test before this one may have stopped it
    url = postgres.create_database()
    yield url
    postgres.start()
    postgres.drop_database(url)


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


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
    """Make a token as the command does, without a process."""
    secret = development_secret(cli.directory / ".holdfast")
    return mint_token(secret, sub="ada", lifetime=timedelta(hours=1), now=datetime.now(UTC))


def one_line(error: bytes) -> str:
    """Return the one line of stderr, or fail."""
    lines = error.decode().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("holdfast: ")
    return lines[0]
