"""Reading, responding and auditing, shared by all routes of planning."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from fastapi import Header, Request, Response

from onceward import Execution, Onceward, Policy, Transaction
from onceward.errors import NotFoundError, ServiceError
from onceward.ports import Row
from onceward_protocol.ids import new_id
from onceward_protocol.versions import etag
from onceward_services.json_response import EncodedJsonResponse
from onceward_services.planning.model import dashboard_view, row_view
from onceward_services.planning.read_cache import Kind, ReadCache, ReadKey
from onceward_services.planning.repository import find, find_in, version_in
from onceward_services.planning.roles import RoleRules

__all__ = ["ARCHIVED", "AggregateService", "IfMatch", "IfNoneMatch", "json_response"]

ARCHIVED: Final = "project.archived"

_JSON: Final = "application/json"
_NOUNS: Final[dict[Kind, str]] = {
    "project": "project",
    "mission": "mission",
    "assignment": "assignment",
    "dashboard": "project",
}

# Only for the OpenAPI document. Handlers read the headers from the request, to see duplicates.
IfMatch = Annotated[
    str | None,
    Header(
        alias="If-Match",
        description='The ETag of the version to change, such as `"7"`; or `version` in the body.',
    ),
]
IfNoneMatch = Annotated[
    str | None,
    Header(
        alias="If-None-Match", description="A known ETag: the response is 304 if it is current."
    ),
]

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class AggregateService:
    """Reads and writes projects, missions, assignments and dashboards."""

    onceward: Onceward
    policy: Policy
    cache: ReadCache
    roles: RoleRules

    def new_id(self) -> str:
        """Return a new id; ids grow with time."""
        return new_id(self.onceward.clock.now())

    # -- reading ---------------------------------------------------------------------------------

    async def read(self, request: Request, kind: Kind, tenant: str, item_id: str) -> Response:
        """Respond with an aggregate, from the cache only if the cached version is current."""
        key = ReadKey(tenant, kind, item_id)
        store = self.onceward.store
        tags = request.headers.getlist("if-none-match")
        if tags or key in self.cache:
            version = await version_in(store, kind, tenant, item_id)
            if version is None:
                raise NotFoundError(f"there is no such {_NOUNS[kind]}")
            if _matches(tags, version):
                return Response(status_code=304, headers={"etag": etag(version)})
            cached = self.cache.get(key, version)
            if cached is not None:
                return Response(cached, headers={"etag": etag(version)}, media_type=_JSON)
        row = await find_in(store, kind, tenant, item_id)
        if row is None:
            raise NotFoundError(f"there is no such {_NOUNS[kind]}")
        body = _encode(dashboard_view(row) if kind == "dashboard" else row_view(row))
        self.cache.put(key, row["version"], body)
        return Response(body, headers={"etag": etag(row["version"])}, media_type=_JSON)

    async def ensure_exists(self, tenant: str, kind: Kind, item_id: str) -> None:
        """Raise ``NotFoundError`` if the aggregate does not exist."""
        if await version_in(self.onceward.store, kind, tenant, item_id) is None:
            raise NotFoundError(f"there is no such {_NOUNS[kind]}")

    # -- writing ---------------------------------------------------------------------------------

    async def get(self, tx: Transaction, kind: Kind, tenant: str, item_id: str) -> Row:
        """Return an aggregate inside a transaction; raises ``NotFoundError``."""
        row = await find(tx, kind, tenant, item_id)
        if row is None:
            raise NotFoundError(f"there is no such {_NOUNS[kind]}")
        return row

    async def check_not_archived(self, tx: Transaction, tenant: str, project_id: str) -> None:
        """Raise ``ServiceError`` (409) if the project is archived."""
        project = await self.get(tx, "project", tenant, project_id)
        if project["archived_at"] is not None:
            raise ServiceError(
                409,
                ARCHIVED,
                "the project is archived: take it out of the archive, or choose another one",
                details={"project_id": project_id},
            )

    def respond(self, run: Execution, kind: Kind, row: Row, *, status: int = 200) -> Response:
        """Respond with the new state of an aggregate, and record the change."""
        item_id, version = row["id"], row["version"]
        self.record_change(run, kind, item_id, version)
        headers = [("etag", etag(version))]
        if status == 201:  # noqa: PLR2004 - created
            headers.append(("location", f"/v1/{kind}s/{item_id}"))
        return EncodedJsonResponse(_encode(row_view(row)), status, headers)

    def record_change(self, run: Execution, kind: Kind, item_id: str, version: int) -> None:
        """Name the aggregate in the audit event, and remove it from the cache after the commit.

        Only a first execution that commits reaches the cache: errors, rollbacks and replays do not.
        """
        run.describe(resource=f"{kind}:{item_id}", version=version)
        key = ReadKey(run.request.principal.tenant, kind, item_id)
        run.after_commit(partial(self.cache.remove, key))


def json_response(value: Any) -> Response:
    """Return a JSON response."""
    return Response(_encode(value), media_type=_JSON)


def _matches(tags: list[str], version: int) -> bool:
    """Return whether If-None-Match names this version; malformed tags match nothing."""
    listed = {part.strip().removeprefix("W/") for tag in tags for part in tag.split(",")}
    return etag(version) in listed or "*" in listed
