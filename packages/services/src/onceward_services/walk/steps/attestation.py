"""Verify App Check tokens, which prove that a report comes from the app.

App Check tokens are JWTs and get the same checks as those of users: algorithm RS256, keys of a
JWKS, issuer, audience and expiry by the server's clock. In addition a token
must have been issued within the last five minutes, so that a leaked token soon becomes useless.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from inspect import isawaitable
from math import ceil, floor
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import jwt
import msgspec

from onceward.errors import ConfigurationError, NotAuthenticatedError, StoreUnavailableError
from onceward.guard.request import RequestHead
from onceward.ports import Clock
from onceward.sign_in.jwt_auth import JwtIdentify
from onceward_services.dev_secrets import development_app_check_key
from onceward_services.walk.steps.settings import StepSettings

__all__ = ["DEVELOPMENT_APP", "AppCheck", "AttestationError", "Attested", "mint_app_check"]

DEVELOPMENT_APP: Final = "1:0:web:development"
_ALGORITHM: Final = "RS256"
_MAX_ID_CHARS: Final = 128
# The claims of a token that are kept in the attestation log.
_LOGGED_CLAIMS: Final = ("iss", "sub", "aud", "iat", "exp")

_log = logging.getLogger("onceward.sign_in")


@dataclass(frozen=True, slots=True)
class Attested:
    """A valid token: its id, and its claims for the log."""

    token_id: str
    summary: Mapping[str, Any] = field(default_factory=dict)


class AttestationError(Exception):
    """The token is missing or invalid."""

    def __init__(self, reason: str, token_id: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.token_id = token_id


class AppCheck:
    """Checks App Check tokens; without a JWKS, those of ``onceward token --app-check``."""

    def __init__(
        self,
        settings: StepSettings,
        home: Path,
        clock: Clock,
        *,
        allow_development_key: bool = True,
    ) -> None:
        """Load the keys of the settings. Development keys are created on first use."""
        self._allow_development_key = allow_development_key
        self._clock = clock
        self._home = home
        self._max_age = settings.app_check_max_age_seconds
        self._audience, self._issuer = settings.app_check_party
        self._identify: JwtIdentify | None = None
        self._opening = asyncio.Lock()
        if not settings.app_check_is_development:
            self._identify = self._create_identify(
                settings.app_check_jwks_file, settings.app_check_jwks_url
            )

    async def verify(self, in_header: Sequence[str], in_body: str | None) -> Attested:
        """Check the token of a request; raises ``AttestationError`` if it is missing or invalid.

        Raises ``StoreUnavailableError`` if the keys cannot be fetched.
        """
        tokens = {token for token in (*in_header, in_body) if token}
        if not tokens:
            raise AttestationError("there is no App Check token", "none")
        if len(tokens) > 1:
            raise AttestationError("header and body have different App Check tokens", "several")
        token = tokens.pop()
        anonymous_id = token_digest(token)
        identify = self._identify or await self._with_development_key()
        try:
            found = identify(_head(token))
            claims = (await found if isawaitable(found) else found).claims
            self._check_age(claims)
        except NotAuthenticatedError as error:
            raise AttestationError(error.message, anonymous_id) from None
        token_id = claims.get("jti")
        if not isinstance(token_id, str) or not 0 < len(token_id) <= _MAX_ID_CHARS:
            token_id = anonymous_id
        return Attested(
            token_id.replace("\x00", ""),
            {name: claims[name] for name in _LOGGED_CLAIMS if name in claims},
        )

    def _check_age(self, claims: Mapping[str, Any]) -> None:
        issued_at = claims.get("iat")
        if issued_at is None:
            raise NotAuthenticatedError('the token has no claim "iat"')
        if issued_at < self._clock.now().timestamp() - self._max_age:
            raise NotAuthenticatedError(f"the token is older than {self._max_age:g} seconds")

    def _create_identify(self, jwks_file: Path | None, jwks_url: str | None) -> JwtIdentify:
        return JwtIdentify(
            jwks_file=jwks_file,
            jwks_url=jwks_url,
            algorithm=_ALGORITHM,
            issuer=self._issuer,
            audience=self._audience,
            clock=self._clock,
        )

    async def _with_development_key(self) -> JwtIdentify:
        if not self._allow_development_key:
            _log.error("App Check tokens cannot be checked: set ONCEWARD_APP_CHECK_JWKS_URL")
            raise StoreUnavailableError(
                "App Check tokens cannot be checked: this server has no keys for them",
                is_for_callers=True,
            )
        async with self._opening:
            if self._identify is None:
                try:
                    # In a thread: generating a key takes about a second.
                    path = await asyncio.to_thread(development_app_check_key, self._home)
                    self._identify = self._create_identify(path, None)
                except ConfigurationError as error:
                    _log.error("App Check tokens cannot be checked: %s", error)
                    raise StoreUnavailableError(
                        "App Check tokens cannot be checked now", is_for_callers=True
                    ) from error
                _log.warning("App Check tokens are checked with a development key in %s", path)
            return self._identify


def mint_app_check(
    key_file: Path,
    *,
    audience: str,
    issuer: str,
    sub: str = DEVELOPMENT_APP,
    lifetime: timedelta = timedelta(hours=1),
    now: datetime | None = None,
) -> str:
    """Create an App Check token with the development key, for development and tests."""
    now = now or datetime.now(UTC)
    jwk = msgspec.json.decode(key_file.read_bytes())["keys"][0]
    claims = {
        "iss": issuer,
        "aud": [audience],
        "sub": sub,
        "jti": str(uuid4()),
        "iat": floor(now.timestamp()),
        "exp": ceil((now + lifetime).timestamp()),
    }
    key = jwt.PyJWK(jwk, algorithm=_ALGORITHM).key
    return jwt.encode(claims, key, algorithm=_ALGORITHM, headers={"kid": jwk["kid"]})


def token_digest(token: str) -> str:
    """Return an id for a token that does not reveal it."""
    return "sha256:" + sha256(token.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _head(token: str) -> RequestHead:
    """Return a request head with the token where ``JwtIdentify`` reads it."""
    value = b"Bearer " + token.encode("utf-8", "surrogatepass")
    return RequestHead("POST", "/", b"", [(b"authorization", value)])
