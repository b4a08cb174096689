"""Run by ``test_interrupted.py``, which ends it: real servers, and a process of a test's own."""

import os
import subprocess
import threading
from pathlib import Path

import pytest

from onceward_testing.servers import RealPostgres, RealRedis


@pytest.mark.parametrize("number", range(2))
def test_ends_never(number: int, postgres: RealPostgres, redis_server: RealRedis) -> None:
    assert postgres.pid
    assert redis_server.pid
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(os.environ["ENDLESS_FOLDER"], f"{number}").touch()
    threading.Event().wait()
