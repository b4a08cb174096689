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


SINGLE_TENANT: Final = Tenants.SINGLE
ALL_TENANTS: Final = Tenants.ALL
SingleTenant: TypeAlias = Literal[Tenants.SINGLE]
AllTenants: TypeAlias = Literal[Tenants.ALL]
