"""An asyncio client of the fork server: start processes, signal them, read their output."""

import asyncio
import json
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from onceward_services.registry import SERVICES
from onceward_testing import fork_server

__all__ = ["ONCEWARD", "AsyncForkServer", "Child", "ChildError"]

ONCEWARD: Final = "onceward_protocol.cli.main:main"
"""The function that the installed ``onceward`` command calls."""

_PRELOADED: Final = (
    "onceward.cli.commands",
    "onceward_outbox.cli.commands",
    "onceward_services.cli.serve",
    "onceward_services.app",
    # Imported by a server and a worker when they start.
    *(f"{service.package}.api" for service in SERVICES),
    "onceward_services.routes.jobs",
    "onceward_services.walk.jobs",
    "onceward_services.planning.jobs",
    "onceward.stores.sqlite",
    "apsw",
    "uvicorn.protocols.http.auto",
    "uvicorn.loops.auto",
    "uvicorn.lifespan.on",
)
_STOP_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.02
_TAIL_LINES: Final = 20


class ChildError(RuntimeError):
    """A process ended early, or did not become ready."""


@dataclass(eq=False)
class Child:
    """One process. ``code`` is None while it runs, negative if a signal ended it."""

    name: str
    out: Path
    pid: int = 0
    code: int | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _read: int = 0

    @property
    def is_alive(self) -> bool:
        """False once the fork server has reported its end."""
        return not self.ended.is_set()

    def new_lines(self) -> Iterator[str]:
        """Yield the complete lines written since the last call."""
        with self.out.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        complete = text.rfind(b"\n") + 1
        self._read += complete
        yield from text[:complete].decode(errors="replace").splitlines()

    async def wait_for_line(self, prefix: str, *, seconds: float = 30.0) -> str:
        """Return the first new line with this prefix.

        Raises ``ChildError`` if the process ends first, ``TimeoutError`` after ``seconds``.
        """
        async with asyncio.timeout(seconds):
            while True:
                for line in self.new_lines():
                    if line.startswith(prefix):
                        return line
                if self.ended.is_set():
                    raise ChildError(f"{self.name} ended with {self.code}: {self.tail()}")
                await asyncio.sleep(_POLL_SECONDS)

    def tail(self) -> str:
        """Return the last lines of its output."""
        return "\n".join(self.out.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


class AsyncForkServer:
    """Starts processes and kills those that are left at the end. An async context manager."""

    def __init__(self, directory: Path, *, preload: Iterable[str] = ()) -> None:
        """Use ``directory`` for all output of the processes; it is deleted at the end."""
        self.directory = directory
        self._modules = (*_PRELOADED, *preload)
        self._process: Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._alive: dict[str, Child] = {}
        self._ready = asyncio.Event()
        self._started = 0

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *fork_server.command(*self._modules, remove=self.directory),
            stdin=PIPE,
            stdout=PIPE,
            # Temporary files of killed processes are deleted with the directory.
            env=_clean_environment() | {"TMPDIR": str(self.directory)},
            # Ctrl-C goes to the owner only, which then ends the children.
            start_new_session=True,
        )
        self._reader = asyncio.create_task(self._read_messages())
        return self

    async def __aexit__(self, *_: object) -> None:
        process, reader = self._process, self._reader
        if process is None or process.stdin is None or reader is None:
            return
        process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(process.wait()), _STOP_SECONDS)
        if process.returncode is None:
            process.kill()
            await process.wait()
        await reader

    async def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        target: str = ONCEWARD,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Start a process; its ``pid`` is 0 until the fork server reports the fork."""
        await self._ready.wait()
        self._started += 1
        child = Child(name, self.directory / f"{name}.{self._started}.out")
        child.out.touch(mode=0o600)
        self._alive[name] = child
        self._send(
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
        """Send a signal to a process; does nothing if it has ended."""
        if self._alive.get(child.name) is child:
            self._send({"signal": child.name, "number": int(number)})

    async def kill(self, child: Child) -> None:
        """Send SIGKILL and wait for the end."""
        self.signal(child, signal.SIGKILL)
        await child.ended.wait()

    async def stop(self, child: Child, *, seconds: float = 30.0) -> int | None:
        """Send SIGTERM, and SIGKILL after ``seconds``. Returns the exit code."""
        self.signal(child, signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(child.ended.wait(), seconds)
        if child.is_alive:
            await self.kill(child)
        return child.code

    def _send(self, message: Mapping[str, object]) -> None:
        if self._process is None or self._process.stdin is None:
            raise ChildError("the fork server is not running")
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read_messages(self) -> None:
        if self._process is None or self._process.stdout is None:
            return
        while line := await self._process.stdout.readline():
            message = json.loads(line)
            if "ready" in message:
                self._ready.set()
            elif "started" in message:
                self._alive[message["started"]].pid = message["pid"]
            else:
                child = self._alive.pop(message["ended"])
                child.code = message["code"]
                child.ended.set()
        # The fork server has ended and has killed its children.
        self._ready.set()
        for child in self._alive.values():
            child.ended.set()
        self._alive.clear()


def _clean_environment() -> dict[str, str]:
    """Leave out settings of the caller: the result should not depend on them."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("ONCEWARD_") and name != "ROUTES_IDEMPOTENCY_TTL_HOURS"
    }
