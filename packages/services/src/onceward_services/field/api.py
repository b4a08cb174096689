"""HTTP routes of field: the same six operations for activities, contacts and expenses."""

from datetime import datetime
from typing import Annotated, Any, Final

from fastapi import APIRouter, Body, Header, Query, Request, Response

from onceward import Execution, Onceward
from onceward.errors import BodyInvalidError, NotFoundError
from onceward.frameworks.starlette import Run
from onceward_protocol.staleness import parse_instant
from onceward_protocol.versions import check_version, etag, expected_version
from onceward_services.auth import CurrentPrincipal
from onceward_services.field.changes import add_changes
from onceward_services.field.document_writer import DocumentWriter
from onceward_services.field.model import (
    KINDS,
    SERVER_FIELDS_BYTES,
    Kind,
    app_fields,
    merge_patch,
)
from onceward_services.field.repository import Item, find_in, list_page
from onceward_services.json_response import EncodedJsonResponse
from onceward_services.large_bodies import LargeDocumentRoute
from onceward_services.openapi import errors
from onceward_services.routing import service_router
from onceward_services.settings import Settings
from onceward_services.streams import StreamNotifier

__all__ = ["router"]

_PREFIX: Final = "/api/v1"
_MAX_LIMIT: Final = 500
_CREATED: Final = 201
_DOCUMENT: Final = {"content": {"application/json": {"schema": {"type": "object"}}}}
_WITH_TAG: Final = {
    "ETag": {"description": "The version, for If-Match.", "schema": {"type": "string"}}
}

Document = Annotated[Any, Body(openapi_examples={"a document": {"value": {"title": "Visit"}}})]
# The body of a DELETE is optional; it may contain a version, as those of PUT and PATCH.
VersionBody = Annotated[Any, Body(openapi_examples={"a version": {"value": {"version": 1}}})]
IfMatch = Annotated[
    str | None,
    Header(
        alias="If-Match",
        description="The ETag of the version to change; `*` matches any. Without If-Match the "
        "change applies to the current version.",
    ),
]
GeneratedAt = Annotated[
    str | None,
    Header(
        alias="X-Client-Generated-At",
        description="When the user acted, ISO 8601 with a zone; becomes `occurred_at`. Without it "
        "the server's time does.",
    ),
]


def router(onceward: Onceward, settings: Settings) -> APIRouter:
    """Build the field service."""
    api = service_router("field", route_class=LargeDocumentRoute)
    notifier = StreamNotifier()
    for kind in KINDS:
        _add_writes(api, onceward, settings, kind, notifier)
        _add_reads(api, onceward, settings, kind)
    add_changes(api, onceward, settings, notifier)
    return api


def _add_writes(
    api: APIRouter, onceward: Onceward, settings: Settings, kind: Kind, notifier: StreamNotifier
) -> None:
    policy = settings.policies().field
    # At most the size of a body, so that a document can be sent back, and small enough for a
    # response.
    max_bytes = min(policy.max_body_bytes, policy.max_response_bytes - SERVER_FIELDS_BYTES)
    path, one, what = _paths(kind)

    writer = DocumentWriter(onceward, notifier, kind, what, max_bytes)

    def respond(item: Item, run: Execution, status: int = 200) -> Response:
        run.describe(resource=f"{what}:{item.id}", version=item.version)
        location = f"{path}/{item.id}" if status == _CREATED else None
        return _document_response(item, status, location)

    @api.post(
        path,
        status_code=201,
        summary=f"Create: {what}",
        operation_id=f"create_{what}",
        responses={201: {"headers": _WITH_TAG, **_DOCUMENT}, **errors()},
    )
    @onceward.guard(f"POST {path}", policy=policy)
    async def create(document: Document, run: Run, generated_at: GeneratedAt = None) -> Response:
        fields = app_fields(document)
        occurred_at = _occurred_at(run, generated_at)
        text = await writer.encode(run, 0, lambda: fields)
        return respond(await writer.add(run, fields, text, occurred_at), run, _CREATED)

    @api.put(
        one,
        summary=f"Replace: {what}",
        operation_id=f"replace_{what}",
        responses={200: {"headers": _WITH_TAG, **_DOCUMENT}, **errors(404, 409)},
    )
    @onceward.guard(f"PUT {one}", policy=policy)
    async def replace(
        item_id: str, document: Document, run: Run, request: Request, _if_match: IfMatch = None
    ) -> Response:
        fields = app_fields(document)
        text = await writer.encode(run, 0, lambda: fields)
        at, item = await writer.begin(run, item_id)
        _check_version(request, document, item)
        await writer.check_references(run, fields)
        return respond(await writer.change(run, item, text, at), run)

    @api.patch(
        one,
        summary=f"Change: {what}",
        operation_id=f"change_{what}",
        description="A JSON merge patch (RFC 7396): `null` removes a field.",
        responses={200: {"headers": _WITH_TAG, **_DOCUMENT}, **errors(404, 409)},
    )
    @onceward.guard(f"PATCH {one}", policy=policy)
    async def patch(
        item_id: str, document: Document, run: Run, request: Request, _if_match: IfMatch = None
    ) -> Response:
        patched = app_fields(document)
        at, item = await writer.begin(run, item_id)
        _check_version(request, document, item)
        await writer.check_references(run, patched)
        text = await writer.encode(
            run, len(item.document), lambda: merge_patch(item.fields(), patched)
        )
        return respond(await writer.change(run, item, text, at), run)

    @api.delete(
        one,
        summary=f"Delete: {what}",
        operation_id=f"delete_{what}",
        status_code=204,
        response_class=Response,
        responses=errors(404, 409),
    )
    @onceward.guard(f"DELETE {one}", policy=policy)
    async def delete(
        item_id: str,
        run: Run,
        request: Request,
        document: VersionBody = None,
        _if_match: IfMatch = None,
    ) -> Response:
        at, item = await writer.begin(run, item_id)
        _check_version(request, document, item)
        await writer.remove(run, item, at)
        run.describe(resource=f"{what}:{item.id}", version=item.version + 1)
        return Response(status_code=204)


