"""Who may open the console, what they may see and what they may do."""

import inspect
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from typing import Any, Final, Protocol

from onceward.errors import NotAuthenticatedError
from onceward.guard.request import Principal, RequestHead
from onceward.tenants import ALL_TENANTS, AllTenants, TenantFilter

__all__ = ["Access", "Operator", "Role", "TokenAccess"]


class Role(IntEnum):
    """Role of a person. Each role may do all that the ones before it may."""

    # Read.
    VIEWER = 1
    # Retry, requeue, cancel, pause.
    OPERATOR = 2
    # Remove records, erase and export tenants, see settings.
    ADMIN = 3

    @property
    def label(self) -> str:
        """The name in tokens and on pages."""
        return self.name.lower()


_ROLES: Final = {role.label: role for role in Role}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """A person who is signed in."""

    # Who acts, for the audit log.
    subject: str
    # What they may do.
    role: Role
    # The tenants that may be seen. Nothing of others is shown by any URL.
    tenants: tuple[str, ...] | AllTenants
    # Whether bodies and payloads are shown. Without it, only their sizes and hashes are.
    sees_payloads: bool = False
    # When the sign-in ends, at the latest.
    expires_at: datetime | None = None

    @property
    def sees_all(self) -> bool:
        """Whether no tenant is hidden."""
        return self.tenants is ALL_TENANTS

    def sees(self, tenant: str) -> bool:
        """Return whether rows of this tenant may be shown."""
        return self.tenants is ALL_TENANTS or tenant in self.tenants

    def may(self, role: Role) -> bool:
        """Return whether the person may do what needs this role."""
        return self.role >= role

    def choose(self, wanted: str | None) -> TenantFilter | None:
        """Return the tenant of a query: the wanted one, or the default; None if it is hidden."""
        if self.tenants is ALL_TENANTS:
            return wanted or ALL_TENANTS
        if not wanted:
            return self.tenants[0] if self.tenants else None
        return wanted if wanted in self.tenants else None


class Access(Protocol):
    """Signs a person in to the console."""

    async def sign_in(self, token: str) -> Operator | None:
        """Return who the token is for; None if they may not open the console.

        Raises ``NotAuthenticatedError`` for a token that is not valid, and
        ``StoreUnavailableError`` if that cannot be checked now.
        """


class TokenAccess:
    """Access with the tokens of the app itself.

    The roles ``viewer``, ``operator`` and ``admin`` of a token count for the tenants that
    ``tenants_of`` reads from it. All tenants are for the subjects in ``operators`` only, who need
    a role as well.
    """

    def __init__(
        self,
        identify: Callable[[RequestHead], Principal | Awaitable[Principal]],
        *,
        operators: Collection[str] = (),
        tenants_of: Callable[[Principal], Collection[str]] | None = None,
        payload_role: Role = Role.OPERATOR,
    ) -> None:
        """``identify`` is that of ``Onceward``. ``payload_role`` and higher roles see payloads."""
        self._identify = identify
        self._operators = frozenset(operators)
        self._tenants_of = tenants_of or (lambda principal: (principal.tenant,))
        self._payload_role = payload_role

    async def sign_in(self, token: str) -> Operator | None:
        """Check the token, and read roles and tenants from it."""
        if not token.isascii() or not token.isprintable() or " " in token:
            raise NotAuthenticatedError("token contains whitespace or non-ASCII characters")
        headers = [(b"authorization", b"Bearer " + token.encode("ascii"))]
        found: Any = self._identify(RequestHead("GET", "/", b"", headers))
        principal: Principal = await found if inspect.isawaitable(found) else found
        role = max((_ROLES[name] for name in principal.roles if name in _ROLES), default=None)
        if role is None:
            return None
        return Operator(
            subject=principal.actor,
            role=role,
            tenants=ALL_TENANTS
            if principal.actor in self._operators
            else tuple(sorted({name for name in self._tenants_of(principal) if name})),
            sees_payloads=role >= self._payload_role,
            expires_at=_expiry_of(principal),
        )


def _expiry_of(principal: Principal) -> datetime | None:
    seconds = principal.claims.get("exp")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return None
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, OSError, ValueError):
        return None
