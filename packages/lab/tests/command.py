"""Runs a command of the lab in this process."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from onceward_protocol.cli.main import _run, report_errors
from packages.services.tests.cli.conftest import environment


@dataclass
class Done:
    """The result of a command."""

    code: int
    out: str
    err: str


Command = Callable[..., Done]


def command_in(
    directory: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Command:
    """Return a function that runs the command in this directory, with a clean environment."""
    monkeypatch.chdir(directory)
    for variable in set(os.environ) - set(environment()):
        monkeypatch.delenv(variable)

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["onceward", name, *arguments])
        code = report_errors(_run)
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return run
