"""An interrupted test run leaves no process behind, and can be started again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

ROOT = Path(__file__).parents[1]
HANG_SECONDS = 100


@pytest.mark.timeout(2 * HANG_SECONDS)
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_survives(ending: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider"]
    run = subprocess.Popen(
        [*command, "tests/interrupted/endless.py"],
        cwd=ROOT,
        env={**os.environ, "ENDLESS_FOLDER": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + HANG_SECONDS
    try:
        while len(list(tmp_path.iterdir())) < 2:
            assert run.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        # Workers, servers of two kinds, guards, and processes that the tests started.
        children = psutil.Process(run.pid).children(recursive=True)
        names = {process.name().partition("-")[0] for process in children}
        assert {"postgres", "redis", "sh", "sleep"} <= names
        if ending is signal.SIGINT:
            os.killpg(run.pid, ending)  # as a terminal does
        else:
            run.send_signal(ending)
        run.wait(HANG_SECONDS)
    finally:
        run.kill()
        run.wait()
    _, alive = psutil.wait_procs(children, HANG_SECONDS)
    assert alive == []
