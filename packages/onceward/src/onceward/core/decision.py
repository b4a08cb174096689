"""What a store says of a key that another request holds."""

from typing import Final

__all__ = ["HELD", "Held"]


class Held:
    """Another request with this key is running and has not committed yet."""


HELD: Final = Held()
