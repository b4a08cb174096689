"""``holdfast bench`` as a command: one line for what cannot be meant, and an end in good order."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast_lab.bench.__main__ import main

HOLDFAST = str(Path(sys.executable).with_name("holdfast"))
CHECKOUT = Path(__file__).parents[4]


def bench(*options: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [HOLDFAST, "bench", *options],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--rounds", "0"], "--rounds: should be a number from 1"),
        (["--seconds", "-1"], "--seconds: should be from"),
        (["--seconds", "inf"], "--seconds: should be from"),
        (["--rows", "0"], "--rows: should be a number from 2,000"),
        (["--only", "nope"], "--only: invalid choice: 'nope'"),
        (["--only", "fingerprint", "--results", "/proc/x"], "--results /proc/x: "),
    ],
)
def test_what_cannot_be_meant_is_one_line_and_ends_with_2(
    options: list[str],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = main(options)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else -1
    said = capsys.readouterr()
    assert (code, said.out, said.err.count("\n")) == (2, "", 1)
    assert told in said.err


def test_the_command_ends_as_its_main_function_does(tmp_path: Path) -> None:
    ran = bench("--rows", "0", cwd=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)


def test_the_help_says_what_it_does(tmp_path: Path) -> None:
    ran = bench("--help", cwd=tmp_path)
    assert ran.returncode == 0
    assert "Every speed line" in ran.stdout
    assert "``" not in ran.stdout


def test_results_and_pictures_go_below_the_current_directory(tmp_path: Path) -> None:
    before = (CHECKOUT / "bench" / "results" / "latest.json").read_bytes()
    ran = bench("--only", "fingerprint", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    folder = tmp_path / "bench" / "results"
    assert {path.name for path in folder.iterdir()} == {"latest.json", "at-most.svg"}
    assert (CHECKOUT / "bench" / "results" / "latest.json").read_bytes() == before


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_the_parts_that_have_ended(sign: signal.Signals, tmp_path: Path) -> None:
    command = [HOLDFAST, "bench", "--results", str(tmp_path), "--rounds", "100"]
    command += ["--only", "sqlite", "fingerprint"]
    (tmp_path / "latest.json").write_text(json.dumps({"made": {"walk": {"at": "before"}}}))
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        _until(tmp_path / "latest.json", '"lines": []')
        time.sleep(1)
        process.send_signal(sign)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 0
    assert told.startswith("holdfast: stopped before the end; kept: nothing")
    assert told.count("\n") == 1
    assert json.loads((tmp_path / "latest.json").read_text())["made"] == {"walk": {"at": "before"}}


def _until(path: Path, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in path.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
