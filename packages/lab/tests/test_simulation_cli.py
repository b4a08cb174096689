"""The command: counts for scripts, a replay for people, and one line for bad input."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from holdfast_lab.simulation.faults import POINTS

PATIENCE_SECONDS = 120


def holdfast(*args: str) -> "subprocess.CompletedProcess[str]":
    command = [str(Path(sys.executable).with_name("holdfast")), "simulate", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_a_short_run_counts_what_it_did() -> None:
    ran = holdfast("--seeds", "12", "--jobs", "1", "--json")
    assert ran.returncode == 0, ran.stderr
    facts: dict[str, Any] = json.loads(ran.stdout)
    assert (facts["seeds"], facts["good"], facts["failing"]) == (12, True, [])
    assert facts["taps"] > 0
    assert facts["effects"] > 0
    assert sum(facts["faults"].values()) > 0
    assert sum(facts["points"].values()) > 0


def test_a_short_run_tells_of_every_fault_point_and_where_nothing_happened() -> None:
    ran = holdfast("--seeds", "3", "--jobs", "1", "--json")
    facts: dict[str, Any] = json.loads(ran.stdout)
    assert list(facts["points"]) == list(facts["struck"]) == list(POINTS)
    assert 0 in facts["struck"].values()
    assert facts["unvisited"] == [point for point in POINTS if not facts["struck"][point]]
    assert facts["good"]  # so few seeds cannot come by every point


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_with_what_it_has_seen(sign: signal.Signals) -> None:
    command = [str(Path(sys.executable).with_name("holdfast")), "simulate", "--jobs", "1"]
    with subprocess.Popen(
        [*command, "--seconds", "600"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        _until_it_has_children(process.pid)
        process.send_signal(sign)
        out, told = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, told) == (0, "")
    assert out.splitlines()[0] == "\tcount"
    assert "no guarantee was violated\nstopped early" in out


def _until_it_has_children(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not psutil.Process(pid).children() and time.monotonic() < deadline:
        time.sleep(0.05)


def test_a_replay_is_the_same_in_every_process() -> None:
    first, again = holdfast("--seed", "21"), holdfast("--seed", "21")
    assert first.returncode == 0, first.stderr
    assert first.stdout == again.stdout
    assert "no violations" in first.stdout


@pytest.mark.parametrize(
    "options",
    [
        ("--seed", "1", "--seeds", "5"),
        ("--seed", "1", "--planted"),
        ("--seconds", "5", "--planted"),
        ("--seconds", "inf"),
        ("--seconds", "nan"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_in_one_line(options: tuple[str, ...]) -> None:
    ran = holdfast(*options)
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert "Traceback" not in ran.stderr
