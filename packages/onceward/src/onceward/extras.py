"""Imports of optional packages: a missing one is reported with the extra that installs it."""

from collections.abc import Iterator
from contextlib import contextmanager

from onceward.errors import MissingExtraError

__all__ = ["needs_extra"]


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Raise ``MissingExtraError`` if an import in the ``with`` block fails."""
    try:
        yield
    except MissingExtraError:
        raise
    except ImportError as error:
        reason, _, _ = str(error).partition("\n")
        raise MissingExtraError(
            f'{reason}: pip install "onceward[{extra}]"', name=error.name
        ) from error
