"""Keys for verifying tokens: shared secrets, a JWKS file or a JWKS URL.

PyJWT (2.15) parses the keys, but its ``PyJWKClient`` does not fetch them: it blocks the calling
thread, reads responses of any size, cannot use expired keys during an outage of the key server,
sends that server a request for every token meanwhile, and ignores keys without an id. Nor do
``urllib`` and ``http.client`` alone: their time-outs are per read, so that a server that sends one
byte every few seconds would keep a download running for hours.
"""

import asyncio
import io
import logging
import ssl
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from pathlib import Path
from socket import socket
from threading import Lock, Thread
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from onceward_protocol.extras import needs_extra

with needs_extra("jwt"):
    import jwt
import msgspec

from onceward.errors import ConfigurationError, StoreUnavailableError
from onceward.ports import Clock

# RFC 7518 §3.2: an HMAC key must be at least as long as the hash.
_SECRET_MIN_BYTES: Final = 32
# NIST SP 800-131A disallows shorter RSA keys for signatures.
_RSA_MIN_BITS: Final = 2048

# Key type and curve of a JWK for each algorithm.
_KEY_TYPE: Final = {"RS256": ("RSA", None), "ES256": ("EC", "P-256")}
_PRIVATE_PARTS: Final = frozenset({"d", "p", "q", "dp", "dq", "qi", "oth"})

# Older keys are still used, and refreshed in the background.
_JWKS_FRESH_SECONDS: Final = 300.0
# Even older keys are used only if the last refresh failed, or takes too long to wait for it.
_JWKS_STALE_SECONDS: Final = 600.0
_JWKS_MAX_STALE_SECONDS: Final = 3600.0
# An unknown key id may mean that the keys were rotated, or that a client is guessing ids.
_JWKS_REFETCH_SECONDS: Final = 30.0
# The pause after a refresh that failed.
_JWKS_PAUSE_SECONDS: Final = 5.0
# For the whole download. A request without a usable key waits less, and then gets 503.
_JWKS_TIMEOUT_SECONDS: Final = 5.0
_JWKS_WAIT_SECONDS: Final = 2.0
# The largest JWKS.
MAX_BYTES: Final = 1024 * 1024
_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})

# Secrets that the documentation has shown: everybody knows them.
SAMPLE_SECRETS: Final = frozenset(
    {
        "a random text of at least 32 bytes, kept secret",
        "a secret for this page, of 32 bytes or more",
        "change me: at least thirty-two bytes long",
    }
)

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

_log = logging.getLogger("onceward.sign_in")


class KeySource:
    """Keys that are always available. ``generation`` grows whenever they change."""

    def __init__(self) -> None:
        self.generation = 0
        self._keys: Sequence[tuple[str | None, Any]] = ()

    def is_current(self) -> bool:
        """Return whether the keys may be used without waiting; may start a refresh."""
        return True

    def may_refetch(self) -> bool:
        """Return whether fetching now could bring an unknown key."""
        return False

    def is_failing(self) -> bool:
        """Return whether the last fetch failed, or has not ended yet."""
        return False

    def start_refresh(self) -> None:
        """Fetch the keys in the background, unless that has just been tried. Never blocks."""

    async def fetch(self) -> None:
        """Wait for new keys; raise ``StoreUnavailableError`` if none are usable afterwards."""

    def find(self, kid: str | None) -> Sequence[Any]:
        """Return the keys with this id; all keys if the token names none."""
        return [key for name, key in self._keys if kid is None or name == kid]


class _SecretKeys(KeySource):
    def __init__(self, secrets: Sequence[bytes]) -> None:
        super().__init__()
        self._keys = tuple((None, secret) for secret in secrets)

    def find(self, kid: str | None) -> Sequence[Any]:  # noqa: ARG002 - secrets have no ids
        return [secret for _, secret in self._keys]


