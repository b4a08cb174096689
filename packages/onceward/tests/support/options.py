"""Options of ``Onceward`` in one dictionary, as tests pass them on."""

from dataclasses import fields
from typing import Any

from onceward import GuardConfig

_OF_CONFIG = {field.name for field in fields(GuardConfig)}


def with_config(**options: Any) -> dict[str, Any]:
    """Return the arguments of ``Onceward``, with those of ``GuardConfig`` in ``config``."""
    config = {name: options.pop(name) for name in _OF_CONFIG & options.keys()}
    return {**options, "config": GuardConfig(**config)}
