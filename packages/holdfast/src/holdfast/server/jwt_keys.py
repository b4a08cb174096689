"""Keys to check tokens with: a secret, a JWKS file or a JWKS URL. No token is read here."""

import asyncio
import logging
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, build_opener

import jwt
import msgspec

from holdfast.errors import ConfigurationError, StoreUnavailableError
from holdfast.ports import Clock

__all__ = ["UNREADABLE", "Keys", "keys_unavailable", "open_keys", "usable_secret"]

# RFC 7518 §3.2: an HMAC key must be at least as long as the hash it makes.
_SECRET_LEAST_BYTES: Final = 32
# NIST SP 800-131A: shorter RSA keys no longer count as signatures.
_RSA_LEAST_BITS: Final = 2048

# What a JWK must look like to serve an algorithm.
_KEY_TYPE: Final = {"RS256": ("RSA", None), "ES256": ("EC", "P-256")}
_PRIVATE_PARTS: Final = frozenset({"d", "p", "q", "dp", "dq", "qi", "oth"})

_JWKS_FRESH_SECONDS: Final = 300.0
# An unknown key id may mean that keys were rotated, or that somebody is guessing.
_JWKS_LOOK_AGAIN_SECONDS: Final = 30.0
# While the key server is away, its last keys are good for this long, and it is asked this often.
_JWKS_STALE_MOST_SECONDS: Final = 3600.0
_JWKS_PAUSE_SECONDS: Final = 5.0
_JWKS_TIMEOUT_SECONDS: Final = 5.0
_JWKS_MOST_BYTES: Final = 1024 * 1024
_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})

# Everything PyJWT, cryptography and msgspec raise on input made to annoy them.
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


class Keys(Protocol):
    """Where the keys come from. ``generation`` grows whenever they change."""

    generation: int

    def is_current(self) -> bool:
        """Tell whether the keys at hand may be used without fetching."""

    def may_look_again(self) -> bool:
        """Tell whether fetching now could bring a key that is not known yet."""

    def is_failing(self) -> bool:
        """Tell whether the last attempt to fetch brought nothing."""

    async def fetch(self) -> None:
        """Bring the keys up to date; raise ``StoreUnavailableError`` if that leaves none to use."""

    def find(self, kid: str | None) -> Sequence[Any]:
        """Return the keys a token may be signed with."""


class _SecretKeys:
    """One shared secret."""

    generation = 0

    def __init__(self, secret: bytes) -> None:
        self._keys = (secret,)

    def is_current(self) -> bool:
        return True

    def may_look_again(self) -> bool:
        return False

    def is_failing(self) -> bool:
        return False

    async def fetch(self) -> None:
        pass

    def find(self, kid: str | None) -> Sequence[Any]:  # noqa: ARG002 - a secret has no id
        return self._keys


class _JwksKeys:
    """Public keys of a JWKS, wherever it comes from."""

    def __init__(self, algorithm: str) -> None:
        self.generation = 0
        self._algorithm = algorithm
        self._raw: bytes | None = None
        self._keys: Sequence[tuple[str | None, Any]] = ()

    def find(self, kid: str | None) -> Sequence[Any]:
        return [key for name, key in self._keys if kid is None or name == kid]

    def take(self, raw: bytes) -> None:
        """Use these keys from now on. Raises ``ValueError`` if none of them can be used."""
        if raw != self._raw:
            self._keys = _usable_keys(raw, self._algorithm)
            self._raw = raw
            self.generation += 1


