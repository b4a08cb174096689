"""Errors of the walk service in the OpenAPI document."""

from typing import Any

from holdfast import ErrorFormat
from holdfast_services.openapi import errors
from holdfast_services.walk.errors import STATUSES

__all__ = ["describe_errors", "envelope_errors"]


def envelope_errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return ``responses`` for a route, in the error format of this service."""
    return errors(*statuses, error_format=ErrorFormat.ENVELOPE)


def describe_errors(description: str, *codes: str) -> str:
    """Add the operation's own error codes to a description; the guard documents the others."""
    listed = ", ".join(f"`{code}` ({STATUSES[code]})" for code in codes)
    return f"{description}\n\nErrors: {listed}."
