"""``onceward canonical`` and ``hash``: exact output, invalid input."""

import json
from pathlib import Path

import pytest

from packages.protocol.tests.cli.harness import Cli, Here, one_line

FIXTURES = Path(__file__).parents[1] / "fixtures"
CASES = json.loads((FIXTURES / "golden_hashes.json").read_text())["cases"]
# Each takes a process; the tests of the core cover all cases.
SOME = [next(case for case in CASES if case["name"].startswith("rfc 8785")), CASES[-1]]


@pytest.mark.parametrize("case", SOME, ids=lambda case: case["name"])
def test_golden_cases_are_printed_byte_for_byte(cli: Cli, case: dict[str, str]) -> None:
    (cli.directory / "body.json").write_bytes(case["json"].encode())
    canonical = cli("canonical", "body.json")
    assert (canonical.returncode, canonical.stderr) == (0, b"")
    assert canonical.stdout == case["canonical"].encode()
    hashed = cli("hash", stdin=case["json"].encode())
    assert (hashed.returncode, hashed.stderr) == (0, b"")
    assert hashed.stdout == case["sha256"].encode() + b"\n"


def test_dash_reads_stdin_and_volatile_fields_are_removed(cli: Cli) -> None:
    body = b'{"b": 1, "sentAt": "now", "a": {"sentAt": 1}, "x": 2}'
    done = cli("canonical", "--volatile", "sentAt", "--volatile", "x", "-", stdin=body)
    assert done.stdout == b'{"a":{"sentAt":1},"b":1}'


@pytest.mark.parametrize("command", ["canonical", "hash"])
def test_bad_input_is_exit_2_with_one_line_and_no_output(cli: Cli, command: str) -> None:
    done = cli(command, stdin=b'{"a": 1, "a": 2}')
    assert (done.returncode, done.stdout) == (2, b"")
    assert "same key twice" in one_line(done.stderr)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"NaN", b"\xff", b'"\\ud800"', b"[" * 129 + b"]" * 129, b"1 2", b"1e999"]
)
def test_invalid_json_is_reported_in_one_line(
    body: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from onceward_protocol.cli.commands import canonical_of
    from onceward_protocol.cli.main import report_errors

    file = tmp_path / "body.json"
    file.write_bytes(body)
    assert report_errors(lambda: len(canonical_of(file, []))) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert str(file) in one_line(output.err.encode())


def test_missing_file_is_exit_2(here: Here) -> None:
    done = here("hash", "nowhere.json")
    assert (done.returncode, done.stdout) == (2, b"")
    assert "nowhere.json" in one_line(done.stderr)
