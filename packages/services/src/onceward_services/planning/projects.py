"""Routes of projects and their dashboards, which jobs update."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from onceward import update_with_version
from onceward.frameworks.starlette import Caller, Run, Tx
from onceward_services.auth import CurrentPrincipal
from onceward_services.planning.aggregates import (
    AggregateService,
    IfMatch,
    IfNoneMatch,
    json_response,
)
from onceward_services.planning.model import (
    DashboardView,
    NewProject,
    Page,
    ProjectPatch,
    ProjectView,
)
from onceward_services.planning.openapi import LIST, changed, created, read
from onceward_services.planning.paging import After, Limit, page, read_cursor
from onceward_services.planning.repository import add, change_project, find, list_in

__all__ = ["add_routes"]


def add_routes(api: APIRouter, service: AggregateService) -> None:
    """Add the routes of projects."""
    onceward = service.onceward

    @api.post(
        "/projects",
        status_code=201,
        summary="Create a project",
        operation_id="create_project",
        responses=created(ProjectView, under=False),
    )
    @onceward.guard("POST /v1/projects", policy=service.policy)
    async def create(project: NewProject, tx: Tx, caller: Caller, run: Run) -> Response:
        service.roles.check_write(run)
        now = onceward.clock.now()
        fields = project.model_dump()
        row = await add(tx, "project", caller.tenant, service.new_id(), fields=fields, now=now)
        return service.respond(run, "project", {**row, "archived_at": None}, status=201)

    @api.patch(
        "/projects/{project_id}",
        summary="Change a project",
        operation_id="change_project",
        description="Renames, describes or archives it. Missing fields keep their values. An "
        "archived project is listed apart and gets no new missions and assignments "
        "(409 `project.archived`); those it has can still be changed.",
        responses=changed(ProjectView),
    )
    @onceward.guard("PATCH /v1/projects/{project_id}", policy=service.policy)
    async def change(
        project_id: str, project: ProjectPatch, run: Run, request: Request, _tag: IfMatch = None
    ) -> Response:
        service.roles.check_write(run)
        tx, tenant = run.transaction, run.request.principal.tenant
        fields = project.model_dump(exclude={"version"}, exclude_unset=True)
        row = await update_with_version(
            what="project",
            if_match=request.headers.getlist("if-match"),
            in_body=project.version,
            current=lambda: find(tx, "project", tenant, project_id),
            write=lambda version: change_project(
                tx, tenant, project_id, fields, version=version, now=onceward.clock.now()
            ),
        )
        return service.respond(run, "project", row)

    @api.get(
        "/projects",
        summary="List projects",
        operation_id="list_projects",
        description="Oldest first.",
        response_model=Page[ProjectView],
        responses=LIST,
    )
    async def list_page(
        caller: CurrentPrincipal,
        *,
        limit: Limit = 50,
        after: After = None,
        archived: Annotated[
            bool, Query(description="Archived projects instead of the others.")
        ] = False,
    ) -> Response:
        service.roles.check_read(caller)
        rows = await list_in(
            onceward.store,
            "list_archived_projects" if archived else "list_projects",
            caller.tenant,
            after=read_cursor(after, "archived projects" if archived else "projects"),
            limit=limit + 1,
        )
        return json_response(page(rows, limit, "archived projects" if archived else "projects"))

    @api.get(
        "/projects/{project_id}",
        summary="Read a project",
        operation_id="read_project",
        response_model=ProjectView,
        responses=read(ProjectView),
    )
    async def read_one(
        project_id: str, caller: CurrentPrincipal, request: Request, _tag: IfNoneMatch = None
    ) -> Response:
        service.roles.check_read(caller)
        return await service.read(request, "project", caller.tenant, project_id)

    @api.get(
        "/projects/{project_id}/dashboard",
        summary="Read a project's dashboard",
        operation_id="read_dashboard",
        description="Counted by jobs soon after each write. The counters include every write "
        "acknowledged before `as_of`.",
        response_model=DashboardView,
        responses=read(DashboardView),
    )
    async def dashboard(
        project_id: str, caller: CurrentPrincipal, request: Request, _tag: IfNoneMatch = None
    ) -> Response:
        service.roles.check_read(caller)
        return await service.read(request, "dashboard", caller.tenant, project_id)
