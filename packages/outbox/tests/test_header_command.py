"""Commands that print the value of a header."""

import sys
from pathlib import Path

import msgspec
import pytest

from onceward_outbox.cli.commands import HeaderCommands, parse_header_command
from onceward_outbox.entry import Entry
from onceward_protocol.cli.output import CommandError
from packages.outbox.tests.samples import entry


def command(source: str) -> str:
    return f'"{sys.executable}" -c "{source}"'


def refused(claim: int) -> Entry:
    return msgspec.structs.replace(entry(last=401), claim_number=claim)


def test_the_command_runs_once_and_again_after_a_refusal(tmp_path: Path) -> None:
    log = tmp_path / "runs"
    source = f"f = open('{log}', 'a+'); f.write('x'); f.seek(0); print(len(f.read()))"
    headers = HeaderCommands([("X-Proof", command(source))])
    assert [headers(entry()) for _ in range(2)] == [{"X-Proof": "1"}] * 2
    # Reads that belong to one attempt use one value.
    assert [headers(refused(2)) for _ in range(2)] == [{"X-Proof": "2"}] * 2
    assert headers(refused(3)) == {"X-Proof": "3"}
    assert headers(entry()) == {"X-Proof": "3"}


def test_there_is_no_shell(tmp_path: Path) -> None:
    headers = HeaderCommands([("X-Proof", f"echo $HOME; touch {tmp_path}/made")])
    assert headers(entry()) == {"X-Proof": f"$HOME; touch {tmp_path}/made"}
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import sys; print('secret'); sys.exit(3)", "ended with 3"),
        ("import time; time.sleep(60)", "not ended after 0.2 s"),
        ("print('secret'); print('secret')", "one line of ASCII"),
        ("print()", "one line of ASCII"),
        ("print(chr(233))", "one line of ASCII"),
    ],
)
def test_a_command_that_fails_is_reported_without_its_output(source: str, error: str) -> None:
    limit = 0.2 if "sleep" in source else 30
    headers = HeaderCommands([("X-Proof", command(source))], max_seconds=limit)
    with pytest.raises(CommandError, match=error) as caught:
        headers(entry())
    assert "secret" not in str(caught.value)
    assert "X-Proof" in str(caught.value)


def test_a_command_that_does_not_exist_is_reported() -> None:
    with pytest.raises(CommandError, match="cannot be run: /no/such/program"):
        HeaderCommands([("X-Proof", "/no/such/program")])(entry())


@pytest.mark.parametrize(
    "given", ["X-Proof", "X-Proof:", ": echo", "X Proof: echo", "Authorization: echo", "X-P: '"]
)
def test_a_malformed_option_is_refused(given: str) -> None:
    with pytest.raises(CommandError):
        HeaderCommands([parse_header_command(given)])
