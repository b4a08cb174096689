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

Json = dict[str, Any]

_GUARD_KINDS: Final = (
    *("key_required", "key_invalid", "body_invalid", "not_authenticated", "payload_mismatch"),
    *("in_progress", "body_too_large", "body_timeout", "store_unavailable", "overloaded"),
    "record_unreadable",
)
# Sent by the app's own dependencies and validation, if they come before the claim.
_OF_THE_APP: Final = ("not_authenticated", "field_not_allowed")
# The errors of a batch that cannot be read. Those of items are in the results.
_BATCH_KINDS: Final = (
    *("body_invalid", "not_authenticated", "body_timeout", "batch_too_large", "overloaded"),
    "store_unavailable",
)


def _object(properties: Json, *required: str, **more: Any) -> Json:
    return {"type": "object", "properties": properties, "required": list(required), **more}


def _texts(*names: str) -> Json:
    return {name: {"type": "string"} for name in names}


def _headers(**descriptions: str) -> Json:
    """Return headers with their descriptions; an underscore in a name is a hyphen."""
    return {
        name.replace("_", "-"): {"description": description, "schema": {"type": "string"}}
        for name, description in descriptions.items()
    }


def _reference(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


_COMMON: Final = {"details": {"type": "object"}, **_texts("requestId")}
_ENVELOPE: Final = _texts("error", "message") | _COMMON
_PROBLEM: Final = (
    _texts("type", "title", "detail", "code") | {"status": {"type": "integer"}} | _COMMON
)
# The media type of each format, and the name and the schema of its bodies.
_FORMATS: Final = {
    ErrorFormat.ENVELOPE: (
        "application/json",
        "OncewardEnvelope",
        _object(_ENVELOPE, *sorted(_ENVELOPE)),
    ),
    ErrorFormat.PROBLEM: (
        "application/problem+json",
        "OncewardProblem",
        _object(_PROBLEM, *sorted(_PROBLEM)),
    ),
}
_RESPONSE_HEADERS: Final = _headers(
    Idempotency_Replayed="`true` when this is the stored response of an earlier request.",
    Onceward_Effect="`none`: nothing has happened under the key; `stored`: the record's response.",
    X_Request_ID="Id of this request.",
    X_Original_Request_ID="On a replay: id of the request that was executed.",
    X_Correlation_ID="Id of the chain of work this request belongs to.",
)
_LIMIT_HEADERS: Final = _headers(
    RateLimit_Policy="The limits: `q` requests in `w` seconds.",
    RateLimit="`r` requests are left; the next one is free in `t` seconds.",
)
_ERROR_HEADERS: Final = _headers(X_Request_ID="Id of this request.") | _headers(
    **{ERROR_HEADER: "Code of the error, in every error format."}
)
_WAIT_HEADERS: Final = _headers(Retry_After="Seconds to wait.")


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

    def with_guards() -> Json:
        is_complete = app.openapi_schema is not None
        schema: Json = plain()
        if is_complete:
            return schema
        paths = schema.setdefault("paths", {})
        components = schema.setdefault("components", {}).setdefault("schemas", {})
        own_validation = _formats_validation(app)
        security = []
        for route in table().routes:
            _add_error_schema(components, route.guard.policy.error_format)
            operation = paths.get(route.path, {}).get(route.method.lower())
            if operation is not None:
                _describe(operation, route, kinds, own_validation=own_validation)
                security.append(operation.get("security"))
        if batch is not None:
            _add_error_schema(components, error_format)
            components |= _batch_schemas(batch)
            operation = _batch_operation(batch, _responses(_BATCH_KINDS, error_format))
            # That of guarded operations, if all have the same.
            if (
                security
                and security[0] is not None
                and security.count(security[0]) == len(security)
            ):
                operation["security"] = security[0]
            paths.setdefault(batch.path, {})["post"] = operation
        return schema

    app.openapi = with_guards


def _add_error_schema(components: Json, error_format: ErrorFormat | ErrorFormatter) -> None:
    known = _known_format(error_format)
    if known is not None:
        _, name, schema = _FORMATS[known]
        components[name] = schema


def _formats_validation(app: Any) -> bool:
    """Return whether the app replaces FastAPI's response to invalid input."""
    from fastapi.exception_handlers import (  # noqa: PLC0415 - FastAPI only
        request_validation_exception_handler as of_fastapi,
    )
    from fastapi.exceptions import RequestValidationError  # noqa: PLC0415

    return app.exception_handlers.get(RequestValidationError, of_fastapi) is not of_fastapi


def _known_format(error_format: ErrorFormat | ErrorFormatter) -> ErrorFormat | None:
    """Return the built-in format that a format has the schema of; None for an app's own."""
    if isinstance(error_format, ErrorFormat):
        return error_format
    return ErrorFormat.PROBLEM if isinstance(error_format, ProblemFormat) else None


# -- guarded operations ----------------------------------------------------------------------------


def _describe(
    operation: Json, route: GuardedRoute, kinds: Iterable[str], *, own_validation: bool
) -> None:
    policy = route.guard.policy
    parameters = [] if policy.key_field is not None else [_key_parameter(policy)]
    if policy.ordering == "strict":
        parameters += _SEQUENCE_PARAMETERS
    if parameters:
        operation.setdefault("parameters", []).extend(parameters)
    responses = operation.setdefault("responses", {})
    if own_validation and not route.guard.is_claimed_late:
        # FastAPI's own format, which the app replaces.
        content = responses.get("422", {}).get("content")
        if "HTTPValidationError" in repr(content):
            del responses["422"]
    limits = {} if policy.rate_limit is None else _LIMIT_HEADERS
    for status, response in responses.items():
        if status.startswith(("2", "3")):
            response.setdefault("headers", {}).update(_RESPONSE_HEADERS | limits)
    errors = _responses(
        _error_kinds(route.guard, kinds), policy.error_format, ietf_statuses=policy.ietf_statuses
    )
    if "429" in errors:
        errors["429"]["headers"] |= limits
    for status, response in errors.items():
        responses[status] = _merged(responses.get(status), response)


def _error_kinds(guard: Guard, always: Iterable[str]) -> list[str]:
    kinds = [*always, "field_not_allowed"]
    if guard.is_claimed_late:
        kinds = [kind for kind in kinds if kind not in _OF_THE_APP]
    if guard.policy.rate_limit is not None:
        kinds.append("rate_limited")
    if guard.policy.staleness is not None:
        kinds.append("stale_action")
    if guard.policy.ordering == "strict":
        kinds += ("bad_request", "sequence_violation")
    return kinds


def _responses(
    kinds: Iterable[str],
    error_format: ErrorFormat | ErrorFormatter,
    *,
    ietf_statuses: bool = False,
) -> Json:
    """Return the responses of kinds of errors, by status."""
    titles: dict[int, str] = {}
    names: dict[int, dict[str, None]] = {}
    for kind in kinds:
        code = CODES[kind]
        status = 422 if ietf_statuses and kind == "payload_mismatch" else code.status
        titles.setdefault(status, code.title)
        names.setdefault(status, {})[f"`{code.name(error_format)}`"] = None
    known = _known_format(error_format)
    if known is None:  # the app's own format: its shape is not known
        content = _json({"type": "object"})
    else:
        media_type, name, _ = _FORMATS[known]
        content = {media_type: {"schema": _reference(name)}}
    return {
        str(status): {
            "description": f"{title}: {', '.join(names[status])}",
            "headers": _ERROR_HEADERS | (_WAIT_HEADERS if status in (409, 429, 503) else {}),
            "content": content,
        }
        for status, title in sorted(titles.items())
    }


def _merged(of_app: Json | None, of_guard: Json) -> Json:
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


def _header_parameter(name: str, schema: Json, description: str, *, required: bool = True) -> Json:
    return {
        "name": name,
        "in": "header",
        "required": required,
        "schema": schema,
        "description": description,
    }


def _key_parameter(policy: Policy) -> Json:
    if policy.key_format is KeyFormat.UUID4:
        most = 36
        pattern = "^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$"
    else:
        most = 128
        pattern = "^[!-~]{1,128}$"
    hours = policy.success_ttl.total_seconds() / 3600
    return _header_parameter(
        policy.key_header,
        {"type": "string", "maxLength": most, "minLength": 1, "pattern": pattern},
        "Created once per action and sent with every retry of it. The same key with the same "
        f"request replays the stored response for {hours:g} hours; with a different request "
        "it is refused.",
        required=policy.key_required,
    )


_SEQUENCE_PARAMETERS: Final = (
    _header_parameter(
        CLIENT_HEADER,
        {"type": "string", "minLength": 1, "maxLength": 128, "pattern": "^[!-+\\--~]{1,128}$"},
        "The client whose requests are numbered: the same in all of them.",
    ),
    _header_parameter(
        SEQUENCE_HEADER,
        {"type": "integer", "format": "int64", "minimum": 1},
        "The number of this request among those of the client: 1, 2, 3 … without gaps. A "
        "retry has the number and the key of the first send.",
    ),
)


# -- the batch endpoint ----------------------------------------------------------------------------


def _optional(kind: str, description: str, **more: int) -> Json:
    return {"type": [kind, "null"], **more, "description": description}


_ITEM: Final = _object(
    {
        "method": {"type": "string", "examples": ["POST"]},
        "path": {
            "type": "string",
            "description": "Path and query of a guarded operation, as in a single request.",
        },
        "key": _optional("string", "The idempotency key."),
        "headers": {
            "anyOf": [
                {
                    "type": "object",
                    "additionalProperties": {"type": "string"},
                    "description": "`If-Match`, `Content-Type` and others that the operation "
                    "allows.",
                },
                {"type": "null"},
            ]
        },
        "body": {
            "description": "A JSON value; with a `Content-Type` that is not JSON: `base64` in an "
            "object. `{local:…}` and `{version:…}` are replaced by results of earlier items."
        },
        "lane": _optional(
            "string",
            "After an item that did not succeed, the rest of its lane is 424.",
            minLength=1,
            maxLength=256,
        ),
        "local_id": _optional("string", "A lowercase UUID by which later items refer to this one."),
        "client_id": _optional("string", "Sent as `X-Client-ID`.", minLength=1, maxLength=256),
        "sequence": _optional("integer", "Sent as `X-Sequence`.", minimum=1),
    },
    *("method", "path"),
    additionalProperties=False,
)
_RESULT: Final = _object(
    {
        "status": {"type": "integer", "minimum": 200, "maximum": 599},
        "headers": {"type": "object", "additionalProperties": {"type": "string"}},
        "body": {"description": "JSON, an object with `base64`, or null for an empty body."},
        "replayed": {"type": "boolean", "description": "It is a stored response."},
        "effect": {
            "type": ["string", "null"],
            "description": "As the header `Onceward-Effect`; null if the server does not know.",
        },
    },
    *("status", "headers", "body", "replayed", "effect"),
)
_RESULTS: Final = _object(
    {
        "results": {
            "type": "array",
            "items": _reference("OncewardBatchResult"),
            "description": "One for each item, from the first on; maybe not for all.",
        },
        "retry_after": _optional(
            "number", "Seconds after which to send the items without a result."
        ),
    },
    *("results", "retry_after"),
)


def _batch_schemas(batch: BatchOptions) -> Json:
    items = {
        "type": "array",
        "maxItems": batch.max_items,
        "items": _reference("OncewardBatchItem"),
    }
    return {
        "OncewardBatch": _object({"items": items}, "items", additionalProperties=False),
        "OncewardBatchItem": _ITEM,
        "OncewardBatchResult": _RESULT,
        "OncewardBatchResults": _RESULTS,
    }


def _batch_operation(batch: BatchOptions, errors: Json) -> Json:
    return {
        "tags": ["batch"],
        "summary": "Send many requests in one",
        "description": (
            "Each item is a request to a guarded operation, with its own key. Its result is what "
            f"the single request would have got. At most {batch.max_items} items and "
            f"{batch.max_bytes} bytes."
        ),
        "operationId": "onceward_batch",
        "requestBody": {"required": True, "content": _json(_reference("OncewardBatch"))},
        "responses": {
            "200": {
                "description": "The results, in the order of the items.",
                "content": _json(_reference("OncewardBatchResults")),
            },
            **errors,
        },
    }
