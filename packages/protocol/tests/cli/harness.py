"""Runs ``onceward`` as a process or in this one, without the settings of the environment."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ONCEWARD = str(Path(sys.executable).with_name("onceward"))
TIMEOUT_SECONDS = 60


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment without Onceward's settings, plus ``variables``."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("ONCEWARD_") and name != "ROUTES_IDEMPOTENCY_TTL_HOURS"
    }
    return clean | variables


@dataclass
class Cli:
    """Runs commands as processes, in one directory."""

    directory: Path

    def __call__(
        self, *arguments: str, stdin: bytes = b"", **variables: str
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [ONCEWARD, *arguments],
            cwd=self.directory,
            env=environment(**variables),
            input=stdin,
            capture_output=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )


@dataclass
class Done:
    """The result of a command that ran in this process."""

    returncode: int
    stdout: bytes
    stderr: bytes


Here = Callable[..., Done]


def run_script(
    script: str, *, env: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[bytes]:
    """Run Python code in a new process, for tests of what a command imports."""
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        env=environment() if env is None else env,
        check=False,
        **options,
    )


def one_line(error: bytes) -> str:
    """Return the only line of stderr; fail if there are more, or none."""
    lines = error.decode().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("onceward: ")
    return lines[0]
