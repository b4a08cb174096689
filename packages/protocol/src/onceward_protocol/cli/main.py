"""The entry point of ``onceward``. Every error ends as one line on stderr and an exit code."""

import os
import sys
from collections.abc import Callable
from typing import Final

from onceward_protocol.cli.gc import pause_gc, resume_gc
from onceward_protocol.cli.output import CommandError, print_error
from onceward_protocol.cli.plugins import (
    add_plugins,
    error_without_typer,
    install_argument,
)
from onceward_protocol.errors import OncewardError, UsageError

__all__ = ["main", "report_errors"]

_FAILED: Final = 1
_USAGE: Final = 2
_INTERRUPTED: Final = 130


def main() -> None:
    """Run the command line and exit: 0 success, 1 failure, 2 bad usage, 130 interrupted."""
    pause_gc()
    try:
        sys.exit(report_errors(_run))
    finally:
        resume_gc()


def report_errors(work: Callable[[], int]) -> int:
    """Call ``work`` and return its exit code; an exception becomes one line and an exit code."""
    try:
        return work()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe, as in `onceward keys ls | head`. Without a new stdout,
        # Python's flush at exit would print the error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    except Exception as error:  # noqa: BLE001 - the outermost handler: users get no traceback
        line, code = _describe(error)
        print_error(line)
        return code


def _describe(error: Exception) -> tuple[str, int]:
    """Return the line to print and the exit code."""
    match error:
        case CommandError():
            return str(error), error.code
        case UsageError():
            return str(error), _USAGE
        case OncewardError():
            return str(error), _FAILED
        case OSError():
            return error.strerror or str(error), _FAILED
        case ModuleNotFoundError():
            needed = install_argument(error.name or "")
            return f"this needs the package {error.name}: pip install {needed}", _FAILED
        case _:
            what = f"{type(error).__name__}: {error}"
            return f"unexpected {what} (this is a bug; please report it)", _FAILED


def _run() -> int:
    try:
        from onceward_protocol.cli.commands import create_app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        raise error_without_typer(sys.argv[1:]) from error
    app = create_app()
    add_plugins(app, sys.argv[1:])
    try:
        # Not standalone: typer prints its errors as boxes of several lines.
        code = app(prog_name="onceward", standalone_mode=False)
    except Exception as error:
        # Click's UsageError is at different places in different versions of typer.
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "onceward"
        raise CommandError(f"{error.format_message()} (try: {command} --help)", _USAGE) from error
    return code if isinstance(code, int) else 0
