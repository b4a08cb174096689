"""Adds the key, the replay headers and the errors of guarded operations to an OpenAPI document."""

from collections.abc import Callable, Iterable
from typing import Any, Final

from onceward.batch.options import BatchOptions
from onceward.guard.error_formats import ErrorFormatter, ProblemFormat
from onceward.guard.policy import Policy
from onceward.guard.route_table import Guard, GuardedRoute, GuardTable
from onceward_protocol.error_codes import CODES, ERROR_HEADER, ErrorFormat
from onceward_protocol.keys import KeyFormat
from onceward_protocol.sequence import CLIENT_HEADER, SEQUENCE_HEADER

__all__ = ["describe_batch", "document", "error_schema"]


_GUARD_KINDS: Final = (
    "key_required",
    "key_invalid",
    "body_invalid",
    "not_authenticated",
    "payload_mismatch",
    "in_progress",
    "body_too_large",
    "body_timeout",
    "store_unavailable",
    "overloaded",
    "record_unreadable",
)
# Sent by the app's own dependencies and validation, if they come before the claim.
_OF_THE_APP: Final = ("not_authenticated", "field_not_allowed")
_MEDIA_TYPE: Final = {
    ErrorFormat.ENVELOPE: "application/json",
    ErrorFormat.PROBLEM: "application/problem+json",
}
_SCHEMA_NAME: Final = {
    ErrorFormat.ENVELOPE: "OncewardEnvelope",
    ErrorFormat.PROBLEM: "OncewardProblem",
}


def document(
    app: Any,
    table: Callable[[], GuardTable],
    *,
    optional_kinds: Iterable[str] = (),
    batch: BatchOptions | None = None,
    error_format: ErrorFormat | ErrorFormatter = ErrorFormat.PROBLEM,
) -> None:
    """Extend a FastAPI app's OpenAPI document. ``table`` is called when the document is made.

    ``optional_kinds`` are errors that only some configurations send, such as ``quota_exceeded``.
    ``batch`` are the settings of the batch endpoint, whose errors have ``error_format``.
    """
    kinds = (*_GUARD_KINDS, *optional_kinds)
    plain = app.openapi
    formats_validation = _formats_validation(app)

    def with_guards() -> dict[str, Any]:
        fresh = app.openapi_schema is None
        schema: dict[str, Any] = plain()
        if fresh:
            components = schema.setdefault("components", {}).setdefault("schemas", {})
            described = []
            for route in table().routes:
                _add_error_schema(components, route.guard.policy.error_format)
                operation = schema.get("paths", {}).get(route.path, {}).get(route.method.lower())
                if operation is not None:
                    _describe(operation, route, kinds, own_validation=formats_validation())
                    described.append(operation)
            if batch is not None:
                _add_error_schema(components, error_format)
                describe_batch(
                    schema,
                    batch,
                    lambda kinds: _responses(_by_status(kinds, error_format), error_format),
                    security=_common([operation.get("security") for operation in described]),
                )
        return schema

    app.openapi = with_guards


def _add_error_schema(
    components: dict[str, Any], error_format: ErrorFormat | ErrorFormatter
) -> None:
    if (known := _known_format(error_format)) is not None:
        components[_SCHEMA_NAME[known]] = error_schema(known)


def _common(values: list[Any]) -> Any:
    """Return the value that all have; None if they differ."""
    return values[0] if values and all(value == values[0] for value in values) else None


def _formats_validation(app: Any) -> Callable[[], bool]:
    """Return a function that says whether the app replaces FastAPI's response to invalid input."""
    from fastapi.exception_handlers import (  # noqa: PLC0415 - FastAPI only
        request_validation_exception_handler as of_fastapi,
    )
    from fastapi.exceptions import RequestValidationError  # noqa: PLC0415

    handlers = app.exception_handlers
    return lambda: handlers.get(RequestValidationError, of_fastapi) is not of_fastapi


def _known_format(error_format: ErrorFormat | ErrorFormatter) -> ErrorFormat | None:
    """Return the built-in format that a format has the schema of; None for an app's own."""
    if isinstance(error_format, ErrorFormat):
        return error_format
    return ErrorFormat.PROBLEM if isinstance(error_format, ProblemFormat) else None


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


def _describe(
    operation: dict[str, Any],
    route: GuardedRoute,
    kinds: Iterable[str],
    *,
    own_validation: bool,
) -> None:
    policy = route.guard.policy
    if policy.key_field is None:
        operation.setdefault("parameters", []).append(_key_parameter(policy))
    if policy.ordering == "strict":
        operation.setdefault("parameters", []).extend(_sequence_parameters())
    responses = operation.setdefault("responses", {})
    is_own = own_validation and not route.guard.is_claimed_late
    if is_own and _is_of_fastapi(responses.get("422")):
        del responses["422"]  # FastAPI's own format, which the app replaces
    for status, response in responses.items():
        if status.startswith(("2", "3")):
            response.setdefault("headers", {}).update(_response_headers())
            if policy.rate_limit is not None:
                response["headers"].update(_limit_headers())
    described = _responses(_errors(route.guard, kinds), policy.error_format)
    if policy.rate_limit is not None and "429" in described:
        described["429"]["headers"].update(_limit_headers())
    for status, response in described.items():
        responses[status] = _merged(responses.get(status), response)


