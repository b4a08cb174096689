"""How a bug is planted: attributes are replaced while a ``with`` block lasts, and put back."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

PLANTED: dict[str, Callable[[], AbstractContextManager[None]]] = {}

Replacement = tuple[Any, str, Any]


def bug(function: Callable[[], list[Replacement]]) -> Callable[[], list[Replacement]]:
    """Register a bug under its function's name; the function says what is replaced by what."""

    @contextmanager
    def planted() -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, wrong in function():
                right = owner.__dict__[name]
                setattr(owner, name, wrong)
                stack.callback(setattr, owner, name, right)
            yield

    PLANTED[function.__name__] = planted
    return function


def inside(module: Any) -> Any:
    """Return a module with its private parts: bugs are made there."""
    return module
