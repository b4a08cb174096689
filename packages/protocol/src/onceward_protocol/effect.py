"""Statement of a response about its key: whether anything has happened under it on the server."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

__all__ = ["EFFECT_HEADER", "Effect", "is_conclusive"]

EFFECT_HEADER: Final = "onceward-effect"
"""On every response of the guard after it has looked the key up, if it knows one of ``Effect``."""


class Effect(StrEnum):
    """The values of the header, and of the member ``effect`` in the results of batches."""

    # Nothing has happened under the key, this request included: all was rolled back.
    NONE = "none"
    # This is the response of the record.
    STORED = "stored"


def is_conclusive(headers: Mapping[str, str]) -> bool:
    """Return whether a response is final for its key, whatever its status. Names are lower-case.

    No earlier request with the key can have had another outcome.
    """
    return "idempotency-replayed" in headers or headers.get(EFFECT_HEADER) in set(Effect)
