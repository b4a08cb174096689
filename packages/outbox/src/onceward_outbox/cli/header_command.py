"""Headers whose values a command prints, such as an attestation, for ``onceward outbox drain``."""

import re
import shlex
import subprocess
from collections.abc import Iterable, Mapping
from threading import Lock
from typing import Final

from onceward_outbox.entry import Entry
from onceward_protocol.cli.output import CommandError

__all__ = ["APP_CHECK_HEADER", "HeaderCommands", "parse_header_command"]

APP_CHECK_HEADER: Final = "X-Firebase-AppCheck"

_MAX_SECONDS: Final = 30.0
_BAD_INPUT: Final = 2
_REFUSED: Final = 401
_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE: Final = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
# The drain makes these itself.
_RESERVED: Final = frozenset({"authorization", "host", "content-length", "transfer-encoding"})


def parse_header_command(given: str) -> tuple[str, str]:
    """Return the name and the command in ``NAME: COMMAND``."""
    name, colon, command = given.partition(":")
    name, command = name.strip(), command.strip()
    if not colon or not _NAME.fullmatch(name) or not command:
        raise CommandError("a --header-command should look like 'X-Proof: ./proof --fresh'", 2)
    if name.lower() in _RESERVED:
        raise CommandError(f"--header-command cannot set {name}", _BAD_INPUT)
    return name, command


class HeaderCommands:
    """Runs commands for the values of headers. Safe for use by several threads.

    A command runs without a shell, at the first send, and again for an entry that the server has
    refused with 401: the value may be valid for some minutes only. Its output is never shown.
    """

    def __init__(
        self, commands: Iterable[tuple[str, str]], *, max_seconds: float = _MAX_SECONDS
    ) -> None:
        """Raise ``CommandError`` for a command that cannot be parsed."""
        self._commands = {name: _words(name, command) for name, command in commands}
        self._max_seconds = max_seconds
        self._values: dict[str, str] | None = None
        # The attempt of each entry for which the values were made.
        self._made_for: dict[str, int] = {}
        self._lock = Lock()

    def __call__(self, entry: Entry) -> Mapping[str, str]:
        """Return the headers for a send of this entry."""
        with self._lock:
            was_refused = entry.last_error_code == _REFUSED and (
                self._made_for.get(entry.id) != entry.claim_number
            )
            if self._values is None or was_refused:
                self._values = {
                    name: self._output_of(name, words) for name, words in self._commands.items()
                }
                self._made_for[entry.id] = entry.claim_number
            return self._values

    def _output_of(self, name: str, words: list[str]) -> str:
        try:
            done = subprocess.run(  # noqa: S603 - the user's own command
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                timeout=self._max_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CommandError(
                f"the command for {name} has not ended after {self._max_seconds:g} s"
            ) from None
        except OSError as error:
            raise CommandError(
                f"the command for {name} cannot be run: {words[0]}: {error.strerror}"
            ) from None
        if done.returncode != 0:
            raise CommandError(f"the command for {name} ended with {done.returncode}")
        value = done.stdout.decode("ascii", "replace").strip()
        if not _VALUE.fullmatch(value):
            # Not shown: it was meant to be a secret.
            raise CommandError(f"the command for {name} should print one line of ASCII text")
        return value


def _words(name: str, command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise CommandError(f"the command for {name} cannot be parsed: {error}", 2) from None
    if not words:
        raise CommandError(f"the command for {name} is empty", _BAD_INPUT)
    return words
