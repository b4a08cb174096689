"""The option ``--app``: an app or its ``Onceward`` as ``MODULE:NAME``. Every error is one line."""

import inspect
from typing import Any, Final

from onceward import Onceward
from onceward_protocol.cli.load_object import describe_error, load_object
from onceward_protocol.cli.output import CommandError

_USAGE: Final = 2
_EXAMPLE: Final = "for example --app shop.main:onceward"


def load_onceward(name: str) -> Onceward:
    """Import ``MODULE:NAME`` and return its ``Onceward``. Raises ``CommandError``.

    NAME is a ``Onceward``, an app on which one is installed, or a function without arguments that
    returns either. The current directory is on ``sys.path``.
    """
    found = load_object(name, option="--app", example=_EXAMPLE, is_meant=_has_onceward)
    return _onceward_of(found, name)


def _onceward_of(found: Any, name: str) -> Onceward:
    is_cached = _attribute(found, "cache_info") and _attribute(found, "__wrapped__")
    if inspect.isfunction(found) or inspect.ismethod(found) or is_cached:
        found = _call(found, name)
    onceward = _installed_on(found)
    if onceward is None:
        kind = type(found).__name__
        what = "a class" if isinstance(found, type) else f"of type {kind}"
        raise CommandError(
            f"{name} is {what}: expected a Onceward, an app on which one is installed, "
            "or a function without arguments that returns one",
            _USAGE,
        )
    return onceward


def _call(function: Any, name: str) -> Any:
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise CommandError(f"{name} cannot be called without arguments: {error}", _USAGE) from error
    if inspect.iscoroutinefunction(function):
        raise CommandError(
            f"{name} is a coroutine function: use a plain function that returns a Onceward", _USAGE
        )
    try:
        return function()
    except Exception as error:
        raise CommandError(f"{name} failed: {describe_error(error)}") from error


def _installed_on(app: Any) -> Onceward | None:
    """Return the ``Onceward`` of an app of Starlette, FastAPI or Flask, or of a guard."""
    extensions = _attribute(app, "extensions")
    middlewares = _attribute(app, "user_middleware")
    candidates = [
        app,
        _attribute(app, "onceward"),
        _attribute(_attribute(app, "state"), "onceward"),
        extensions.get("onceward") if isinstance(extensions, dict) else None,
        _attribute(_attribute(app, "wsgi_app"), "onceward"),
        # Starlette and FastAPI: the middleware is a bound method of Onceward.
        *(
            _attribute(_attribute(middleware, "cls"), "__self__")
            for middleware in (middlewares if isinstance(middlewares, list) else ())
        ),
    ]
    for candidate in candidates:
        for found in (candidate, _attribute(candidate, "onceward")):
            if isinstance(found, Onceward):
                return found
    return None


def _has_onceward(found: Any) -> bool:
    return _installed_on(found) is not None


def _attribute(found: Any, name: str) -> Any:
    """Return an attribute, or None. Objects of a module may raise anything, as proxies do."""
    try:
        return getattr(found, name, None)
    except Exception:  # noqa: BLE001
        return None
