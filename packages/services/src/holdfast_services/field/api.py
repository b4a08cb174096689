"""The HTTP face of field: the same six operations for activities, contacts and expenses."""

from typing import Annotated, Any, Final
from uuid import uuid4

from fastapi import APIRouter, Body, Header, Query, Request, Response

from holdfast import Holdfast
from holdfast.core.staleness import parse_instant
from holdfast.core.versions import check_version, etag, expected_version
from holdfast.errors import BodyInvalidError, NotFoundError
from holdfast.ports import Transaction
from holdfast.server.starlette import Caller, Run, Tx
from holdfast_services.auth import CurrentPrincipal
from holdfast_services.field.model import (
    KINDS,
    OURS_BYTES,
    Kind,
    check_size,
    merged,
    own_fields,
    references,
    written,
)
from holdfast_services.field.repository import (
    Item,
    add,
    change,
    find,
    find_in,
    list_items,
    next_change,
    remove,
)
from holdfast_services.openapi import errors
from holdfast_services.routing import service_router
from holdfast_services.settings import Settings

__all__ = ["router"]

_PREFIX: Final = "/api/v1"
_MOST: Final = 500
_CREATED: Final = 201
_DOCUMENT: Final = {"content": {"application/json": {"schema": {"type": "object"}}}}
_WITH_TAG: Final = {
    "ETag": {"description": "The version, for If-Match.", "schema": {"type": "string"}}
}

Document = Annotated[Any, Body(openapi_examples={"a document": {"value": {"title": "Visit"}}})]
# A DELETE needs no body; one that has one may say a version there, as PUT and PATCH do.
Seen = Annotated[Any, Body(openapi_examples={"a version": {"value": {"version": 1}}})]
IfMatch = Annotated[
    str | None,
    Header(
        alias="If-Match",
        description="The ETag the change was made against; `*` forces it. Without it the change is "
        "made to whatever is there.",
    ),
]


def router(holdfast: Holdfast, settings: Settings) -> APIRouter:
    """Build the field service."""
    api = service_router("field")
    for kind in KINDS:
        _add_writes(api, holdfast, settings, kind)
        _add_reads(api, holdfast, kind)
    return api


def _add_writes(  # noqa: C901 - four operations of one kind belong together
    api: APIRouter, holdfast: Holdfast, settings: Settings, kind: Kind
) -> None:
    policy = settings.policies().field
    # No larger than a body, so that what was read can be sent back; and it must fit an answer.
    most_bytes = min(policy.max_body_bytes, policy.max_response_bytes - OURS_BYTES)
    path, one, what = _names(kind)

    async def current(tx: Transaction, tenant: str, item_id: str) -> Item:
        found = await find(tx, tenant, kind, item_id)
        if found is None:
            raise NotFoundError(f"there is no such {what}")
        return found

    async def check_references(tx: Transaction, tenant: str, fields: dict[str, Any]) -> None:
        for field, of_kind, item_id in references(kind, fields):
            if await find(tx, tenant, of_kind, item_id) is None:
                raise NotFoundError(f"{field} names nothing of yours")

    def kept(item: Item, run: Any, status: int = 200) -> Response:
        run.describe(resource=f"{what}:{item.id}", version=item.version)
        place = {"location": f"{path}/{item.id}"} if status == _CREATED else {}
        return _shown(item, status, place)

    @api.post(
        path,
        status_code=201,
        summary=f"Create: {what}",
        operation_id=f"create_{what}",
        responses={201: {"headers": _WITH_TAG, **_DOCUMENT}, **errors()},
    )
    @holdfast.guard(f"POST {path}", policy=policy)
    async def create(document: Document, tx: Tx, caller: Caller, run: Run) -> Response:
        fields = own_fields(document)
        check_size(fields, most_bytes)
        at = await next_change(tx, caller.tenant, holdfast.clock.now())
        await check_references(tx, caller.tenant, fields)
        item = await add(tx, caller.tenant, kind, item_id=str(uuid4()), fields=fields, at=at)
        return kept(item, run, _CREATED)

    @api.put(
        one,
        summary=f"Replace: {what}",
        operation_id=f"replace_{what}",
        responses={200: {"headers": _WITH_TAG, **_DOCUMENT}, **errors(404, 409)},
    )
    @holdfast.guard(f"PUT {one}", policy=policy)
    async def replace(  # noqa: PLR0917 - FastAPI reads them
        item_id: str,
        document: Document,
        tx: Tx,
        caller: Caller,
        run: Run,
        request: Request,
        _if_match: IfMatch = None,
    ) -> Response:
        fields = own_fields(document)
        check_size(fields, most_bytes)
        at = await next_change(tx, caller.tenant, holdfast.clock.now())
        item = await current(tx, caller.tenant, item_id)
        _check(request, document, item)
        await check_references(tx, caller.tenant, fields)
        changed = await change(tx, caller.tenant, kind, item=item, fields=fields, at=at)
        return kept(changed, run)

    @api.patch(
        one,
        summary=f"Change: {what}",
        operation_id=f"change_{what}",
        description="Merged as RFC 7396 says: `null` removes a field.",
        responses={200: {"headers": _WITH_TAG, **_DOCUMENT}, **errors(404, 409)},
    )
    @holdfast.guard(f"PATCH {one}", policy=policy)
    async def patch(  # noqa: PLR0917 - FastAPI reads them
        item_id: str,
        document: Document,
        tx: Tx,
        caller: Caller,
        run: Run,
        request: Request,
        _if_match: IfMatch = None,
    ) -> Response:
        patched = own_fields(document)
        at = await next_change(tx, caller.tenant, holdfast.clock.now())
        item = await current(tx, caller.tenant, item_id)
        _check(request, document, item)
        await check_references(tx, caller.tenant, patched)
        fields = merged(item.fields, patched)
        check_size(fields, most_bytes)
        changed = await change(tx, caller.tenant, kind, item=item, fields=fields, at=at)
        return kept(changed, run)

    @api.delete(
        one,
        summary=f"Delete: {what}",
        operation_id=f"delete_{what}",
        status_code=204,
        response_class=Response,
        responses=errors(404, 409),
    )
    @holdfast.guard(f"DELETE {one}", policy=policy)
    async def delete(  # noqa: PLR0917 - FastAPI reads them
        item_id: str,
        tx: Tx,
        caller: Caller,
        run: Run,
        request: Request,
        document: Seen = None,
        _if_match: IfMatch = None,
    ) -> Response:
        at = await next_change(tx, caller.tenant, holdfast.clock.now())
        item = await current(tx, caller.tenant, item_id)
        _check(request, document, item)
        await remove(tx, caller.tenant, kind, item, at)
        run.describe(resource=f"{what}:{item.id}", version=item.version + 1)
        return Response(status_code=204)


