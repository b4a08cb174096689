"""A notifier for the processes that share one SQLite file: a datagram socket per listener.

SQLite has no notifications. Each listener binds a socket in a directory named after the file, and
``notify`` sends one byte to each. Sockets of ended processes are removed when a byte cannot be
sent. On systems without Unix sockets, workers poll once a second.
"""

import asyncio
import os
import socket
import tempfile
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from onceward.stores.notifier import LocalNotifier
from onceward.stores.table_names import DEFAULT_NAMES

_FAMILY: Final = getattr(socket, "AF_UNIX", None)
_DEFAULT_CHANNEL: Final = DEFAULT_NAMES.channel


class SocketNotifier(LocalNotifier):
    """Wakes the workers of this user's processes that use the file."""

    def __init__(self, database: str, *, channel: str = _DEFAULT_CHANNEL) -> None:
        super().__init__()
        place = os.path.realpath(database)
        if channel != _DEFAULT_CHANNEL:
            place = f"{place}#{channel}"
        # Not next to the file: the path of a socket must fit into about 100 bytes.
        name = sha256(place.encode()).hexdigest()[:16]
        self._folder = Path(tempfile.gettempdir()) / f"onceward-{os.getuid()}-{name}"
        self._own: Path | None = None
        self._socket: Any = None

    async def open(self) -> None:
        """Bind a socket and read it in the event loop."""
        if self._socket is not None:
            return
        await super().open()
        if _FAMILY is None:
            return
        for _ in range(3):  # another process may be removing the directory
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
        asyncio.get_running_loop().add_reader(listening, self._receive)

    async def close(self) -> None:
        listening, self._socket = self._socket, None
        if listening is not None:
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        if self._own is not None:
            self._own.unlink(missing_ok=True)
            self._own = None
            with suppress(OSError):  # other processes listen
                self._folder.rmdir()

    def notify(self) -> None:
        """Wake this process and every process with a socket in the directory."""
        super().notify()
        if _FAMILY is None:
            return
        try:
            others = [
                Path(entry) for entry in os.scandir(self._folder) if entry.path != str(self._own)
            ]
        except OSError:  # no process listens
            return
        if not others or not _is_ours(self._folder):
            return
        with socket.socket(_FAMILY, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            for other in others:
                try:
                    sender.sendto(b"!", str(other))
                except ConnectionRefusedError:  # its process has ended
                    other.unlink(missing_ok=True)
                except OSError:  # its buffer is full, so it is awake
                    continue

    def _receive(self) -> None:
        with suppress(OSError):
            while self._socket.recv(64):
                pass
        LocalNotifier.notify(self)


def _is_ours(folder: Path) -> bool:
    """Check that no other user has created or can write the directory."""
    about = folder.lstat()
    return about.st_uid == os.getuid() and (about.st_mode & 0o077) == 0
