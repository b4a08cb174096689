"""Routes of missions. Every change names the version it was made against."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from fastapi import APIRouter, Body, Query, Request, Response

from onceward import Execution, update_with_version
from onceward.frameworks.starlette import Caller, Run, Tx
from onceward_services.auth import CurrentPrincipal
from onceward_services.planning.aggregates import (
    AggregateService,
    IfMatch,
    IfNoneMatch,
    json_response,
)
from onceward_services.planning.jobs import recount_projects, reindex_mission, searchable
from onceward_services.planning.model import (
    MissionPatch,
    MissionReplacement,
    MissionView,
    NewMission,
    Page,
    VersionOnly,
    check_period,
)
from onceward_services.planning.openapi import LIST, changed, created, deleted, read
from onceward_services.planning.paging import After, Limit, page, read_cursor
from onceward_services.planning.repository import (
    add,
    change_mission,
    find,
    list_in,
    remove_mission,
)

__all__ = ["add_routes"]

_MISSION: Final = "/missions/{mission_id}"
_SEARCHED_FIELDS: Final = frozenset({"title", "description"})


def add_routes(api: APIRouter, service: AggregateService) -> None:
    """Add the routes of missions."""
    _add_reads(api, service)
    _add_writes(api, service)


def _add_reads(api: APIRouter, service: AggregateService) -> None:
    @api.get(
        "/projects/{project_id}/missions",
        summary="List a project's missions",
        operation_id="list_missions",
        description="Oldest first. `search` reads an index of title and description that a job "
        "updates soon after each write.",
        response_model=Page[MissionView],
        responses=LIST,
    )
    async def list_page(
        project_id: str,
        caller: CurrentPrincipal,
        limit: Limit = 50,
        after: After = None,
        search: Annotated[
            str | None, Query(max_length=200, description="Only missions that contain this text.")
        ] = None,
    ) -> Response:
        service.roles.check_read(caller)
        position = read_cursor(after, "missions")
        await service.ensure_exists(caller.tenant, "project", project_id)
        filters = {"project_id": project_id}
        if search is not None:
            filters["pattern"] = _pattern(search)
        rows = await list_in(
            service.onceward.store,
            "list_missions" if search is None else "search_missions",
            caller.tenant,
            after=position,
            limit=limit + 1,
            **filters,
        )
        return json_response(page(rows, limit, "missions"))

    @api.get(
        _MISSION,
        summary="Read a mission",
        operation_id="read_mission",
        response_model=MissionView,
        responses=read(MissionView),
    )
    async def read_one(
        mission_id: str, caller: CurrentPrincipal, request: Request, _tag: IfNoneMatch = None
    ) -> Response:
        service.roles.check_read(caller)
        return await service.read(request, "mission", caller.tenant, mission_id)


def _add_writes(api: APIRouter, service: AggregateService) -> None:
    onceward, policy = service.onceward, service.policy

    @api.post(
        "/projects/{project_id}/missions",
        status_code=201,
        summary="Create a mission",
        operation_id="create_mission",
        responses=created(MissionView, under=True),
    )
    @onceward.guard("POST /v1/projects/{project_id}/missions", policy=policy)
    async def create(
        project_id: str, mission: NewMission, tx: Tx, caller: Caller, run: Run
    ) -> Response:
        service.roles.check_write(run)
        fields = mission.model_dump()
        check_period(fields)
        await service.check_not_archived(tx, caller.tenant, project_id)
        now = onceward.clock.now()
        fields = {"project_id": project_id} | fields
        row = await add(tx, "mission", caller.tenant, service.new_id(), fields=fields, now=now)
        await recount_projects(onceward, project_id, version=row["version"])
        await reindex_mission(onceward, row["id"], version=row["version"])
        return service.respond(run, "mission", row, status=201)

    async def change(
        run: Execution,
        request: Request,
        mission_id: str,
        *,
        fields: Mapping[str, Any],
        seen: int | None,
    ) -> Response:
        service.roles.check_write(run)
        # From the execution, not from dependencies: FastAPI takes time to resolve each, and this is
        # the most frequent write.
        tx, tenant = run.transaction, run.request.principal.tenant
        row = await update_with_version(
            what="mission",
            if_match=request.headers.getlist("if-match"),
            in_body=seen,
            current=lambda: find(tx, "mission", tenant, mission_id),
            write=lambda version: change_mission(
                tx, tenant, mission_id, fields, version=version, now=onceward.clock.now()
            ),
        )
        check_period(row)  # checks the merged row; an error rolls the update back
        if "status" in fields:
            await recount_projects(onceward, row["project_id"], version=row["version"])
        if not _SEARCHED_FIELDS.isdisjoint(fields):
            await reindex_mission(onceward, mission_id, version=row["version"])
        return service.respond(run, "mission", row)

    @api.put(
        _MISSION,
        summary="Replace a mission",
        operation_id="replace_mission",
        description="Missing fields are reset to their defaults.",
        responses=changed(MissionView),
    )
    @onceward.guard(f"PUT /v1{_MISSION}", policy=policy)
    async def replace(
        mission_id: str,
        mission: MissionReplacement,
        run: Run,
        request: Request,
        _tag: IfMatch = None,
    ) -> Response:
        fields = mission.model_dump(exclude={"version"})
        return await change(run, request, mission_id, fields=fields, seen=mission.version)

    @api.patch(
        _MISSION,
        summary="Change a mission",
        operation_id="change_mission",
        description="Missing fields keep their values; null clears `description`, `starts_at` and "
        "`ends_at`. Every accepted change is a new version, even if it changes no value.",
        responses=changed(MissionView),
    )
    @onceward.guard(f"PATCH /v1{_MISSION}", policy=policy)
    async def patch(
        mission_id: str, mission: MissionPatch, run: Run, request: Request, _tag: IfMatch = None
    ) -> Response:
        fields = mission.model_dump(exclude={"version"}, exclude_unset=True)
        return await change(run, request, mission_id, fields=fields, seen=mission.version)

    @api.delete(
        _MISSION,
        status_code=204,
        response_class=Response,
        summary="Delete a mission",
        operation_id="delete_mission",
        description="Its assignments remain, are not counted, and can be moved to another mission.",
        responses=deleted(),
    )
    @onceward.guard(f"DELETE /v1{_MISSION}", policy=policy)
    async def delete(
        mission_id: str,
        *,
        tx: Tx,
        caller: Caller,
        run: Run,
        request: Request,
        seen: Annotated[VersionOnly | None, Body()] = None,
        _tag: IfMatch = None,
    ) -> Response:
        service.roles.check_write(run)
        row = await update_with_version(
            what="mission",
            if_match=request.headers.getlist("if-match"),
            in_body=None if seen is None else seen.version,
            current=lambda: find(tx, "mission", caller.tenant, mission_id),
            write=lambda version: remove_mission(
                tx, caller.tenant, mission_id, version=version, now=onceward.clock.now()
            ),
        )
        await recount_projects(onceward, row["project_id"], version=row["version"])
        await reindex_mission(onceward, mission_id, version=row["version"])
        service.record_change(run, "mission", mission_id, row["version"])
        return Response(status_code=204)


def _pattern(search: str) -> str:
    """Return a LIKE pattern that finds the text anywhere, with special characters escaped."""
    text = searchable(search).replace("\x00", "\ufffd")
    for special in "!%_":
        text = text.replace(special, f"!{special}")
    return f"%{text}%"
