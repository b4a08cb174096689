"""The batch endpoint in an OpenAPI document."""

from collections.abc import Callable, Iterable
from typing import Any, Final

from onceward.batch.options import BatchOptions

__all__ = ["describe_batch"]

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
