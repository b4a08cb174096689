"""Check the parameters of a statement before a driver sees them."""

from collections.abc import Mapping
from typing import Any

from onceward.errors import UsageError
from onceward.ports import Params

__all__ = ["named_parameters"]

_NONE: Mapping[str, Any] = {}


def named_parameters(params: Params) -> Mapping[str, Any]:
    """Return the parameters by name. Raises ``UsageError`` for a list, a tuple or one value."""
    if params is None:
        return _NONE
    if type(params) is not dict and not isinstance(params, Mapping):
        raise UsageError(
            f"parameters have names, but a {type(params).__name__} was given: write :name in the "
            'statement and pass {"name": value}'
        )
    return params
