"""OpenAPI responses for the errors of operations without a guard, with the guard's schemas."""

from typing import Any, Final

from onceward import ErrorFormat
from onceward_protocol.error_codes import CODES

__all__ = ["errors"]

_SCHEMA: Final = {
    ErrorFormat.ENVELOPE: ("application/json", "OncewardEnvelope"),
    ErrorFormat.PROBLEM: ("application/problem+json", "OncewardProblem"),
}


def errors(
    *statuses: int, error_format: ErrorFormat = ErrorFormat.PROBLEM
) -> dict[int | str, dict[str, Any]]:
    """Return ``responses`` for a route: these statuses, and a default for all others.

    Because there is a default, FastAPI does not add its own 422, which is never sent here.
    """
    media_type, schema = _SCHEMA[error_format]
    content = {media_type: {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    responses: dict[int | str, dict[str, Any]] = {
        "default": {"description": "Any other error", "content": content}
    }
    for status in statuses:
        codes = list(
            dict.fromkeys(c.name(error_format) for c in CODES.values() if c.status == status)
        )
        titles = [c.title for c in CODES.values() if c.status == status]
        names = ", ".join(f"`{code}`" for code in codes)
        responses[status] = {"description": f"{titles[0]}: {names}", "content": content}
    return responses
