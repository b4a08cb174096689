"""Run several server processes on one listening socket, and replace those that die.

Uvicorn's supervisor (``Multiprocess``, read and tried in 0.54) does not report when all workers are
ready, leaves its workers running when it is killed, and waits without limit for a worker that does
not shut down.
"""

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

__all__ = ["Supervisor"]

_METRICS: Final = "PROMETHEUS_MULTIPROC_DIR"
_POLL_SECONDS: Final = 0.1
# The minimum time between two starts, for a worker that dies at start-up.
_RESTART_SECONDS: Final = 1.0
# Added to the time that running requests and then running jobs get to finish.
_GRACE_SECONDS: Final = 5.0

_log = logging.getLogger("onceward.workers")


class _Worker:
    """One server process. It stops when the supervisor's end of its stdin closes."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        environment: Mapping[str, str],
        rate_limit_file: Path,
    ) -> None:
        self.started_at = time.monotonic()
        self.is_ready = False
        self._ready, ready = os.pipe()
        numbers = [listener.fileno() for listener in listeners]
        arguments = (",".join(map(str, numbers)), str(ready), str(rate_limit_file))
        try:
            self.process = subprocess.Popen(  # noqa: S603 - a module of this package
                [sys.executable, "-m", "onceward_services.cli.server_process", *arguments],
                env=dict(environment),
                pass_fds=(*numbers, ready),
                stdin=subprocess.PIPE,
                # Ctrl-C reaches only the supervisor, which stops the workers.
                start_new_session=True,
            )
        except BaseException:
            os.close(self._ready)
            raise
        finally:
            os.close(ready)

    def poll(self) -> int | None:
        """Update ``is_ready``; return the exit code once the process has ended."""
        if not self.is_ready and select.select([self._ready], [], [], 0)[0]:
            self.is_ready = bool(os.read(self._ready, 1))
        return self.process.poll()

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            self.process.terminate()

    def wait_or_kill(self, deadline: float) -> None:
        """Wait for the process until the deadline, then kill it."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.close()

    def close(self) -> None:
        os.close(self._ready)
        if self.process.stdin is not None:
            self.process.stdin.close()


class Supervisor:
    """Keeps ``count`` server processes running until SIGTERM or Ctrl-C."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        count: int,
        overrides: Mapping[str, str | None],
        shutdown_seconds: float,
    ) -> None:
        """Take the socket that the processes share, and the settings of the command line."""
        self._listeners = listeners
        self._count = count
        self._shutdown_seconds = shutdown_seconds
        self._environment = dict(os.environ)
        for name, value in overrides.items():
            if value is not None:
                self._environment[f"ONCEWARD_{name.upper()}"] = value
        self._workers: list[_Worker] = []
        self._shared = Path()
        self._signals = 0

    def run(self, on_ready: Callable[[], None]) -> int:
        """Run until SIGTERM or Ctrl-C; returns the exit code."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note_signal)
        with tempfile.TemporaryDirectory(prefix="onceward-workers-") as directory:
            self._shared = Path(directory)
            # Every file in this directory is read as metrics, so it holds nothing else.
            metrics = self._shared / "metrics"
            metrics.mkdir()
            self._environment.setdefault(_METRICS, str(metrics))
            try:
                self._workers = [self._start() for _ in range(self._count)]
                failed = self._wait_until_ready()
                if failed is None and not self._signals:
                    on_ready()
                    self._keep_running()
                return failed or 0
            finally:
                self._stop_all()

    def _start(self) -> _Worker:
        return _Worker(self._listeners, self._environment, self._shared / "rate-limits")

    def _note_signal(self, _number: int, _frame: Any) -> None:
        self._signals += 1

    def _wait_until_ready(self) -> int | None:
        """Return the exit code of a worker that could not start; it has printed the reason."""
        while not self._signals:
            ended = [code for worker in self._workers if (code := worker.poll()) is not None]
            if ended:
                return abs(ended[0]) or 1
            if all(worker.is_ready for worker in self._workers):
                return None
            time.sleep(_POLL_SECONDS / 5)
        return None

    def _keep_running(self) -> None:
        while not self._signals:
            time.sleep(_POLL_SECONDS)
            for index, worker in enumerate(self._workers):
                code = worker.poll()
                if code is None or time.monotonic() - worker.started_at < _RESTART_SECONDS:
                    continue
                _log.warning(
                    "worker ended, starting another",
                    extra={"pid": worker.process.pid, "exit_code": code},
                )
                worker.close()
                self._workers[index] = self._start()

    def _stop_all(self) -> None:
        """Let running requests and jobs finish; a second Ctrl-C kills the workers."""
        for worker in self._workers:
            worker.stop()
        signals_before = self._signals
        deadline = time.monotonic() + 2 * self._shutdown_seconds + _GRACE_SECONDS
        while time.monotonic() < deadline and self._signals <= max(signals_before, 1):
            if all(worker.process.poll() is not None for worker in self._workers):
                break
            time.sleep(_POLL_SECONDS / 5)
        for worker in self._workers:
            worker.wait_or_kill(time.monotonic())
