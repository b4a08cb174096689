"""The option ``--tenant``: one tenant, or without it all of them; never an empty name."""

from onceward.core.tenants import ALL_TENANTS, TenantFilter
from onceward_protocol.cli.output import CommandError

__all__ = ["check_tenant", "tenant_or_all"]


def tenant_or_all(given: str | None) -> TenantFilter:
    """Return ``--tenant``; all tenants without it. Raises ``CommandError`` if it is empty."""
    return ALL_TENANTS if given is None else check_tenant(given)


def check_tenant(given: str) -> str:
    """Return a tenant. An empty one, as of an unset shell variable, is a ``CommandError``."""
    if not given.strip():
        raise CommandError("--tenant is empty: name a tenant, or leave it out for all tenants", 2)
    return given
