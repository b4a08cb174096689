"""Adds the key, the replay headers and the errors of guarded operations to an OpenAPI document."""

from collections.abc import Callable
from typing import Any, Final

from holdfast.core.error_code import ERROR_HEADER
from holdfast.core.error_formats import CODES, ErrorFormat, ErrorFormatter
from holdfast.core.keys import KeyFormat
from holdfast.core.policy import Policy
from holdfast.server.route_table import Guard, GuardedRoute, GuardTable

__all__ = ["document", "error_schema"]

_GUARD_KINDS: Final = (
    "key_required",
    "key_invalid",
    "body_invalid",
    "not_authenticated",
    "payload_mismatch",
    "in_progress",
    "body_too_large",
    "rate_limited",
    "store_unavailable",
)
# Sent by the app's own dependencies and validation, if they come before the claim.
_OF_THE_APP: Final = ("not_authenticated", "field_not_allowed")
_MEDIA_TYPE: Final = {
    ErrorFormat.ENVELOPE: "application/json",
    ErrorFormat.PROBLEM: "application/problem+json",
}
_SCHEMA_NAME: Final = {
    ErrorFormat.ENVELOPE: "HoldfastEnvelope",
    ErrorFormat.PROBLEM: "HoldfastProblem",
}


def document(app: Any, table: Callable[[], GuardTable]) -> None:
    """Extend a FastAPI app's OpenAPI document. ``table`` is called when the document is made."""
    plain = app.openapi

    def with_guards() -> dict[str, Any]:
        fresh = app.openapi_schema is None
        schema: dict[str, Any] = plain()
        if fresh:
            components = schema.setdefault("components", {}).setdefault("schemas", {})
            for route in table().routes:
                error_format = route.guard.policy.error_format
                if isinstance(error_format, ErrorFormat):
                    components[_SCHEMA_NAME[error_format]] = error_schema(error_format)
                operation = schema.get("paths", {}).get(route.path, {}).get(route.method.lower())
                if operation is not None:
                    _describe(operation, route)
        return schema

    app.openapi = with_guards


def error_schema(error_format: ErrorFormat) -> dict[str, Any]:
    """Return the JSON schema of an error body."""
    text = {"type": "string"}
    common = {"details": {"type": "object"}, "requestId": text}
    if error_format is ErrorFormat.ENVELOPE:
        properties: dict[str, Any] = {"error": text, "message": text, **common}
    else:
        properties = {
            "type": text,
            "title": text,
            "status": {"type": "integer"},
            "detail": text,
            "code": text,
            **common,
        }
    return {"type": "object", "properties": properties, "required": sorted(properties)}


def _describe(operation: dict[str, Any], route: GuardedRoute) -> None:
    policy = route.guard.policy
    if policy.key_field is None:
        operation.setdefault("parameters", []).append(_key_parameter(policy))
    responses = operation.setdefault("responses", {})
    if not route.guard.is_claimed_late:
        responses.pop("422", None)  # FastAPI's own format; a guarded route uses the policy's
    for status, response in responses.items():
        if status.startswith(("2", "3")):
            response.setdefault("headers", {}).update(_response_headers())
    for status, (description, codes) in sorted(_errors(route.guard).items()):
        responses[str(status)] = {
            "description": f"{description}: {', '.join(f'`{code}`' for code in codes)}",
            "headers": {
                "X-Request-ID": _header("Id of this request."),
                ERROR_HEADER: _header("Code of the error, in every error format."),
            }
            | ({"Retry-After": _header("Seconds to wait.")} if status in (409, 429, 503) else {}),
            "content": _error_content(policy.error_format),
        }


def _error_content(error_format: ErrorFormat | ErrorFormatter) -> dict[str, Any]:
    if not isinstance(error_format, ErrorFormat):  # the app's own format: its shape is not known
        return {"application/json": {"schema": {"type": "object"}}}
    reference = f"#/components/schemas/{_SCHEMA_NAME[error_format]}"
    return {_MEDIA_TYPE[error_format]: {"schema": {"$ref": reference}}}


def _errors(guard: Guard) -> dict[int, tuple[str, list[str]]]:
    policy = guard.policy
    kinds = [*_GUARD_KINDS, "field_not_allowed"]
    if guard.is_claimed_late:
        kinds = [kind for kind in kinds if kind not in _OF_THE_APP]
    if policy.staleness is not None:
        kinds.append("stale_action")
    found: dict[int, tuple[str, list[str]]] = {}
    for kind in kinds:
        code = CODES[kind]
        status = 422 if policy.ietf_statuses and kind == "payload_mismatch" else code.status
        names = found.setdefault(status, (code.title, []))[1]
        if (name := code.name(policy.error_format)) not in names:
            names.append(name)
    return found


def _key_parameter(policy: Policy) -> dict[str, Any]:
    uuid4 = policy.key_format is KeyFormat.UUID4
    schema: dict[str, Any] = {"type": "string", "maxLength": 36 if uuid4 else 128, "minLength": 1}
    schema["pattern"] = (
        "^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$"
        if uuid4
        else "^[!-~]{1,128}$"
    )
    hours = policy.success_ttl.total_seconds() / 3600
    return {
        "name": "Idempotency-Key",
        "in": "header",
        "required": policy.key_required,
        "schema": schema,
        "description": (
            "Created once per action and sent with every retry of it. The same key with the same "
            f"request replays the stored response for {hours:g} hours; with a different request "
            "it is refused."
        ),
    }


def _response_headers() -> dict[str, Any]:
    return {
        "Idempotency-Replayed": _header(
            "`true` when this is the stored response of an earlier request."
        ),
        "X-Request-ID": _header("Id of this request."),
        "X-Original-Request-ID": _header("On a replay: id of the request that was executed."),
        "X-Correlation-ID": _header("Id of the chain of work this request belongs to."),
    }


def _header(description: str) -> dict[str, Any]:
    return {"description": description, "schema": {"type": "string"}}
