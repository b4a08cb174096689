"""Identifies the caller by a JSON Web Token; what the caller may do is decided elsewhere.

The algorithm is configured, never taken from the token: a token that names another one, or
``none``, is refused before any key is used. Times are compared with the given clock, not by
PyJWT, so that tests can set it. No message contains any part of the token.
"""

import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from hashlib import sha256
from inspect import isawaitable
from math import ceil, floor
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any, Final, Self

from onceward_protocol.extras import needs_extra

with needs_extra("jwt"):
    import jwt
    from jwt.api_jws import PyJWS
import msgspec

from onceward.errors import ConfigurationError, NotAuthenticatedError
from onceward.guard.request import Principal, RequestHead
from onceward.ports import Clock
from onceward.sign_in.jwt_keys import UNREADABLE, keys_unavailable, open_keys, usable_secret
from onceward.tenants import is_reserved
from onceward_protocol.clock import SystemClock

__all__ = ["JwtIdentify", "mint_token"]

_TOKEN_MAX_BYTES: Final = 16 * 1024
# Names become part of keys in databases and caches: short, and no NUL, which PostgreSQL refuses.
_NAME_MAX_CHARS: Final = 256
_FORBIDDEN_IN_NAME: Final = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
# For an issuer whose clock is ahead (``nbf``, ``iat``). There is none for ``exp``: if this server's
# clock is ahead, the caller refreshes its token early.
_LEEWAY_SECONDS: Final = 30.0
# About 2 KB each. Only valid tokens are cached, so others cannot flush the cache.
_CACHED_TOKENS: Final = 4096


