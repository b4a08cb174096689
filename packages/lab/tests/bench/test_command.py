"""The command ``onceward bench``: bad options, results, and signals."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onceward_lab.bench.__main__ import main

ONCEWARD = str(Path(sys.executable).with_name("onceward"))
CHECKOUT = Path(__file__).parents[4]


def bench(*options: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [ONCEWARD, "bench", *options],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--rounds", "0"], "--rounds: should be a number from 1"),
        (["--seconds", "-1"], "--seconds: should be from"),
        (["--seconds", "inf"], "--seconds: should be from"),
        (["--rows", "0"], "--rows: should be a number from 2,000"),
        (["--only", "nope"], "--only: invalid choice: 'nope'"),
        (["--only", "fingerprint", "--results", "/proc/x"], "--results /proc/x: "),
    ],
)
def test_bad_option_is_one_line_and_exits_with_2(
    options: list[str],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = main(options)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else -1
    captured = capsys.readouterr()
    assert (code, captured.out, captured.err.count("\n")) == (2, "", 1)
    assert expected in captured.err


def test_command_returns_the_exit_code_of_main(tmp_path: Path) -> None:
    ran = bench("--rows", "0", cwd=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)


def test_help_describes_the_command(tmp_path: Path) -> None:
    ran = bench("--help", cwd=tmp_path)
    assert ran.returncode == 0
    assert "Run the benchmarks" in ran.stdout
    assert "``" not in ran.stdout


def test_results_and_charts_are_written_below_the_current_directory(tmp_path: Path) -> None:
    before = (CHECKOUT / "bench" / "results" / "latest.json").read_bytes()
    ran = bench("--only", "fingerprint", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    folder = tmp_path / "bench" / "results"
    assert {path.name for path in folder.iterdir()} == {"latest.json", "at-most.svg"}
    assert (CHECKOUT / "bench" / "results" / "latest.json").read_bytes() == before


def test_draw_only_draws_the_charts_of_existing_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    latest = (CHECKOUT / "bench" / "results" / "latest.json").read_bytes()
    (tmp_path / "latest.json").write_bytes(latest)
    assert main(["--draw-only", "--results", str(tmp_path)]) == 0
    charts = {"at-least.svg", "at-most.svg", "compare.svg", "growth.svg"}
    assert {path.name for path in tmp_path.iterdir()} == {"latest.json", *charts}
    assert (tmp_path / "latest.json").read_bytes() == latest
    committed = (CHECKOUT / "bench" / "results" / "compare.svg").read_text()
    assert (tmp_path / "compare.svg").read_text() == committed
    capsys.readouterr()


def test_draw_only_without_results_is_one_line_and_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--draw-only", "--results", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_signal_keeps_the_finished_suites(sign: signal.Signals, tmp_path: Path) -> None:
    # As a shell starts a command in the background of a script: SIGINT is ignored at first.
    command = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]
    command += [ONCEWARD, "bench", "--results", str(tmp_path), "--rounds", "100"]
    command += ["--only", "sqlite", "fingerprint"]
    (tmp_path / "latest.json").write_text(json.dumps({"runs": {"walk": {"at": "before"}}}))
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        _wait_for_text(tmp_path / "latest.json", '"measurements": []')
        time.sleep(1)
        process.send_signal(sign)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert errors.startswith("onceward: stopped before the end; kept: nothing")
    assert errors.count("\n") == 1
    assert json.loads((tmp_path / "latest.json").read_text())["runs"] == {"walk": {"at": "before"}}


def _wait_for_text(path: Path, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in path.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