def _add_reads(api: APIRouter, holdfast: Holdfast, kind: Kind) -> None:
    path, one, what = _names(kind)

    @api.get(
        one,
        summary=f"Read: {what}",
        operation_id=f"read_{what}",
        responses={200: {"headers": _WITH_TAG, **_DOCUMENT}, **errors(401, 404, 503)},
    )
    async def read(item_id: str, caller: CurrentPrincipal) -> Response:
        item = await find_in(holdfast.store, caller.tenant, kind, item_id)
        if item is None:
            raise NotFoundError(f"there is no such {what}")
        return _shown(item)

    @api.get(
        path,
        summary=f"List: {kind}",
        operation_id=f"list_{kind}",
        description="By their last change, oldest first. With `updated_since` deleted ones are "
        "listed too, as marks, so that a device can pull what it has missed.",
        responses={200: _DOCUMENT, **errors(400, 401, 422, 503)},
    )
    async def listing(
        caller: CurrentPrincipal,
        limit: Annotated[int, Query(ge=1, le=_MOST)] = 50,
        after: Annotated[str | None, Query(description="`next` of the page before.")] = None,
        updated_since: Annotated[
            str | None, Query(description="An instant with a zone, ISO 8601.")
        ] = None,
    ) -> dict[str, Any]:
        since = None if updated_since is None else parse_instant(updated_since, "updated_since")
        items = await list_items(
            holdfast.store,
            caller.tenant,
            kind,
            after=_cursor(after),
            since=since,
            limit=limit + 1,
        )
        page = items[:limit]
        more = len(items) > limit
        return {
            "items": [item.shown() for item in page],
            "next": str(page[-1].seq) if more else None,
        }


def _names(kind: Kind) -> tuple[str, str, str]:
    """Return the path of all, the path of one, and what one is called."""
    path = f"{_PREFIX}/{kind}"
    what = {"activities": "activity", "contacts": "contact", "expenses": "expense"}[kind]
    return path, f"{path}/{{item_id}}", what


def _shown(item: Item, status: int = 200, place: dict[str, str] | None = None) -> Response:
    headers = {"etag": etag(item.version), **(place or {})}
    return Response(written(item.shown()), status, headers, "application/json")


def _check(request: Request, document: Any, item: Item) -> None:
    """Hold the change against the version it was made for, where it says one."""
    tags = request.headers.getlist("if-match")
    in_body = document.get("version") if isinstance(document, dict) else None
    if tags or in_body is not None:
        expected = expected_version(if_match=tags, in_body=in_body, allow_any=True)
        check_version(expected, item.version)


def _cursor(after: str | None) -> int:
    if after is None:
        return 0
    if not (after.isascii() and after.isdigit() and len(after) <= 18):  # noqa: PLR2004 - fits a bigint
        raise BodyInvalidError("after should be what next of another page was")
    return int(after)
