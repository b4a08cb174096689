"""Who the caller is, for the common cases: an API key in a header, or an app's own sign-in.

=====================  =====================================================================
API key in a header    ``Onceward(…, identify=ApiKeyIdentify({hash_api_key(key): principal}))``
bearer token (JWT)     ``Onceward(…, identify=JwtIdentify(…))`` of ``sign_in.jwt_auth``
FastAPI dependency     ``Onceward(…, principal=principal_from(current_user))``
Flask-Login            nothing to write; ``onceward.flask.login_principal``
Django's user          nothing to write; ``onceward.django.user_principal``
=====================  =====================================================================
"""

import hashlib
import hmac
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Final

from onceward.errors import ConfigurationError, NotAuthenticatedError, UsageError
from onceward.guard.request import Principal, RequestHead

__all__ = ["ApiKeyIdentify", "FindPrincipal", "hash_api_key", "id_of_user", "principal_from"]

_HASH: Final = re.compile(r"[0-9a-f]{64}")
_MAX_KEY_BYTES: Final = 1024

# Returns the caller of an API key's hash, or None if there is no such key. May be async.
FindPrincipal = Callable[[str], Principal | Awaitable[Principal | None] | None]


def hash_api_key(key: str) -> str:
    """Return the SHA-256 of an API key in hex, to store in place of the key.

    The key must be random, e.g. ``secrets.token_urlsafe(32)``: a word can be guessed by its hash.
    """
    return hashlib.sha256(key.encode()).hexdigest()


class ApiKeyIdentify:
    """Identifies the caller by a secret key in a header.

    ``keys`` maps the hashes of keys to their principals, and is compared in constant time: each
    request costs about 0.2 µs per key. For thousands of keys, or keys in a database, give a
    function that takes the hash and returns the principal or None.
    """

    def __init__(
        self, keys: Mapping[str, Principal] | FindPrincipal, *, header: str = "X-API-Key"
    ) -> None:
        """Raise ``ConfigurationError`` for a key that is not a hash of ``hash_api_key``."""
        self._header = header.lower().encode("latin-1")
        self._name = header
        self._find: FindPrincipal
        if not isinstance(keys, Mapping):
            self._find = keys
            return
        for digest, principal in keys.items():
            if not isinstance(digest, str) or _HASH.fullmatch(digest) is None:
                raise ConfigurationError(
                    "ApiKeyIdentify takes the hashes of keys, 64 hexadecimal digits in lower "
                    "case: write {hash_api_key(key): Principal(…)}"
                )
            if not isinstance(principal, Principal):
                raise ConfigurationError(
                    f"ApiKeyIdentify maps hashes to Principal(tenant=…, actor=…), not {principal!r}"
                )
        self._known = dict(keys)
        self._find = self._find_known

    def __call__(self, head: RequestHead) -> Principal | Awaitable[Principal]:
        """Return the caller, or an awaitable of it. Raises ``NotAuthenticatedError``."""
        sent = {value for name, value in head.headers if name == self._header}
        # Two different ones identify no caller: a proxy may have checked the other one.
        if len(sent) != 1:
            raise self._refusal()
        key = sent.pop()
        if self._header == b"authorization" and key[:7].lower() == b"bearer ":
            key = key[7:]
        key = key.strip()
        if not 0 < len(key) <= _MAX_KEY_BYTES:
            raise self._refusal()
        found = self._find(hashlib.sha256(key).hexdigest())
        return self._awaited(found) if inspect.isawaitable(found) else self._checked(found)

    def _find_known(self, digest: str) -> Principal | None:
        found = None
        for known, principal in self._known.items():
            if hmac.compare_digest(known, digest):
                found = principal  # and go on: the time must not depend on which key it is
        return found

    async def _awaited(self, found: Awaitable[Principal | None]) -> Principal:
        return self._checked(await found)

    def _checked(self, found: object) -> Principal:
        if found is None:
            raise self._refusal()
        if not isinstance(found, Principal):
            raise UsageError(f"the caller must be a Principal(tenant=…, actor=…), not {found!r}")
        return found

    def _refusal(self) -> NotAuthenticatedError:
        return NotAuthenticatedError(f"send a valid API key in the header {self._name}")


def principal_from(
    dependency: Callable[..., Any],
    *,
    tenant: Callable[[Any], str] | None = None,
    actor: Callable[[Any], str] | None = None,
) -> Callable[..., Any]:
    """Return a ``principal`` for FastAPI from the dependency that signs the app's users in.

    ``tenant`` and ``actor`` take what the dependency returns. The default of both is the user's
    ``id``, or the user itself if it is text or a number. No user (None) is a 401.
    """
    from fastapi import Depends  # noqa: PLC0415 - FastAPI only

    async def principal(user: Annotated[Any, Depends(dependency)]) -> Principal:
        if user is None:
            raise NotAuthenticatedError("sign in first")
        name = (actor or id_of_user)(user)
        return Principal(tenant=name if tenant is None else tenant(user), actor=name)

    return principal


def id_of_user(user: object) -> str:
    """Return the id of a user. Raises ``ConfigurationError`` if it has none."""
    found = user if isinstance(user, str | int) else getattr(user, "id", None)
    if found is None or isinstance(found, bool):
        raise ConfigurationError(
            f"{type(user).__name__} has no id that could be its tenant: give tenant=… and actor=…, "
            "functions of the user"
        )
    return str(found)
