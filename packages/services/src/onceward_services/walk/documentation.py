"""Errors of the walk service in the OpenAPI document."""

from collections import defaultdict
from typing import Any, Final

from onceward import ErrorFormat
from onceward_services.openapi import errors
from onceward_services.walk.error_examples import EXAMPLES

__all__ = ["ACTION_ERRORS", "documented", "envelope_errors", "error_responses"]

_JSON: Final = "application/json"
_REQUEST_ID: Final = "955c3bc01995d1b117affe59475f71b1"

# Errors that every action of a walker can have.
ACTION_ERRORS: Final = ("ATTESTATION_INVALID", "WALKER_BEING_DELETED", "WALKER_SUSPENDED")


def envelope_errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return ``responses`` for a route, in the error format of this service."""
    return errors(*statuses, error_format=ErrorFormat.ENVELOPE)


def error_responses(*codes: str, statuses: tuple[int, ...] = ()) -> dict[int | str, dict[str, Any]]:
    """Return ``responses`` for a route with an example of each of its own codes.

    ``statuses`` are those of errors that no code of this service has, such as 404.
    """
    found = envelope_errors(*statuses)
    by_status: dict[int, list[str]] = defaultdict(list)
    for code in codes:
        by_status[EXAMPLES[code].status].append(code)
    for status, names in by_status.items():
        listed = ", ".join(f"`{name}`" for name in names)
        known = found.get(status, {}).get("description")
        content = {
            _JSON: {
                "schema": {"$ref": "#/components/schemas/OncewardEnvelope"},
                "examples": {name: _example(name) for name in names},
            }
        }
        description = f"{known}, {listed}" if known else f"Refused: {listed}"
        found[status] = {"description": description, "content": content}
    return found


def documented(description: str, *codes: str, statuses: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return ``description`` and ``responses`` of an operation with its own error codes."""
    return {
        "description": _describe(description, *codes),
        "responses": error_responses(*codes, statuses=statuses),
    }


def _describe(description: str, *codes: str) -> str:
    """Add the operation's own error codes to a description; the guard documents the others."""
    listed = ", ".join(f"`{code}` ({EXAMPLES[code].status})" for code in codes)
    return f"{description}\n\nErrors: {listed}."


def _example(code: str) -> dict[str, Any]:
    example = EXAMPLES[code]
    return {
        "summary": example.message,
        "value": {
            "error": code,
            "message": example.message,
            "details": example.details,
            "requestId": _REQUEST_ID,
        },
    }
