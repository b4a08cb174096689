"""OpenAPI responses of planning's operations."""

from typing import Any, Final

from onceward_services.openapi import errors

__all__ = ["LIST", "changed", "created", "deleted", "read"]

Responses = dict[int | str, dict[str, Any]]

_ETAG: Final = {"description": "The version, for If-Match.", "schema": {"type": "string"}}
_LOCATION: Final = {"description": "The path of the new resource.", "schema": {"type": "string"}}
_NOT_MODIFIED: Final[dict[str, Any]] = {
    "description": "The ETag of If-None-Match is current.",
    "headers": {"ETag": _ETAG},
}

LIST: Final[Responses] = errors(400, 401, 403, 404, 422, 503)


def created(model: Any, *, under: bool) -> Responses:
    """Return the responses of a create; with a parent (``under``) it may be 404."""
    response = {"model": model, "headers": {"ETag": _ETAG, "Location": _LOCATION}}
    return {201: response, **errors(403, *((404, 409) if under else ()))}


def changed(model: Any) -> Responses:
    """Return the responses of a write that names a version."""
    return {200: {"model": model, "headers": {"ETag": _ETAG}}, **errors(403, 404, 409, 428)}


def deleted() -> Responses:
    """Return the responses of a deletion."""
    return {204: {"description": "The resource is deleted."}, **errors(403, 404, 409, 428)}


def read(model: Any) -> Responses:
    """Return the responses of a read."""
    response = {"model": model, "headers": {"ETag": _ETAG}}
    return {200: response, 304: _NOT_MODIFIED, **errors(401, 403, 404, 503)}
