"""Fixtures that run ``onceward`` in an empty directory."""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onceward_protocol.cli.main import main
from packages.protocol.tests.cli.harness import Cli, Done, Here, environment


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Iterator[Here]:
    """Run commands in this process: a new process takes most of a second to import everything."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    root = logging.getLogger()
    logs, level = list(root.handlers), root.level
    monkeypatch.chdir(tmp_path)
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)

    def run(*arguments: str, **variables: str) -> Done:
        capfdbinary.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["onceward", *arguments])
            for name, value in variables.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as end:
                main()
        out, err = capfdbinary.readouterr()
        return Done(int(str(end.value.code)), out, err)

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
    # Commands log to the stderr of their start, which is closed after the test.
    root.handlers[:] = logs
    root.setLevel(level)
