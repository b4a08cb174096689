"""Where the command starts, and where every error becomes one line."""

import os
import sys
from collections.abc import Callable
from typing import Final

from holdfast.cli.gc import hold_collector, release_collector
from holdfast.cli.output import Failure, complain
from holdfast.errors import HoldfastError, UsageError

__all__ = ["main", "tell_errors"]

_BAD_INPUT: Final = 2
_FAILED: Final = 1
_INTERRUPTED: Final = 130


def main() -> None:
    """Run the command line."""
    hold_collector()
    try:
        sys.exit(tell_errors(_run))
    finally:
        release_collector()


def tell_errors(work: Callable[[], int]) -> int:
    """Run something; whatever goes wrong is told in one line. Returns the exit code."""
    try:
        return work()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader has left, as `holdfast keys ls | head` does. Python's own flush at exit
        # would complain once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    except Exception as error:  # noqa: BLE001 - the last stop: no traceback for a person
        line, code = _told(error)
        complain(line)
        return code


def _told(error: Exception) -> tuple[str, int]:
    """Return what a person is told, and the exit code."""
    match error:
        case Failure():
            return str(error), error.code
        case UsageError():
            return str(error), _BAD_INPUT
        case HoldfastError():
            return str(error), _FAILED
        case OSError():
            return error.strerror or str(error), _FAILED
        case ModuleNotFoundError():
            return f'this needs the package {error.name}: pip install "holdfast[all]"', _FAILED
        case _:
            what = f"{type(error).__name__}: {error}"
            return f"unexpected {what} (this is a bug; please report it)", _FAILED


def _run() -> int:
    try:
        from holdfast.cli.commands import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        raise Failure(
            'the command line needs more packages: pip install "holdfast[cli]"'
        ) from error
    try:
        # Not standalone: typer's own errors are boxes of several lines.
        code = app(prog_name="holdfast", standalone_mode=False)
    except Exception as error:
        # The class moved from click into typer lately; what it can do tells it apart.
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "holdfast"
        raise Failure(f"{error.format_message()} (try: {command} --help)", _BAD_INPUT) from error
    return code if isinstance(code, int) else 0
