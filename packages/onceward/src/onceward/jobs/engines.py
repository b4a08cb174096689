"""Engines that deliver jobs by a broker, found through entry points.

A package adds one with an entry point in its ``pyproject.toml``::

    [project.entry-points."onceward.engines"]
    nats = "onceward_nats.jetstream:jetstream"

The object is called with the broker's URL and returns an ``EngineMaker`` for ``Worker``.
"""

from importlib.metadata import entry_points
from typing import Any, Final

from onceward.errors import MissingExtraError

__all__ = ["GROUP", "broker_engine"]

GROUP: Final = "onceward.engines"


def broker_engine(name: str, url: str, **options: Any) -> Any:
    """Return the ``EngineMaker`` of a broker. Raises ``MissingExtraError`` without its package."""
    for entry_point in entry_points(group=GROUP, name=name):
        return entry_point.load()(url, **options)
    raise MissingExtraError(
        f"jobs by {name} need the package onceward-{name}, which is not installed"
    )