class JwtIdentify:
    """Identifies the caller by ``Authorization: Bearer <JWT>``.

    Returns a principal, or an awaitable of one if keys have to be fetched first. Raises
    ``NotAuthenticatedError`` for every defect of the token, and ``StoreUnavailableError`` (503)
    if the keys cannot be fetched.
    """

    def __init__(
        self,
        *,
        secret: str | Sequence[str] | None = None,
        jwks_file: Path | None = None,
        jwks_url: str | None = None,
        algorithm: str = "HS256",
        issuer: str | Sequence[str] | None = None,
        audience: str | Sequence[str] | None = None,
        is_revoked: Callable[[str], bool | Awaitable[bool]] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Take exactly one source of keys: a secret for HS256, a JWKS for RS256 and ES256.

        The tenant is the claim ``sub``, or that of ``with_tenant``.

        Several secrets are accepted while one replaces another. A token must be from one of the
        issuers and for one of the audiences; with a JWKS both are required, because its keys may
        sign tokens for other services too.

        ``is_revoked`` gets the token's ``jti`` at every request and returns whether it is refused;
        it may be async. With it, a token needs a ``jti``. If it raises, the request fails.
        """
        self._clock: Clock = clock or SystemClock()
        self._issuers = _texts("issuer", issuer)
        self._audiences = _texts("audience", audience)
        secrets = () if secret is None else (secret,) if isinstance(secret, str) else tuple(secret)
        self._keys = open_keys(secrets, jwks_file, jwks_url, algorithm, self._clock)
        if not secrets and not (self._issuers and self._audiences):
            raise ConfigurationError(
                "a JWKS needs issuer= and audience= too: its keys may sign tokens for other "
                "services"
            )
        self._algorithm = algorithm
        self._tenant_claim, self._prefix = "sub", ""
        # Of all copies: a tenant without a prefix must not begin with one.
        self._prefixes: set[str] = set()
        self._is_revoked = is_revoked
        self._verified = _VerifiedTokens()
        self._jws = PyJWS(algorithms=[algorithm])

    def with_tenant(self, claim: str, *, prefix: str = "") -> Self:
        """Return a copy that reads the tenant from another claim and shares keys and cache.

        ``prefix`` is put before the claim, so that tenants of two claims cannot be the same.
        """
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._tenant_claim, other._prefix = claim, prefix
        self._prefixes.update((prefix,) if prefix else ())
        return other

    def start_refresh(self) -> None:
        """Begin to fetch the keys of a JWKS URL, so that the first request need not wait."""
        self._keys.start_refresh()

    def __call__(self, head: RequestHead) -> Principal | Awaitable[Principal]:
        """Return the caller, or an awaitable of it."""
        token = _bearer_token(head.authorization)
        if self._keys.is_current():
            try:
                principal = self._identify(token)
            except _UnknownKeyError:
                if not self._keys.may_refetch():
                    raise
            else:
                return self._unless_revoked(principal)
        return self._identify_with_new_keys(token)

    async def _identify_with_new_keys(self, token: bytes) -> Principal:
        self._header(token)  # fetch no keys for a token that is refused anyway
        await self._keys.fetch()
        try:
            principal = self._identify(token)
        except _UnknownKeyError:
            if self._keys.is_failing():  # the key may be a new one
                raise keys_unavailable() from None
            raise
        checked = self._unless_revoked(principal)
        return await checked if isawaitable(checked) else checked

    def _unless_revoked(self, principal: Principal) -> Principal | Awaitable[Principal]:
        if self._is_revoked is None:
            return principal
        revoked = self._is_revoked(_name(principal.claims, "jti"))
        if isawaitable(revoked):
            return _unless(revoked, principal)
        if revoked:
            raise _revoked()
        return principal

    def _identify(self, token: bytes) -> Principal:
        digest = sha256(token).digest()
        # Read before the keys, which another thread may replace meanwhile: a token that was
        # verified with old keys must not be cached for the new ones.
        generation = self._keys.generation
        verified = self._verified.get(digest, generation)
        is_new = verified is None
        if verified is None:
            verified = _Verified(self._claims(token), generation)
        self._check_times(verified)
        principal = verified.principals.get(self._tenant_claim)
        if principal is None:
            principal = self._principal(verified.claims)
            verified.principals[self._tenant_claim] = principal
        if is_new:
            self._verified.put(digest, verified)
        return principal

    # -- verifying a token -------------------------------------------------------------------

    def _header(self, token: bytes) -> dict[str, Any]:
        try:
            header: dict[str, Any] = self._jws.get_unverified_header(token)
        except UNREADABLE:
            raise NotAuthenticatedError("the token is not a readable JWT") from None
        if header.get("alg") != self._algorithm:
            raise NotAuthenticatedError(f"the token must be signed with {self._algorithm}")
        return header

    def _claims(self, token: bytes) -> Mapping[str, Any]:
        kid = self._header(token).get("kid")
        candidates = self._keys.find(kid)
        if not candidates:
            raise _UnknownKeyError("the token is signed with an unknown key")
        payload: bytes | None = None
        for key in candidates:
            try:
                payload = self._jws.decode(token, key, algorithms=[self._algorithm])
            except jwt.InvalidSignatureError:
                continue
            except UNREADABLE:
                raise NotAuthenticatedError("the token is not a readable JWT") from None
            break
        if payload is None:
            # Without a key id, an invalid signature may mean that the keys were rotated.
            error = NotAuthenticatedError if kid is not None else _UnknownKeyError
            raise error("the token's signature is invalid")
        try:
            # msgspec, unlike json, refuses NaN, lone surrogates and invalid UTF-8.
            claims = msgspec.json.decode(payload)
        except UNREADABLE:
            raise NotAuthenticatedError("the token's claims are not JSON") from None
        if not isinstance(claims, dict):
            raise NotAuthenticatedError("the token's claims are not a JSON object")
        self._check_party(claims)
        return MappingProxyType(claims)

    def _check_party(self, claims: Mapping[str, Any]) -> None:
        if self._issuers and claims.get("iss") not in self._issuers:
            raise NotAuthenticatedError("the token is from another issuer")
        if self._audiences:
            audience = claims.get("aud")
            named = audience if isinstance(audience, list) else [audience]
            if not any(name in self._audiences for name in named):
                raise NotAuthenticatedError("the token is for another audience")

    def _check_times(self, verified: "_Verified") -> None:
        now = self._clock.now().timestamp()
        if now >= verified.expires_at:
            raise NotAuthenticatedError("the token has expired")
        if now + _LEEWAY_SECONDS < verified.begins_at:
            raise NotAuthenticatedError("the token is not valid yet")

    def _principal(self, claims: Mapping[str, Any]) -> Principal:
        name = _name(claims, self._tenant_claim)
        if not self._prefix and name.startswith(tuple(self._prefixes)):
            raise NotAuthenticatedError(f'the claim "{self._tenant_claim}" begins like another one')
        tenant = self._prefix + name
        if is_reserved(tenant):
            raise NotAuthenticatedError("the tenant is Onceward's own")
        return Principal(
            tenant=tenant,
            actor=_name(claims, "sub"),
            roles=_roles(claims.get("roles")),
            claims=claims,
        )


def mint_token(
    secret: str,
    *,
    sub: str,
    lifetime: timedelta,
    now: datetime,
    **claims: str | Sequence[str] | None,
) -> str:
    """Return an HS256 token, for development and tests.

    ``claims`` are others, such as ``org``, ``roles``, ``iss``, ``aud`` and ``jti``; those that are
    None or empty are left out.
    """
    times = {"iat": floor(now.timestamp()), "exp": ceil((now + lifetime).timestamp())}
    others = {name: value for name, value in claims.items() if value}
    return jwt.encode({"sub": sub, **times, **others}, usable_secret(secret), algorithm="HS256")


# -- tokens ------------------------------------------------------------------------------------


class _UnknownKeyError(NotAuthenticatedError):
    """No known key verifies this token; a newer one might."""


class _Verified:
    """A token with a valid signature: claims, times, and a principal per tenant claim."""

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
    """LRU cache by SHA-256 of the token: verifying costs more than the rest of a replay."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[bytes, _Verified] = OrderedDict()
        self._lock = Lock()

    def get(self, digest: bytes, generation: int) -> _Verified | None:
        with self._lock:
            verified = self._tokens.get(digest)
            if verified is None:
                return None
            if verified.generation != generation:  # the keys have changed
                del self._tokens[digest]
                return None
            self._tokens.move_to_end(digest)
            return verified

    def put(self, digest: bytes, verified: _Verified) -> None:
        with self._lock:
            self._tokens[digest] = verified
            if len(self._tokens) > _CACHED_TOKENS:
                self._tokens.popitem(last=False)


def _texts(name: str, value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return one or several names as a tuple; none if the argument is None."""
    if value is None:
        return ()
    texts = (value,) if isinstance(value, str) else tuple(value)
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ConfigurationError(f"{name} should be a text, or several, and none of them empty")
    return texts


async def _unless(revoked: Awaitable[bool], principal: Principal) -> Principal:
    if await revoked:
        raise _revoked()
    return principal


def _revoked() -> NotAuthenticatedError:
    return NotAuthenticatedError("the token was revoked: sign in again")


def _bearer_token(authorization: str | None) -> bytes:
    if not authorization:
        raise NotAuthenticatedError("sign in: send Authorization: Bearer <token>")
    scheme, _, text = authorization.strip(" \t").partition(" ")
    text = text.strip(" \t")
    if scheme.lower() != "bearer" or not text:
        raise NotAuthenticatedError("sign in with Authorization: Bearer <token>")
    if len(text) > _TOKEN_MAX_BYTES:
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
        or not value.strip()
        or len(value) > _NAME_MAX_CHARS
        or _FORBIDDEN_IN_NAME.search(value)
    ):
        raise NotAuthenticatedError(
            f'the token\'s claim "{claim}" must be 1 to {_NAME_MAX_CHARS} characters of text'
        )
    return value


def _roles(value: object) -> frozenset[str]:
    if value is None:
        return frozenset()
    if isinstance(value, str):
        return frozenset({value})
    if isinstance(value, list) and all(isinstance(role, str) for role in value):
        return frozenset(value)
    raise NotAuthenticatedError('the token\'s claim "roles" must be a list of strings')
