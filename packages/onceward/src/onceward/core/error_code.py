"""The code of an error response: from its header, or from its body in any common shape. Pure."""

from typing import Any, Final

import msgspec

__all__ = ["ERROR_HEADER", "error_code"]

ERROR_HEADER: Final = "Onceward-Error"
"""Carries the code of the guard's own errors, whatever the format of the body."""


def error_code(header: str | None, body: bytes) -> str | None:
    """Return the code of a 4xx or 5xx response; None if it has none.

    ``header`` is the value of ``ERROR_HEADER``. In a JSON body the code is ``code``, ``error`` or
    ``error.code``, the first of them that is a string.
    """
    if header is not None and header.strip():
        return header.strip()
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return _code_in(value)


def _code_in(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    error = value.get("error")
    nested = error.get("code") if isinstance(error, dict) else None
    return next((it for it in (value.get("code"), error, nested) if isinstance(it, str)), None)
