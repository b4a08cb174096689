"""The owner's side of a nursery: start children, hear of their end, signal them, read their output.

Asynchronous, because whoever runs children here also runs a proxy and shows what happens.
"""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from holdfast_services.registry import SERVICES

__all__ = ["HOLDFAST", "Child", "ChildrenError", "Nursery"]

HOLDFAST: Final = "holdfast.cli.main:main"
"""What the installed command runs."""

_PRELOADED: Final = (
    "holdfast.cli.commands",
    "holdfast.cli.outbox",
    "holdfast_services.cli.serve",
    "holdfast_services.app",
    # What a server and a worker import when they start.
    *(f"{service.package}.api" for service in SERVICES),
    "holdfast_services.routes.jobs",
    "holdfast_services.walk.jobs",
    "holdfast_services.planning.jobs",
    "holdfast.stores.sqlite",
    "apsw",
    "uvicorn.protocols.http.auto",
    "uvicorn.loops.auto",
    "uvicorn.lifespan.on",
)
_GOODBYE_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 0.02
_TAIL_LINES: Final = 20


class ChildrenError(RuntimeError):
    """A child did not do what it was started for."""


@dataclass(eq=False)
class Child:
    """One process. ``code`` is None while it lives, negative if a signal ended it."""

    name: str
    out: Path
    pid: int = 0
    code: int | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _read: int = 0

    @property
    def is_alive(self) -> bool:
        """Whether its end has not been heard of."""
        return not self.ended.is_set()

    def new_lines(self) -> Iterator[str]:
        """Give the whole lines that were written since the last look."""
        with self.out.open("rb") as file:
            file.seek(self._read)
            given = file.read()
        whole = given.rfind(b"\n") + 1
        self._read += whole
        yield from given[:whole].decode(errors="replace").splitlines()

    async def until_line(self, beginning: str, *, seconds: float = 30.0) -> str:
        """Wait for a line that begins so; raises ``ChildrenError`` if none comes."""
        async with asyncio.timeout(seconds):
            while True:
                for line in self.new_lines():
                    if line.startswith(beginning):
                        return line
                if self.ended.is_set():
                    raise ChildrenError(f"{self.name} ended with {self.code}: {self.tail()}")
                await asyncio.sleep(_LOOK_SECONDS)

    def tail(self) -> str:
        """Return its last words."""
        return "\n".join(self.out.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


class Nursery:
    """Starts children quickly, and leaves none behind. An async context manager."""

    def __init__(self, directory: Path, *, preload: Iterable[str] = ()) -> None:
        """Take the directory of all that the children write. It is removed at the end."""
        self.directory = directory
        self._modules = (*_PRELOADED, *preload)
        self._process: Process | None = None
        self._listener: asyncio.Task[None] | None = None
        self._alive: dict[str, Child] = {}
        self._ready = asyncio.Event()
        self._started = 0

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "holdfast_lab.fork_server",
            str(self.directory),
            *self._modules,
            stdin=PIPE,
            stdout=PIPE,
            # What a killed process leaves in the temporary directory goes with ours.
            env=_clean_environment() | {"TMPDIR": str(self.directory)},
            # Ctrl-C is for the owner, who ends the children.
            start_new_session=True,
        )
        self._listener = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *_: object) -> None:
        process, listener = self._process, self._listener
        if process is None or process.stdin is None or listener is None:
            return
        process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(process.wait()), _GOODBYE_SECONDS)
        if process.returncode is None:
            process.kill()
            await process.wait()
        await listener

    async def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        target: str = HOLDFAST,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Start a program; returns at once, with a child that has no pid until it is forked."""
        await self._ready.wait()
        self._started += 1
        child = Child(name, self.directory / f"{name}.{self._started}.out")
        child.out.touch(mode=0o600)
        self._alive[name] = child
        self._order(
            {
                "start": name,
                "target": target,
                "argv": list(argv),
                "out": str(child.out),
                "directory": str(self.directory),
                "environment": dict(environment or {}),
            }
        )
        return child

    def signal(self, child: Child, number: signal.Signals) -> None:
        """Send a signal to a child, unless it has ended."""
        if self._alive.get(child.name) is child:
            self._order({"signal": child.name, "number": int(number)})

    async def kill(self, child: Child) -> None:
        """SIGKILL, and wait until it is gone."""
        self.signal(child, signal.SIGKILL)
        await child.ended.wait()

    async def stop(self, child: Child, *, seconds: float = 30.0) -> int | None:
        """Ask a child to end; past the limit it is killed. Returns how it ended."""
        self.signal(child, signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(child.ended.wait(), seconds)
        if child.is_alive:
            await self.kill(child)
        return child.code

    def _order(self, order: Mapping[str, object]) -> None:
        if self._process is None or self._process.stdin is None:
            raise ChildrenError("the nursery is closed")
        self._process.stdin.write(json.dumps(order).encode() + b"\n")

    async def _listen(self) -> None:
        if self._process is None or self._process.stdout is None:
            return
        while line := await self._process.stdout.readline():
            news = json.loads(line)
            if "ready" in news:
                self._ready.set()
            elif "started" in news:
                self._alive[news["started"]].pid = news["pid"]
            else:
                child = self._alive.pop(news["ended"])
                child.code = news["code"]
                child.ended.set()
        # It is gone, and its children with it.
        self._ready.set()
        for child in self._alive.values():
            child.ended.set()
        self._alive.clear()


def _clean_environment() -> dict[str, str]:
    """Leave out what is set for another server: the proof should not depend on who runs it."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("HOLDFAST_") and name != "ROUTES_IDEMPOTENCY_TTL_HOURS"
    }
