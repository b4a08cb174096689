"""``onceward canonical`` and ``hash``: the canonical form of JSON from a file or stdin."""

import sys
from collections.abc import Sequence
from pathlib import Path

from onceward.cli.output import CommandError
from onceward.core.canonical_json import canonical_json
from onceward.errors import BodyInvalidError

__all__ = ["canonical_of"]


def canonical_of(file: Path | None, volatile: Sequence[str]) -> bytes:
    """Return the canonical form of the JSON in ``file`` (None or ``-``: stdin).

    Raises ``CommandError`` with exit code 2 if it cannot be read or is not valid JSON.
    """
    name = "standard input" if file is None or str(file) == "-" else str(file)
    try:
        raw = sys.stdin.buffer.read() if name == "standard input" else Path(name).read_bytes()
    except OSError as error:
        raise CommandError(f"cannot read {name}: {error.strerror}", 2) from error
    try:
        return canonical_json(raw, volatile=frozenset(volatile))
    except BodyInvalidError as error:
        raise CommandError(f"{name}: {error}", 2) from error
