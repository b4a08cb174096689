"""Sign-in by JSON Web Token. Says who is calling; what they may do is decided elsewhere.

The algorithm is the server's choice, never the token's: a token that names another one, or
``none``, is refused before any key is looked at. Times are judged on the given clock, not by
PyJWT, so that tests can hold it. No message repeats anything of the token.
"""

import asyncio
import logging
import re
from collections import OrderedDict
from collections.abc import Awaitable, Mapping, Sequence
from datetime import datetime, timedelta
from hashlib import sha256
from http.client import HTTPException
from math import ceil, floor
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any, Final, Protocol, Self
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, build_opener

import jwt
import msgspec
from jwt.api_jws import PyJWS

from holdfast.errors import ConfigurationError, NotAuthenticatedError, StoreUnavailableError
from holdfast.ports import Clock
from holdfast.server.call import Principal
from holdfast.server.head import RequestHead
from holdfast.server.ids import SystemClock

__all__ = ["JwtIdentify", "mint_token"]

# RFC 7518 §3.2: an HMAC key must be at least as long as the hash it makes.
_SECRET_LEAST_BYTES: Final = 32
# NIST SP 800-131A: shorter RSA keys no longer count as signatures.
_RSA_LEAST_BITS: Final = 2048
# Longer than any token with a reasonable list of roles; hashing and parsing stay cheap.
_TOKEN_MOST_BYTES: Final = 16 * 1024
# Names become part of keys in databases and caches: short, and no NUL, which PostgreSQL refuses.
_NAME_MOST_CHARS: Final = 256
_UNFIT_IN_NAME: Final = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
# A verified token costs about 2 KB; only tokens that hold get in, so strangers cannot flush it.
_REMEMBERED_TOKENS: Final = 4096

