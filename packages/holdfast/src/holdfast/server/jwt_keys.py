"""Keys for verifying tokens: a shared secret, a JWKS file or a JWKS URL.

PyJWT (2.15) parses the keys, but its ``PyJWKClient`` does not fetch them: it blocks the calling
thread, reads responses of any size, cannot use expired keys during an outage of the key server,
sends that server a request for every token meanwhile, and ignores keys without an id.
"""

import asyncio
import logging
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, build_opener

from holdfast.extras import needs_extra

with needs_extra("jwt"):
    import jwt
import msgspec

from holdfast.errors import ConfigurationError, StoreUnavailableError
from holdfast.ports import Clock

__all__ = ["UNREADABLE", "KeySource", "keys_unavailable", "open_keys", "usable_secret"]

# RFC 7518 §3.2: an HMAC key must be at least as long as the hash.
_SECRET_MIN_BYTES: Final = 32
# NIST SP 800-131A disallows shorter RSA keys for signatures.
_RSA_MIN_BITS: Final = 2048

# Key type and curve of a JWK for each algorithm.
_KEY_TYPE: Final = {"RS256": ("RSA", None), "ES256": ("EC", "P-256")}
_PRIVATE_PARTS: Final = frozenset({"d", "p", "q", "dp", "dq", "qi", "oth"})

_JWKS_FRESH_SECONDS: Final = 300.0
# An unknown key id may mean that the keys were rotated, or that a client is guessing ids.
_JWKS_REFETCH_SECONDS: Final = 30.0
# While the key server fails, its last keys are used for this long; the pause is between fetches.
_JWKS_MAX_STALE_SECONDS: Final = 3600.0
_JWKS_PAUSE_SECONDS: Final = 5.0
_JWKS_TIMEOUT_SECONDS: Final = 5.0
_JWKS_MAX_BYTES: Final = 1024 * 1024
_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})

