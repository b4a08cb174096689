"""The fork server runs functions in new processes, reports how they ended, and kills them."""

import os
import sys
import time
from pathlib import Path

import pytest

from onceward_testing.fork_server import ForkServer

ROOT = Path(__file__).parents[3]


def append_pid(path: str) -> None:
    print("output of a child must not disturb the protocol")
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")


def fail() -> None:
    raise SystemExit(7)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def server() -> ForkServer:
    return ForkServer(__name__, cwd=ROOT)


def test_calls_run_in_separate_processes_and_return_exit_codes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with server() as processes:
        assert processes.run(*[("append_pid", {"path": str(log)})] * 3, ("fail", {})) == [
            0,
            0,
            0,
            7,
        ]
        assert processes.run(("append_pid", {"path": str(log)})) == [0]
    pids = {int(line) for line in log.read_text().splitlines()}
    assert len(pids) == 4
    assert os.getpid() not in pids


def test_exception_is_exit_code_1_and_its_traceback_goes_to_stderr(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with server() as processes:
        assert processes.run(("sleep", {"seconds": "not a number"})) == [1]
    assert "TypeError" in capfd.readouterr().err


def test_processes_are_killed_after_the_limit() -> None:
    with server() as processes:
        calls = [("sleep", {"seconds": 60}), ("sleep", {"seconds": 0})]
        assert processes.run(*calls, kill_after=0.3) == [-9, 0]


def test_module_that_cannot_be_imported_is_an_error() -> None:
    processes = ForkServer("no.such.module", cwd=ROOT)
    with pytest.raises(RuntimeError, match="ended early"), processes:
        processes.run(("sleep", {"seconds": 0}))
    assert "no.such.module" not in sys.modules


def test_use_outside_a_with_block_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="with block"):
        server().run(("fail", {}))
