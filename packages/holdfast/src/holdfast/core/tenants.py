"""Sentinels for a choice of tenants, so that no string has a second meaning."""

from enum import Enum
from typing import Final, Literal, TypeAlias

__all__ = ["ALL_TENANTS", "SINGLE_TENANT", "AllTenants", "SingleTenant", "Tenants"]


class Tenants(Enum):
    """The type of ``SINGLE_TENANT`` and ``ALL_TENANTS``."""

    # All callers of an app share one tenant: any caller that knows a key may use it.
    SINGLE = "single"
    # An operator's command concerns every tenant.
    ALL = "all"


# For ``Holdfast(tenants=…)``: an app whose callers are not kept apart.
SINGLE_TENANT: Final = Tenants.SINGLE
# For operators' functions and commands, in place of the name of a tenant.
ALL_TENANTS: Final = Tenants.ALL
SingleTenant: TypeAlias = Literal[Tenants.SINGLE]
AllTenants: TypeAlias = Literal[Tenants.ALL]
