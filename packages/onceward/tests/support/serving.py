"""Start and stop the shop as a real server process."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

ROOT = Path(__file__).parents[4]


def free_port() -> int:
    """Return an unused port below the ephemeral range."""
    while True:
        port = 15000 + secrets.randbelow(15000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class ShopProcess:
    """The shop of ``packages.onceward.tests.support.shop`` in its own process."""

    def __init__(self, database: str, **environment: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._environment = {
            **os.environ,
            "SHOP_DATABASE": database,
            "SHOP_PORT": str(self.port),
            **environment,
        }
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self, **environment: str) -> None:
        command = [sys.executable, "-m", "packages.onceward.tests.support.shop"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env={**self._environment, **environment}
        )
        self._wait_until_up()

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def wait_until_killed(self) -> int:
        """Wait for the process to die by itself, and return how."""
        assert self._process is not None
        status = self._process.wait(timeout=15)
        self._process = None
        return status

    def _wait_until_up(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + 120  # only to detect a hang: machines may be busy
        # One client: to make one reads all certificates of the machine, which takes long.
        with httpx.Client(timeout=10) as client:
            while time.monotonic() < deadline:
                if self._process.poll() is not None:
                    raise RuntimeError(f"the shop ended with {self._process.returncode}")
                with contextlib.suppress(httpx.TransportError):
                    client.get(f"{self.url}/orders")
                    return
                time.sleep(0.05)
        raise RuntimeError("the shop did not come up")