def _responses(
    errors: dict[int, tuple[str, list[str]]], error_format: ErrorFormat | ErrorFormatter
) -> dict[str, Any]:
    """Return the responses of errors by status."""
    return {
        str(status): {
            "description": f"{description}: {', '.join(f'`{code}`' for code in codes)}",
            "headers": {
                "X-Request-ID": _header("Id of this request."),
                ERROR_HEADER: _header("Code of the error, in every error format."),
            }
            | ({"Retry-After": _header("Seconds to wait.")} if status in (409, 429, 503) else {}),
            "content": _error_content(error_format),
        }
        for status, (description, codes) in sorted(errors.items())
    }


def _is_of_fastapi(response: dict[str, Any] | None) -> bool:
    """Return whether FastAPI has added this response, and not the app."""
    return "HTTPValidationError" in repr((response or {}).get("content"))


def _merged(of_app: dict[str, Any] | None, of_guard: dict[str, Any]) -> dict[str, Any]:
    """Return a response that the app documents, too: either body may be sent."""
    if not of_app:
        return of_guard
    content = {kind: dict(media) for kind, media in of_app.get("content", {}).items()}
    for kind, media in of_guard["content"].items():
        other = content.get(kind, {}).get("schema")
        if other is None:
            content[kind] = media
        elif other != media["schema"]:
            content[kind] = {"schema": {"anyOf": [other, media["schema"]]}}
    return {
        **of_app,
        "description": f"{of_app.get('description', '')}. {of_guard['description']}".lstrip(". "),
        "headers": of_app.get("headers", {}) | of_guard["headers"],
        "content": content,
    }


def _error_content(error_format: ErrorFormat | ErrorFormatter) -> dict[str, Any]:
    known = _known_format(error_format)
    if known is None:  # the app's own format: its shape is not known
        return {"application/json": {"schema": {"type": "object"}}}
    reference = f"#/components/schemas/{_SCHEMA_NAME[known]}"
    return {_MEDIA_TYPE[known]: {"schema": {"$ref": reference}}}


def _errors(guard: Guard, always: Iterable[str]) -> dict[int, tuple[str, list[str]]]:
    policy = guard.policy
    kinds = [*always, "field_not_allowed"]
    if guard.is_claimed_late:
        kinds = [kind for kind in kinds if kind not in _OF_THE_APP]
    if policy.rate_limit is not None:
        kinds.append("rate_limited")
    if policy.staleness is not None:
        kinds.append("stale_action")
    if policy.ordering == "strict":
        kinds += ("bad_request", "sequence_violation")
    return _by_status(kinds, policy.error_format, ietf_statuses=policy.ietf_statuses)


def _by_status(
    kinds: Iterable[str],
    error_format: ErrorFormat | ErrorFormatter,
    *,
    ietf_statuses: bool = False,
) -> dict[int, tuple[str, list[str]]]:
    """Return titles and codes of kinds of errors."""
    found: dict[int, tuple[str, list[str]]] = {}
    for kind in kinds:
        code = CODES[kind]
        status = 422 if ietf_statuses and kind == "payload_mismatch" else code.status
        names = found.setdefault(status, (code.title, []))[1]
        if (name := code.name(error_format)) not in names:
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
        "name": policy.key_header,
        "in": "header",
        "required": policy.key_required,
        "schema": schema,
        "description": (
            "Created once per action and sent with every retry of it. The same key with the same "
            f"request replays the stored response for {hours:g} hours; with a different request "
            "it is refused."
        ),
    }


def _sequence_parameters() -> list[dict[str, Any]]:
    return [
        {
            "name": CLIENT_HEADER,
            "in": "header",
            "required": True,
            "schema": {
                "type": "string",
                "minLength": 1,
                "maxLength": 128,
                "pattern": "^[!-+\\--~]{1,128}$",
            },
            "description": "The client whose requests are numbered: the same in all of them.",
        },
        {
            "name": SEQUENCE_HEADER,
            "in": "header",
            "required": True,
            "schema": {"type": "integer", "format": "int64", "minimum": 1},
            "description": (
                "The number of this request among those of the client: 1, 2, 3 … without gaps. A "
                "retry has the number and the key of the first send."
            ),
        },
    ]


