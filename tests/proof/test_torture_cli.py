"""The command: counts for scripts, a replay for people, and one line for bad input."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def holdfast(*args: str) -> "subprocess.CompletedProcess[str]":
    command = [str(Path(sys.executable).with_name("holdfast")), "torture", *args]
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


def test_a_replay_is_the_same_in_every_process() -> None:
    first, again = holdfast("--seed", "21"), holdfast("--seed", "21")
    assert first.returncode == 0, first.stderr
    assert first.stdout == again.stdout
    assert "all promises kept" in first.stdout


def test_options_that_contradict_each_other_are_refused_in_one_line() -> None:
    ran = holdfast("--seed", "1", "--seeds", "5")
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert "Traceback" not in ran.stderr