# Everything PyJWT, cryptography and msgspec raise for malformed input.
UNREADABLE: Final = (
    jwt.PyJWTError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

_log = logging.getLogger("holdfast.sign_in")


class KeySource:
    """Keys that are always available. ``generation`` grows whenever they change."""

    def __init__(self) -> None:
        self.generation = 0
        self._keys: Sequence[tuple[str | None, Any]] = ()

    def is_current(self) -> bool:
        """Return whether the keys may be used without fetching."""
        return True

    def may_refetch(self) -> bool:
        """Return whether fetching now could bring an unknown key."""
        return False

    def is_failing(self) -> bool:
        """Return whether the last fetch failed."""
        return False

    async def fetch(self) -> None:
        """Fetch the keys; raise ``StoreUnavailableError`` if none are usable afterwards."""

    def find(self, kid: str | None) -> Sequence[Any]:
        """Return the keys with this id; all keys if the token names none."""
        return [key for name, key in self._keys if kid is None or name == kid]


class _SecretKey(KeySource):
    def __init__(self, secret: bytes) -> None:
        super().__init__()
        self._keys = ((None, secret),)

    def find(self, kid: str | None) -> Sequence[Any]:  # noqa: ARG002 - a secret has no id
        return [self._keys[0][1]]


class _JwksKeys(KeySource):
    def __init__(self, algorithm: str) -> None:
        super().__init__()
        self._algorithm = algorithm
        self._raw: bytes | None = None

    def use(self, raw: bytes) -> None:
        """Use these keys from now on. Raises ``ValueError`` if none of them is usable."""
        if raw != self._raw:
            self._keys = _usable_keys(raw, self._algorithm)
            self._raw = raw
            self.generation += 1


class _FileKeys(_JwksKeys):
    """A JWKS file, read again when it changes. A file that cannot be used is logged and ignored."""

    def __init__(self, path: Path, algorithm: str) -> None:
        super().__init__(algorithm)
        self._path = path
        self._version = self._stat()
        try:
            self.use(path.read_bytes())
        except OSError as error:
            raise ConfigurationError(
                f"the JWKS file {path} cannot be read: {error.strerror}"
            ) from error
        except ValueError as error:
            raise ConfigurationError(f"the JWKS file {path} {error}") from error

    def is_current(self) -> bool:
        version = self._stat()
        if version != self._version:
            self._version = version
            try:
                self.use(self._path.read_bytes())
            except (OSError, ValueError) as error:
                _log.warning(
                    "the changed JWKS file cannot be used; the old keys stay in use: %s", error
                )
        return True

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


class _UrlKeys(_JwksKeys):
    """A JWKS URL, fetched in a thread, once for all callers that wait."""

    def __init__(self, url: str, algorithm: str, clock: Clock) -> None:
        super().__init__(algorithm)
        self._url = url
        self._clock = clock
        self._fetched_at: float | None = None
        self._requested_at: float | None = None
        self._failed_at: float | None = None
        self._fetching: asyncio.Task[None] | None = None

    def is_current(self) -> bool:
        now = self._clock.monotonic()
        if self._fetched_at is None:
            return False
        age = now - self._fetched_at
        return age < _JWKS_FRESH_SECONDS or (age < _JWKS_MAX_STALE_SECONDS and self._is_paused(now))

    def may_refetch(self) -> bool:
        return (
            self._failed_at is not None
            or self._requested_at is None
            or self._running() is not None
            or self._clock.monotonic() - self._requested_at >= _JWKS_REFETCH_SECONDS
        )

    def is_failing(self) -> bool:
        return self._failed_at is not None

    async def fetch(self) -> None:
        if not self._is_paused(self._clock.monotonic()):
            task = self._running()
            if task is None:
                task = self._fetching = asyncio.create_task(self._fetch())
            # Shielded: cancelling one caller must not cancel the fetch for the others.
            await asyncio.shield(task)
        if not self.is_current():
            raise keys_unavailable()

    def _is_paused(self, now: float) -> bool:
        return self._failed_at is not None and now - self._failed_at < _JWKS_PAUSE_SECONDS

    def _running(self) -> asyncio.Task[None] | None:
        task = self._fetching
        if task is None or task.done() or task.get_loop() is not asyncio.get_running_loop():
            return None
        return task

    async def _fetch(self) -> None:
        self._requested_at = self._clock.monotonic()
        try:
            async with asyncio.timeout(2 * _JWKS_TIMEOUT_SECONDS):
                raw = await asyncio.to_thread(_download, self._url)
            self.use(raw)
        except (OSError, ValueError, HTTPException) as error:  # OSError: timeouts, refused
            self._failed_at = self._clock.monotonic()
            _log.warning("no keys could be fetched from the JWKS URL: %s", error)
        else:
            self._fetched_at = self._clock.monotonic()
            self._failed_at = None


def keys_unavailable() -> StoreUnavailableError:
    """Return the 503 for keys that cannot be fetched, which is not the caller's fault."""
    return StoreUnavailableError(
        "the keys for verifying tokens cannot be fetched",
        retry_after_seconds=_JWKS_PAUSE_SECONDS,
        is_for_callers=True,
    )


def open_keys(
    secret: str | None, jwks_file: Path | None, jwks_url: str | None, algorithm: str, clock: Clock
) -> KeySource:
    """Return the source of keys. Raises ``ConfigurationError`` unless exactly one is given."""
    sources = [source for source in (secret, jwks_file, jwks_url) if source is not None]
    if len(sources) != 1:
        raise ConfigurationError(
            "set exactly one of a secret, a JWKS file and a JWKS URL for verifying tokens: "
            f"{len(sources)} are set"
        )
    if secret is not None:
        if algorithm != "HS256":
            raise ConfigurationError(f"a secret verifies HS256 tokens; {algorithm} needs a JWKS")
        return _SecretKey(usable_secret(secret))
    if algorithm not in _KEY_TYPE:
        raise ConfigurationError(f"a JWKS verifies RS256 or ES256 tokens, not {algorithm}")
    if jwks_file is not None:
        return _FileKeys(Path(jwks_file), algorithm)
    assert jwks_url is not None  # noqa: S101 - one of three is set
    try:
        parts = urlsplit(jwks_url)
        is_safe = parts.scheme == "https" or (
            parts.scheme == "http" and parts.hostname in _LOOPBACK
        )
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_safe = has_host = False
    if not (is_safe and has_host):
        # An attacker who can change the keys in transit can sign any token.
        raise ConfigurationError("the JWKS URL must be https (http on loopback only)")
    return _UrlKeys(jwks_url, algorithm, clock)


def usable_secret(secret: str) -> bytes:
    """Return the secret as bytes. Raises ``ConfigurationError`` if too short or a public key."""
    usable = secret.encode("utf-8", "surrogateescape")  # as read from the environment
    if len(usable) < _SECRET_MIN_BYTES:
        raise ConfigurationError(
            f"the JWT secret has {len(usable)} bytes; HS256 needs at least {_SECRET_MIN_BYTES}"
        )
    try:
        jwt.get_algorithm_by_name("HS256").prepare_key(usable)
    except jwt.InvalidKeyError:
        raise ConfigurationError("the JWT secret is a public key; use a random secret") from None
    return usable


def _usable_keys(raw: bytes, algorithm: str) -> Sequence[tuple[str | None, Any]]:
    """Return the keys of a JWKS that fit the algorithm, with their ids; skip the others."""
    try:
        found = msgspec.json.decode(raw, type=dict[str, Any]).get("keys")
    except UNREADABLE:
        raise ValueError("is not a JSON object") from None
    wanted_type, wanted_curve = _KEY_TYPE[algorithm]
    usable: list[tuple[str | None, Any]] = []
    for jwk in found if isinstance(found, list) else ():
        if (
            not isinstance(jwk, dict)
            or jwk.get("kty") != wanted_type
            or jwk.get("crv") != wanted_curve
            or jwk.get("alg", algorithm) != algorithm
            or jwk.get("use", "sig") != "sig"
        ):
            continue
        try:
            # Without its private part, in case the JWKS contains it.
            public = {name: value for name, value in jwk.items() if name not in _PRIVATE_PARTS}
            key = jwt.PyJWK(public, algorithm=algorithm).key
        except UNREADABLE:
            continue
        if wanted_type == "RSA" and key.key_size < _RSA_MIN_BITS:
            _log.warning("a key of the JWKS has only %d bits and is ignored", key.key_size)
            continue
        kid = jwk.get("kid")
        usable.append((kid if isinstance(kid, str) else None, key))
    if not usable:
        raise ValueError(f"has no key for {algorithm}")
    return usable


class _NoRedirect(HTTPRedirectHandler):
    """Follows no redirect: urllib then raises the status as an error."""

    def redirect_request(self, *_args: Any, **_kwargs: Any) -> None:
        """Return None, which refuses the redirect."""


def _download(url: str) -> bytes:
    opener = build_opener(_NoRedirect)
    with opener.open(url, timeout=_JWKS_TIMEOUT_SECONDS) as response:
        raw: bytes = response.read(_JWKS_MAX_BYTES + 1)
    if len(raw) > _JWKS_MAX_BYTES:
        raise ValueError(f"has more than {_JWKS_MAX_BYTES} bytes")
    return raw
