"""A bell between the processes that share one SQLite file: a datagram socket per listener.

SQLite tells nobody that something was committed. Each listener binds a socket in a folder that is
named after the file; whoever rings sends one byte to each. A socket nobody reads any more is
removed by whoever finds it. Where there are no such sockets, workers look once a second.
"""

import asyncio
import os
import socket
import tempfile
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from holdfast.stores.notifier import LocalNotifier

__all__ = ["SocketNotifier"]

_FAMILY: Final = getattr(socket, "AF_UNIX", None)


class SocketNotifier(LocalNotifier):
    """Rings in every process of this user that works on the file."""

    def __init__(self, database: str) -> None:
        """Name the folder; nothing is made before ``open``."""
        super().__init__()
        # Not beside the file: the path of a socket must fit into about 100 bytes.
        name = sha256(os.path.realpath(database).encode()).hexdigest()[:16]
        self._folder = Path(tempfile.gettempdir()) / f"holdfast-{os.getuid()}-{name}"
        self._own: Path | None = None
        self._socket: Any = None

    async def open(self) -> None:
        """Bind a socket and read it with the event loop."""
        if self._socket is not None:
            return
        await super().open()
        if _FAMILY is None:
            return
        for _ in range(3):  # whoever leaves last removes the folder: just now, perhaps
            with suppress(OSError):
                self._listen(_FAMILY)
                return

    def _listen(self, family: int) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if not _is_ours(self._folder):
            return
        own = self._folder / f"{os.getpid()}-{id(self):x}"
        listening = socket.socket(family, socket.SOCK_DGRAM)
        try:
            own.unlink(missing_ok=True)
            listening.bind(str(own))
        except OSError:
            listening.close()
            raise
        listening.setblocking(False)
        self._own, self._socket = own, listening
        asyncio.get_running_loop().add_reader(listening, self._heard)

    async def close(self) -> None:
        """Take the socket away."""
        listening, self._socket = self._socket, None
        if listening is not None:
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        if self._own is not None:
            self._own.unlink(missing_ok=True)
            self._own = None
            with suppress(OSError):  # somebody else listens
                self._folder.rmdir()

    def notify(self) -> None:
        """Wake this process, and everyone whose socket is in the folder."""
        super().notify()
        if _FAMILY is None:
            return
        try:
            others = [
                Path(entry) for entry in os.scandir(self._folder) if entry.path != str(self._own)
            ]
        except OSError:  # nobody listens
            return
        if not others or not _is_ours(self._folder):
            return
        with socket.socket(_FAMILY, socket.SOCK_DGRAM) as ringing:
            ringing.setblocking(False)
            for other in others:
                try:
                    ringing.sendto(b"!", str(other))
                except ConnectionRefusedError:  # its process is gone
                    other.unlink(missing_ok=True)
                except OSError:  # full: it is awake already
                    continue

    def _heard(self) -> None:
        with suppress(OSError):
            while self._socket.recv(64):
                pass
        LocalNotifier.notify(self)


def _is_ours(folder: Path) -> bool:
    """Refuse a folder that another user has put there: it could send us anywhere."""
    about = folder.lstat()
    return about.st_uid == os.getuid() and (about.st_mode & 0o077) == 0
