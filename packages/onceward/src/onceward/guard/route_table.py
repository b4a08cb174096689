"""Which operations are guarded, by which policy, and which are switched off."""

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from inspect import iscoroutinefunction
from typing import Any, Final, NamedTuple

from onceward.errors import ConfigurationError
from onceward.guard.policy import Policy

_ATTRIBUTE: Final = "__onceward_guard__"
_PARAM: Final = re.compile(r"{([a-zA-Z_]\w*)(?::(\w+))?}")
# Starlette's converters: a path that reaches a handler there must match here, or it is unguarded.
_CONVERTERS: Final = {
    "str": r"[^/]+",
    "int": r"[0-9]+",
    "float": r"[0-9]+(?:\.[0-9]+)?",
    "uuid": r"[0-9a-fA-F]{8}(?:-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}",
    "path": r".*",
}

# Names of endpoints, in which ``*`` matches any characters; or a function that gets the name
# of an endpoint for each request, e.g. to ask a feature flag. It must not block.
Disabled = Collection[str] | Callable[[str], bool]

_MAX_ENDPOINTS = 4096

# The path parameter with which requests to a later route of a name are compared.
ROUTE_PARAM: Final = "onceward.route"

# These change nothing and never access the store of records.
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})


@dataclass(frozen=True, slots=True)
class Guard:
    """How one operation is guarded. The default endpoint is method and path template."""

    policy: Policy
    endpoint: str | None = None
    # The endpoint claims the key itself, after its dependencies have run.
    is_claimed_late: bool = False


@dataclass(frozen=True, slots=True)
class GuardedRoute:
    """A guarded operation: one method, one path template."""

    method: str
    path: str
    guard: Guard
    # The framework's route, if it may be called directly.
    source: object = field(default=None, compare=False, repr=False)

    @property
    def endpoint(self) -> str:
        """The stable name of the operation, part of every stored key."""
        return self.guard.endpoint or f"{self.method} {self.path}"


@dataclass(frozen=True, slots=True)
class OpenRoute:
    """A route without a guard. If it comes first, a later guarded route is never reached."""

    method: str
    path: str


class Match(NamedTuple):
    """The guarded route of a request, with its path parameters."""

    endpoint: str
    policy: Policy
    path_params: dict[str, str]
    is_claimed_late: bool = False
    # The framework's route, if it may be called directly.
    source: object = None


_NOT_FOUND: Final = Match("", Policy(), {})


def mark_guarded(handler: Callable[..., Any], guard: Guard) -> None:
    """Set the guard of a handler, as an attribute of it."""
    setattr(handler, _ATTRIBUTE, guard)


def guard_of(handler: object) -> Guard | None:
    """Return a handler's guard, or None."""
    return getattr(handler, _ATTRIBUTE, None)


class GuardTable:
    """An app's guarded routes. Fixed paths are in a dictionary; templates are tried in order."""

    def __init__(self, routes: Iterable[GuardedRoute | OpenRoute] = ()) -> None:
        """Add the routes in the order in which the app tries them."""
        self.routes: list[GuardedRoute] = []
        self._by_name: dict[str, GuardedRoute] = {}
        # None for an open route.
        self._fixed: dict[tuple[str, str], Match | None] = {}
        self._templates: dict[str, list[tuple[re.Pattern[str], GuardedRoute | OpenRoute]]] = {}
        for route in routes:
            self.add(route)

    def add(self, route: GuardedRoute | OpenRoute) -> None:
        """Add a route. Raises ``ConfigurationError`` for a guarded GET or an unknown converter."""
        if isinstance(route, GuardedRoute):
            if route.method in SAFE_METHODS:
                raise ConfigurationError(
                    f"{route.method} {route.path} is guarded, but a {route.method} must not write: "
                    "guard POST, PUT, PATCH or DELETE"
                )
            self._refuse_shared_name(route)
            self.routes.append(route)
        if "{" in route.path:
            pattern = _compile(route)
            if pattern is not None:
                self._templates.setdefault(route.method, []).append((pattern, route))
        elif (route.method, route.path) not in self._fixed:
            # The app serves the first route that matches: an earlier template wins.
            match = self._by_template(route.method, route.path)
            if match is _NOT_FOUND:
                match = self._match(route, {}) if isinstance(route, GuardedRoute) else None
            self._fixed[route.method, route.path] = match

    def _refuse_shared_name(self, route: GuardedRoute) -> None:
        """Raise if another guard has this endpoint name: they would share their records."""
        first = self._by_name.setdefault(route.endpoint, route)
        if first.guard is not route.guard:
            raise ConfigurationError(
                f"two guards have the endpoint name {route.endpoint!r}: {first.method} "
                f"{first.path} and {route.method} {route.path}. They would replay each other's "
                "responses: give each guard a name of its own"
            )

    def find(self, method: str, path: str) -> Match | None:
        path = path.removesuffix("\n")  # Starlette's patterns end in ``$``, which ignores one
        match = self._fixed.get((method, path), _NOT_FOUND)
        if match is _NOT_FOUND:
            match = self._by_template(method, path)
        return None if match is _NOT_FOUND else match

    def _by_template(self, method: str, path: str) -> Match | None:
        for pattern, route in self._templates.get(method, ()):
            found = pattern.fullmatch(path)
            if found is not None:
                if isinstance(route, OpenRoute):
                    return None
                return self._match(route, found.groupdict())
        return _NOT_FOUND

    def _match(self, route: GuardedRoute, path_params: dict[str, str]) -> Match:
        guard = route.guard
        if route.path != self._by_name[route.endpoint].path:
            # A key that was used on the first path of a name is refused on the others.
            path_params[ROUTE_PARAM] = route.path
        return Match(route.endpoint, guard.policy, path_params, guard.is_claimed_late, route.source)


def _compile(route: GuardedRoute | OpenRoute) -> re.Pattern[str] | None:
    path, parts, position = route.path, list[str](), 0
    for param in _PARAM.finditer(path):
        name, converter = param.group(1), param.group(2) or "str"
        if converter not in _CONVERTERS:
            if isinstance(route, OpenRoute):
                return None
            raise ConfigurationError(f"{path}: path converter {converter!r} is not known")
        parts += [
            re.escape(path[position : param.start()]),
            f"(?P<{name}>{_CONVERTERS[converter]})",
        ]
        position = param.end()
    return re.compile("".join(parts) + re.escape(path[position:]))


# -- endpoints that are switched off -----------------------------------------------------------


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
