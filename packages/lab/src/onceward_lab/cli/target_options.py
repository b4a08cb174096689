"""Options of ``onceward conform`` and ``onceward attack``: the server, its sign-in, a request."""

import ipaddress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from onceward_lab.conformance import Profile, ProfileError, SignIn, read_profile
from onceward_protocol.cli.output import CommandError

__all__ = [
    "BAD_INPUT",
    "host_of",
    "is_loopback",
    "json_option",
    "local_sign_in",
    "profile_from",
    "read_file",
    "request_of",
]

BAD_INPUT: Final = 2
"""The exit code."""


def host_of(url: str) -> str:
    """Return the host of a URL. Raises ``CommandError`` if it is not one of HTTP."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if host is None or parts.scheme not in ("http", "https"):
        raise CommandError("the URL should be like http://127.0.0.1:8000", BAD_INPUT)
    return host


def request_of(path: str, body: str, method: str | None) -> dict[str, Any]:
    """Return the request of a profile from its options."""
    request: dict[str, Any] = {"path": path, "body": json_option("--body", body)}
    if method is not None:
        request["method"] = method.upper()
    return request


def json_option(option: str, text: str) -> Any:
    """Return the JSON of an option, or of the file that it names with ``@``."""
    raw = read_file(Path(text[1:])) if text.startswith("@") else text.encode()
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CommandError(
            f"{option} is not JSON: {error} (give JSON, or @file)", BAD_INPUT
        ) from error


def read_file(path: Path) -> bytes:
    """Return the content of a file that an option names."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}", BAD_INPUT) from error


def profile_from(source: str, raw: bytes) -> Profile:
    """Return a profile; ``source`` is named in errors."""
    try:
        return read_profile(raw)
    except ProfileError as error:
        raise CommandError(f"{source}: {error}", BAD_INPUT) from error


def local_sign_in(host: str) -> SignIn:
    """Return the secret of a server in this directory, for URLs of this machine only."""
    from onceward_services.dev_secrets import JWT_SECRET, development_secret
    from onceward_services.settings import load_settings

    settings = load_settings()
    if is_loopback(host):
        secret = None
        if settings.jwt_secrets:
            secret = settings.jwt_secrets[0]
        elif settings.needs_development_secret and (settings.home / JWT_SECRET).is_file():
            secret = development_secret(settings.home)
        if secret is not None:
            return SignIn(
                secret=secret,
                issuer=settings.jwt_issuers[0] if settings.jwt_issuers else None,
                audience=settings.jwt_audiences,
            )
    raise CommandError(
        "no credentials: give --token, or --secret to sign tokens (not needed for a server on this "
        "machine if the command runs in its directory); for your own app give --path and --body",
        BAD_INPUT,
    )


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine, without looking its name up."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
