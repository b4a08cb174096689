"""Imports of optional packages: a missing one is reported with the extra that installs it."""

from collections.abc import Iterator
from contextlib import contextmanager

from onceward_protocol.errors import MissingExtraError

__all__ = ["needs_extra"]


@contextmanager
def needs_extra(extra: str, package: str = "onceward") -> Iterator[None]:
    """Raise ``MissingExtraError`` if an import in the ``with`` block fails.

    The message names the ``extra`` of ``package`` that installs it. Without an ``extra`` the
    package requires it always, so that its installation is incomplete.
    """
    try:
        yield
    except MissingExtraError:
        raise
    except ImportError as error:
        reason, _, _ = str(error).partition("\n")
        needed = f'pip install "{package}[{extra}]"' if extra else f"{package} is incomplete"
        raise MissingExtraError(f"{reason}: {needed}", name=error.name) from error