class _FileKeys(_JwksKeys):
    """A JWKS file, read again when it changes. A broken change is logged and not followed."""

    def __init__(self, path: Path, algorithm: str) -> None:
        super().__init__(algorithm)
        self._path = path
        self._seen = self._look()
        try:
            self.take(path.read_bytes())
        except OSError as error:
            raise ConfigurationError(
                f"the JWKS file {path} cannot be read: {error.strerror}"
            ) from error
        except ValueError as error:
            raise ConfigurationError(f"the JWKS file {path} {error}") from error

    def is_current(self) -> bool:
        seen = self._look()
        if seen != self._seen:
            self._seen = seen
            try:
                self.take(self._path.read_bytes())
            except (OSError, ValueError) as error:
                _log.warning("the JWKS file changed and cannot be used: %s", error)
        return True

    def may_look_again(self) -> bool:
        return False

    def is_failing(self) -> bool:
        return False

    async def fetch(self) -> None:
        pass

    def _look(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


class _UrlKeys(_JwksKeys):
    """A JWKS behind a URL, fetched off the event loop by one request for all that wait."""

    def __init__(self, url: str, algorithm: str, clock: Clock) -> None:
        super().__init__(algorithm)
        self._url = url
        self._clock = clock
        self._fetched_at: float | None = None
        self._asked_at: float | None = None
        self._failed_at: float | None = None
        self._fetching: asyncio.Task[None] | None = None

    def is_current(self) -> bool:
        now = self._clock.monotonic()
        if self._fetched_at is None:
            return False
        age = now - self._fetched_at
        return age < _JWKS_FRESH_SECONDS or (age < _JWKS_STALE_MOST_SECONDS and self._pauses(now))

    def may_look_again(self) -> bool:
        return (
            self._failed_at is not None
            or self._asked_at is None
            or self._running() is not None
            or self._clock.monotonic() - self._asked_at >= _JWKS_LOOK_AGAIN_SECONDS
        )

    def is_failing(self) -> bool:
        return self._failed_at is not None

    async def fetch(self) -> None:
        if not self._pauses(self._clock.monotonic()):
            task = self._running()
            if task is None:
                task = self._fetching = asyncio.create_task(self._fetch())
            # One caller going away must not take the keys from the others who wait.
            await asyncio.shield(task)
        if not self.is_current():
            raise keys_unavailable()

    def _pauses(self, now: float) -> bool:
        return self._failed_at is not None and now - self._failed_at < _JWKS_PAUSE_SECONDS

    def _running(self) -> asyncio.Task[None] | None:
        task = self._fetching
        if task is None or task.done() or task.get_loop() is not asyncio.get_running_loop():
            return None
        return task

    async def _fetch(self) -> None:
        self._asked_at = self._clock.monotonic()
        try:
            async with asyncio.timeout(2 * _JWKS_TIMEOUT_SECONDS):
                raw = await asyncio.to_thread(_download, self._url)
            self.take(raw)
        except (OSError, ValueError, HTTPException) as error:  # OSError: timeouts and refusals
            self._failed_at = self._clock.monotonic()
            _log.warning("the JWKS URL gives no keys: %s", error)
        else:
            self._fetched_at = self._clock.monotonic()
            self._failed_at = None


def keys_unavailable() -> StoreUnavailableError:
    """Make the error for keys that cannot be had now: not the caller's fault."""
    return StoreUnavailableError(
        "keys to check tokens with cannot be fetched",
        retry_after_seconds=_JWKS_PAUSE_SECONDS,
        is_for_callers=True,
    )


def open_keys(
    secret: str | None, jwks_file: Path | None, jwks_url: str | None, algorithm: str, clock: Clock
) -> Keys:
    """Open the one source of keys that is given; it must go with the algorithm."""
    sources = [source for source in (secret, jwks_file, jwks_url) if source is not None]
    if len(sources) != 1:
        raise ConfigurationError(
            "give one of a secret, a JWKS file and a JWKS URL to check tokens with: "
            f"{len(sources)} are set"
        )
    if secret is not None:
        if algorithm != "HS256":
            raise ConfigurationError(f"a secret checks HS256 tokens; {algorithm} takes a JWKS")
        return _SecretKeys(usable_secret(secret))
    if algorithm not in _KEY_TYPE:
        raise ConfigurationError(f"a JWKS checks RS256 or ES256 tokens, not {algorithm}")
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
        # Whoever can change the keys on their way can sign in as anybody.
        raise ConfigurationError("the JWKS URL must be https (http on loopback only)")
    return _UrlKeys(jwks_url, algorithm, clock)


def usable_secret(secret: str) -> bytes:
    """Return the secret as bytes, or raise if it is too short or no secret."""
    usable = secret.encode("utf-8", "surrogateescape")  # as it stood in the environment
    if len(usable) < _SECRET_LEAST_BYTES:
        raise ConfigurationError(
            f"the JWT secret has {len(usable)} bytes; HS256 needs at least {_SECRET_LEAST_BYTES}"
        )
    try:
        jwt.get_algorithm_by_name("HS256").prepare_key(usable)
    except jwt.InvalidKeyError:
        raise ConfigurationError("the JWT secret is a public key, which is no secret") from None
    return usable


def _usable_keys(raw: bytes, algorithm: str) -> Sequence[tuple[str | None, Any]]:
    """Return the keys of a JWKS that fit the algorithm; what does not fit is passed over."""
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
            # Without its private part, should somebody have left that in.
            public = {name: value for name, value in jwk.items() if name not in _PRIVATE_PARTS}
            key = jwt.PyJWK(public, algorithm=algorithm).key
        except UNREADABLE:
            continue
        if wanted_type == "RSA" and key.key_size < _RSA_LEAST_BITS:
            _log.warning("a key of the JWKS has only %d bits and is not used", key.key_size)
            continue
        kid = jwk.get("kid")
        usable.append((kid if isinstance(kid, str) else None, key))
    if not usable:
        raise ValueError(f"has no key for {algorithm}")
    return usable


class _NoRedirect(HTTPRedirectHandler):
    """Keys come from the configured place or not at all."""

    def redirect_request(self, *_args: Any, **_kwargs: Any) -> None:
        """Follow nothing: urllib then raises the status as an error."""


def _download(url: str) -> bytes:
    opener = build_opener(_NoRedirect)
    with opener.open(url, timeout=_JWKS_TIMEOUT_SECONDS) as response:
        raw: bytes = response.read(_JWKS_MOST_BYTES + 1)
    if len(raw) > _JWKS_MOST_BYTES:
        raise ValueError(f"has more than {_JWKS_MOST_BYTES} bytes")
    return raw
