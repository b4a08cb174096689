"""The server side of a chaos run: the database, optionally NATS, two servers and two workers.

Like a process supervisor it restarts every process that ends.
"""

import asyncio
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Literal

from onceward_lab.fork_client import AsyncForkServer, Child, ChildError
from onceward_testing.nats_server import RealNatsCluster
from onceward_testing.postgres_pair import RealPostgresPair
from onceward_testing.servers import RealNats, RealPostgres

__all__ = ["Cluster", "DatabaseKind", "Replication"]

DatabaseKind = Literal["sqlite", "postgres", "postgres-ha"]
Replication = Literal["sync", "async"]

_SERVERS: Final = 2
_WORKERS: Final = 2
_PORTS: Final = range(15_000, 30_000)
# Shorter than the longest SIGSTOP, so that a stopped worker loses its lease.
_JOB_LEASE_SECONDS: Final = 2
_SERVICES: Final = ("WALK", "PLANNING", "ROUTES", "FIELD")
_RESTART_SECONDS: Final = 0.2
# Output that a server or worker writes only if it has a bug.
_BUG_MESSAGES: Final = ("Traceback (most recent call last)", "this is a bug")


class Cluster:
    """Starts, restarts and stops the processes of the server side."""

    def __init__(
        self,
        processes: AsyncForkServer,
        *,
        kind: DatabaseKind,
        replication: Replication,
        nats: bool,
        secret: str,
        first_port: int,
    ) -> None:
        """Choose ports from ``first_port`` on; nothing is started yet."""
        self._processes = processes
        self._resources = ExitStack()
        self._environment = {
            "ONCEWARD_JWT_SECRET": secret,
            "ONCEWARD_HOME": str(processes.directory / "home"),
            "ONCEWARD_LOG_LEVEL": "ERROR",
            "ONCEWARD_LOG_JSON": "false",
            "ONCEWARD_JOBS_LEASE_SECONDS": str(_JOB_LEASE_SECONDS),
            # A device that drains a long queue on a fast machine would only wait.
            **{f"ONCEWARD_{name}_RATE_LIMIT": "0" for name in _SERVICES},
        }
        self.postgres = RealPostgres() if kind == "postgres" else None
        self.pair = (
            RealPostgresPair(synchronous=replication == "sync") if kind == "postgres-ha" else None
        )
        self.nats = RealNats() if nats and kind != "postgres-ha" else None
        self.nats_cluster = RealNatsCluster() if nats and kind == "postgres-ha" else None
        self.database_url = f"sqlite:///{processes.directory / 'server.db'}"
        self.ports = _free_ports(first_port, _SERVERS)
        # Running processes by name; one that is down is missing here.
        self.servers: dict[str, Child] = {}
        self.workers: dict[str, Child] = {}
        self.starts = 0
        self.errors: list[str] = []
        self._supervisors: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all processes and wait until they are ready."""
        if self.postgres is not None:
            await asyncio.to_thread(self._resources.enter_context, self.postgres)
            self.database_url = await asyncio.to_thread(self.postgres.create_database)
        if self.pair is not None:
            await asyncio.to_thread(self._resources.enter_context, self.pair)
            self.database_url = await asyncio.to_thread(self.pair.create_database)
        if self.nats is not None:
            await asyncio.to_thread(self._resources.enter_context, self.nats)
        if self.nats_cluster is not None:
            await asyncio.to_thread(self._resources.enter_context, self.nats_cluster)
        # One server first: it runs the migrations.
        await self._start_server("server-0")
        for number in range(1, _SERVERS):
            await self._start_server(f"server-{number}")
        for number in range(_WORKERS):
            await self._start_worker(f"worker-{number}")
        names = [*self.servers, *self.workers]
        self._supervisors = [asyncio.create_task(self._supervise(name)) for name in names]

    async def stop_restarting(self) -> None:
        """Stop the supervisors; processes that end stay down."""
        for task in self._supervisors:
            task.cancel()
        for result in await asyncio.gather(*self._supervisors, return_exceptions=True):
            if isinstance(result, Exception):
                self.errors.append(f"a process was not restarted: {result!r}")
        self._supervisors.clear()

    async def stop(self) -> None:
        """Stop all processes with SIGTERM; an exit code other than 0 is recorded as an error."""
        await self.stop_restarting()
        children = [*self.servers.values(), *self.workers.values()]
        codes = await asyncio.gather(*(self._processes.stop(child) for child in children))
        for child, code in zip(children, codes, strict=True):
            if code != 0:
                self.errors.append(f"{child.name} exited with {code} after SIGTERM")
            self._check_output(child)

    def remove(self) -> None:
        """Stop database and broker and delete their files."""
        self._resources.close()

    async def _supervise(self, name: str) -> None:
        running = self.servers if name in self.servers else self.workers
        while True:
            child = running[name]
            await child.ended.wait()
            self._check_output(child)
            del running[name]
            while name not in running:
                try:
                    if running is self.servers:
                        await self._start_server(name)
                    else:
                        await self._start_worker(name)
                except (ChildError, TimeoutError):
                    # The database is down, or the process was killed while it started.
                    await asyncio.sleep(_RESTART_SECONDS)

    async def _start_server(self, name: str) -> None:
        port = self.ports[int(name.rpartition("-")[2])]
        arguments = ["serve", "--port", str(port), "--no-jobs", "--database", self.database_url]
        self.servers[name] = await self._start(name, arguments, "Onceward is ready on ")

    async def _start_worker(self, name: str) -> None:
        arguments = ["worker", "--database", self.database_url]
        if (nats := self.nats or self.nats_cluster) is not None:
            arguments += ["--nats", nats.url()]
        self.workers[name] = await self._start(name, arguments, "Onceward runs jobs of ")

    async def _start(self, name: str, arguments: list[str], ready: str) -> Child:
        self.starts += 1
        child = await self._processes.start(name, arguments, environment=self._environment)
        try:
            await child.wait_for_line(ready)
        except ChildError:
            self._check_output(child)
            raise
        except TimeoutError:
            await self._processes.kill(child)
            self.errors.append(f"{name} was not ready in time: {child.tail()}")
            raise
        return child

    def _check_output(self, child: Child) -> None:
        text = Path(child.out).read_text(errors="replace")
        if any(message in text for message in _BUG_MESSAGES):
            self.errors.append(f"{child.name} wrote: {child.tail()}")


def _free_ports(first: int, count: int) -> list[int]:
    """Find ports below the ephemeral range: no client can take one while a server is down."""
    found: list[int] = []
    for port in (*range(first, _PORTS.stop), *range(_PORTS.start, first)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise ChildError(f"no free port between {_PORTS.start} and {_PORTS.stop - 1}")
