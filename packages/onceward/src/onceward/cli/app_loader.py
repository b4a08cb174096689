"""Options that name an object as ``MODULE:NAME``, such as ``--app``. Every error is one line."""

import inspect
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from onceward import Onceward
from onceward.cli.output import CommandError
from onceward.errors import MissingExtraError

__all__ = ["load_object", "load_onceward"]

_USAGE: Final = 2
_EXAMPLE: Final = "for example --app shop.main:onceward"
_MAX_NAMES: Final = 8


def load_onceward(name: str) -> Onceward:
    """Import ``MODULE:NAME`` and return its ``Onceward``. Raises ``CommandError``.

    NAME is a ``Onceward``, an app on which one is installed, or a function without arguments that
    returns either. The current directory is on ``sys.path``.
    """
    return _onceward_of(load_object(name, option="--app", example=_EXAMPLE), name)


def load_object(name: str, *, option: str, example: str) -> Any:
    """Import ``MODULE:NAME``. Raises ``CommandError``."""
    module_name, colon, path = name.partition(":")
    if not (colon and module_name and path) or "/" in name or module_name.endswith(".py"):
        raise CommandError(f"{option} {name} is not of the form MODULE:NAME, {example}", _USAGE)
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    _set_up_django()
    found: Any = _import(module_name)
    seen = module_name
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise CommandError(f"{seen} has no {part}{_names_in(found)}", _USAGE) from error
        seen = f"{seen}:{part}" if seen == module_name else f"{seen}.{part}"
    return found


def _import(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            where = f"in {Path.cwd()} or among the installed packages"
            raise CommandError(f"there is no module {error.name} {where}", _USAGE) from error
        raise CommandError(f"{name} cannot be imported: {_describe(error)}") from error
    except CommandError:
        raise
    except MissingExtraError as error:  # what to do is more useful than where
        raise CommandError(f"{name} cannot be imported: {error}") from error
    except Exception as error:
        raise CommandError(f"{name} cannot be imported: {_describe(error)}") from error


def _describe(error: BaseException) -> str:
    """Return type, message and the line of the app that raised."""
    if isinstance(error, SyntaxError):  # its own location is the app's line
        where = f"{error.filename}, line {error.lineno}"
        return f"{type(error).__name__}: {error.msg} ({where})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith("<frozen")]
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{where}"


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
        raise CommandError(f"{name} failed: {_describe(error)}") from error


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


def _attribute(found: Any, name: str) -> Any:
    """Return an attribute, or None. Objects of a module may raise anything, as proxies do."""
    try:
        return getattr(found, name, None)
    except Exception:  # noqa: BLE001
        return None


def _names_in(found: Any) -> str:
    """Return what may have been meant: names of a ``Onceward`` or of an app, else all names."""
    public = {
        name: value
        for name, value in getattr(found, "__dict__", {}).items()
        if not name.startswith("_") and not isinstance(value, type | ModuleType)
    }
    meant = [name for name, value in public.items() if _installed_on(value) is not None]
    names = meant or sorted(public)
    if not names:
        return "; it has no names of its own"
    more = ", …" if len(names) > _MAX_NAMES else ""
    return f"; it has {', '.join(names[:_MAX_NAMES])}{more}"


def _set_up_django() -> None:
    """Load Django's apps before anything that imports models, as ``manage.py`` does."""
    if "DJANGO_SETTINGS_MODULE" not in os.environ:
        return
    try:
        import django
        from django.apps import apps
    except ModuleNotFoundError:
        return
    if not apps.ready:
        try:
            django.setup()
        except Exception as error:
            settings = os.environ["DJANGO_SETTINGS_MODULE"]
            raise CommandError(f"{settings} cannot be used: {_describe(error)}") from error
