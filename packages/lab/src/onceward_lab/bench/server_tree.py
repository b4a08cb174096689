"""Serves a source tree's ``onceward serve``, so that two commits can be measured side by side."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from onceward_lab.bench.races import free_port, wait_until_up

__all__ = ["CpuClock", "ServerTree"]

_FREE = ("WALK", "PLANNING", "ROUTES", "FIELD")


@dataclass(frozen=True)
class ServerTree:
    """The code of a commit: that of this process, or another checkout of the repository."""

    name: str
    path: Path | None = None

    def environment(self) -> dict[str, str]:
        """Return the environment in which Python imports the packages of this tree."""
        if self.path is None:
            return dict(os.environ)
        sources = sorted(self.path.glob("packages/*/src"))
        if not sources:
            raise FileNotFoundError(
                f"{self.path}/packages/*/src: a checkout of the repository has it"
            )
        return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sources))}

    @contextmanager
    def serve(
        self,
        database: str,
        secret: str,
        home: Path,
        *,
        options: tuple[str, ...] = (),
        settings: Mapping[str, str] | None = None,
    ) -> Iterator[tuple[int, int]]:
        """Serve without rate limits; yields the port and the process id."""
        port = free_port()
        environment = self.environment() | {
            "ONCEWARD_JWT_SECRET": secret,
            "ONCEWARD_HOME": str(home),
            "ONCEWARD_LOG_LEVEL": "ERROR",
            **{f"ONCEWARD_{name}_RATE_LIMIT": "0" for name in _FREE},
            **(settings or {}),
        }
        command = [sys.executable, "-m", "onceward.cli", "serve", "--port", str(port)]
        command += ["--database", database, *options]
        # Not in a checkout: Python would import packages of the current directory first.
        server = subprocess.Popen(command, env=environment, cwd=home, stdout=subprocess.DEVNULL)
        try:
            wait_until_up(port)
            yield port, server.pid
        finally:
            server.terminate()
            server.wait()


class CpuClock:
    """The CPU time of a process, and of its descendants, in seconds."""

    def __init__(self, pid: int, *, with_children: bool = True) -> None:
        self._process = psutil.Process(pid)
        self._with_children = with_children

    def read(self) -> float:
        """Return user and system time so far."""
        total = 0.0
        children = self._process.children(recursive=True) if self._with_children else ()
        for one in (self._process, *children):
            times = one.cpu_times()
            total += times.user + times.system
        return total
