"""How a bug is planted: attributes are replaced while a ``with`` block lasts, and put back."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FunctionType
from typing import Any

PLANTED: dict[str, Callable[[], AbstractContextManager[None]]] = {}

Replacement = tuple[Any, str, Any]


def bug(function: Callable[[], list[Replacement]]) -> Callable[[], list[Replacement]]:
    """Register a bug under its function's name; the function says what is replaced by what."""
    PLANTED[function.__name__] = plant(function)
    return function


def plant(
    function: Callable[[], list[Replacement]],
) -> Callable[[], AbstractContextManager[None]]:
    """Return what plants a bug while a ``with`` block lasts."""

    @contextmanager
    def planted() -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, wrong in function():
                right = owner.__dict__[name]
                setattr(owner, name, _called(wrong) if type(wrong) is FunctionType else wrong)
                stack.callback(setattr, owner, name, right)
            yield

    return planted


def _called(wrong: Callable[..., Any]) -> Callable[..., Any]:
    """Have it called from here: arguments that it does not take are then an error of the plant's.

    Else Python raises in the frame of the caller, which is the product's, as if that were broken.
    """

    def called(*args: Any, **options: Any) -> Any:
        return wrong(*args, **options)

    return called


def inside(module: Any) -> Any:
    """Return a module with its private parts: bugs are made there."""
    return module
