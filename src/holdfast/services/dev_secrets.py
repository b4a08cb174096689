"""Secrets for development: made once, kept in the home directory, the same for every process.

The one secret so far signs tokens (``jwt-secret``); the App Check key pair will stand beside it.
"""

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Final

from holdfast.errors import ConfigurationError

__all__ = ["JWT_SECRET", "development_secret"]

JWT_SECRET: Final = "jwt-secret"  # noqa: S105 - the name of the file, not what is in it


def development_secret(home: Path, name: str = JWT_SECRET) -> str:
    """Return the secret of that name, making it if it is not there yet."""
    path = home / name
    try:
        if not path.exists():
            _make(path)
        secret = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigurationError(
            f"cannot keep a development secret in {path}: {reason}; "
            "set HOLDFAST_HOME to a directory of your own, or set HOLDFAST_JWT_SECRET"
        ) from error
    if not secret:
        raise ConfigurationError(f"{path} is empty: delete it, and a new secret will be made")
    return secret


def _make(path: Path) -> None:
    """Write it aside, then link it into place: whole or not at all, and the first one stays."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(48) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):  # another process was first: its secret counts
            os.link(aside, path)
    finally:
        aside.unlink(missing_ok=True)
