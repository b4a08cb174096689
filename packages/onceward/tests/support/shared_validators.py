"""Apps are built for every test: what FastAPI makes of the same annotations is made only once."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from pydantic import TypeAdapter

_kept: dict[tuple[Any, str, str], tuple[Any, TypeAdapter[Any]]] = {}


@contextmanager
def shared_validators() -> Iterator[None]:
    """Have all apps share the validators of their parameters, which hold no state.

    To make them is half of what it costs to build an app. Real servers, which other tests start
    as processes, make their own.
    """
    with patch("fastapi._compat.v2.TypeAdapter", _shared):
        yield


def _shared(annotation: Any, *, config: Any = None) -> TypeAdapter[Any]:
    # Types are the same if they are equal, and not if they only have the same name. Of what else is
    # said about them, whatever is written with its address stays alive in here, so that no other
    # can come to that address.
    key = annotation.__origin__, repr(annotation.__metadata__), repr(config)
    try:
        found = _kept.get(key)
    except TypeError:  # says something that has no hash
        return TypeAdapter(annotation, config=config)
    if found is None:
        found = _kept[key] = annotation, TypeAdapter(annotation, config=config)
    return found[1]