def _add_reads(api: APIRouter, onceward: Onceward, settings: Settings, kind: Kind) -> None:
    path, one, what = _paths(kind)
    max_bytes = settings.policies().field.max_response_bytes

    @api.get(
        one,
        summary=f"Read: {what}",
        operation_id=f"read_{what}",
        responses={200: {"headers": _WITH_TAG, **_DOCUMENT}, **errors(401, 404, 503)},
    )
    async def read(item_id: str, caller: CurrentPrincipal) -> Response:
        item = await find_in(onceward.store, caller.tenant, kind, item_id)
        if item is None:
            raise NotFoundError(f"there is no such {what}")
        return _document_response(item)

    @api.get(
        path,
        summary=f"List: {kind}",
        operation_id=f"list_{kind}",
        description="Ordered by last change, oldest first. With `updated_since` the list includes "
        "deleted documents as tombstones, so that a device can fetch all changes. A page may have "
        "fewer documents than `limit` if they are large; `next` is null on the last page.",
        responses={200: _DOCUMENT, **errors(400, 401, 422, 503)},
    )
    async def list_documents(
        caller: CurrentPrincipal,
        limit: Annotated[int, Query(ge=1, le=_MAX_LIMIT)] = 50,
        after: Annotated[str | None, Query(description="`next` of the previous page.")] = None,
        updated_since: Annotated[
            str | None, Query(description="An instant with a zone, ISO 8601.")
        ] = None,
    ) -> Response:
        since = None if updated_since is None else parse_instant(updated_since, "updated_since")
        page = await list_page(
            onceward.store,
            caller.tenant,
            kind,
            after=_cursor(after),
            since=since,
            limit=limit,
            max_bytes=max_bytes,
        )
        following = f'"{page.last_seq}"' if page.has_more else "null"
        text = f'{{"items":[{",".join(page.texts)}],"next":{following}}}'
        return Response(text, media_type="application/json")


def _paths(kind: Kind) -> tuple[str, str, str]:
    """Return the path of the list, the path of one document, and the singular name."""
    path = f"{_PREFIX}/{kind}"
    what = {"activities": "activity", "contacts": "contact", "expenses": "expense"}[kind]
    return path, f"{path}/{{item_id}}", what


def _document_response(item: Item, status: int = 200, location: str | None = None) -> Response:
    headers = [("etag", etag(item.version))]
    if location is not None:
        headers.append(("location", location))
    return EncodedJsonResponse(item.as_text().encode(), status, headers)


def _occurred_at(run: Execution, sent: str | None) -> datetime | None:
    """Return when the user acted, as the device says; None if it does not.

    ``sent`` is the first header of this name. The request has none if there are different ones.
    """
    if sent is None:
        return None
    if sent and run.request.client_generated_at is None:
        raise BodyInvalidError("X-Client-Generated-At should be sent once")
    return parse_instant(sent, "X-Client-Generated-At")


def _check_version(request: Request, document: Any, item: Item) -> None:
    """Compare the version of the request, if it has one, with the current version."""
    tags = request.headers.getlist("if-match")
    in_body = document.get("version") if isinstance(document, dict) else None
    if tags or in_body is not None:
        expected = expected_version(if_match=tags, in_body=in_body, allow_any=True)
        check_version(expected, item.version)


def _cursor(after: str | None) -> int:
    if after is None:
        return 0
    if not (after.isascii() and after.isdigit() and len(after) <= 18):  # noqa: PLR2004 - fits a bigint
        raise BodyInvalidError("after should be the `next` of another page")
    return int(after)
