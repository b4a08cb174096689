"""Routes of assignments, which assign a person to a mission until they end."""

from typing import Annotated, Final

from fastapi import APIRouter, Body, Request, Response

from onceward import update_with_version
from onceward.errors import NotFoundError
from onceward.frameworks.starlette import Caller, Run, Tx
from onceward.ports import Row
from onceward_services.auth import CurrentPrincipal
from onceward_services.planning.aggregates import (
    AggregateService,
    IfMatch,
    IfNoneMatch,
    json_response,
)
from onceward_services.planning.jobs import notify_assignee, recount_projects
from onceward_services.planning.model import (
    AssignmentMove,
    AssignmentPatch,
    AssignmentView,
    NewAssignment,
    OwnAssignmentView,
    Page,
    VersionOnly,
)
from onceward_services.planning.openapi import LIST, changed, created, deleted, read
from onceward_services.planning.paging import After, Limit, page, read_cursor
from onceward_services.planning.repository import (
    add,
    change_assignment,
    end_assignment,
    find,
    list_in,
    move_assignment,
)

__all__ = ["add_routes"]

_ASSIGNMENT: Final = "/assignments/{assignment_id}"


def add_routes(api: APIRouter, service: AggregateService) -> None:
    """Add the routes of assignments."""
    _add_reads(api, service)
    _add_edits(api, service)
    onceward, policy = service.onceward, service.policy

    @api.post(
        "/missions/{mission_id}/assignments",
        status_code=201,
        summary="Create an assignment",
        operation_id="create_assignment",
        responses=created(AssignmentView, under=True),
    )
    @onceward.guard("POST /v1/missions/{mission_id}/assignments", policy=policy)
    async def create(
        mission_id: str, assignment: NewAssignment, tx: Tx, caller: Caller, run: Run
    ) -> Response:
        service.roles.check_write(run)
        mission = await service.get(tx, "mission", caller.tenant, mission_id)
        await service.check_not_archived(tx, caller.tenant, mission["project_id"])
        parents = {"project_id": mission["project_id"], "mission_id": mission_id}
        fields = parents | assignment.model_dump()
        now = onceward.clock.now()
        row = await add(tx, "assignment", caller.tenant, service.new_id(), fields=fields, now=now)
        await recount_projects(onceward, row["project_id"], version=row["version"])
        await notify_assignee(onceward, "assigned", row)
        return service.respond(run, "assignment", row, status=201)

    @api.post(
        "/assignments/{assignment_id}/move",
        summary="Move an assignment to another mission",
        operation_id="move_assignment",
        description="To a mission of any project. The old mission may be deleted already.",
        responses=changed(AssignmentView),
    )
    @onceward.guard("POST /v1/assignments/{assignment_id}/move", policy=policy)
    async def move(
        assignment_id: str,
        *,
        to: AssignmentMove,
        tx: Tx,
        caller: Caller,
        run: Run,
        request: Request,
        _tag: IfMatch = None,
    ) -> Response:
        service.roles.check_write(run)
        tenant = caller.tenant
        before: Row | None = None

        async def current() -> Row | None:
            return await find(tx, "assignment", tenant, assignment_id)

        async def write(version: int) -> Row | None:
            nonlocal before
            before = await current()
            if before is None or before["version"] != version:
                return None
            target = await find(tx, "mission", tenant, to.mission_id)
            if target is None:
                raise NotFoundError("mission_id: there is no such mission")
            await service.check_not_archived(tx, tenant, target["project_id"])
            now = onceward.clock.now()
            return await move_assignment(
                tx, tenant, assignment_id, target, version=version, now=now
            )

        row = await update_with_version(
            what="assignment",
            if_match=request.headers.getlist("if-match"),
            in_body=to.version,
            current=current,
            write=write,
        )
        assert before is not None  # noqa: S101 - write() has read it
        await recount_projects(
            onceward, before["project_id"], row["project_id"], version=row["version"]
        )
        await notify_assignee(onceward, "moved", row)
        return service.respond(run, "assignment", row)


