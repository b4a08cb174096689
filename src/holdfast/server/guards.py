"""Guards: which operations are guarded, by which policy, found by method and path."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from holdfast.core.policy import Policy
from holdfast.errors import ConfigurationError

__all__ = ["Guard", "GuardTable", "GuardedRoute", "Match", "guard_of", "mark_guarded"]

_ATTRIBUTE: Final = "__holdfast_guard__"
_PARAM: Final = re.compile(r"{([a-zA-Z_]\w*)(?::(\w+))?}")
_CONVERTERS: Final = {
    "str": r"[^/]+",
    "int": r"[0-9]+",
    "float": r"[0-9]+(?:\.[0-9]+)?",
    "uuid": r"[0-9a-fA-F-]{36}",
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


class Match(NamedTuple):
    """A guarded route that a request hits, with the parameters in its path."""

    endpoint: str
    policy: Policy
    path_params: dict[str, str]


def mark_guarded(handler: Callable[..., Any], guard: Guard) -> None:
    """Note on a handler that it is guarded; the handler itself stays as it is."""
    setattr(handler, _ATTRIBUTE, guard)


def guard_of(handler: object) -> Guard | None:
    """Return a handler's guard, or None."""
    return getattr(handler, _ATTRIBUTE, None)


class GuardTable:
    """All guarded routes of an app. Fixed paths are one look-up; templates are tried in turn."""

    def __init__(self, routes: Iterable[GuardedRoute] = ()) -> None:
        """Take the routes in the order the app tries them."""
        self.routes: list[GuardedRoute] = []
        self._fixed: dict[tuple[str, str], Match] = {}
        self._templates: dict[str, list[tuple[re.Pattern[str], GuardedRoute]]] = {}
        for route in routes:
            self.add(route)

    def add(self, route: GuardedRoute) -> None:
        """Add one route."""
        if route.method in SAFE_METHODS:
            raise ConfigurationError(
                f"{route.method} {route.path} is guarded, but a {route.method} must not write: "
                "guard POST, PUT, PATCH or DELETE"
            )
        self.routes.append(route)
        if "{" in route.path:
            pattern = _compile(route.path)
            self._templates.setdefault(route.method, []).append((pattern, route))
        else:
            match = Match(route.endpoint, route.guard.policy, {})
            self._fixed.setdefault((route.method, route.path), match)

    def find(self, method: str, path: str) -> Match | None:
        """Return the guarded route of a request, or None."""
        match = self._fixed.get((method, path))
        if match is not None:
            return match
        for pattern, route in self._templates.get(method, ()):
            hit = pattern.fullmatch(path)
            if hit is not None:
                return Match(route.endpoint, route.guard.policy, hit.groupdict())
        return None


def _compile(path: str) -> re.Pattern[str]:
    parts, position = [], 0
    for param in _PARAM.finditer(path):
        name, converter = param.group(1), param.group(2) or "str"
        if converter not in _CONVERTERS:
            raise ConfigurationError(f"{path}: path converter {converter!r} is not known")
        parts += [
            re.escape(path[position : param.start()]),
            f"(?P<{name}>{_CONVERTERS[converter]})",
        ]
        position = param.end()
    return re.compile("".join(parts) + re.escape(path[position:]))
