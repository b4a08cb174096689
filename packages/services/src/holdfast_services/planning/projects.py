"""Routes of projects and their dashboards, which jobs update."""

from fastapi import APIRouter, Request, Response

from holdfast.server.starlette import Caller, Run, Tx
from holdfast_services.auth import CurrentPrincipal
from holdfast_services.planning.aggregates import AggregateService, IfNoneMatch, json_response
from holdfast_services.planning.model import DashboardView, NewProject, Page, ProjectView
from holdfast_services.planning.openapi import LIST, created, read
from holdfast_services.planning.paging import After, Limit, page, read_cursor
from holdfast_services.planning.repository import add, list_in

__all__ = ["add_routes"]


def add_routes(api: APIRouter, service: AggregateService) -> None:
    """Add the routes of projects."""
    holdfast = service.holdfast

    @api.post(
        "/projects",
        status_code=201,
        summary="Create a project",
        operation_id="create_project",
        responses=created(ProjectView, under=False),
    )
    @holdfast.guard("POST /v1/projects", policy=service.policy)
    async def create(project: NewProject, tx: Tx, caller: Caller, run: Run) -> Response:
        now = holdfast.clock.now()
        row = await add(
            tx, "project", caller.tenant, service.new_id(), fields=project.model_dump(), now=now
        )
        return service.respond(run, "project", row, status=201)

    @api.get(
        "/projects",
        summary="List projects",
        operation_id="list_projects",
        description="Oldest first.",
        response_model=Page[ProjectView],
        responses=LIST,
    )
    async def list_page(
        caller: CurrentPrincipal, limit: Limit = 50, after: After = None
    ) -> Response:
        rows = await list_in(
            holdfast.store,
            "list_projects",
            caller.tenant,
            after=read_cursor(after, "projects"),
            limit=limit + 1,
        )
        return json_response(page(rows, limit, "projects"))

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
        return await service.read(request, "dashboard", caller.tenant, project_id)
