"""What ``@guard(…)`` of all frameworks have in common: names, and what cannot be guarded."""

from collections.abc import Callable
from inspect import iscoroutinefunction
from typing import Any, Final

from onceward.core.policy import Policy
from onceward.errors import ConfigurationError
from onceward.guard.limits import RateLimiter
from onceward.guard.route_table import ROUTE_PARAM

__all__ = [
    "EndpointNames",
    "check_endpoint",
    "check_policy",
    "check_rate_limit",
    "name_of_view",
    "no_caller",
    "refuse_coroutine",
    "with_route",
]

# Handlers of class-based views for methods that must not write.
_SAFE_HANDLERS: Final = frozenset({"get", "head", "options", "trace", "list", "retrieve"})


class EndpointNames:
    """The names given to guards: two views with one name would replay each other's responses."""

    def __init__(self) -> None:
        self._views: dict[str, str] = {}

    def add(self, endpoint: str, view: str) -> None:
        """Register the name of a view. Raises ``ConfigurationError`` if another view has it."""
        other = self._views.setdefault(endpoint, view)
        if other != view:
            raise ConfigurationError(
                f"{view} and {other} are both guarded as {endpoint!r}, and would replay each "
                "other's responses: give each its own name"
            )


def check_endpoint(endpoint: object) -> None:
    """Raise ``ConfigurationError`` for ``@guard`` without parentheses and for an empty name."""
    if callable(endpoint):
        raise ConfigurationError("write @guard() with parentheses, or @guard('orders.create')")
    if endpoint is not None and (not isinstance(endpoint, str) or not endpoint):
        raise ConfigurationError(f"the name of a guard must be text, not {endpoint!r}")


def check_policy(policy: object) -> None:
    """Raise ``ConfigurationError`` for a policy that is not a ``Policy``."""
    if policy is not None and not isinstance(policy, Policy):
        raise ConfigurationError(
            f"policy must be a Policy, e.g. policy=Policy(key_required=False), not {policy!r}"
        )


def no_caller(what: str, fix: str, single_tenant: str) -> ConfigurationError:
    """Return the refusal of ``what``, a clause, with the two ways to say who the caller is."""
    return ConfigurationError(
        f"{what}, but nothing says who the caller is, and keys belong to callers: "
        f"write {fix}, or, if all callers may get each other's responses, {single_tenant}"
    )


def name_of_view(view: Any, owner: type | None = None) -> str:
    """Return a view's import path. Raises ``ConfigurationError`` for a handler of GET."""
    name = getattr(view, "__name__", type(view).__name__)
    qualname = getattr(view, "__qualname__", name)
    scope = qualname.rpartition(".")[0]
    is_method = owner is not None or (scope != "" and not scope.endswith("<locals>"))
    if owner is not None:
        path = f"{owner.__module__}.{owner.__qualname__}.{name}"
    else:
        path = f"{getattr(view, '__module__', '?')}.{qualname}"
        if qualname.rpartition(".")[2] != name:  # as Flask names the function of a class
            path += f" ({name})"
    if is_method and name in _SAFE_HANDLERS:
        raise ConfigurationError(
            f"{path} is guarded, but it serves GET, which must not write: guard the handlers of "
            "POST, PUT, PATCH or DELETE"
        )
    return path


def with_route(path_params: dict[str, str], route: str | None) -> dict[str, str]:
    """Add the route to what is compared, where one name covers several: another path is a 409."""
    return path_params if route is None else {**path_params, ROUTE_PARAM: route}


def check_rate_limit(limiter: RateLimiter | None, policy: Policy, view: str) -> None:
    """Raise ``ConfigurationError`` for a rate limit that nothing would count."""
    if policy.rate_limit is None:
        return
    if limiter is None:
        raise ConfigurationError(
            f"{view} has a rate limit but no limiter is configured: give Onceward one, e.g. "
            "limiter=LimitsRateLimiter() of onceward.guard.rate_limits"
        )
    limiter.check(policy.rate_limit)


def refuse_coroutine(view: Callable[..., Any]) -> None:
    """Raise ``ConfigurationError`` for an async view."""
    if iscoroutinefunction(view):
        raise ConfigurationError(
            f"{name_of_view(view)} is async, but its transaction belongs to a thread: make it a "
            "plain def"
        )