class _JwksKeys(KeySource):
    def __init__(self, algorithm: str) -> None:
        super().__init__()
        self._algorithm = algorithm
        self._raw: bytes | None = None

    def use(self, raw: bytes) -> None:
        """Use these keys from now on. Raises ``ValueError`` if none of them is usable."""
        if raw != self._raw:
            # In this order: readers on other threads read the generation before the keys.
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
    """A JWKS URL, fetched by one background thread at a time.

    Requests use the known keys while a thread fetches newer ones. Only a request whose token no
    known key verifies waits for the thread, for ``_JWKS_WAIT_SECONDS`` at most.
    """

    def __init__(self, url: str, algorithm: str, clock: Clock) -> None:
        super().__init__(algorithm)
        self._url = url
        self._clock = clock
        self._lock = Lock()
        self._thread: Thread | None = None
        self._refresh: Future[None] = Future()
        self._fetched_at: float | None = None
        self._ended_at: float | None = None
        self._has_failed = False

    def is_current(self) -> bool:
        age = self._age()
        # The first keys are fetched for a token that they may verify, not for garbage.
        if self._fetched_at is not None and age >= _JWKS_FRESH_SECONDS:
            self.start_refresh()
        # After a long time without requests, wait: the keys may have been withdrawn long ago.
        return age < (_JWKS_MAX_STALE_SECONDS if self._has_failed else _JWKS_STALE_SECONDS)

    def may_refetch(self) -> bool:
        return self._has_failed or self._is_running() or self._is_due()

    def is_failing(self) -> bool:
        return self._has_failed or self._is_running()

    def start_refresh(self) -> None:
        with self._lock:
            if self._is_running() or not self._is_due():
                return
            self._refresh = Future()
            # A running future cannot be cancelled by one of the callers that wait for it.
            self._refresh.set_running_or_notify_cancel()
            thread = Thread(
                target=self._run, args=(self._refresh,), name="onceward-jwks", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # too many threads, or the interpreter is ending
                self._fail(error)
                self._refresh.set_result(None)
                return
            self._thread = thread

    async def fetch(self) -> None:
        self.start_refresh()
        if self._is_running():
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.wrap_future(self._refresh), _JWKS_WAIT_SECONDS)
        if self._age() >= _JWKS_MAX_STALE_SECONDS:
            raise keys_unavailable()

    def _age(self) -> float:
        """Return the age of the keys in seconds; infinite if there are none."""
        fetched_at = self._fetched_at
        return float("inf") if fetched_at is None else self._clock.monotonic() - fetched_at

    def _is_running(self) -> bool:
        # After a fork, the thread of the parent is not alive in the child.
        return self._thread is not None and self._thread.is_alive() and not self._refresh.done()

    def _is_due(self) -> bool:
        """Return whether enough time has passed since the last refresh, for any reason."""
        if self._ended_at is None:
            return True
        is_healthy = not self._has_failed and self._age() < _JWKS_FRESH_SECONDS
        pause = _JWKS_REFETCH_SECONDS if is_healthy else _JWKS_PAUSE_SECONDS
        return self._clock.monotonic() - self._ended_at >= pause

    def _run(self, refresh: Future[None]) -> None:
        try:
            self.use(download(self._url, _JWKS_TIMEOUT_SECONDS))
        except Exception as error:  # noqa: BLE001 - a thread has no caller that could handle it
            self._fail(error)
        else:
            self._fetched_at = self._ended_at = self._clock.monotonic()
            self._has_failed = False
        finally:
            refresh.set_result(None)

    def _fail(self, error: Exception) -> None:
        self._ended_at = self._clock.monotonic()
        self._has_failed = True
        _log.warning("no keys could be fetched from the JWKS URL: %s", error)


def keys_unavailable() -> StoreUnavailableError:
    """Return the 503 for keys that cannot be fetched, which is not the caller's fault."""
    return StoreUnavailableError(
        "the keys for verifying tokens cannot be fetched",
        retry_after_seconds=_JWKS_PAUSE_SECONDS,
        is_for_callers=True,
    )


def open_keys(
    secrets: Sequence[str],
    jwks_file: Path | None,
    jwks_url: str | None,
    algorithm: str,
    clock: Clock,
) -> KeySource:
    """Return the source of keys. Raises ``ConfigurationError`` unless exactly one is given."""
    sources = [secrets or None, jwks_file, jwks_url]
    count = sum(source is not None for source in sources)
    if count != 1:
        raise ConfigurationError(
            "set exactly one of a secret, a JWKS file and a JWKS URL for verifying tokens: "
            f"{count} are set"
        )
    if secrets:
        if algorithm != "HS256":
            raise ConfigurationError(f"a secret verifies HS256 tokens; {algorithm} needs a JWKS")
        if any(secret in SAMPLE_SECRETS for secret in secrets):
            _log.warning("a JWT secret is a sample from the documentation: anyone can sign in")
        return _SecretKeys([usable_secret(secret) for secret in secrets])
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


# -- downloading -------------------------------------------------------------------------------


def download(url: str, timeout_seconds: float) -> bytes:
    """Return the body of a 200 response. Blocks, for about ``timeout_seconds`` at most.

    Raises ``OSError``, ``HTTPException`` or ``ValueError``. Proxies come from the environment.
    """
    opener = build_opener(_NoRedirect, _Handler)
    with opener.open(url, timeout=timeout_seconds) as response:
        raw: bytes = response.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise ValueError(f"has more than {MAX_BYTES} bytes")
    return raw


class _NoRedirect(HTTPRedirectHandler):
    """Follows no redirect: urllib then raises the status as an error."""

    def redirect_request(self, *_args: Any, **_kwargs: Any) -> None:
        return None


class _Handler(HTTPHandler, HTTPSHandler):
    """Opens connections that read responses until a deadline."""

    def http_open(self, req: Request) -> Any:
        return self.do_open(partial(_connection, HTTPConnection), req)

    def https_open(self, req: Request) -> Any:
        context = ssl.create_default_context()
        return self.do_open(partial(_connection, HTTPSConnection), req, context=context)


def _connection(kind: Any, host: str, *, timeout: float, **options: Any) -> HTTPConnection:
    connection: HTTPConnection = kind(host, timeout=timeout, **options)
    deadline = time.monotonic() + timeout
    connection.response_class = partial(_Response, deadline=deadline)  # type: ignore[assignment]
    return connection


class _Response(HTTPResponse):
    def __init__(self, sock: socket, *args: Any, deadline: float, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        with self.fp:
            self.fp = io.BufferedReader(_DeadlineReader(sock, deadline))


class _DeadlineReader(io.RawIOBase):
    """Reads from a socket until a deadline, however often bytes arrive."""

    def __init__(self, connection: socket, deadline: float) -> None:
        self._connection = connection
        # Keeps the socket open after the connection object is closed.
        self._file: Any = connection.makefile("rb", buffering=0)
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the download takes too long")
        self._connection.settimeout(remaining)
        read: int | None = self._file.readinto(buffer)
        return read

    def close(self) -> None:
        self._file.close()
        super().close()
