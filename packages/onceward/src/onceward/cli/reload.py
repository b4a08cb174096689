"""``--reload``: run a command in a process of its own and restart it when a source file changes.

Compares the times of the files, as the reloaders of Django and Werkzeug do by default: that needs
no further package, and works on network file systems (docs/decisions/0012-jobs.md).
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final

from onceward_protocol.cli.output import print_error

_POLL_SECONDS: Final = 0.25
_SUFFIXES: Final = (".py", ".sql")
# Directories that contain no source of the app; those that begin with a dot are left out too.
_IGNORED: Final = frozenset({"__pycache__", "node_modules", "site-packages", "venv"})


def run_with_reload(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run ``onceward ARGUMENTS`` until a signal; restart it when a file of the app changes.

    Files of the app are those below the current directory. Signals are passed on to the process.
    Returns its exit code, or 0 if none was running.
    """
    return _Reloader(arguments, environment).run()


class _Reloader:
    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-m", "onceward.cli", *arguments]
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopping = False

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._pass_on)
        seen = _times(Path.cwd())
        self._start()
        while not self._is_stopping:
            time.sleep(_POLL_SECONDS)
            if self._process is not None and self._process.poll() is not None:
                if self._process.returncode == 0:
                    return 0
                print_error("the worker has ended; it starts again when a file changes")
                self._process = None
            now = _times(Path.cwd())
            if now != seen and not self._is_stopping:
                changed = sorted({path for path, _ in now.items() ^ seen.items()})
                print_error(f"{os.path.relpath(changed[0])} has changed: restarting")
                seen = now
                self._restart()
        return 0 if self._process is None else self._process.wait()

    def _start(self) -> None:
        # In a session of its own: Ctrl-C in a terminal reaches this process only, and is passed on
        # once. (A second signal would not wait for running jobs.)
        self._process = subprocess.Popen(  # noqa: S603 - the command line of this process
            self._command, env=self._environment, start_new_session=True
        )

    def _restart(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait()
        if not self._is_stopping:
            self._start()

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._is_stopping = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def _times(directory: Path) -> dict[str, int]:
    """Return when each source file below a directory was last changed."""
    times = {}
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if name[0] != "." and name not in _IGNORED]
        for name in names:
            if name.endswith(_SUFFIXES):
                path = Path(folder, name)
                with suppress(OSError):  # removed meanwhile
                    times[str(path)] = path.stat().st_mtime_ns
    return times
