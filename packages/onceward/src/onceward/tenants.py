"""Sentinels for a choice of tenants, so that no string has a second meaning."""

from enum import Enum
from typing import Final, Literal, TypeAlias

from onceward.errors import UsageError

__all__ = [
    "ALL_TENANTS",
    "OPERATOR_TENANT",
    "SINGLE_TENANT",
    "SYSTEM_TENANT",
    "AllTenants",
    "SingleTenant",
    "TenantFilter",
    "Tenants",
    "is_reserved",
    "tenant_or_none",
]


class Tenants(Enum):
    """The type of ``SINGLE_TENANT`` and ``ALL_TENANTS``."""

    # All callers of an app share one tenant: any caller that knows a key may use it.
    SINGLE = "single"
    # An operator's command concerns every tenant.
    ALL = "all"


# For ``Onceward(tenants=…)``: an app whose callers are not kept apart.
# All callers of an app share one tenant: ``Onceward(…, tenants=SINGLE_TENANT)``.
SINGLE_TENANT: Final = Tenants.SINGLE
# For operators' functions and commands, in place of the name of a tenant.
# Every tenant, where a command or a query of an operator takes a tenant.
ALL_TENANTS: Final = Tenants.ALL
# Audit events about the whole server, such as a paused queue, belong to it.
OPERATOR_TENANT: Final = "onceward:operator"
# The tenant of jobs that no caller has caused, such as periodic ones.
SYSTEM_TENANT: Final = "onceward"
SingleTenant: TypeAlias = Literal[Tenants.SINGLE]
AllTenants: TypeAlias = Literal[Tenants.ALL]
# A tenant, or all of them.
TenantFilter: TypeAlias = str | AllTenants


def is_reserved(tenant: str) -> bool:
    """Return whether a tenant is Onceward's own, and cannot be a caller's."""
    return tenant == SYSTEM_TENANT or tenant.startswith("onceward:")


def tenant_or_none(tenant: TenantFilter) -> str | None:
    """Return a tenant for a query in which NULL matches all tenants.

    Raises ``UsageError`` for an empty one and for None: a tenant that is missing by mistake must
    not match all of them.
    """
    if tenant is ALL_TENANTS:
        return None
    if not isinstance(tenant, str) or not tenant:
        raise UsageError(
            f"tenant must be the name of a tenant, or ALL_TENANTS of onceward.tenants, not "
            f"{tenant!r}"
        )
    return tenant
