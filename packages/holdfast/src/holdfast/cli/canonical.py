"""Canonical JSON from a file or from standard input."""

import sys
from collections.abc import Sequence
from pathlib import Path

from holdfast.cli.output import Failure
from holdfast.core.canonical_json import canonical_json
from holdfast.errors import BodyInvalidError

__all__ = ["canonical_of"]


def canonical_of(file: Path | None, volatile: Sequence[str]) -> bytes:
    """Read JSON and return its canonical form; ends the command where it is not JSON."""
    name = "standard input" if file is None or str(file) == "-" else str(file)
    try:
        raw = sys.stdin.buffer.read() if name == "standard input" else Path(name).read_bytes()
    except OSError as error:
        raise Failure(f"cannot read {name}: {error.strerror}", 2) from error
    try:
        return canonical_json(raw, volatile=frozenset(volatile))
    except BodyInvalidError as error:
        raise Failure(f"{name}: {error}", 2) from error
