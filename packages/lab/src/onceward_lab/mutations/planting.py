"""Plants a bug: replaces attributes while a ``with`` block lasts, and restores them after it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FunctionType
from typing import Any, Final

__all__ = ["BUGS", "Bug", "Replacement", "bug", "plant", "untyped"]

Bug = Callable[[], AbstractContextManager[None]]

Replacement = tuple[Any, str, Any]
"""Owner, name of the attribute, and the wrong value."""

BUGS: Final[dict[str, Bug]] = {}
"""The bugs of all modules that are imported, by name."""


def bug(function: Callable[[], list[Replacement]]) -> Callable[[], list[Replacement]]:
    """Register a bug under the name of the function, which returns the replacements."""
    BUGS[function.__name__] = plant(function)
    return function


def plant(function: Callable[[], list[Replacement]]) -> Bug:
    """Return a context manager that makes the replacements and undoes them."""

    @contextmanager
    def planted() -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, wrong in function():
                right = owner.__dict__[name]
                setattr(owner, name, _wrap(wrong) if type(wrong) is FunctionType else wrong)
                stack.callback(setattr, owner, name, right)
            yield

    return planted


def _wrap(wrong: Callable[..., Any]) -> Callable[..., Any]:
    """Call the function from this file, so that wrong arguments count as an error of the plant.

    Without it Python raises the ``TypeError`` in the frame of the caller, which is real code.
    """

    def call(*args: Any, **options: Any) -> Any:
        return wrong(*args, **options)

    return call


def untyped(module: Any) -> Any:
    """Return a module as ``Any``: the bugs replace private names, which mypy would reject."""
    return module
