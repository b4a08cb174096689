"""Ends every process that a test run has started and left running.

``start`` puts an id into the environment, which all processes of the run inherit. A process of its
own waits for the end of pytest, even by SIGKILL, and then kills those that still have the id.
PostgreSQL and Redis overwrite their environment; they have guards (``RealServer``).
"""

import os
import select
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

import psutil  # type: ignore[import-untyped]

VARIABLE: Final = "ONCEWARD_TEST_SESSION"
_GRACE_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.2
# The shell that stops a server in order once its test process has ended.
_SERVER_GUARD: Final = "sh"


def start() -> "subprocess.Popen[bytes]":
    """Mark the children of this process; those that are left end when the guard's input ends."""
    session = uuid.uuid4().hex
    guard = subprocess.Popen(
        [sys.executable, __file__, session, str(os.getpid())],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    # A run inside a test belongs to both.
    os.environ[VARIABLE] = f"{os.environ.get(VARIABLE, '')} {session}".strip()
    return guard


def processes(session: str) -> list[Any]:
    """Return the running processes of a test run."""
    return [process for process in psutil.process_iter() if session in _sessions(process)]


def _sessions(process: Any) -> str:
    try:
        if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
            return ""
        return str(process.environ().get(VARIABLE, ""))
    except (psutil.Error, OSError):
        return ""


def _main(session: str, pytest: int) -> None:
    # Until pytest closes the pipe, or ends; processes that it forked may have the pipe open, too.
    while os.getppid() == pytest and not select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
        pass
    if _are_left(session):
        _kill(process for process in processes(session) if process.name() != _SERVER_GUARD)
        if _are_left(session):
            _kill(processes(session))


def _are_left(session: str) -> bool:
    deadline = time.monotonic() + _GRACE_SECONDS
    while processes(session) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return bool(processes(session))


def _kill(left: Iterable[Any]) -> None:
    for process in left:
        with suppress(psutil.Error):
            print(f"a test left {process.name()} running: killed", file=sys.stderr)
            process.kill()


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
