"""The demo convinces over a pipe, leaves nothing behind, and would say so if the promise broke."""

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast_lab.demo.device import PLACES, USER
from holdfast_lab.demo.verdict import Verdict, judge
from holdfast_lab.effects import Document, Effects
from holdfast_lab.user_actions import SHORT_DAY, marks_of, visit

HOLDFAST = str(Path(sys.executable).with_name("holdfast"))
COUNTS = {
    "requests": 60,
    "answers_lost": 20,
    "kills": 2,
    "replays": 20,
    "troubles": (),
    "seconds": 10.0,
}


def test_forty_taps_happen_once_over_a_pipe_and_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    done = subprocess.run(
        [HOLDFAST, "demo"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    said = {
        words[0]: int(words[1])
        for line in done.stdout.splitlines()
        if len(words := line.strip().rsplit(maxsplit=1)) == 2 and words[1].isdigit()
    }
    assert (said["taps"], said["effects"], said["duplicates"], said["lost"]) == (40, 40, 0, 0)
    assert said["kill -9 of the device"] == 2
    # What is lost after the server has acted is asked for again, and answered from memory.
    assert said["answers lost"] >= 10
    assert said["answered from memory"] >= 10
    assert said["requests sent"] >= 50
    assert "\x1b" not in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_one_line_and_nothing_is_left_behind(
    sign: signal.Signals, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [HOLDFAST, "demo"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(sign)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 0
    assert told.startswith("holdfast: stopped")
    assert told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def effects() -> Effects:
    """Return what there is when everything happened once."""
    documents: list[Document] = []
    for place in PLACES:
        entries = list(visit(USER, place))
        title = tuple(marks_of(entries.pop().payload))
        made = [Document(e.entity_type, 1, tuple(marks_of(e.payload))) for e in entries]
        documents += [replace(made[0], version=2, marks=made[0].marks + title), *made[1:]]
    return Effects({USER: list(SHORT_DAY)}, {USER: documents})


def judged(found: Effects) -> Verdict:
    return judge(found, **COUNTS)


def test_the_verdict_holds_when_everything_happened_once() -> None:
    verdict = judged(effects())
    assert (verdict.taps, verdict.effects, verdict.holds) == (40, 40, True)


def test_a_document_that_was_made_twice_breaks_the_promise() -> None:
    found = effects()
    found.documents[USER].append(found.documents[USER][-1])
    verdict = judged(found)
    assert (verdict.duplicates, verdict.lost, verdict.holds) == (1, 0, False)


def test_a_change_that_was_made_twice_breaks_the_promise() -> None:
    found = effects()
    found.documents[USER][0] = replace(found.documents[USER][0], version=3)
    verdict = judged(found)
    assert (verdict.duplicates, verdict.lost, verdict.holds) == (1, 0, False)


def test_a_tap_that_never_happened_breaks_the_promise() -> None:
    found = effects()
    del found.walk[USER][-1]
    del found.documents[USER][-1]
    verdict = judged(found)
    assert (verdict.duplicates, verdict.lost, verdict.holds) == (0, 2, False)


def test_walk_out_of_order_breaks_the_promise() -> None:
    found = effects()
    acts = found.walk[USER]
    acts[3], acts[4] = acts[4], acts[3]
    verdict = judged(found)
    assert (verdict.duplicates, verdict.lost, verdict.in_order, verdict.holds) == (
        0,
        0,
        False,
        False,
    )
