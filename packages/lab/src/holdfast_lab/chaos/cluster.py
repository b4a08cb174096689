"""The besieged side: a database, maybe a broker, two servers and two workers, kept running.

Like a supervisor of services anywhere, it starts again whatever has ended. What the besiegers do to
the processes is their business; this file only says how they are started, and when again.
"""

import asyncio
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Literal

from holdfast.testing.servers import RealNats, RealPostgres
from holdfast_lab.fork_client import Child, ChildrenError, Nursery

__all__ = ["DatabaseKind", "Fort"]

DatabaseKind = Literal["sqlite", "postgres"]

_SERVERS: Final = 2
_WORKERS: Final = 2
_PORTS: Final = range(15_000, 30_000)
# A worker that is stopped for longer than its lease has to find itself fenced, so it is short.
_JOB_LEASE_SECONDS: Final = 2
_RESTART_SECONDS: Final = 0.2
# What no process of ours ever writes, unless something is wrong with it.
_ALARMS: Final = ("Traceback (most recent call last)", "this is a bug")


class Fort:
    """Everything on the server's side."""

    def __init__(
        self, nursery: Nursery, *, kind: DatabaseKind, nats: bool, secret: str, first_port: int
    ) -> None:
        """Take how to build it; nothing runs yet."""
        self._nursery = nursery
        self._resources = ExitStack()
        self._environment = {
            "HOLDFAST_JWT_SECRET": secret,
            "HOLDFAST_HOME": str(nursery.directory / "home"),
            "HOLDFAST_LOG_LEVEL": "ERROR",
            "HOLDFAST_LOG_JSON": "false",
            "HOLDFAST_JOBS_LEASE_SECONDS": str(_JOB_LEASE_SECONDS),
        }
        self.postgres = RealPostgres() if kind == "postgres" else None
        self.nats = RealNats() if nats else None
        self.database_url = f"sqlite:///{nursery.directory / 'server.db'}"
        self.ports = _free_ports(first_port, _SERVERS)
        # By name; what is down at the moment is not in here.
        self.servers: dict[str, Child] = {}
        self.workers: dict[str, Child] = {}
        self.starts = 0
        self.mishaps: list[str] = []
        self._keepers: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Start everything, and return when all of it is ready."""
        if self.postgres is not None:
            await asyncio.to_thread(self._resources.enter_context, self.postgres)
            self.database_url = await asyncio.to_thread(self.postgres.create_database)
        if self.nats is not None:
            await asyncio.to_thread(self._resources.enter_context, self.nats)
        # The first one alone: it brings the schema up to date.
        await self._start_server("server-0")
        for number in range(1, _SERVERS):
            await self._start_server(f"server-{number}")
        for number in range(_WORKERS):
            await self._start_worker(f"worker-{number}")
        names = [*self.servers, *self.workers]
        self._keepers = [asyncio.create_task(self._keep(name)) for name in names]

    async def leave(self) -> None:
        """Start nothing again from now on."""
        for keeper in self._keepers:
            keeper.cancel()
        for ended in await asyncio.gather(*self._keepers, return_exceptions=True):
            if isinstance(ended, Exception):
                self.mishaps.append(f"a process was not started again: {ended!r}")
        self._keepers.clear()

    async def close(self) -> None:
        """End all processes in order, and note who does not end well."""
        await self.leave()
        children = [*self.servers.values(), *self.workers.values()]
        codes = await asyncio.gather(*(self._nursery.stop(child) for child in children))
        for child, code in zip(children, codes, strict=True):
            if code != 0:
                self.mishaps.append(f"{child.name} ended with {code} when asked to stop")
            self._look_for_alarms(child)

    def remove(self) -> None:
        """End database and broker, and remove their files."""
        self._resources.close()

    async def _keep(self, name: str) -> None:
        """Start a process again whenever it has ended."""
        running = self.servers if name in self.servers else self.workers
        while True:
            child = running[name]
            await child.ended.wait()
            self._look_for_alarms(child)
            del running[name]
            while name not in running:
                try:
                    if running is self.servers:
                        await self._start_server(name)
                    else:
                        await self._start_worker(name)
                except (ChildrenError, TimeoutError):
                    # The database is away, or somebody killed it while it was starting.
                    await asyncio.sleep(_RESTART_SECONDS)

    async def _start_server(self, name: str) -> None:
        port = self.ports[int(name.rpartition("-")[2])]
        arguments = ["serve", "--port", str(port), "--no-jobs", "--database", self.database_url]
        self.servers[name] = await self._started(name, arguments, "Holdfast is ready on ")

    async def _start_worker(self, name: str) -> None:
        arguments = ["worker", "--database", self.database_url]
        if self.nats is not None:
            arguments += ["--nats", self.nats.url()]
        self.workers[name] = await self._started(name, arguments, "Holdfast runs jobs of ")

    async def _started(self, name: str, arguments: list[str], ready: str) -> Child:
        self.starts += 1
        child = await self._nursery.start(name, arguments, environment=self._environment)
        try:
            await child.until_line(ready)
        except ChildrenError:
            self._look_for_alarms(child)
            raise
        except TimeoutError:
            await self._nursery.kill(child)
            self.mishaps.append(f"{name} was not ready in time: {child.tail()}")
            raise
        return child

    def _look_for_alarms(self, child: Child) -> None:
        text = Path(child.out).read_text(errors="replace")
        if any(alarm in text for alarm in _ALARMS):
            self.mishaps.append(f"{child.name} wrote: {child.tail()}")


def _free_ports(first: int, count: int) -> list[int]:
    """Take ports below the ephemeral range: no client takes them while a server is down."""
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
    raise ChildrenError("there is no free port")