# What a JWK must look like to serve an algorithm.
_KEY_TYPE: Final = {"RS256": ("RSA", None), "ES256": ("EC", "P-256")}

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
_UNREADABLE: Final = (
    jwt.PyJWTError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

_log = logging.getLogger("holdfast.sign_in")


class JwtIdentify:
    """Finds the caller in ``Authorization: Bearer <JWT>``.

    Returns a principal at once where keys are at hand, and an awaitable where they have to be
    fetched first. Every fault of the token is a ``NotAuthenticatedError``; keys that cannot be
    fetched are not the caller's fault and are a ``StoreUnavailableError`` (503).
    """

    def __init__(
        self,
        *,
        secret: str | None = None,
        jwks_file: Path | None = None,
        jwks_url: str | None = None,
        algorithm: str = "HS256",
        tenant_claim: str = "sub",
        issuer: str | None = None,
        audience: str | None = None,
        clock: Clock | None = None,
        leeway_seconds: float = 30.0,
    ) -> None:
        """Take exactly one source of keys. HS256 goes with a secret, RS256 and ES256 with a JWKS.

        ``leeway_seconds`` is for an issuer whose clock runs ahead (``nbf``, ``iat``). A token
        past its ``exp`` gets none: where our clock runs ahead, that costs the caller one refresh.
        """
        self._clock: Clock = clock or SystemClock()
        self._keys = _open_keys(secret, jwks_file, jwks_url, algorithm, self._clock)
        self._algorithm = algorithm
        self._tenant_claim = tenant_claim
        self._issuer = issuer
        self._audience = audience
        self._leeway = leeway_seconds
        self._verified = _VerifiedTokens()
        self._jws = PyJWS(algorithms=[algorithm])

    def with_tenant(self, claim: str) -> Self:
        """Return one that reads the tenant from another claim, sharing keys and cache."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._tenant_claim = claim
        return other

    def __call__(self, head: RequestHead) -> Principal | Awaitable[Principal]:
        """Say who is calling, or raise."""
        token = _bearer_token(head.authorization)
        if self._keys.is_current():
            try:
                return self._identify(token)
            except _UnknownKeyError:
                if not self._keys.may_look_again():
                    raise
        return self._identify_with_new_keys(token)

    async def _identify_with_new_keys(self, token: bytes) -> Principal:
        self._header(token)  # no key server is asked about a token that cannot hold anyway
        await self._keys.fetch()
        try:
            return self._identify(token)
        except _UnknownKeyError:
            if self._keys.is_failing():  # the key may be a new one: nobody can tell now
                raise _keys_unavailable() from None
            raise

    def _identify(self, token: bytes) -> Principal:
        digest = sha256(token).digest()
        verified = self._verified.get(digest, self._keys.generation)
        is_new = verified is None
        if verified is None:
            verified = _Verified(self._claims(token), self._keys.generation)
        self._check_times(verified)
        principal = verified.principals.get(self._tenant_claim)
        if principal is None:
            principal = self._principal(verified.claims)
            verified.principals[self._tenant_claim] = principal
        if is_new:
            self._verified.put(digest, verified)
        return principal

    # -- reading a token -------------------------------------------------------------------

    def _header(self, token: bytes) -> dict[str, Any]:
        try:
            header: dict[str, Any] = self._jws.get_unverified_header(token)
        except _UNREADABLE:
            raise NotAuthenticatedError("the token is not a readable JWT") from None
        if header.get("alg") != self._algorithm:
            raise NotAuthenticatedError(f"the token must be signed with {self._algorithm}")
        return header

    def _claims(self, token: bytes) -> Mapping[str, Any]:
        kid = self._header(token).get("kid")
        candidates = self._keys.find(kid)
        if not candidates:
            raise _UnknownKeyError("the token is signed with a key that is not known here")
        payload: bytes | None = None
        for key in candidates:
            try:
                payload = self._jws.decode(token, key, algorithms=[self._algorithm])
            except jwt.InvalidSignatureError:
                continue
            except _UNREADABLE:
                raise NotAuthenticatedError("the token is not a readable JWT") from None
            break
        if payload is None:
            # Without a key id, a signature that does not hold may mean that keys were rotated.
            error = NotAuthenticatedError if kid is not None else _UnknownKeyError
            raise error("the token's signature does not hold")
        try:
            # msgspec, not json: NaN, half surrogate pairs and broken UTF-8 end here.
            claims = msgspec.json.decode(payload)
        except _UNREADABLE:
            raise NotAuthenticatedError("the token's claims are not JSON") from None
        if not isinstance(claims, dict):
            raise NotAuthenticatedError("the token's claims are not a JSON object")
        self._check_party(claims)
        return MappingProxyType(claims)

    def _check_party(self, claims: Mapping[str, Any]) -> None:
        if self._issuer is not None and claims.get("iss") != self._issuer:
            raise NotAuthenticatedError("the token was made by another issuer")
        if self._audience is not None:
            audience = claims.get("aud")
            if self._audience not in (audience if isinstance(audience, list) else [audience]):
                raise NotAuthenticatedError("the token was made for another audience")

    def _check_times(self, verified: "_Verified") -> None:
        now = self._clock.now().timestamp()
        if now >= verified.expires_at:
            raise NotAuthenticatedError("the token has expired")
        if now + self._leeway < verified.begins_at:
            raise NotAuthenticatedError("the token is not valid yet")

    def _principal(self, claims: Mapping[str, Any]) -> Principal:
        return Principal(
            tenant=_name(claims, self._tenant_claim),
            actor=_name(claims, "sub"),
            roles=_roles(claims.get("roles")),
            claims=claims,
        )


def mint_token(
    secret: str,
    *,
    sub: str,
    org: str | None = None,
    roles: Sequence[str] = (),
    lifetime: timedelta,
    now: datetime,
) -> str:
    """Make an HS256 token, for development and tests."""
    claims: dict[str, Any] = {
        "sub": sub,
        "iat": floor(now.timestamp()),
        "exp": ceil((now + lifetime).timestamp()),
    }
    if org is not None:
        claims["org"] = org
    if roles:
        claims["roles"] = list(roles)
    return jwt.encode(claims, _usable_secret(secret), algorithm="HS256")


# -- tokens ------------------------------------------------------------------------------------


class _UnknownKeyError(NotAuthenticatedError):
    """No key at hand verifies this token; newer keys might."""


class _Verified:
    """A token whose signature holds: its claims, its times, and who it is for each tenant claim."""

    __slots__ = ("begins_at", "claims", "expires_at", "generation", "principals")

    def __init__(self, claims: Mapping[str, Any], generation: int) -> None:
        self.claims = claims
        self.generation = generation
        expires_at = _time(claims, "exp")
        if expires_at is None:
            raise NotAuthenticatedError('the token has no claim "exp"')
        self.expires_at = expires_at
        starts = (_time(claims, "nbf"), _time(claims, "iat"))
        self.begins_at = max((start for start in starts if start is not None), default=0)
        self.principals: dict[str, Principal] = {}


class _VerifiedTokens:
    """The tokens seen last, by hash: HMAC and JSON cost more than the rest of a replay."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[bytes, _Verified] = OrderedDict()
        self._lock = Lock()

    def get(self, digest: bytes, generation: int) -> _Verified | None:
        with self._lock:
            verified = self._tokens.get(digest)
            if verified is None:
                return None
            if verified.generation != generation:  # keys have changed: it must prove itself anew
                del self._tokens[digest]
                return None
            self._tokens.move_to_end(digest)
            return verified

    def put(self, digest: bytes, verified: _Verified) -> None:
        with self._lock:
            self._tokens[digest] = verified
            if len(self._tokens) > _REMEMBERED_TOKENS:
                self._tokens.popitem(last=False)


def _bearer_token(authorization: str | None) -> bytes:
    if not authorization:
        raise NotAuthenticatedError("sign in: send Authorization: Bearer <token>")
    scheme, _, text = authorization.strip(" \t").partition(" ")
    text = text.strip(" \t")
    if scheme.lower() != "bearer" or not text:
        raise NotAuthenticatedError("sign in with Authorization: Bearer <token>")
    if len(text) > _TOKEN_MOST_BYTES:
        raise NotAuthenticatedError("the token is too long")
    try:
        return text.encode("ascii")
    except UnicodeEncodeError:
        raise NotAuthenticatedError("the token is not a readable JWT") from None


def _time(claims: Mapping[str, Any], claim: str) -> float | None:
    value = claims.get(claim)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NotAuthenticatedError(f'the token\'s claim "{claim}" is not a time in seconds')
    return value


def _name(claims: Mapping[str, Any], claim: str) -> str:
    value = claims.get(claim)
    if value is None:
        raise NotAuthenticatedError(f'the token has no claim "{claim}"')
    if (
        not isinstance(value, str)
        or not 0 < len(value) <= _NAME_MOST_CHARS
        or _UNFIT_IN_NAME.search(value)
    ):
        raise NotAuthenticatedError(
            f'the token\'s claim "{claim}" must be 1 to {_NAME_MOST_CHARS} characters of text'
        )
    return value


def _roles(value: object) -> frozenset[str]:
    if value is None:
        return frozenset()
    if isinstance(value, str):
        return frozenset({value})
    if isinstance(value, list) and all(isinstance(role, str) for role in value):
        return frozenset(value)
    raise NotAuthenticatedError('the token\'s claim "roles" must be a list of texts')


# -- keys --------------------------------------------------------------------------------------


class _Keys(Protocol):
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
            raise _keys_unavailable()

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


def _keys_unavailable() -> StoreUnavailableError:
    return StoreUnavailableError(
        "keys to check tokens with cannot be fetched", retry_after_seconds=_JWKS_PAUSE_SECONDS
    )


def _open_keys(
    secret: str | None, jwks_file: Path | None, jwks_url: str | None, algorithm: str, clock: Clock
) -> _Keys:
    sources = [source for source in (secret, jwks_file, jwks_url) if source is not None]
    if len(sources) != 1:
        raise ConfigurationError(
            "give one of a secret, a JWKS file and a JWKS URL to check tokens with: "
            f"{len(sources)} are set"
        )
    if secret is not None:
        if algorithm != "HS256":
            raise ConfigurationError(f"a secret checks HS256 tokens; {algorithm} takes a JWKS")
        return _SecretKeys(_usable_secret(secret))
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


def _usable_secret(secret: str) -> bytes:
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
    except _UNREADABLE:
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
        except _UNREADABLE:
            continue
        if wanted_type == "RSA" and key.key_size < _RSA_LEAST_BITS:
            _log.warning("a key of the JWKS has only %d bits and is not used", key.key_size)
            continue
        kid = jwk.get("kid")
        usable.append((kid if isinstance(kid, str) else None, key))
    if not usable:
        raise ValueError(f"has no key for {algorithm}")
    return usable


_PRIVATE_PARTS: Final = frozenset({"d", "p", "q", "dp", "dq", "qi", "oth"})


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
