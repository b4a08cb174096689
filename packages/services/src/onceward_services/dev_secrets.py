"""Secrets for development: created once, kept in the home directory, shared by every process.

``jwt-secret`` signs the tokens of users. ``app-check-key.json`` is the key pair of App Check
tokens: one JWKS file that includes the private key, so that no process can read half a pair. The
server reads only the public part.

A secret that another user could have read or replaced would let them sign in as anyone, so a
directory or file of another user, or one that others can write, is refused.
"""

import json
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from onceward.errors import ConfigurationError

__all__ = ["APP_CHECK_KEY", "JWT_SECRET", "development_app_check_key", "development_secret"]

JWT_SECRET: Final = "jwt-secret"  # noqa: S105 - a file name
APP_CHECK_KEY: Final = "app-check-key.json"

_RSA_BITS: Final = 2048
_WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH


def development_secret(home: Path, name: str = JWT_SECRET) -> str:
    """Return the secret of that name, creating it if it does not exist."""
    path = home / name
    try:
        _check_home(home)
        if not path.exists():
            _create(path, lambda: secrets.token_urlsafe(48))
        _check_file(path)
        secret = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not ASCII text"
        raise ConfigurationError(
            f"cannot keep a development secret in {path}: {reason}; "
            "set ONCEWARD_HOME to a writable directory, or set ONCEWARD_JWT_SECRET"
        ) from error
    if not secret:
        raise ConfigurationError(f"{path} is empty: delete it, and a new secret will be created")
    return secret


def development_app_check_key(home: Path) -> Path:
    """Return the file with the App Check key pair, creating it if it does not exist."""
    path = home / APP_CHECK_KEY
    try:
        _check_home(home)
        if not path.exists():
            _create(path, _new_key_pair)
        _check_file(path)
    except OSError as error:
        raise ConfigurationError(
            f"cannot keep a development key in {path}: {error.strerror}; set ONCEWARD_HOME to a "
            "writable directory, or set ONCEWARD_APP_CHECK_JWKS_URL"
        ) from error
    return path


def _check_home(home: Path) -> None:
    try:
        _check_directory(home)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"development secrets are not kept in a directory of others: {error}; or set "
            "ONCEWARD_HOME to another directory"
        ) from None


def _check_directory(path: Path) -> None:
    """Raise ``ConfigurationError`` if another user owns, can replace or can write a directory.

    A directory that does not exist passes. Raises ``OSError`` if it cannot be looked at.
    """
    try:
        about = path.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(about.st_mode):
        raise ConfigurationError(
            f"{path} is a symbolic link: give the directory that it names instead"
        )
    if not stat.S_ISDIR(about.st_mode):
        raise ConfigurationError(f"{path} is not a directory")
    if not hasattr(os, "geteuid"):  # Windows has no owners in this sense
        return
    if about.st_uid != os.geteuid():
        raise ConfigurationError(
            f"{path} belongs to another user (uid {about.st_uid}), who could read and replace "
            f"what is kept in it: use a directory of your own (uid {os.geteuid()})"
        )
    if about.st_mode & _WRITABLE_BY_OTHERS:
        raise ConfigurationError(
            f"{path} can be written by other users (mode {stat.S_IMODE(about.st_mode):04o}): "
            f"run chmod 700 {path}"
        )


def _check_file(path: Path) -> None:
    """Refuse a secret that another user has put here, or can read."""
    about = path.lstat()
    is_private = stat.S_ISREG(about.st_mode) and not about.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    is_own = not hasattr(os, "geteuid") or about.st_uid == os.geteuid()
    if not (is_private and is_own):
        raise ConfigurationError(
            f"{path} should be a file that only you can read: delete it, and a new secret will be "
            f"created (or run chmod 600 {path}, if no other user could read it)"
        )


def _new_key_pair() -> str:
    from cryptography.hazmat.primitives.asymmetric import rsa  # noqa: PLC0415 - rarely needed
    from jwt.algorithms import RSAAlgorithm  # noqa: PLC0415

    key = rsa.generate_private_key(public_exponent=65_537, key_size=_RSA_BITS)
    jwk: dict[str, Any] = RSAAlgorithm.to_jwk(key, as_dict=True)
    jwk.pop("key_ops", None)
    jwk |= {"alg": "RS256", "use": "sig", "kid": f"development-{secrets.token_hex(4)}"}
    return json.dumps({"keys": [jwk]})


def _create(path: Path, content: Callable[[], str]) -> None:
    """Write a temporary file and link it into place: complete or absent, and the first one wins."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_home(path.parent)  # another user may have created it meanwhile
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(content() + "\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):  # another process created it first
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
