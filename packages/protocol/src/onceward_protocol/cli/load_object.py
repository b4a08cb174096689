"""Options that name an object as ``MODULE:NAME``. Every error is one line."""

import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from onceward_protocol.cli.output import CommandError
from onceward_protocol.errors import MissingExtraError

__all__ = ["describe_error", "load_object"]

_USAGE: Final = 2
_MAX_NAMES: Final = 8


def load_object(
    name: str, *, option: str, example: str, is_meant: Callable[[Any], bool] = lambda _: False
) -> Any:
    """Import ``MODULE:NAME``. Raises ``CommandError``.

    If there is no such NAME, the error lists the names of which ``is_meant`` returns True, or all.
    """
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
            raise CommandError(
                f"{seen} has no {part}{_names_in(found, is_meant)}", _USAGE
            ) from error
        seen = f"{seen}:{part}" if seen == module_name else f"{seen}.{part}"
    return found


def _import(name: str) -> ModuleType:
    try:
        return import_module(name)
    except CommandError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            where = f"in {Path.cwd()} or among the installed packages"
            raise CommandError(f"there is no module {error.name} {where}", _USAGE) from error
        # What to install is more useful than where the import failed.
        reason = error if isinstance(error, MissingExtraError) else describe_error(error)
        raise CommandError(f"{name} cannot be imported: {reason}") from error


def describe_error(error: BaseException) -> str:
    """Return type, message and the line of the app that raised."""
    if isinstance(error, SyntaxError):  # its own location is the app's line
        where = f"{error.filename}, line {error.lineno}"
        return f"{type(error).__name__}: {error.msg} ({where})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith("<frozen")]
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{where}"


def _names_in(found: Any, is_meant: Callable[[Any], bool]) -> str:
    """Return the names that may have been meant, as the end of a sentence."""
    public = {
        name: value
        for name, value in getattr(found, "__dict__", {}).items()
        if not name.startswith("_") and not isinstance(value, type | ModuleType)
    }
    meant = [name for name, value in public.items() if is_meant(value)]
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
            raise CommandError(f"{settings} cannot be used: {describe_error(error)}") from error
