"""A fork server: one process imports everything once and forks a child for each request.

A new interpreter needs most of a second to import a server; a fork needs a millisecond. The process
that runs the tests is not forked itself, because it may have threads.

Run as a program (``python -m onceward_testing.fork_server``) it reads one JSON object per line from
standard input and writes one per line to standard output::

    {"start": "server", "target": "my_app.main:main", "argv": ["serve"], "out": "server.log"}
    {"started": "server", "pid": 4711}
    {"signal": "server", "number": 9}
    {"ended": "server", "code": -9}

The server sends the signals, because only a parent knows that a pid still belongs to its child.
When its input ends (the owner closed it or was killed) it kills all children and removes the
directory given with ``--remove``.

:class:`ForkServer` is a synchronous client; others can use :func:`command` and this protocol.
"""

import argparse
import contextlib
import gc
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Self

__all__ = ["ForkServer", "command", "main"]

_READ_BYTES: Final = 65_536
_STOP_SECONDS: Final = 30.0


def command(*modules: str, remove: Path | None = None) -> list[str]:
    """Return the command line of a server that preloads ``modules``.

    The server deletes ``remove`` when it ends, even if its owner was killed.
    """
    options = [] if remove is None else ["--remove", str(remove)]
    return [sys.executable, "-m", "onceward_testing.fork_server", *options, *modules]


class ForkServer:
    """Runs functions of one module in forked processes. A context manager, for one thread."""

    def __init__(self, module: str, *, cwd: Path | None = None) -> None:
        """Preload ``module``, which must be importable from ``cwd``."""
        self._module = module
        self._cwd = cwd
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            command(self._module), cwd=self._cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.communicate(timeout=_STOP_SECONDS)

    def run(
        self, *calls: tuple[str, Mapping[str, Any]], kill_after: float | None = None
    ) -> list[int]:
        """Run all calls at the same time, each in its own process, and wait for them.

        A call is the name of a function and its keyword arguments, which must be JSON values.
        Returns the exit codes: 0, 1 after an exception, -9 if the process was killed. Processes
        that still run after ``kill_after`` seconds are killed.
        """
        names = [str(self._started + number) for number in range(len(calls))]
        self._started += len(calls)
        for name, (function, kwargs) in zip(names, calls, strict=True):
            self._send({"start": name, "target": f"{self._module}:{function}", "kwargs": kwargs})
        codes: dict[str, int] = {}
        started: set[str] = set()
        while len(started) < len(names):
            self._receive(started, codes)
        if kill_after is not None:
            time.sleep(kill_after)
            for name in names:
                self._send({"signal": name, "number": signal.SIGKILL})
        while len(codes) < len(names):
            self._receive(started, codes)
        return [codes[name] for name in names]

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._process is None or self._process.stdin is None:
            raise RuntimeError("the fork server is not running: use it in a with block")
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def _receive(self, started: set[str], codes: dict[str, int]) -> None:
        if self._process is None or self._process.stdout is None:
            raise RuntimeError("the fork server is not running: use it in a with block")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the fork server ended early; its error is on standard error")
        message = json.loads(line)
        if "started" in message:
            started.add(message["started"])
        elif "ended" in message:
            codes[message["ended"]] = message["code"]


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m onceward_testing.fork_server")
    parser.add_argument("--remove", metavar="DIRECTORY", help="directory to delete at the end")
    parser.add_argument("modules", nargs="*", help="modules to import before the first fork")
    options = parser.parse_args()
    for name in options.modules:
        import_module(name)
    gc.freeze()  # keeps the pages of imported modules shared between the children
    server = _Server()
    try:
        server.run()
    finally:
        server.kill_children()
        if options.remove is not None:
            shutil.rmtree(options.remove, ignore_errors=True)


class _Server:
    def __init__(self) -> None:
        self._children: dict[int, str] = {}
        self._wakeup, wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(wakeup, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)

    def run(self) -> None:
        _write({"ready": os.getpid()})
        buffered = b""
        while True:
            readable, _, _ = select.select([0, self._wakeup], [], [])
            if self._wakeup in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup, _READ_BYTES)
                self._reap()
            if 0 in readable:
                received = os.read(0, _READ_BYTES)
                if not received:
                    return
                *lines, buffered = (buffered + received).split(b"\n")
                for line in lines:
                    self._handle(json.loads(line))

    def kill_children(self) -> None:
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)

    def _handle(self, message: Mapping[str, Any]) -> None:
        if "signal" in message:
            for pid, name in self._children.items():
                if name == message["signal"]:
                    os.kill(pid, message["number"])
            return
        pid = os.fork()
        if pid == 0:
            _run_child(message)
        self._children[pid] = message["start"]
        _write({"started": message["start"], "pid": pid})

    def _reap(self) -> None:
        for pid in list(self._children):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                name = self._children.pop(pid)
                _write({"ended": name, "code": os.waitstatus_to_exitcode(status)})


def _run_child(message: Mapping[str, Any]) -> None:
    """Run the target in this fork and exit; does not return."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _redirect(message.get("out"))
        os.chdir(message.get("directory", "."))
        os.environ.update(message.get("environment", {}))
        sys.argv = ["onceward", *message.get("argv", ())]
        module, _, function = message["target"].partition(":")
        target: Callable[..., Any] = getattr(import_module(module), function)
        target(**message.get("kwargs", {}))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - the traceback must be printed before os._exit
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _redirect(out: str | None) -> None:
    """Give the child an empty input, and ``out`` (default: the server's stderr) as its output."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if out is None:
        os.dup2(2, 1)  # descriptor 1 is the pipe of the protocol
        return
    file = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)


def _write(message: Mapping[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
