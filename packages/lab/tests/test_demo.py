"""The demo runs over a pipe, leaves no files behind, and reports lost and doubled effects."""

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from onceward_lab.demo.device import PLACES, USER
from onceward_lab.demo.result import DemoResult, compare
from onceward_lab.effects import Document, Effects
from onceward_lab.user_actions import SHORT_DAY, marks_of, visit

ONCEWARD = str(Path(sys.executable).with_name("onceward"))
COUNTS = {
    "requests": 60,
    "responses_lost": 20,
    "kills": 2,
    "replays": 20,
    "errors": (),
    "seconds": 10.0,
}


def test_forty_actions_take_effect_once_and_no_files_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    done = subprocess.run(
        [ONCEWARD, "demo"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    printed = {
        words[0]: int(words[1])
        for line in done.stdout.splitlines()
        if len(words := line.strip().rsplit(maxsplit=1)) == 2 and words[1].isdigit()
    }
    assert (printed["user actions"], printed["effects"]) == (40, 40)
    assert (printed["doubled"], printed["lost"]) == (0, 0)
    assert printed["kill -9 of the device"] == 2
    # A request whose response was lost is sent again and replayed.
    assert printed["responses lost"] >= 10
    assert printed["replays"] >= 10
    assert printed["requests sent"] >= 50
    assert "\x1b" not in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_demo_with_one_line_and_no_files(
    sign: signal.Signals, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [ONCEWARD, "demo"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(sign)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert errors.startswith("onceward: interrupted")
    assert errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def effects() -> Effects:
    """Return the effects of a run in which every action took effect once."""
    documents: list[Document] = []
    for place in PLACES:
        entries = list(visit(USER, place))
        title = tuple(marks_of(entries.pop().payload))
        made = [Document(e.entity_type, 1, tuple(marks_of(e.payload))) for e in entries]
        documents += [replace(made[0], version=2, marks=made[0].marks + title), *made[1:]]
    return Effects({USER: list(SHORT_DAY)}, {USER: documents})


def result_of(found: Effects) -> DemoResult:
    return compare(found, **COUNTS)


def test_result_holds_when_every_action_took_effect_once() -> None:
    result = result_of(effects())
    assert (result.actions, result.effects, result.holds) == (40, 40, True)


def test_document_created_twice_is_doubled() -> None:
    found = effects()
    found.documents[USER].append(found.documents[USER][-1])
    result = result_of(found)
    assert (result.doubled, result.lost, result.holds) == (1, 0, False)


def test_change_made_twice_is_doubled() -> None:
    found = effects()
    found.documents[USER][0] = replace(found.documents[USER][0], version=3)
    result = result_of(found)
    assert (result.doubled, result.lost, result.holds) == (1, 0, False)


def test_action_without_effect_is_lost() -> None:
    found = effects()
    del found.walk[USER][-1]
    del found.documents[USER][-1]
    result = result_of(found)
    assert (result.doubled, result.lost, result.holds) == (0, 2, False)


def test_walk_actions_out_of_order_are_reported() -> None:
    found = effects()
    acts = found.walk[USER]
    acts[3], acts[4] = acts[4], acts[3]
    result = result_of(found)
    assert (result.doubled, result.lost, result.in_order, result.holds) == (
        0,
        0,
        False,
        False,
    )
