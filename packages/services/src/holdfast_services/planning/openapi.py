"""What planning's operations answer, for the OpenAPI document."""

from typing import Any, Final

from holdfast_services.openapi import errors

__all__ = ["LISTED", "changed", "created", "deleted", "read"]

Responses = dict[int | str, dict[str, Any]]

_ETAG: Final = {"description": "The version, for If-Match.", "schema": {"type": "string"}}
_LOCATION: Final = {"description": "Where it is.", "schema": {"type": "string"}}
_NOT_MODIFIED: Final[dict[str, Any]] = {
    "description": "It still is what If-None-Match names.",
    "headers": {"ETag": _ETAG},
}

LISTED: Final[Responses] = errors(400, 401, 404, 422, 503)


def created(model: Any, *, under: bool) -> Responses:
    """Return the answers of a create, of something that belongs to something else or not."""
    answer = {"model": model, "headers": {"ETag": _ETAG, "Location": _LOCATION}}
    return {201: answer, **errors(*((404,) if under else ()))}


def changed(model: Any) -> Responses:
    """Return the answers of a write that names a version."""
    return {200: {"model": model, "headers": {"ETag": _ETAG}}, **errors(404, 409, 428)}


def deleted() -> Responses:
    """Return the answers of a deletion."""
    return {204: {"description": "It is gone."}, **errors(404, 409, 428)}


def read(model: Any) -> Responses:
    """Return the answers of a read."""
    answer = {"model": model, "headers": {"ETag": _ETAG}}
    return {200: answer, 304: _NOT_MODIFIED, **errors(401, 404, 503)}
