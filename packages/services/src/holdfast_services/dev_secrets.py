"""Secrets for development: made once, kept in the home directory, the same for every process.

One secret signs the tokens people sign in with (``jwt-secret``). Beside it stands the key pair of
App Check tokens (``app-check-key.json``): one file, a JWKS with the private part in it, so that no
process can ever see half a pair. The server reads only the public part of it.
"""

import json
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from holdfast.errors import ConfigurationError

__all__ = ["APP_CHECK_KEY", "JWT_SECRET", "development_app_check_key", "development_secret"]

JWT_SECRET: Final = "jwt-secret"  # noqa: S105 - the name of the file, not what is in it
APP_CHECK_KEY: Final = "app-check-key.json"

_RSA_BITS: Final = 2048


def development_secret(home: Path, name: str = JWT_SECRET) -> str:
    """Return the secret of that name, making it if it is not there yet."""
    path = home / name
    try:
        if not path.exists():
            _make(path, lambda: secrets.token_urlsafe(48))
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


def development_app_check_key(home: Path) -> Path:
    """Return the file with the App Check key pair, making it if it is not there yet."""
    path = home / APP_CHECK_KEY
    try:
        if not path.exists():
            _make(path, _new_key_pair)
    except OSError as error:
        raise ConfigurationError(
            f"cannot keep a development key in {path}: {error.strerror}; set HOLDFAST_HOME to a "
            "directory of your own, or set HOLDFAST_APP_CHECK_JWKS_URL"
        ) from error
    return path


def _new_key_pair() -> str:
    from cryptography.hazmat.primitives.asymmetric import rsa  # noqa: PLC0415 - rarely needed
    from jwt.algorithms import RSAAlgorithm  # noqa: PLC0415

    key = rsa.generate_private_key(public_exponent=65_537, key_size=_RSA_BITS)
    jwk: dict[str, Any] = RSAAlgorithm.to_jwk(key, as_dict=True)
    jwk.pop("key_ops", None)
    jwk |= {"alg": "RS256", "use": "sig", "kid": f"development-{secrets.token_hex(4)}"}
    return json.dumps({"keys": [jwk]})


def _make(path: Path, content: Callable[[], str]) -> None:
    """Write it aside, then link it into place: whole or not at all, and the first one stays."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(content() + "\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):  # another process was first: its secret counts
            os.link(aside, path)
    finally:
        aside.unlink(missing_ok=True)
