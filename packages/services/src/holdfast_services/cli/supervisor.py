"""Several processes behind one listening socket: started together, replaced when they die.

Not uvicorn's own supervisor: it kills a worker whose loop is busy for five seconds, does not say
when all are ready, and leaves its workers behind when it is killed itself.
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

__all__ = ["Supervisor"]

_METRICS: Final = "PROMETHEUS_MULTIPROC_DIR"
_LOOK_SECONDS: Final = 0.1
# A worker that dies at once would be started again at once, for ever.
_RESTART_SECONDS: Final = 1.0
# On top of what requests and, after them, jobs get to finish.
_GRACE_SECONDS: Final = 5.0

_log = logging.getLogger("holdfast.workers")


class _Worker:
    """One process. It ends by itself when our end of its standard input closes."""

    def __init__(
        self, listener: socket.socket, environment: Mapping[str, str], rate_limit_file: Path
    ) -> None:
        self.started_at = time.monotonic()
        self.is_ready = False
        self._ready, ready = os.pipe()
        given = (str(listener.fileno()), str(ready), str(rate_limit_file))
        try:
            self.process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", "holdfast_services.cli.server_process", *given],
                env=dict(environment),
                pass_fds=(listener.fileno(), ready),
                stdin=subprocess.PIPE,
                # Ctrl-C is for us; we pass it on.
                start_new_session=True,
            )
        except BaseException:
            os.close(self._ready)
            raise
        finally:
            os.close(ready)

    def look(self) -> int | None:
        """Note whether it is ready; return its exit code once it has ended."""
        if not self.is_ready and select.select([self._ready], [], [], 0)[0]:
            self.is_ready = bool(os.read(self._ready, 1))
        return self.process.poll()

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            self.process.terminate()

    def end(self, deadline: float) -> None:
        """Wait for its end, and make one past the deadline."""
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
    """Keeps so many workers running until it is told to stop."""

    def __init__(
        self,
        listener: socket.socket,
        count: int,
        given: Mapping[str, str | None],
        shutdown_seconds: float,
    ) -> None:
        """Take the socket to share, and the settings that were given on the command line."""
        self._listener = listener
        self._count = count
        self._shutdown_seconds = shutdown_seconds
        self._environment = dict(os.environ)
        for name, value in given.items():
            if value is not None:
                self._environment[f"HOLDFAST_{name.upper()}"] = value
        self._workers: list[_Worker] = []
        self._shared = Path()
        self._signals = 0

    def run(self, say_ready: Callable[[], None]) -> int:
        """Run until SIGTERM or Ctrl-C; returns the exit code."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note_signal)
        with tempfile.TemporaryDirectory(prefix="holdfast-workers-") as directory:
            self._shared = Path(directory)
            # A folder of its own: whatever is in it is read as metrics.
            metrics = self._shared / "metrics"
            metrics.mkdir()
            self._environment.setdefault(_METRICS, str(metrics))
            try:
                self._workers = [self._start() for _ in range(self._count)]
                failed = self._wait_until_ready()
                if failed is None and not self._signals:
                    say_ready()
                    self._keep_running()
                return failed or 0
            finally:
                self._stop_all()

    def _start(self) -> _Worker:
        return _Worker(self._listener, self._environment, self._shared / "rate-limits")

    def _note_signal(self, _number: int, _frame: Any) -> None:
        self._signals += 1

    def _wait_until_ready(self) -> int | None:
        """Return the exit code of a worker that could not start; it has told why."""
        while not self._signals:
            ended = [code for worker in self._workers if (code := worker.look()) is not None]
            if ended:
                return abs(ended[0]) or 1
            if all(worker.is_ready for worker in self._workers):
                return None
            time.sleep(_LOOK_SECONDS / 5)
        return None

    def _keep_running(self) -> None:
        while not self._signals:
            time.sleep(_LOOK_SECONDS)
            for index, worker in enumerate(self._workers):
                code = worker.look()
                if code is None or time.monotonic() - worker.started_at < _RESTART_SECONDS:
                    continue
                _log.warning(
                    "worker ended, starting another",
                    extra={"pid": worker.process.pid, "exit_code": code},
                )
                worker.close()
                self._workers[index] = self._start()

    def _stop_all(self) -> None:
        """Let everyone finish; a second Ctrl-C does not wait."""
        for worker in self._workers:
            worker.stop()
        asked = self._signals
        deadline = time.monotonic() + 2 * self._shutdown_seconds + _GRACE_SECONDS
        while time.monotonic() < deadline and self._signals <= max(asked, 1):
            if all(worker.process.poll() is not None for worker in self._workers):
                break
            time.sleep(_LOOK_SECONDS / 5)
        for worker in self._workers:
            worker.end(time.monotonic())