def _response_headers() -> dict[str, Any]:
    return {
        "Idempotency-Replayed": _header(
            "`true` when this is the stored response of an earlier request."
        ),
        "X-Request-ID": _header("Id of this request."),
        "X-Original-Request-ID": _header("On a replay: id of the request that was executed."),
        "X-Correlation-ID": _header("Id of the chain of work this request belongs to."),
    }


def _limit_headers() -> dict[str, Any]:
    return {
        "RateLimit-Policy": _header("The limits: `q` requests in `w` seconds."),
        "RateLimit": _header("`r` requests are left; the next one is free in `t` seconds."),
    }


def _header(description: str) -> dict[str, Any]:
    return {"description": description, "schema": {"type": "string"}}


# The errors of a batch that cannot be read. Those of items are in the results.
_KINDS: Final = (
    "body_invalid",
    "not_authenticated",
    "body_timeout",
    "batch_too_large",
    "overloaded",
    "store_unavailable",
)
_TEXT: Final = {"type": "string"}
_HEADERS: Final = {
    "type": "object",
    "additionalProperties": {"type": "string"},
    "description": "`If-Match`, `Content-Type` and others that the operation allows.",
}
_ITEM: Final = {
    "type": "object",
    "additionalProperties": False,
    "required": ["method", "path"],
    "properties": {
        "method": {"type": "string", "examples": ["POST"]},
        "path": {
            "type": "string",
            "description": "Path and query of a guarded operation, as in a single request.",
        },
        "key": {"type": ["string", "null"], "description": "The idempotency key."},
        "headers": {"anyOf": [_HEADERS, {"type": "null"}]},
        "body": {
            "description": "A JSON value; with a `Content-Type` that is not JSON: `base64` in an "
            "object. `{local:…}` and `{version:…}` are replaced by results of earlier items."
        },
        "lane": {
            "type": ["string", "null"],
            "minLength": 1,
            "maxLength": 256,
            "description": "After an item that did not succeed, the rest of its lane is 424.",
        },
        "local_id": {
            "type": ["string", "null"],
            "description": "A lowercase UUID by which later items refer to this one.",
        },
        "client_id": {
            "type": ["string", "null"],
            "minLength": 1,
            "maxLength": 256,
            "description": "Sent as `X-Client-ID`.",
        },
        "sequence": {
            "type": ["integer", "null"],
            "minimum": 1,
            "description": "Sent as `X-Sequence`.",
        },
    },
}
_RESULT: Final = {
    "type": "object",
    "required": ["status", "headers", "body", "replayed"],
    "properties": {
        "status": {"type": "integer", "minimum": 200, "maximum": 599},
        "headers": {"type": "object", "additionalProperties": _TEXT},
        "body": {"description": "JSON, an object with `base64`, or null for an empty body."},
        "replayed": {"type": "boolean", "description": "It is a stored response."},
    },
}
_RESULTS: Final = {
    "type": "object",
    "required": ["results", "retry_after"],
    "properties": {
        "results": {
            "type": "array",
            "items": {"$ref": "#/components/schemas/OncewardBatchResult"},
            "description": "One for each item, from the first on; maybe not for all.",
        },
        "retry_after": {
            "type": ["number", "null"],
            "description": "Seconds after which to send the items without a result.",
        },
    },
}


def describe_batch(
    schema: dict[str, Any],
    batch: BatchOptions,
    errors: Callable[[Iterable[str]], dict[str, Any]],
    *,
    security: Any,
) -> None:
    """Add the operation and its schemas. ``errors`` returns the responses of kinds of errors.

    ``security`` is that of guarded operations, None if they have none or differ.
    """
    batch_schema = {
        "type": "object",
        "additionalProperties": False,
        "required": ["items"],
        "properties": {
            "items": {
                "type": "array",
                "maxItems": batch.max_items,
                "items": {"$ref": "#/components/schemas/OncewardBatchItem"},
            }
        },
    }
    schema["components"]["schemas"] |= {
        "OncewardBatch": batch_schema,
        "OncewardBatchItem": _ITEM,
        "OncewardBatchResult": _RESULT,
        "OncewardBatchResults": _RESULTS,
    }
    operation: dict[str, Any] = {
        "tags": ["batch"],
        "summary": "Send many requests in one",
        "description": (
            "Each item is a request to a guarded operation, with its own key. Its result is what "
            f"the single request would have got. At most {batch.max_items} items and "
            f"{batch.max_bytes} bytes."
        ),
        "operationId": "onceward_batch",
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": {"$ref": "#/components/schemas/OncewardBatch"}}
            },
        },
        "responses": {
            "200": {
                "description": "The results, in the order of the items.",
                "content": {
                    "application/json": {
                        "schema": {"$ref": "#/components/schemas/OncewardBatchResults"}
                    }
                },
            },
            **errors(_KINDS),
        },
    }
    if security is not None:
        operation["security"] = security
    schema.setdefault("paths", {}).setdefault(batch.path, {})["post"] = operation
