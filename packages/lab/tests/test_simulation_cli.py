"""``onceward simulate``: JSON counts, replays, signals and invalid options."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from onceward_lab.simulation.faults import POINTS

TIMEOUT_SECONDS = 120


def onceward(*args: str) -> "subprocess.CompletedProcess[str]":
    command = [str(Path(sys.executable).with_name("onceward")), "simulate", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_json_contains_the_counts() -> None:
    ran = onceward("--seeds", "12", "--jobs", "1", "--json")
    assert ran.returncode == 0, ran.stderr
    facts: dict[str, Any] = json.loads(ran.stdout)
    assert ran.stdout.count("\n") == 1
    assert (facts["violations"], facts["planted"]) == (0, None)
    assert (facts["seeds"], facts["good"], facts["failing"]) == (12, True, [])
    assert facts["taps"] > 0
    assert facts["effects"] > 0
    assert sum(facts["faults"].values()) > 0
    assert sum(facts["points"].values()) > 0


def test_json_contains_every_fault_point_and_those_without_a_fault() -> None:
    ran = onceward("--seeds", "3", "--jobs", "1", "--json")
    facts: dict[str, Any] = json.loads(ran.stdout)
    assert list(facts["points"]) == list(facts["struck"]) == list(POINTS)
    assert 0 in facts["struck"].values()
    assert facts["unvisited"] == [point for point in POINTS if not facts["struck"][point]]
    assert facts["good"]  # only a long run must reach every fault point


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_run_and_prints_the_counts(signal_number: signal.Signals) -> None:
    command = [str(Path(sys.executable).with_name("onceward")), "simulate", "--jobs", "1"]
    with subprocess.Popen(
        [*command, "--seconds", "600"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        _wait_for_children(process.pid)
        process.send_signal(signal_number)
        out, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert (process.returncode, errors) == (0, "")
    # A line of progress comes first where the last seed took ten seconds.
    assert "\tcount" in out.splitlines()
    assert "no guarantee was violated\nstopped early" in out


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_search_in_the_background_leaves_no_process(signal_number: signal.Signals) -> None:
    """A shell without job control starts it with SIGINT ignored."""
    command = [str(Path(sys.executable).with_name("onceward")), "simulate", "--planted"]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        _wait_for_children(process.pid)
        time.sleep(0.5)  # some are importing, some search
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal_number)
        process.wait(TIMEOUT_SECONDS)
    _, alive = psutil.wait_procs(children, TIMEOUT_SECONDS)
    assert alive == []


def _wait_for_children(pid: int) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not psutil.Process(pid).children() and time.monotonic() < deadline:
        time.sleep(0.05)


def test_a_replay_is_the_same_in_every_process() -> None:
    first, again = onceward("--seed", "21"), onceward("--seed", "21")
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
def test_invalid_options_are_rejected_in_one_line(options: tuple[str, ...]) -> None:
    ran = onceward(*options)
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert "Traceback" not in ran.stderr