def _add_edits(api: APIRouter, service: AggregateService) -> None:
    onceward, policy = service.onceward, service.policy

    @api.patch(
        _ASSIGNMENT,
        summary="Change an assignment",
        operation_id="change_assignment",
        description="Another assignee or role. Missing fields keep their values; null clears the "
        "role. If the assignee changes, both persons are notified.",
        responses=changed(AssignmentView),
    )
    @onceward.guard(f"PATCH /v1{_ASSIGNMENT}", policy=policy)
    async def change(
        assignment_id: str,
        assignment: AssignmentPatch,
        run: Run,
        request: Request,
        _tag: IfMatch = None,
    ) -> Response:
        service.roles.check_write(run)
        tx, tenant = run.transaction, run.request.principal.tenant
        fields = assignment.model_dump(exclude={"version"}, exclude_unset=True)
        before: Row | None = None

        async def current() -> Row | None:
            return await find(tx, "assignment", tenant, assignment_id)

        async def write(version: int) -> Row | None:
            nonlocal before
            before = await current()
            return await change_assignment(
                tx,
                tenant,
                assignment_id,
                fields,
                version=version,
                now=onceward.clock.now(),
            )

        row = await update_with_version(
            what="assignment",
            if_match=request.headers.getlist("if-match"),
            in_body=assignment.version,
            current=current,
            write=write,
        )
        # The version that was changed is the one that was read before, or the write has failed.
        assert before is not None  # noqa: S101
        if before["assignee"] == row["assignee"]:
            await notify_assignee(onceward, "changed", row)
        else:
            await recount_projects(onceward, row["project_id"], version=row["version"])
            await notify_assignee(onceward, "assigned", row)
            await notify_assignee(onceward, "ended", {**before, "version": row["version"]})
        return service.respond(run, "assignment", row)

    @api.delete(
        _ASSIGNMENT,
        status_code=204,
        response_class=Response,
        summary="End an assignment",
        operation_id="end_assignment",
        description="It is not listed or counted any more, and its assignee is notified.",
        responses=deleted(),
    )
    @onceward.guard(f"DELETE /v1{_ASSIGNMENT}", policy=policy)
    async def end(
        assignment_id: str,
        *,
        run: Run,
        request: Request,
        seen: Annotated[VersionOnly | None, Body()] = None,
        _tag: IfMatch = None,
    ) -> Response:
        service.roles.check_write(run)
        tx, tenant = run.transaction, run.request.principal.tenant
        row = await update_with_version(
            what="assignment",
            if_match=request.headers.getlist("if-match"),
            in_body=None if seen is None else seen.version,
            current=lambda: find(tx, "assignment", tenant, assignment_id),
            write=lambda version: end_assignment(
                tx, tenant, assignment_id, version=version, now=onceward.clock.now()
            ),
        )
        await recount_projects(onceward, row["project_id"], version=row["version"])
        await notify_assignee(onceward, "ended", row)
        service.record_change(run, "assignment", assignment_id, row["version"])
        return Response(status_code=204)


def _add_reads(api: APIRouter, service: AggregateService) -> None:
    @api.get(
        "/missions/{mission_id}/assignments",
        summary="List a mission's assignments",
        operation_id="list_assignments",
        description="Oldest first.",
        response_model=Page[AssignmentView],
        responses=LIST,
    )
    async def list_page(
        mission_id: str, caller: CurrentPrincipal, limit: Limit = 50, after: After = None
    ) -> Response:
        service.roles.check_read(caller)
        position = read_cursor(after, "assignments")
        await service.ensure_exists(caller.tenant, "mission", mission_id)
        rows = await list_in(
            service.onceward.store,
            "list_assignments",
            caller.tenant,
            after=position,
            limit=limit + 1,
            mission_id=mission_id,
        )
        return json_response(page(rows, limit, "assignments"))

    @api.get(
        "/me/assignments",
        summary="List one's own assignments",
        operation_id="list_own_assignments",
        description="Those whose assignee is the `sub` of the token, oldest first, without those "
        "of deleted missions.",
        response_model=Page[OwnAssignmentView],
        responses=LIST,
    )
    async def list_own(
        caller: CurrentPrincipal, limit: Limit = 50, after: After = None
    ) -> Response:
        service.roles.check_read(caller)
        rows = await list_in(
            service.onceward.store,
            "list_own_assignments",
            caller.tenant,
            after=read_cursor(after, "own assignments"),
            limit=limit + 1,
            assignee=caller.actor,
        )
        return json_response(page(rows, limit, "own assignments"))

    @api.get(
        "/assignments/{assignment_id}",
        summary="Read an assignment",
        operation_id="read_assignment",
        response_model=AssignmentView,
        responses=read(AssignmentView),
    )
    async def read_one(
        assignment_id: str, caller: CurrentPrincipal, request: Request, _tag: IfNoneMatch = None
    ) -> Response:
        service.roles.check_read(caller)
        return await service.read(request, "assignment", caller.tenant, assignment_id)
