"""Guards: which operations are guarded, by which policy, found by method and path."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from holdfast.core.policy import Policy
from holdfast.errors import ConfigurationError

__all__ = ["Guard", "GuardTable", "GuardedRoute", "Match", "OpenRoute", "guard_of", "mark_guarded"]

_ATTRIBUTE: Final = "__holdfast_guard__"
_PARAM: Final = re.compile(r"{([a-zA-Z_]\w*)(?::(\w+))?}")
# As Starlette has them: what reaches a handler there must be found here, or it runs unguarded.
_CONVERTERS: Final = {
    "str": r"[^/]+",
    "int": r"[0-9]+",
    "float": r"[0-9]+(?:\.[0-9]+)?",
    "uuid": r"[0-9a-fA-F]{8}(?:-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}",
    "path": r".*",
}

# Reading changes nothing: these never touch the store of records.
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})


@dataclass(frozen=True, slots=True)
class Guard:
    """How one operation is guarded. Without a name, method and path template name it."""

    policy: Policy
    endpoint: str | None = None


@dataclass(frozen=True, slots=True)
class GuardedRoute:
    """A guard at its place: one method, one path template."""

    method: str
    path: str
    guard: Guard

    @property
    def endpoint(self) -> str:
        """Return the stable name of the operation."""
        return self.guard.endpoint or f"{self.method} {self.path}"


@dataclass(frozen=True, slots=True)
class OpenRoute:
    """A route without a guard: where the app tries it first, a guarded one behind has no say."""

    method: str
    path: str


class Match(NamedTuple):
    """A guarded route that a request hits, with the parameters in its path."""

    endpoint: str
    policy: Policy
    path_params: dict[str, str]


_NOT_FOUND: Final = Match("", Policy(), {})


def mark_guarded(handler: Callable[..., Any], guard: Guard) -> None:
    """Note on a handler that it is guarded; the handler itself stays as it is."""
    setattr(handler, _ATTRIBUTE, guard)


def guard_of(handler: object) -> Guard | None:
    """Return a handler's guard, or None."""
    return getattr(handler, _ATTRIBUTE, None)


class GuardTable:
    """An app's guarded routes. Fixed paths are a dictionary hit; templates are tried in turn."""

    def __init__(self, routes: Iterable[GuardedRoute | OpenRoute] = ()) -> None:
        """Take the routes in the order the app tries them."""
        self.routes: list[GuardedRoute] = []
        # None stands for an open route.
        self._fixed: dict[tuple[str, str], Match | None] = {}
        self._templates: dict[str, list[tuple[re.Pattern[str], GuardedRoute | OpenRoute]]] = {}
        for route in routes:
            self.add(route)

    def add(self, route: GuardedRoute | OpenRoute) -> None:
        """Add one route."""
        if isinstance(route, GuardedRoute):
            if route.method in SAFE_METHODS:
                raise ConfigurationError(
                    f"{route.method} {route.path} is guarded, but a {route.method} must not write: "
                    "guard POST, PUT, PATCH or DELETE"
                )
            self.routes.append(route)
        if "{" in route.path:
            pattern = _compile(route)
            if pattern is not None:
                self._templates.setdefault(route.method, []).append((pattern, route))
        elif (route.method, route.path) not in self._fixed:
            # An earlier template that fits is what the app serves.
            match = self._by_template(route.method, route.path)
            if match is _NOT_FOUND:
                match = (
                    Match(route.endpoint, route.guard.policy, {})
                    if isinstance(route, GuardedRoute)
                    else None
                )
            self._fixed[route.method, route.path] = match

    def find(self, method: str, path: str) -> Match | None:
        """Return the guarded route of a request, or None."""
        path = path.removesuffix("\n")  # Starlette's patterns end in ``$``, which overlooks one
        match = self._fixed.get((method, path), _NOT_FOUND)
        if match is _NOT_FOUND:
            match = self._by_template(method, path)
        return None if match is _NOT_FOUND else match

    def _by_template(self, method: str, path: str) -> Match | None:
        for pattern, route in self._templates.get(method, ()):
            hit = pattern.fullmatch(path)
            if hit is not None:
                if isinstance(route, OpenRoute):
                    return None
                return Match(route.endpoint, route.guard.policy, hit.groupdict())
        return _NOT_FOUND


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
