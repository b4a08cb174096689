"""The page for an id or key that nothing has: what was searched, where, and what to try next."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from onceward.app import Onceward
from onceward.tenants import ALL_TENANTS
from onceward_operator.console.jobs import SEARCHED_TENANTS
from onceward_operator.console.page import PageRequest, Shown

__all__ = ["not_found", "searched_tenants"]

_NOT_FOUND: Final = 404


def searched_tenants(request: PageRequest) -> Sequence[str | None]:
    """Return the tenants in which an id is searched: None for all.

    The named one, or all that the operator may see.
    """
    operator = request.operator
    if operator.tenants is ALL_TENANTS:
        return [None if request.is_of_all_tenants else str(request.tenant)]
    if "tenant" in request.query:
        return [str(request.tenant)]
    return list(operator.tenants)[:SEARCHED_TENANTS]


def not_found(
    request: PageRequest, onceward: Onceward[Any], *, wanted: str, searched_as: str
) -> Shown:
    """Return the page. ``searched_as`` says what was compared, such as "a request id"."""
    tenants = [name for name in searched_tenants(request) if name is not None]
    lifetimes = [
        ttl
        for route in onceward.runtime.routes.table().routes
        for ttl in (route.guard.policy.success_ttl, route.guard.policy.error_ttl)
    ]
    log_seconds = onceward.runtime.request_log.keep_seconds
    return Shown(
        "not_found.html",
        {
            "wanted": wanted,
            "searched_as": searched_as,
            "tenants": tenants,
            # Searched in others as well, if the operator asks for it.
            "is_narrowed": "tenant" in request.query,
            "shortest": min(lifetimes, default=None),
            "longest": max(lifetimes, default=None),
            "log_kept": timedelta(seconds=log_seconds) if log_seconds > 0 else None,
            "searched_tenants": SEARCHED_TENANTS,
        },
        status=_NOT_FOUND,
    )
