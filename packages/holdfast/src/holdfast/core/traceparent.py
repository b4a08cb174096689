"""The W3C trace context: the header ``traceparent``, which names a trace and the span before."""

import re
from typing import Final

__all__ = ["TRACEPARENT_HEADER", "is_traceparent"]

TRACEPARENT_HEADER: Final = "traceparent"

# Version, trace id, id of the span before, flags. Ids of zeros are not valid.
_VALID: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def is_traceparent(value: object) -> bool:
    """Return whether a value is a ``traceparent`` of version 00, the only one so far."""
    return isinstance(value, str) and _VALID.fullmatch(value) is not None
