"""The routes of a Django project that lead to one view."""

from collections.abc import Iterator, Mapping
from inspect import unwrap
from typing import Any
from weakref import WeakKeyDictionary

from django.http import HttpRequest
from django.urls import get_resolver

__all__ = ["later_route"]

# A route as the patterns it is made of. Their text may depend on the language of the request.
_Route = tuple[Any, ...]
# For each resolver, the routes of views: of functions, and of actions of viewsets.
_routes: WeakKeyDictionary[Any, dict[tuple[int, str], list[_Route]]] = WeakKeyDictionary()


def later_route(request: HttpRequest, action: str) -> str | None:
    """Return the route of a request, or None if it is the first one that leads to its view.

    The first one is None so that a route added to a view changes nothing for the routes before
    it. ``action`` is the name of the viewset's method.
    """
    found = request.resolver_match
    if found is None:
        return None
    resolver = get_resolver(getattr(request, "urlconf", None))
    routes = _routes.get(resolver)
    if routes is None:
        routes = {}
        for route, callback in _walk(resolver, ()):
            for key in _keys(callback):
                routes.setdefault(key, []).append(route)
        _routes[resolver] = routes
    view = _view_of(found.func)
    same = routes.get((id(view), action)) or routes.get((id(view), "")) or []
    own: str = found.route
    return None if not same or own == _text(same[0]) else own


def _walk(resolver: Any, prefix: _Route) -> Iterator[tuple[_Route, Any]]:
    """Yield the routes of a resolver in the order in which they are tried, and their views."""
    for pattern in resolver.url_patterns:
        route = (*prefix, pattern.pattern)
        if hasattr(pattern, "url_patterns"):
            yield from _walk(pattern, route)
        else:
            yield route, pattern.callback


def _keys(callback: Any) -> list[tuple[int, str]]:
    view, actions = id(_view_of(callback)), getattr(callback, "actions", None)
    if isinstance(actions, Mapping):  # a viewset's: each route leads to some of its methods
        return [(view, action) for action in sorted(set(actions.values()))]
    return [(view, "")]


def _view_of(callback: Any) -> Any:
    """Return the class of a view, or its function without decorators."""
    for name in ("cls", "view_class"):  # before unwrap: as_view copies what dispatch wraps
        if isinstance(getattr(callback, name, None), type):
            return getattr(callback, name)
    return unwrap(callback)


def _text(route: _Route) -> str:
    """Return a route as ``ResolverMatch.route`` has it."""
    text = ""
    for part in map(str, reversed(route)):
        text = part + text.removeprefix("^") if part else text
    return text
