"""A process that imports everything once and forks the others: a kill costs milliseconds.

A new interpreter takes most of a second to import a server. What is forked here runs the same code
from the same entry point, in a process of its own that can be killed and stopped like any other.
Orders come as lines of JSON on standard input; standard output tells what has ended::

    {"start": "server", "target": "holdfast.cli.main:main", "argv": ["serve"], "out": "server.log"}
    {"signal": "server", "number": 9}

Signals are sent from here because only a parent knows that a pid is still its child's. When the
input ends, because the owner closed it or was killed itself, every child is killed and the
directory is removed: whatever happens, nothing is left behind.
"""

import contextlib
import gc
import json
import os
import select
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final

__all__ = ["main"]

_READ_BYTES: Final = 65_536


def main() -> None:
    """Obey until the input ends. Arguments: a directory to remove at the end, modules to import."""
    directory, *modules = sys.argv[1:]
    for name in modules:
        import_module(name)
    gc.freeze()  # what is imported stays shared between the children
    room = _Room()
    try:
        room.run()
    finally:
        room.end()
        shutil.rmtree(directory, ignore_errors=True)


class _Room:
    def __init__(self) -> None:
        self._children: dict[int, str] = {}
        self._notifier, notifier = os.pipe()
        os.set_blocking(self._notifier, False)
        os.set_blocking(notifier, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(notifier, warn_on_full_buffer=False)

    def run(self) -> None:
        _tell({"ready": os.getpid()})
        waiting = b""
        while True:
            readable, _, _ = select.select([0, self._notifier], [], [])
            if self._notifier in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._notifier, _READ_BYTES)
                self._reap()
            if 0 in readable:
                given = os.read(0, _READ_BYTES)
                if not given:
                    return
                *lines, waiting = (waiting + given).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))

    def end(self) -> None:
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)

    def _obey(self, order: Mapping[str, Any]) -> None:
        if "signal" in order:
            for pid, name in self._children.items():
                if name == order["signal"]:
                    os.kill(pid, order["number"])
            return
        pid = os.fork()
        if pid == 0:
            _become(order)
        self._children[pid] = order["start"]
        _tell({"started": order["start"], "pid": pid})

    def _reap(self) -> None:
        for pid in list(self._children):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                name = self._children.pop(pid)
                _tell({"ended": name, "code": os.waitstatus_to_exitcode(status)})


def _become(order: Mapping[str, Any]) -> None:
    """Turn this fork into the program that was ordered; does not return."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        out = os.open(order["out"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        for old, new in ((nothing, 0), (out, 1), (out, 2)):
            os.dup2(old, new)
        os.chdir(order["directory"])
        os.environ.update(order["environment"])
        sys.argv = ["holdfast", *order["argv"]]
        module, _, function = order["target"].partition(":")
        run: Callable[[], Any] = getattr(import_module(module), function)
        run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the last stop of this process
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _tell(line: Mapping[str, Any]) -> None:
    os.write(1, json.dumps(line).encode() + b"\n")


if __name__ == "__main__":
    main()
