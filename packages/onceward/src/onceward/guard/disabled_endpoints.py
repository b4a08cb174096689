"""Which endpoints are switched off: named by the app, or decided by its function."""

from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from functools import lru_cache
from inspect import iscoroutinefunction

from onceward.errors import ConfigurationError

__all__ = ["Disabled", "disabled_check", "unknown_names"]

# Names of endpoints, in which ``*`` matches any characters; or a function that gets the name
# of an endpoint for each request, e.g. to ask a feature flag. It must not block.
Disabled = Collection[str] | Callable[[str], bool]

_MAX_ENDPOINTS = 4096


def disabled_check(disabled: Disabled) -> Callable[[str], bool] | None:
    """Return a function that says whether an endpoint is switched off; None if none is."""
    if callable(disabled):
        if iscoroutinefunction(disabled):
            raise ConfigurationError(
                f"disabled must be a function without await, not {disabled!r}: it is called for "
                "each guarded request"
            )
        return disabled
    if isinstance(disabled, str) or not all(isinstance(one, str) and one for one in disabled):
        raise ConfigurationError(
            f'disabled must be a list of endpoints, such as ["orders.create"], not {disabled!r}'
        )
    if not disabled:
        return None
    names = tuple(disabled)

    @lru_cache(maxsize=_MAX_ENDPOINTS)
    def is_disabled(endpoint: str) -> bool:
        return any(fnmatchcase(endpoint, name) for name in names)

    return is_disabled


def unknown_names(disabled: Collection[str], endpoints: Collection[str]) -> list[str]:
    """Return the names and patterns that match no endpoint: probably misspelt."""
    return [
        name for name in disabled if not any(fnmatchcase(endpoint, name) for endpoint in endpoints)
    ]
