"""What all of planning's routes share: how an aggregate is read, answered and noted."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from fastapi import Header, Request, Response

from holdfast import Execution, Holdfast, Policy, Transaction
from holdfast.core.versions import etag
from holdfast.errors import NotFoundError
from holdfast.ids import new_id
from holdfast.ports import Row
from holdfast_services.planning.model import dashboard_view, row_view
from holdfast_services.planning.read_cache import Kind, ReadCache, ReadKey
from holdfast_services.planning.repository import find, find_in, version_in

__all__ = ["AggregateService", "IfMatch", "IfNoneMatch", "json_response"]

_JSON: Final = "application/json"
_WHAT: Final[dict[Kind, str]] = {
    "project": "project",
    "mission": "mission",
    "assignment": "assignment",
    "dashboard": "project",
}

# Read from the request itself, where two of them can be told from one; here for the document.
IfMatch = Annotated[
    str | None,
    Header(
        alias="If-Match",
        description='The ETag this was made against, such as `"7"`. Or say `version` in the body.',
    ),
]
IfNoneMatch = Annotated[
    str | None,
    Header(alias="If-None-Match", description="The ETag at hand: 304 if it is the current one."),
]

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class AggregateService:
    """One server's planning: where it reads and writes, by which policy, with which cache."""

    holdfast: Holdfast
    policy: Policy
    cache: ReadCache

    def new_id(self) -> str:
        """Make an id that grows with time."""
        return new_id(self.holdfast.clock.now())

    # -- reading ---------------------------------------------------------------------------------

    async def read(self, request: Request, kind: Kind, tenant: str, item_id: str) -> Response:
        """Answer with an aggregate as it is now: from memory only if its version still is."""
        key = ReadKey(tenant, kind, item_id)
        store = self.holdfast.store
        tags = request.headers.getlist("if-none-match")
        if tags or key in self.cache:
            version = await version_in(store, kind, tenant, item_id)
            if version is None:
                raise NotFoundError(f"there is no such {_WHAT[kind]}")
            if _names(tags, version):
                return Response(status_code=304, headers={"etag": etag(version)})
            kept = self.cache.get(key, version)
            if kept is not None:
                return Response(kept, headers={"etag": etag(version)}, media_type=_JSON)
        row = await find_in(store, kind, tenant, item_id)
        if row is None:
            raise NotFoundError(f"there is no such {_WHAT[kind]}")
        body = _encode(dashboard_view(row) if kind == "dashboard" else row_view(row))
        self.cache.put(key, row["version"], body)
        return Response(body, headers={"etag": etag(row["version"])}, media_type=_JSON)

    async def there(self, tenant: str, kind: Kind, item_id: str) -> None:
        """Raise unless there is such a thing."""
        if await version_in(self.holdfast.store, kind, tenant, item_id) is None:
            raise NotFoundError(f"there is no such {_WHAT[kind]}")

    # -- writing ---------------------------------------------------------------------------------

    async def parent(self, tx: Transaction, kind: Kind, tenant: str, item_id: str) -> Row:
        """Return what something new is to belong to, or raise that there is none."""
        row = await find(tx, kind, tenant, item_id)
        if row is None:
            raise NotFoundError(f"there is no such {_WHAT[kind]}")
        return row

    def answer(self, run: Execution, kind: Kind, row: Row, *, status: int = 200) -> Response:
        """Answer with what was written; note it for the audit event and, once committed, forget."""
        item_id, version = row["id"], row["version"]
        self.note(run, kind, item_id, version)
        headers = {"etag": etag(version)}
        if status == 201:  # noqa: PLR2004 - created
            headers["location"] = f"/v1/{kind}s/{item_id}"
        return Response(_encode(row_view(row)), status, headers, media_type=_JSON)

    def note(self, run: Execution, kind: Kind, item_id: str, version: int) -> None:
        """Say for the audit event what was changed; once it is committed, forget the old answer.

        Only a first execution that commits gets so far: a refused one, one that is undone and a
        replay leave the cache alone.
        """
        run.describe(resource=f"{kind}:{item_id}", version=version)
        key = ReadKey(run.request.principal.tenant, kind, item_id)
        run.after_commit(partial(self.cache.forget, key))


def json_response(value: Any) -> Response:
    """Write a value as the answer, as it is."""
    return Response(_encode(value), media_type=_JSON)


def _names(tags: list[str], version: int) -> bool:
    """Tell whether If-None-Match names this version. What cannot be read names nothing."""
    listed = {part.strip().removeprefix("W/") for tag in tags for part in tag.split(",")}
    return etag(version) in listed or "*" in listed
